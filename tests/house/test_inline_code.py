"""Names of ours in the prose of the pages (`sync.flush()`, `GradSync(group=)`) exist,
and take the arguments that are named.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from pages import PAGES, name_of, spans

import pyengine as pe
from pyengine.cli.study.probe import Probe as StudyProbe
from pyengine.cli.verify.probe import Probe as VerifyProbe
from pyengine.ops.exact import ExactSum
from pyengine.ops.plan import BucketPlan


def _objects() -> dict[str, Any]:
    """Return what the pages call by these names; instances, since attributes are made with them."""
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
# A name behind another object's dot, or inside a longer word, is not ours.
_NAME = re.compile(r"(?<![\w./])(" + "|".join(OBJECTS) + r")((?:\.\w+)*)(\()?")


def _keywords(call: str) -> list[str]:
    """Return the keywords of a call, whose text goes on behind its opening parenthesis."""
    depth, found = 1, []
    for word in re.findall(r"[()\[\]{}]|\w+ ?=(?!=)|.", call):
        depth += (word in "([{") - (word in ")]}")
        if depth == 0:
            break
        if depth == 1 and len(word) > 1:
            found.append(word.rstrip("= "))
    return found


def _used(span: str) -> list[tuple[str, str, list[str]]]:
    """Return (object, dotted names, keywords) of what a span uses of ours."""
    return [
        (match[1], match[2].strip("."), _keywords(span[match.end() :]) if match[3] else [])
        for match in _NAME.finditer(span)
    ]


USED = sorted(
    {
        (name_of(page), owner, names, tuple(keywords))
        for page in PAGES
        for span in spans(page)
        for owner, names, keywords in _used(span)
        if names or keywords
    }
)


def test_names_and_arguments_are_found_in_a_span():
    assert _used("f(sync.state_dict(), pe.Exact(micro_batches=n, a=g(b=2)), x.sync.no, y(group=1))") == [
        ("sync", "state_dict", []),
        ("pe", "Exact", ["micro_batches", "a"]),
    ]


@pytest.mark.parametrize(("page", "owner", "names", "keywords"), USED, ids=lambda value: str(value))
def test_a_name_of_ours_exists_and_takes_the_arguments(page, owner, names, keywords):
    found = OBJECTS[owner]
    for name in filter(None, names.split(".")):
        # Some properties raise outside a window: whether they are there is all that matters, and they end a
        # name.
        assert name in dir(found) or name in getattr(found, "__annotations__", {})
        found = inspect.getattr_static(found, name) if owner == "sync" else getattr(found, name, None)
    assert set(keywords) <= (set(inspect.signature(found).parameters) if keywords else set())
