"""`doctor`: check this machine and this installation.

Imports no package except torch, so that it runs where packages are missing.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict

import torch
import torch.distributed as dist

from pyengine.cli.doctor import machine as doctor_machine
from pyengine.cli.doctor import native as doctor_native
from pyengine.cli.doctor import pytorch as doctor_torch
from pyengine.cli.doctor.arguments import Settings
from pyengine.cli.doctor.finding import Finding, fail, ok
from pyengine.cli.terminal import print_json
from pyengine.comm.launching import launch
from pyengine.engine.grad_sync import GradSync

_WORKERS, _ACCUMULATE, _ITEMS = 2, 3, 4
_TIMEOUT_S = 120
_REMEDY = (
    "for connection errors: unset GLOO_SOCKET_IFNAME, and let the firewall accept connections on the "
    "loopback interface; otherwise solve the problems above first"
)
Check = Callable[[], Finding | list[Finding]]


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
    """Run a window of `GradSync` on two gloo workers, and compare its gradient with the closed form."""
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


CHECKS: dict[str, Check] = {
    "python": doctor_torch.python,
    "torch": doctor_torch.torch_itself,
    "compiler": doctor_native.compiler,
    "core": doctor_native.core,
    "cuda": doctor_native.cuda,
    "backends": doctor_torch.backends,
    "torch_xla": doctor_torch.xla,
    "packages": doctor_torch.packages,
    "threads": doctor_machine.threads,
    "shared memory": doctor_machine.shared_memory,
    "files": doctor_machine.files,
    "host": doctor_machine.host,
    "settings": doctor_machine.settings,
    "workers": workers,
}
_LABELS = {"ok": "ok", "warn": "WARN", "fail": "FAIL"}
_INDENT = 21


def run(settings: Settings) -> int:
    findings = []
    for finding in examine(CHECKS):
        findings.append(finding)
        if settings.json:
            print_json("finding", **asdict(finding))
        else:
            _print_lines(finding)
    broken, warned = (
        [each.name for each in findings if each.status == status] for status in ("fail", "warn")
    )
    if settings.json:
        print_json("verdict", healthy=not broken, broken=broken, warned=warned)
    else:
        verdict = f"Broken: {', '.join(broken)}." if broken else "Healthy: pyengine works here."
        print(f"\n{verdict}" + (f" Could be better: {', '.join(warned)}." if warned else ""))
    return int(bool(broken))


def examine(checks: dict[str, Check]) -> Iterator[Finding]:
    """Yield the findings of all checks; a check that raises is a finding as well."""
    for name, check in checks.items():
        try:
            found = check()
        except Exception as error:  # noqa: BLE001 - a broken machine can raise anything
            text = f"the check itself failed: {type(error).__name__}: {error}"
            found = fail(name, text, "report this output as a bug")
        yield from found if isinstance(found, list) else [found]


def _print_lines(finding: Finding) -> None:
    head = f"{_LABELS[finding.status]:<5} {finding.name:<14} "
    _print_wrapped(head, finding.text)
    if finding.remedy:
        _print_wrapped(" " * (_INDENT - 2) + "→ ", finding.remedy)


def _print_wrapped(head: str, text: str) -> None:
    width = max(60, min(120, shutil.get_terminal_size().columns))
    indent = " " * _INDENT
    for number, line in enumerate(text.splitlines()):
        first = head if number == 0 else indent
        wrapped = textwrap.fill(
            line, width, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False
        )
        print(wrapped or first, flush=True)
