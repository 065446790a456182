"""Arguments to commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch.distributed as dist

from pyengine.cli import (
    arguments,
    bench_arguments,
    doctor_arguments,
    plan_arguments,
    study_arguments,
    verify_arguments,
)

# What the extras `train` and `study` bring: import name to package.
_EXTRA = {
    "rich": "rich",
    "sklearn": "scikit-learn",
    "numpy": "numpy",
    "matplotlib": "matplotlib",
    "jinja2": "jinja2",
    "psutil": "psutil",
}
_ON_TORCHRUNS_WORKERS = ("train", "plan")
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
    refuse: Callable[[str], NoReturn] = options.error
    if options.command not in _ON_TORCHRUNS_WORKERS and dist.is_torchelastic_launched():
        refuse(f"torchrun has started this, but {options.command} starts its own workers: run it by python")
    try:
        code: int = options.run(options)
        return code
    except arguments.Conflict as error:
        refuse(str(error))
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA:
            raise
        extra = "study" if options.command == "study" else "train"
        print(
            f"{options.command} needs {_EXTRA[missing]}, which is not installed: pip install '.[{extra}]' in a clone of pyengine",
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


def _bench(options: argparse.Namespace) -> int:
    settings = bench_arguments.settings(options)
    from pyengine.cli import bench

    return bench.run(settings)


def _doctor(options: argparse.Namespace) -> int:
    from pyengine.cli import doctor

    return doctor.run(as_json=options.json)


def _study(options: argparse.Namespace) -> int:
    settings = study_arguments.settings(options)
    from pyengine.cli import study

    return study.run(settings)


# Name, what it does, its arguments (with the help's text), and what runs it.
_COMMANDS: list[tuple[str, str, Any, Callable[[argparse.Namespace], int]]] = [
    ("train", "train small real models on this machine, and compare with plain DDP", arguments, _train),
    (
        "verify",
        "train on several world sizes and say whether the runs are identical",
        verify_arguments,
        _verify,
    ),
    ("plan", "show how a global batch is split on any number of workers", plan_arguments, _plan),
    ("study", "train on a grid of workers and batch sizes, and say what they buy", study_arguments, _study),
    (
        "bench",
        "measure kernels and whole windows here, against torch, DDP and its friends",
        bench_arguments,
        _bench,
    ),
    ("doctor", "say what works here, what does not, and how to mend it", doctor_arguments, _doctor),
]


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of every command; `error` of the parsed options ends with that command's usage."""
    parser = argparse.ArgumentParser(
        prog="python -m pyengine", description="Gradient synchronization and accumulation for PyTorch."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, summary, about, run in _COMMANDS:
        command = commands.add_parser(
            name,
            help=summary,
            description=about.DESCRIPTION,
            epilog=about.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        about.add_to(command)
        command.set_defaults(run=run, error=command.error)
    return parser
