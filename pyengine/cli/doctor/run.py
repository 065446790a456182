"""`doctor`: check this machine and this installation.

This command imports no package except torch, so that it runs even if other packages are missing.
"""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict

from pyengine.cli.doctor.checks import CHECKS, CheckResult, fail
from pyengine.cli.terminal import print_json

_LABELS = {"ok": "ok", "warn": "WARN", "fail": "FAIL"}
_INDENT = 21


def run(options: argparse.Namespace) -> int:
    findings = []
    for finding in examine(CHECKS):
        findings.append(finding)
        if options.json:
            print_json("finding", **asdict(finding))
        else:
            _print_wrapped(f"{_LABELS[finding.status]:<5} {finding.name:<14} ", finding.text)
            if finding.remedy:
                _print_wrapped(" " * (_INDENT - 2) + "→ ", finding.remedy)
    broken, warned = (
        [each.name for each in findings if each.status == status] for status in ("fail", "warn")
    )
    if options.json:
        print_json("verdict", healthy=not broken, broken=broken, warned=warned)
    else:
        verdict = f"Broken: {', '.join(broken)}." if broken else "Healthy: pyengine works here."
        print(f"\n{verdict}" + (f" Could be better: {', '.join(warned)}." if warned else ""))
    return int(bool(broken))


def examine(checks: dict[str, Callable[[], CheckResult | list[CheckResult]]]) -> Iterator[CheckResult]:
    """Yield the results of all checks; a check that raises an exception yields a failure."""
    for name, check in checks.items():
        try:
            found = check()
        except Exception as error:  # noqa: BLE001 - a broken machine can raise anything
            text = f"the check itself failed: {type(error).__name__}: {error}"
            found = fail(name, text, "report this output as a bug")
        yield from found if isinstance(found, list) else [found]


def _print_wrapped(head: str, text: str) -> None:
    width = max(60, min(120, shutil.get_terminal_size().columns))
    indent = " " * _INDENT
    for number, line in enumerate(text.splitlines()):
        first = head if number == 0 else indent
        wrapped = textwrap.fill(
            line, width, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False
        )
        print(wrapped or first, flush=True)
