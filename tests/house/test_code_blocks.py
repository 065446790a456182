"""Code blocks of the pages run, and commands on the pages exist."""

from __future__ import annotations

import doctest
import os
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import forked
import pytest
import torch
from page_names import NAMES, loop
from pages import PAGES, ROOT, Block, blocks, name_of, spans

from pyengine.cli.main import build_parser

PYTHON = blocks("python")
SESSIONS = sorted({block.page for block in PYTHON if block.is_doctest})
# A block that starts workers itself is run as a script.
SCRIPTS = [block for block in PYTHON if "pe.launch(" in block.code]
# Libraries that may be missing; a block that needs one is then only compiled. tests/xla covers torch_xla.
OPTIONAL = ["accelerate", "lightning", "peft", "torch_xla", "torchdata", "transformers", "trl", "wandb"]


def _param(*given: Block) -> Any:
    """Mark blocks as slow if they need another library: every rank imports it, which takes seconds."""
    is_slow = any(re.search(rf"\b{module}\b", block.code) for block in given for module in OPTIONAL)
    value = given if len(given) > 1 else given[0]
    return pytest.param(value, id=str(given[-1]), marks=[pytest.mark.slow] if is_slow else [])


# Each loop "before" is followed by the loop "after" that must train the same parameters.
BEFORE = [block for block in PYTHON if block.code.startswith("# before\n")]
AFTER = [block for block in PYTHON if block.code.startswith("# after\n")]
PAIRS = [
    (before, next(after for after in AFTER if after.page == before.page and after.line > before.line))
    for before in BEFORE
    if before.page != "README.md"
]
# Any other loop "after" trains the same parameters as the page's first loop "before".
PAIRS += [
    (next(before for before in BEFORE if before.page == after.page), after)
    for after in AFTER
    if after.page != "README.md" and after not in sum(PAIRS, ())
]
RUN = [block for block in PYTHON if not block.is_doctest and block not in [*SCRIPTS, *sum(PAIRS, ())]]
# Sphinx itself fails on wrong directives; yaml and text blocks are not run.
OTHERS = {"{toctree}", "{eval-rst}", "{literalinclude}", "yaml", "text"}


def test_every_block_has_a_language_that_is_checked():
    assert {block.language for block in blocks()} - {"python", "sh"} <= OTHERS


@pytest.mark.parametrize("page", SESSIONS)
def test_a_session_prints_what_the_page_shows(page):
    result = doctest.testfile(
        str(ROOT / page), module_relative=False, encoding="utf-8", optionflags=doctest.ELLIPSIS
    )
    assert result.attempted > 0 and result.failed == 0


def _run_on_ranks(ranks: Any, block: Block, folder: Path) -> torch.Tensor:
    """Run a block on its page's number of ranks; return the parameters, which must be equal on all ranks."""
    compile(block.code, str(block), "exec")
    for module in [*OPTIONAL, "tqdm"]:
        if re.search(rf"\b{module}\b", block.code):
            pytest.importorskip(module)
    _, world = NAMES.get(block.page, (loop, 2))
    first, *others = ranks(world).run(_run, block, folder)
    has_stages = "PipelineStage(" in block.code
    assert has_stages or all(torch.equal(first, other) for other in others)
    return first


@pytest.mark.parametrize("block", [_param(block) for block in RUN])
def test_a_block_runs_with_what_its_page_assumes(ranks, tmp_path, block):
    _run_on_ranks(ranks, block, tmp_path)


@pytest.mark.parametrize("pair", [_param(*pair) for pair in PAIRS])
def test_the_loop_after_trains_the_parameters_of_the_loop_before(ranks, tmp_path, pair):
    was, now = (_run_on_ranks(ranks, block, tmp_path) for block in pair)
    # Sums of 8 gradients of size 1, times the learning rate, in a different order: 16 roundings of 2^-24 in
    # each of 3 steps.
    torch.testing.assert_close(now, was, rtol=0, atol=3 * 16 * 2**-24)


def test_the_loop_before_halves_the_short_last_window_of_the_readme(ranks):
    before, after = (block for block in BEFORE + AFTER if block.page == "README.md")
    (was, *_), (now, *_) = (ranks(2).run(_last_gradient, block) for block in (before, after))
    # The last window has 4 of 8 micro-batches; its sums of 8 gradients are added in a different order.
    torch.testing.assert_close(2 * was, now, rtol=0, atol=16 * 2**-24)


def _last_gradient(block: Block) -> torch.Tensor:
    torch.manual_seed(0)
    given, _ = NAMES[block.page]
    grads = []
    with given() as names:
        parameters = list(names["model"].parameters())
        names["optimizer"].register_step_pre_hook(
            lambda *_: grads.append(torch.cat([param.grad.flatten() for param in parameters]))
        )
        _execute(block, names)
    assert len(grads) == 2
    return grads[-1]


def _run(block: Block, folder: Path) -> torch.Tensor:
    """Run a block on this rank; return the parameters, which change if it steps or creates an engine."""
    steps = ".step(" in block.code
    makes_an_engine = len(re.findall(r"^sync = ", block.code, re.MULTILINE)) == 1
    start = Path.cwd()
    os.chdir(folder)
    try:
        torch.manual_seed(0)
        given, _ = NAMES.get(block.page, (loop, 2))
        with given() as names:
            model = names["model"]
            before = _flat(model)
            _execute(block, names)
            if makes_an_engine and not steps:
                _train_a_window(names, names["ddp_model" if "pe.attach(d" in block.code else "model"])
    finally:
        os.chdir(start)
    after = _flat(model)
    assert not (steps or makes_an_engine) or not torch.equal(after, before)
    return after


def _execute(block: Block, names: dict[str, Any]) -> None:
    """Run a block as a module, so that ranks can send its definitions; add its names to `names`."""
    module = sys.modules["block"] = ModuleType("block")
    vars(module).update(names)
    exec(compile(block.code, str(block), "exec"), vars(module))
    names.update(vars(module))


def _train_a_window(names: dict[str, Any], forward: torch.nn.Module) -> None:
    for x, y in next(names["sync"].windows(names["loader"])):
        names["sync"].backward(names["loss_sum"](forward(x), y), count=len(y))
    names["sync"].step(names["optimizer"])


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
    forked.python(str(script), cwd=tmp_path).check_returncode()


# ---- commands, in blocks and in backticks ----

_COMMAND = re.compile(r"python -m pyengine|make \w|pip install|(\S*python )?\S*\w\.py --|python \S+\.py")
LINES = [(block.page, line) for block in blocks("sh") for line in block.code.splitlines()]
LINES += [(name_of(page), span) for page in PAGES for span in spans(page)]
COMMANDS = sorted({(page, *shlex.split(line, comments=True)) for page, line in LINES if _COMMAND.match(line)})


@pytest.mark.parametrize("page", sorted({page for page, *_ in COMMANDS}))
def test_the_commands_of_a_page_exist_and_have_the_options(page):
    for _, *words in [command for command in COMMANDS if command[0] == page]:
        yours = ["train.py"]  # the reader's own
        scripts = [word for word in words if word.endswith(".py") and word not in yours]
        if words[:3] == ["python", "-m", "pyengine"]:
            assert build_parser().parse_args(words[3:]).command == words[3]
        elif words[0] == "make":
            _check_make(words[1:])
        elif words[:2] == ["pip", "install"]:
            where, _, extras = words[-1].rstrip("]").partition("[")
            known = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
            assert where == "." and set(filter(None, extras.split(","))) <= set(known), words
        elif scripts:
            script = next(ROOT.glob(f"**/{scripts[0]}"))
            assert script.parent.name in ("benchmarks", "examples", "house"), words
            options = {word.partition("=")[0] for word in words if word.startswith("--")}
            assert options <= _options(script), words


def _check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        name, is_setting, _ = word.partition("=")
        pattern = rf"\$\({name}\)" if is_setting else rf"^{name}:"
        assert re.search(pattern, makefile, re.MULTILINE), word


def _options(script: Path) -> set[str]:
    """Return the options that a script, or the harness that it shares, adds to its parser."""
    sources = [script.read_text(), (ROOT / "benchmarks" / "_harness.py").read_text()]
    return {option for source in sources for option in re.findall(r'\(\s*"(--[\w-]+)"', source)}


# Pages about the command line.
OPTION_PAGES = ["README.md", "docs/study.md", "docs/wires.md", "docs/comparing.md", "docs/reproducible.md"]


def test_the_command_line_has_the_options_of_the_pages():
    spans_of_all = [span for page in OPTION_PAGES for span in spans(ROOT / page)]
    named = {word for span in spans_of_all for word in re.findall(r"^--[\w-]+", span)}
    commands = next(action.choices for action in build_parser()._actions if action.dest == "command")
    known = {option for parser in commands.values() for option in parser._option_string_actions}
    assert named - known == set()
