"""The check that does the whole thing: two real workers, a window of micro-batches,
a gradient known exactly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from pyengine.cli.doctor.finding import Finding, fail, ok
from pyengine.comm.launching import launch
from pyengine.engine.grad_sync import GradSync

_WORKERS, _ACCUMULATE, _ITEMS = 2, 3, 4
_PATIENCE_S = 120
_REMEDY = (
    "if it is about connections: unset GLOO_SOCKET_IFNAME, and let the firewall pass what stays on the "
    "loopback interface; otherwise mend what stands above first"
)


def window_gradient() -> list[float]:
    """Return a window's gradient on this rank; every micro-batch of every rank adds another integer."""
    weight = torch.nn.Parameter(torch.zeros(3))
    sync = GradSync([weight], accumulate=_ACCUMULATE)
    for window in sync.windows(range(_ACCUMULATE)):
        for index in window:
            factor = (1 + dist.get_rank()) * (1 + index)
            sync.backward(factor * (weight * torch.arange(1.0, 4.0)).sum(), count=_ITEMS)
        sync.unscale_()
    assert weight.grad is not None  # every micro-batch used it
    return [float(value) for value in weight.grad]


def closed_form() -> list[float]:
    """Return Σ_ranks (1 + rank) × Σ_micro-batches (1 + index) × [1, 2, 3] / Σ count: 18/24 × [1, 2, 3]."""
    ranks, indices = sum(range(1, _WORKERS + 1)), sum(range(1, _ACCUMULATE + 1))
    return [ranks * indices * position / (_WORKERS * _ACCUMULATE * _ITEMS) for position in (1, 2, 3)]


def workers(
    window: Callable[[], list[float]] = window_gradient, *, patience_s: float = _PATIENCE_S
) -> Finding:
    """Run a window of `GradSync` on two gloo workers, and compare its gradient with the closed form.

    Args:
        window: what each worker runs.
        patience_s: after these seconds the workers are ended.
    """
    try:
        found = launch(window, workers=_WORKERS, timeout_s=patience_s)
    except TimeoutError:
        return fail("workers", f"two gloo workers have not ended after {patience_s:g} s", _REMEDY)
    except (RuntimeError, OSError) as error:
        return fail("workers", str(error).strip(), _REMEDY)
    want = closed_form()
    if found != [want] * _WORKERS:
        return fail(
            "workers",
            f"two gloo workers have the gradients {found}, {want} is right",
            "report this with the whole output: wrong gradients must not happen",
        )
    return ok("workers", "two gloo workers start, and the gradient of a GradSync window is exact on both")
