"""The arguments and settings of `doctor`."""

from __future__ import annotations

import argparse

DESCRIPTION = """\
Check this machine and this installation, and suggest a remedy for each problem. Among other things, run the
native core on values with a known result, a kernel on every CUDA device, and a window of micro-batches on two
worker processes. This takes a few seconds and changes nothing."""

EXAMPLES = """\
examples:
  python -m pyengine doctor                  a line for each check, and a remedy for each problem
  python -m pyengine doctor --json           for a bug report: includes torch's environment variables

results:
  ok     works
  WARN   works, but slower or not everywhere
  FAIL   does not work

exit code: 0 healthy (also with warnings), 1 broken
"""


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add no arguments, because every command already has `--json`."""


def settings(options: argparse.Namespace) -> argparse.Namespace:
    return options
