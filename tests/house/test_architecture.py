"""docs/architecture.md tells the truth: its picture is drawn from the imports, and what it names is there."""

from __future__ import annotations

import ast
import re

import pytest
from floors import COMMAND, FLOORS, MODULES, PICTURE, edges, imported, picture
from pages import ROOT, blocks, prose, spans

PAGE = ROOT / "docs" / "architecture.md"
_PATH = re.compile(r"\S*/\S*|\w+\.(?:py|txt|md|toml)")
SPANS = [span.partition(": ") for span in sorted(set(spans(PAGE)))]
NAMED = [(path, name) for path, _, name in SPANS if name]
PATHS = sorted({path for path, _, _ in SPANS if _PATH.fullmatch(path)})


def _rows(title: str) -> list[list[str]]:
    """Return the cells of the table under a heading, without its first row."""
    (section,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", prose(PAGE), re.MULTILINE | re.DOTALL)
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def _code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def _is_place(cell: str) -> bool:
    return cell == "the same" or "/" in "".join(_code(cell))


def _defined(path: str) -> set[str]:
    """Return the names at the top of a module, and those in its classes as Class.name."""
    names = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        names |= set(_names(node))
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{name}" for inner in node.body for name in _names(inner)}
    return names


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
    return [target.id for target in targets if isinstance(target, ast.Name)]


IMPORTS_NOT = [(floor, name) for floor, _, not_ in _rows("What each floor may know") for name in _code(not_)]
OPENED = [(row[0], path) for row in _rows("To change X, open Y") for path in _code(" ".join(row[1:]))]


def test_the_picture_is_drawn_from_the_imports():
    assert PICTURE.read_text() == picture(edges()), (
        f"{PICTURE.relative_to(ROOT)} shows other floors or imports than there are: run `{COMMAND}`, look "
        f"at it, and see whether {PAGE.relative_to(ROOT)} still tells the truth"
    )


@pytest.mark.parametrize("edge", sorted(edges()), ids="-".join)
def test_the_picture_shows_every_import_between_floors(edge):
    assert picture(edges() - {edge}) != picture(edges())


def test_the_picture_stands_on_the_page_with_words_for_it():
    assert re.search(rf"!\[[^\]]+\]\({PICTURE.name}\)", PAGE.read_text())


def test_the_floors_of_the_page_are_those_of_the_package_from_the_ground_up():
    assert [_code(first) for first, *_ in _rows("What each floor may know")] == [[floor] for floor in FLOORS]


@pytest.mark.parametrize(("floor", "name"), IMPORTS_NOT)
def test_a_floor_does_not_import_what_it_must_not_know(floor, name):
    (floor,) = _code(floor)
    forbidden = f"pyengine.{name}" if name in FLOORS else name
    found = {
        f"{path}: {whole}"
        for path in MODULES
        if path.parts[0] == floor
        for whole, _ in imported(path)
        if f"{whole}.".startswith(f"{forbidden}.")
    }
    assert found == set()


@pytest.mark.parametrize("path", PATHS)
def test_a_path_on_the_page_exists(path):
    assert (ROOT / path).exists(), f"{path} has moved: name the file that holds it now"


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_a_name_on_the_page_is_in_its_file(path, name):
    assert name in _defined(path), f"{name} has left {path}: name the file that holds it now"


@pytest.mark.parametrize("title", ["The life of a gradient", "The life of a count"])
def test_every_station_names_a_file_or_says_that_it_is_the_same(title):
    stations = {station: places for station, *places in _rows(title)}
    assert len(stations) >= 5
    assert [where for where, places in stations.items() if not all(map(_is_place, places))] == []


def test_every_change_names_what_to_open_and_what_tests_it():
    rows = _rows("To change X, open Y")
    assert len(rows) >= 12
    assert [change for change, *places in rows if not all(map(_code, places))] == []


@pytest.mark.parametrize(("change", "path"), OPENED)
def test_a_file_to_open_is_a_file(change, path):
    assert (ROOT / path.partition(": ")[0]).is_file(), f"to change {change}, {path} cannot be opened"


@pytest.mark.parametrize("test", ["test_new_transport", "test_new_owner", "test_new_sum"])
def test_a_worked_example_on_the_page_is_the_one_that_is_tested(test):
    source = (ROOT / "tests" / "extending" / f"{test}.py").read_text()
    shown = [block.code for block in blocks("python") if block.page == "docs/architecture.md"]
    classes = [code[code.index("class ") :] for code in shown if "class " in code]
    assert sum(code.rstrip() in source for code in classes) == 1
    assert len(source.splitlines()) <= 60
