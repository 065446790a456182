"""Links out of the pages have a known form, and files that a page names exist;
`make docs` checks links between pages, `make linkcheck` the network's.
"""

from __future__ import annotations

import re

import pytest
from pages import PAGES, ROOT, name_of, prose, spans

FORMS = {
    "a paper": r"https://arxiv\.org/abs/\d{4}\.\d{4,5}",
    "PyTorch's installer": r"https://pytorch\.org/get-started/locally",
}
SOURCES = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "pyproject.toml", ROOT / "docs" / "conf.py"]
SOURCES += [path for folder in ("pyengine", "csrc", "examples") for path in (ROOT / folder).rglob("*.*")]
TEXTS = {name_of(path): path.read_text() for path in SOURCES if path.suffix not in (".so", ".pyc")}
LINKS = sorted({link for text in TEXTS.values() for link in re.findall(r"https?://[^\s)>\"'`]+", text)})
FOLDERS = "benchmarks|csrc|docs|examples|pyengine|tests"


@pytest.mark.parametrize("link", LINKS)
def test_a_link_out_of_the_project_has_a_known_form(link):
    assert any(re.fullmatch(form, link) for form in FORMS.values())


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_in_use(form):
    assert any(re.fullmatch(FORMS[form], link) for link in LINKS)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_paper_is_linked_by_its_own_number(page):
    said = re.findall(r"arXiv:([\d.]+\d)", prose(page))
    assert said == re.findall(r"\[arXiv:(\S+)\]\(https://arxiv\.org/abs/\1\)", prose(page))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_a_page_names_exist(page):
    named = [span for span in spans(page) if re.fullmatch(rf"(?:{FOLDERS})/[\w./-]*\.\w+", span)]
    assert [path for path in named if not (ROOT / path).exists()] == []
