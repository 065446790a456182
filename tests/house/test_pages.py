"""Names in the prose of the pages exist: public names and their arguments, files, messages, papers."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from pages import MODULES, PACKAGE, PAGES, ROOT, name_of, prose, spans

import pyengine as pe
from pyengine.cli.study.probe import StudyProbe
from pyengine.cli.verify.probe import VerifyProbe
from pyengine.ops.exact import ExactSum
from pyengine.ops.plan import BucketPlan

PUBLIC = [
    *sorted(set(pe.__all__) - {"ops", "wire", "telemetry"}),
    *(f"telemetry.{name}" for name in pe.telemetry.__all__),
    *(f"wire.{name}" for name in pe.wire.__all__),
    *(f"ops.{name}" for name in pe.ops.__all__),
]


def test_every_public_name_is_on_the_api_page():
    page = (ROOT / "docs" / "api.md").read_text()
    named = set(re.findall(r"^\.\. auto(?:class|function):: (?:pyengine\.)?(\S+)$", page, re.MULTILINE))
    assert set(PUBLIC) - named == set()


# ---- names of pyengine in backticks: `sync.flush()`, `GradSync(group=)` ----


def _objects() -> dict[str, Any]:
    """Return the objects that pages refer to by these names; instances have more attributes than classes."""
    model = torch.nn.Linear(2, 1)
    sync = pe.GradSync(model, accumulate=2)
    return {
        "pe": pe,
        "pyengine": pe,
        "sync": sync,
        "wrapped": sync.wrap(torch.optim.SGD(model.parameters(), lr=0.1)),
        "plan": pe.plan_batch(global_batch=8, micro_batch=2, world_size=2),
        "sampler": pe.WindowSampler(8, seed=0, micro_batch=1, global_batch=4),
        "study": StudyProbe,
        "verify": VerifyProbe,
        "wire": pe.wire,
        "ExactSum": ExactSum,
        "BucketPlan": BucketPlan,
        **{name: getattr(pe, name) for name in pe.__all__ if name[0].isupper()},
    }


OBJECTS = _objects()


def _used(span: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (dotted name, keywords) of each pyengine name in a span; `f(x=)` without a value is allowed."""
    if "/" in span:
        return
    try:
        tree = ast.parse(re.sub(r"=(?=[,)])", "=_", span) + (" pass" if span.endswith(":") else ""))
    except SyntaxError:
        return
    for node in ast.walk(tree):
        keywords = [word.arg for word in node.keywords if word.arg] if isinstance(node, ast.Call) else []
        name = ast.unparse(node.func if isinstance(node, ast.Call) else node)
        if re.fullmatch(r"[\w.]+", name) and name.partition(".")[0] in OBJECTS:
            yield name, tuple(keywords)


USED = {(name_of(page), *used) for page in PAGES for span in spans(page) for used in _used(span)}


def _problem(name: str, keywords: tuple[str, ...]) -> str:
    """Return what is missing; "" if the name exists and has the arguments."""
    owner, *names = name.split(".")
    found = OBJECTS[owner]
    for part in names:
        if part not in {*dir(found), *getattr(found, "__dict__", {}), *getattr(found, "__annotations__", {})}:
            return f"{name}: there is no {part}"
        # Some properties of an engine raise outside a window: only check that they exist.
        found = inspect.getattr_static(found, part) if owner == "sync" else getattr(found, part, None)
    unknown = set(keywords) - set(inspect.signature(found).parameters) if keywords else set()
    return f"{name} has no {unknown}" if unknown else ""


def test_names_of_ours_exist_and_have_the_arguments():
    assert USED
    problems = [(page, _problem(name, keywords)) for page, name, keywords in USED]
    assert [(page, problem) for page, problem in problems if problem] == []


# ---- files in backticks: `docs/mesh.md`, `pyengine/comm/base.py: Comm` ----

_FILE = re.compile(r"((?:benchmarks|csrc|docs|examples|pyengine|tests)/[\w./-]*)(?:: ([\w.]+))?")
FILES = {
    (name_of(page), *match.groups(default=""))
    for page in PAGES
    for span in spans(page)
    if (match := _FILE.fullmatch(span))
}


def _has(path: str, name: str) -> bool:
    """Return whether a file exists and defines every part of a dotted name."""
    if not (ROOT / path).exists():
        return False
    definitions = [rf"\b(class|def) {part}\b|^ *{part}(:.*)? = " for part in filter(None, name.split("."))]
    return all(re.search(each, (ROOT / path).read_text(), re.MULTILINE) for each in definitions)


def test_files_on_the_pages_exist_and_have_the_names():
    assert FILES and [(page, path, name) for page, path, name in FILES if not _has(path, name)] == []


def _text(node: ast.Constant | ast.JoinedStr) -> str:
    """Return a string of the source code, with … for each value that is filled in."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)


def test_messages_of_the_errors_page_are_in_the_sources():
    entries = re.findall(r"^\| `(.+?)` \|", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    strings = "\n".join(
        _text(node)
        for module in MODULES
        for node in ast.walk(ast.parse((PACKAGE / module).read_text()))
        if isinstance(node, ast.JoinedStr | ast.Constant)
    )
    patterns = {entry: ".*?".join(map(re.escape, entry.split("…"))) for entry in entries}
    assert entries and [entry for entry, pattern in patterns.items() if not re.search(pattern, strings)] == []


def test_papers_are_linked_by_their_own_number():
    for page in PAGES:
        named = re.findall(r"arXiv:([\d.]+\d)", prose(page))
        linked = re.findall(r"\[arXiv:(\S+)\]\(https://arxiv\.org/abs/\1\)", prose(page))
        assert named == linked, name_of(page)


def test_a_blank_line_ends_every_table():
    ends = re.compile(r"^\|.*\n(?!\||<!--)(\S.*)", re.MULTILINE)
    assert [(name_of(page), line) for page in PAGES for line in ends.findall(prose(page))] == []
