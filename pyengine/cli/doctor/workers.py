"""The check of a whole window: two worker processes, micro-batches, a gradient in closed form."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from pyengine.cli.doctor.finding import Finding, fail, ok
from pyengine.comm.launching import launch
from pyengine.engine.grad_sync import GradSync

_WORKERS, _ACCUMULATE, _ITEMS = 2, 3, 4
_TIMEOUT_S = 120
_REMEDY = (
    "for connection errors: unset GLOO_SOCKET_IFNAME, and let the firewall accept connections on the "
    "loopback interface; otherwise solve the problems above first"
)


def window_gradient() -> list[float]:
    """Return a window's gradient on this rank; each micro-batch of each rank adds another integer."""
    weight = torch.nn.Parameter(torch.zeros(3))
    sync = GradSync([weight], accumulate=_ACCUMULATE)
    for window in sync.windows(range(_ACCUMULATE)):
        for index in window:
            factor = (1 + dist.get_rank()) * (1 + index)
            sync.backward(factor * (weight * torch.arange(1.0, 4.0)).sum(), count=_ITEMS)
        sync.unscale_()
    assert weight.grad is not None  # every micro-batch uses the weight
    return [float(value) for value in weight.grad]


def closed_form() -> list[float]:
    """Return Σ_ranks (1 + rank) × Σ_micro-batches (1 + index) × [1, 2, 3] / Σ count: 18/24 × [1, 2, 3]."""
    ranks, indices = sum(range(1, _WORKERS + 1)), sum(range(1, _ACCUMULATE + 1))
    return [ranks * indices * position / (_WORKERS * _ACCUMULATE * _ITEMS) for position in (1, 2, 3)]


def workers(window: Callable[[], list[float]] = window_gradient, *, timeout_s: float = _TIMEOUT_S) -> Finding:
    """Run a window of `GradSync` on two gloo workers, and compare its gradient with the closed form.

    Args:
        window: the function that each worker runs.
        timeout_s: seconds after which the workers are ended.
    """
    try:
        found = launch(window, workers=_WORKERS, timeout_s=timeout_s)
    except TimeoutError:
        return fail("workers", f"two gloo workers have not ended after {timeout_s:g} s", _REMEDY)
    except (RuntimeError, OSError) as error:
        return fail("workers", str(error).strip(), _REMEDY)
    want = closed_form()
    if found != [want] * _WORKERS:
        return fail(
            "workers",
            f"two gloo workers have the gradients {found}, expected {want}",
            "report this output as a bug: gradients must never be wrong",
        )
    return ok("workers", "two gloo workers start, and the gradient of a GradSync window is exact on both")
