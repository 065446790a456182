"""The arguments of `doctor`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

DESCRIPTION = """\
Look at this machine and this installation: what works, what does not, and how to mend it. Among other things,
run the native core on values whose result is known, a kernel on every CUDA device, and a window of
micro-batches on two real workers. Takes some seconds; changes nothing."""

EXAMPLES = """\
examples:
  python -m pyengine doctor                  a line for each thing looked at, and a remedy where one is needed
  python -m pyengine doctor --json           for a bug report: torch's environment variables are in it

a finding is
  ok     nothing to do
  WARN   works, but slower or not everywhere
  FAIL   does not work

exit code: 0 healthy (there may be warnings), 1 broken
"""


def add_to(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--json", action="store_true", help="one JSON object a line on stdout instead of lines for people"
    )


@dataclass(frozen=True)
class Settings:
    """How to tell what is found: as JSON lines, or as lines for people."""

    json: bool


def settings(options: argparse.Namespace) -> Settings:
    """Turn parsed arguments into settings."""
    return Settings(json=options.json)
