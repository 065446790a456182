"""The entry point: parse the arguments, run a command, return the exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NoReturn

import torch.distributed as dist

from pyengine.cli import stopping, terminal
from pyengine.cli.arguments import Conflict
from pyengine.cli.bench import arguments as bench
from pyengine.cli.doctor import arguments as doctor
from pyengine.cli.plan import arguments as plan
from pyengine.cli.study import arguments as study
from pyengine.cli.train import arguments as train
from pyengine.cli.verify import arguments as verify

# The packages of the extras `train` and `study`, by import name.
_OF_TRAIN, _OF_STUDY = ("rich", "sklearn", "numpy"), ("matplotlib", "jinja2", "psutil")
_UNDER_TORCHRUN = ("train", "plan")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, by default with the arguments of this process; return the exit code."""
    terminal.prepare_output()
    parser = build_parser()
    options, unknown = parser.parse_known_args(argv)
    if options.command is None:
        if unknown:
            parser.error(f"leave out {' '.join(unknown)}, or put a command and its arguments first")
        parser.print_help()
        return 0
    refuse: Callable[[str], NoReturn] = options.error
    if unknown:
        name, these = options.command, " ".join(unknown)
        refuse(f"leave out {these}: {name} has only the arguments above; see {name} --help")
    if options.command not in _UNDER_TORCHRUN and dist.is_torchelastic_launched():
        refuse(f"{options.command} starts its own workers: run it with python, not with torchrun")
    kept = "nothing was saved"
    try:
        settings = _COMMANDS[options.command][1].settings(options)
        kept = getattr(settings, "kept", kept)
        # imported late: the import is slow, and may need a package that is not installed
        run: Callable[[Any], int] = import_module(f"pyengine.cli.{options.command}.run").run
        with stopping.raised():
            code = run(settings)
            sys.stdout.flush()  # flush while an error can still be reported
        return code
    except Conflict as error:
        refuse(str(error))
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _OF_TRAIN + _OF_STUDY:
            raise
        package = "scikit-learn" if missing == "sklearn" else missing
        extra = "train" if options.command != "study" and missing in _OF_TRAIN else "study"
        print(
            f"{options.command} needs {package}, which is not installed: run "
            f"pip install '.[{extra}]' in a clone of pyengine",
            file=sys.stderr,
        )
        return 1
    except OSError as error:
        failed = terminal.exit_code(error)
        if failed is None:
            raise
        return failed
    except (KeyboardInterrupt, SystemExit) as stop:
        return stopping.report(stop, f"every worker has ended; {kept}")
    finally:
        terminal.show_cursor()


# The summary and the arguments of each command; `run.py` in the command's folder runs the command.
_COMMANDS: dict[str, tuple[str, Any]] = {
    "train": ("train small models on this machine and compare them with plain DDP", train),
    "verify": ("train on several world sizes and check that the runs are bitwise identical", verify),
    "plan": ("show how a global batch is split over several numbers of workers", plan),
    "study": ("train with several numbers of workers and batch sizes, and report the speed-up", study),
    "bench": ("time whole windows, and compare them with plain DDP and Accelerate", bench),
    "doctor": ("check this machine and installation, and suggest remedies", doctor),
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; parsed options have a function `error` that prints the command's usage and exits."""
    parser = argparse.ArgumentParser(
        prog="python -m pyengine", description="Gradient synchronization and accumulation for PyTorch."
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print one JSON object per line instead of text")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (summary, about) in _COMMANDS.items():
        command = commands.add_parser(
            name,
            parents=[common],
            help=summary,
            description=about.DESCRIPTION,
            epilog=about.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        about.add_to(command)
        command.set_defaults(error=command.error)
    return parser
