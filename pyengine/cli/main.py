"""Arguments to commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from pyengine.cli import arguments, doctor_arguments, plan_arguments, verify_arguments

# What `pip install pyengine[train]` brings: import name to package.
_EXTRA = {"rich": "rich", "sklearn": "scikit-learn", "numpy": "numpy"}
_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: arguments without the program's name; None is this process's own.
    """
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        code: int = options.run(options)
        return code
    except arguments.Conflict as error:
        refuse: Callable[[str], NoReturn] = options.error
        refuse(str(error))
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA:
            raise
        print(
            f"{options.command} needs {_EXTRA[missing]}, which is not installed: pip install 'pyengine[train]'",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("interrupted: every worker has ended, nothing was saved", file=sys.stderr)
        return _INTERRUPTED


def _train(options: argparse.Namespace) -> int:
    settings = arguments.settings(options)
    from pyengine.cli import train

    return train.run(settings)


def _verify(options: argparse.Namespace) -> int:
    settings = verify_arguments.settings(options)
    from pyengine.cli import verify

    return verify.run(settings)


def _plan(options: argparse.Namespace) -> int:
    settings = plan_arguments.settings(options)
    from pyengine.cli import plan

    return plan.run(settings)


def _doctor(options: argparse.Namespace) -> int:
    from pyengine.cli import doctor

    return doctor.run(as_json=options.json)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of every command; `error` of the parsed options ends with that command's usage."""
    parser = argparse.ArgumentParser(
        prog="python -m pyengine", description="Gradient synchronization and accumulation for PyTorch."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="train small real models data-parallel on this machine, and compare with plain DDP",
        description=arguments.DESCRIPTION,
        epilog=arguments.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    arguments.add_to(train)
    train.set_defaults(run=_train, error=train.error)
    verify = commands.add_parser(
        "verify",
        help="train on several world sizes and say whether the runs are bitwise identical",
        description=verify_arguments.DESCRIPTION,
        epilog=verify_arguments.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verify_arguments.add_to(verify)
    verify.set_defaults(run=_verify, error=verify.error)
    plan = commands.add_parser(
        "plan",
        help="show how a global batch is split on any number of workers, and its learning rate",
        description=plan_arguments.DESCRIPTION,
        epilog=plan_arguments.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan_arguments.add_to(plan)
    plan.set_defaults(run=_plan, error=plan.error)
    doctor = commands.add_parser(
        "doctor",
        help="say what of this machine and installation works, what does not, and how to mend it",
        description=doctor_arguments.DESCRIPTION,
        epilog=doctor_arguments.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    doctor_arguments.add_to(doctor)
    doctor.set_defaults(run=_doctor, error=doctor.error)
    return parser
