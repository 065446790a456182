"""Run some of the tests against the wheel, with several releases of Python and torch: `make matrix`.

    python tests/matrix/matrix.py [--pairs 3.10:2.9.0,3.12:2.11.0] [--keep] TEST...

Every pair builds a wheel with its Python and has its own environment of 2 GB under build/matrix, which is
removed afterwards. A Python that is not on this machine is left out and reported. The exit code is 1 if a
pair fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "matrix"
# Every Python that pyproject.toml names; the oldest, the pinned and the newest torch, and one in between.
PAIRS = "3.10:2.9.0,3.11:2.13.0,3.12:2.11.0,3.13:2.15.0,3.14:2.15.0"
# Requirements of torch that only CUDA devices need.
_FOR_CUDA = re.compile(r"(nvidia|cuda|triton)\b")
_TESTED = ["pytest", "hypothesis", "numpy", "rich", "scikit-learn"]
_LIMIT_S = 1800


@dataclass(frozen=True)
class Pair:
    """A release of Python and one of torch."""

    python: str
    torch: str

    @property
    def name(self) -> str:
        """The name of its folder and of its log."""
        return f"python{self.python}-torch{self.torch}"

    def interpreter(self) -> str | None:
        """Return a working interpreter from PATH, where pyenv's shim may not work, or from pyenv itself."""
        named = f"python{self.python}"
        pyenv = sorted(Path.home().glob(f".pyenv/versions/{self.python}.*/bin/{named}"))
        for path in filter(None, [shutil.which(named), *map(str, pyenv)]):
            if subprocess.run([path, "--version"], check=False, capture_output=True).returncode == 0:
                return path
        return None


def parse(text: str) -> list[Pair]:
    """Read `PYTHON:TORCH,...`."""
    if not re.fullmatch(r"3\.\d+:2\.[\d.]+(,3\.\d+:2\.[\d.]+)*", text):
        raise SystemExit(f"--pairs: got {text!r}, need PYTHON:TORCH,..., as 3.10:2.9.0,3.12:2.11.0")
    return [Pair(*pair.split(":")) for pair in text.split(",")]


def needed_beside(requirements: Iterable[str]) -> list[str]:
    """Return the requirements of torch that a host without accelerators needs."""
    plain = (requirement for requirement in requirements if "extra ==" not in requirement)
    return [requirement for requirement in plain if not _FOR_CUDA.match(requirement)]


def pins() -> list[str]:
    """Return our pinned requirements for the tests, except torch and setuptools, which torch constrains."""
    files = [ROOT / name for name in ("requirements-run.txt", "requirements-dev.txt")]
    lines = [line for file in files for line in file.read_text().splitlines()]
    return [line for line in lines if not line.startswith(("-r", "torch==", "setuptools=="))]


def run(pair: Pair, python: str, tests: list[str]) -> str:
    """Build, install and test one pair; return the last line of pytest, or of the step that failed."""
    folder, log = FOLDER / pair.name, FOLDER / f"{pair.name}.log"
    own = str(folder / "bin" / "python")
    with log.open("w") as out:

        def step(*command: str, cwd: Path = ROOT) -> None:
            out.write(f"$ {' '.join(command)}\n")
            out.flush()
            # The CUDA kernels are the same for every pair, and tests must not import from the checkout.
            environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
            environ["PYENGINE_CUDA"] = "0"
            subprocess.run(
                command, cwd=cwd, check=True, stdout=out, stderr=out, timeout=_LIMIT_S, env=environ
            )

        def pip(what: str, *arguments: str) -> None:
            step(own, "-m", "pip", what, "--quiet", *arguments)

        try:
            step(str(ROOT / "tests" / "matrix" / "make_env.sh"), str(folder), python, f"torch=={pair.torch}")
            pip("wheel", "--no-deps", "--wheel-dir", str(folder / "dist"), str(ROOT))
            (wheel,) = (folder / "dist").glob("*.whl")
            asked = "import importlib.metadata, json; print(json.dumps(importlib.metadata.requires('torch')))"
            said = subprocess.run([own, "-c", asked], check=True, capture_output=True, text=True).stdout
            pip(
                "install",
                "--constraint",
                str(FOLDER / "pins.txt"),
                *_TESTED,
                *needed_beside(json.loads(said)),
            )
            pip("install", "--no-deps", str(wheel))
            step(own, "-m", "pytest", "-q", *[str(ROOT / test) for test in tests], cwd=folder)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            return f"FAILED: {last_line(log)}"
    return last_line(log)


def last_line(log: Path) -> str:
    """Return the last line of a log."""
    lines = [line for line in log.read_text().splitlines() if line.strip()]
    return lines[-1].strip("= ") if lines else "nothing"


def main() -> int:
    """Run every pair and print the table; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", default=PAIRS)
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    parser.add_argument("tests", nargs="+")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "pins.txt").write_text("\n".join(pins()))
    table = []
    for pair in parse(options.pairs):
        python, begin = pair.interpreter(), time.monotonic()
        if python is None:
            result = (
                f"left out: python{pair.python} is not here; put it on PATH, or: pyenv install {pair.python}"
            )
        else:
            print(f"Python {pair.python} with torch {pair.torch}: {FOLDER / pair.name}.log", flush=True)
            result = run(pair, python, options.tests)
        if not options.keep:
            shutil.rmtree(FOLDER / pair.name, ignore_errors=True)
        table.append(f"{pair.python:8}{pair.torch:9}{time.monotonic() - begin:5.0f} s   {result}")
    print("Python  torch", *table, sep="\n")
    return int(any("FAILED" in line for line in table))


if __name__ == "__main__":
    sys.exit(main())
