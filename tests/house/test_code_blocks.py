"""Code on the pages runs as it stands; commands are ones that the command line,
the Makefile and the scripts know.
"""

from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from page_names import NAMES, loop
from pages import PAGES, ROOT, Block, blocks, name_of, spans

from pyengine.cli.main import build_parser


def _needs(block: Block, module: str) -> bool:
    return bool(re.search(rf"\b{module}\b", block.code))


PYTHON = blocks("python")
SESSIONS = sorted({block.page for block in PYTHON if block.is_doctest})
# A block that starts workers itself is a script of its own.
SCRIPTS = [block for block in PYTHON if "pe.launch(" in block.code]
# What a block needs, and why that may be missing here: then the block is compiled only.
NOT_RUN = {
    "torch_xla": "has an environment of its own, where tests/xla makes this call",
    "transformers": "needs Python 3.11",
    "wandb": "is an extra",
}
MISSING = [need for need in NOT_RUN if find_spec(need) is None]
LEFT_OUT = [block for block in PYTHON if any(_needs(block, need) for need in MISSING)]
RUN = [block for block in PYTHON if not block.is_doctest and block not in SCRIPTS + LEFT_OUT]
# Sphinx reads these, and fails on what it does not know; or they are not ours to run.
OTHERS = {"{toctree}", "{eval-rst}", "yaml", "text"}
# Scripts of the reader's own.
YOURS = {"train.py"}


def test_every_block_says_a_language_that_is_checked():
    assert {block.language for block in blocks()} - {"python", "sh"} <= OTHERS


@pytest.mark.parametrize("need", NOT_RUN)
def test_an_exception_is_needed(need):
    assert any(_needs(block, need) for block in PYTHON)


@pytest.mark.parametrize("block", LEFT_OUT, ids=str)
def test_a_block_that_is_not_run_is_python(block):
    compile(block.code, str(block), "exec")


@pytest.mark.parametrize("page", SESSIONS)
def test_a_session_prints_what_the_page_says(page):
    result = doctest.testfile(
        str(ROOT / page), module_relative=False, encoding="utf-8", optionflags=doctest.ELLIPSIS
    )
    assert result.attempted > 0 and result.failed == 0


@pytest.mark.parametrize("block", RUN, ids=str)
def test_a_block_runs_after_what_its_page_takes_for_granted(ranks, tmp_path, block):
    _, world = NAMES.get(block.page, (loop, 2))
    first, *others = ranks(world).run(_run, block, tmp_path)
    has_stages = "PipelineStage(" in block.code
    assert has_stages or all(torch.equal(first, other) for other in others)


def _run(block: Block, folder: Path) -> torch.Tensor:
    """Run a block on this rank; return the model's parameters,
    which have moved if it steps or makes an engine.
    """
    torch.manual_seed(0)
    given, _ = NAMES.get(block.page, (loop, 2))
    with given() as names, _inside(folder):
        model = names["model"]
        before = _flat(model)
        names.update(_executed(block, names))
        if _only_makes_an_engine(block):
            _train_a_window(names, names["ddp_model" if "pe.attach(d" in block.code else "model"])
    steps = ".step(" in block.code or _only_makes_an_engine(block)
    assert not steps or not torch.equal(_flat(model), before)
    return _flat(model)


def _only_makes_an_engine(block: Block) -> bool:
    return (
        block.code.count("\nsync = ") + block.code.startswith("sync = ") == 1 and ".step(" not in block.code
    )


def _train_a_window(names: dict[str, Any], forward: torch.nn.Module) -> None:
    for x, y in next(names["sync"].windows(names["loader"])):
        names["sync"].backward(names["loss_sum"](forward(x), y), count=len(y))
    names["sync"].step(names["optimizer"])


def _executed(block: Block, names: dict[str, Any]) -> dict[str, Any]:
    """Run a block as a module of its own, so that what it defines can be sent to other ranks;
    return its names.
    """
    module = sys.modules["block"] = ModuleType("block")
    vars(module).update(names)
    exec(compile(block.code, str(block), "exec"), vars(module))
    return vars(module)


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _flat(model: torch.nn.Module) -> torch.Tensor:
    wholes = [param.full_tensor() if hasattr(param, "full_tensor") else param for param in model.parameters()]
    return torch.cat([whole.detach().flatten() for whole in wholes])


@pytest.mark.parametrize("block", SCRIPTS, ids=str)
def test_a_block_that_starts_workers_is_a_script(tmp_path, block):
    script = tmp_path / "script.py"
    given = "import torch.distributed as dist, pyengine as pe\n\nlosses = [0.5]\n\n\n"
    given += "def train():\n    return dist.get_rank()\n\n\n"
    checked = "    assert results == [0, 1]\n" if "results = " in block.code else ""
    script.write_text(given + block.code + checked)
    subprocess.run([sys.executable, script], check=True, timeout=300)


def _commands() -> list[tuple[str, list[str]]]:
    """Return every (page, words) of a command, from blocks and from prose."""
    lines = [(block.page, line) for block in blocks("sh") for line in block.code.splitlines()]
    lines += [(name_of(page), span) for page in PAGES for span in spans(page)]
    split = [(page, shlex.split(line, comments=True)) for page, line in lines if _is_command(line)]
    return sorted(split)


def _is_command(line: str) -> bool:
    return bool(
        re.match(r"python -m pyengine|make \w|pip install|(\S*python )?\S*\w\.py --|python \S+\.py", line)
    )


COMMANDS = _commands()


def _parametrize(*beginning: str):
    chosen = [(page, words) for page, words in COMMANDS if words[: len(beginning)] == list(beginning)]
    return pytest.mark.parametrize(("page", "words"), chosen, ids=lambda value: str(value)[:70])


@_parametrize("python", "-m", "pyengine")
def test_the_command_line_knows_a_command(page, words):
    options = build_parser().parse_args(words[3:])
    assert options.command == words[3]


# Pages that tell of the command line.
TOLD = ["README.md", "docs/study.md", "docs/wires.md", "docs/comparing.md", "docs/reproducible.md"]


@pytest.mark.parametrize("page", TOLD)
def test_the_command_line_knows_an_option(page):
    said = {word for span in spans(ROOT / page) for word in re.findall(r"^--[\w-]+", span)}
    commands = next(action.choices for action in build_parser()._actions if action.dest == "command")
    known = {option for parser in commands.values() for option in parser._option_string_actions}
    assert said - known == set()


@_parametrize("make")
def test_the_makefile_has_a_target(page, words):
    makefile = (ROOT / "Makefile").read_text()
    for word in words[1:]:
        name, is_setting, _ = word.partition("=")
        assert f"$({name})" in makefile if is_setting else re.search(rf"^{name}:", makefile, re.MULTILINE)


@_parametrize("pip", "install")
def test_what_is_installed_is_this_checkout_and_its_extras(page, words):
    project = (ROOT / "pyproject.toml").read_text()
    where, _, extras = words[-1].rstrip("]").partition("[")
    assert where == "."
    assert all(
        re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in filter(None, extras.split(","))
    )


SCRIPT_LINES = [
    (page, [script, *words[words.index(script) + 1 :]])
    for page, words in COMMANDS
    for script in [word for word in words if word.endswith(".py") and word not in YOURS][:1]
]


@pytest.mark.parametrize(("page", "words"), SCRIPT_LINES, ids=lambda value: str(value)[:70])
def test_a_script_is_there_and_has_the_options(page, words):
    script = next(ROOT.glob(f"**/{words[0]}"))
    assert script.parent.name in ("benchmarks", "examples", "house")
    said = [word.partition("=")[0] for word in words if word.startswith("--")]
    assert [option for option in said if option not in _help(script)] == []


@cache
def _help(script: Path) -> set[str]:
    done = subprocess.run([sys.executable, script, "--help"], check=True, capture_output=True, text=True)
    return set(re.findall(r"--[\w-]+", done.stdout))
