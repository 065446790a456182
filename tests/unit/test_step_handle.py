"""`on_step` returns a handle like PyTorch's hooks, and works as a decorator."""

from __future__ import annotations

import pytest
import torch
from torch.utils.hooks import RemovableHandle

import pyengine as pe

WEIGHT = torch.nn.Parameter(torch.zeros(1))


@pytest.fixture
def sync():
    with pe.GradSync([WEIGHT]) as made:
        yield made


def _step(sync: pe.Sync) -> None:
    with sync.accumulate():
        sync.backward(WEIGHT.sum())
    sync.step(torch.optim.SGD([WEIGHT], lr=0.0))


def test_a_removed_callback_is_not_called_any_more_and_others_are(sync):
    seen: list[tuple[str, int]] = []
    handle = sync.on_step(lambda record: seen.append(("first", record.step)))
    sync.on_step(lambda record: seen.append(("second", record.step)))
    assert isinstance(handle, RemovableHandle)
    with sync.on_step(lambda record: seen.append(("context", record.step))):
        _step(sync)
    handle.remove()
    handle.remove()  # a second call does nothing
    _step(sync)
    assert seen == [("first", 0), ("second", 0), ("context", 0), ("second", 1)]


def test_a_decorated_function_can_still_be_called_and_may_remove_itself(sync):
    seen: list[object] = []

    @sync.on_step
    def note(record: object) -> None:
        """Note the step."""
        seen.append(record)
        note.remove()

    sync.on_step(lambda record: seen.append(record.step))
    _step(sync)
    record = sync.last_record
    _step(sync)
    note("by hand")
    assert seen == [record, 0, 1, "by hand"]
    assert note.__name__ == "note" and note.__doc__ == "Note the step."


def test_one_function_given_twice_is_called_twice_and_removed_once(sync):
    seen: list[int] = []
    handles = [sync.on_step(lambda record: seen.append(record.step)) for _ in range(2)]
    _step(sync)
    handles[0].remove()
    _step(sync)
    assert seen == [0, 0, 1]


def test_a_handle_that_outlives_its_engine_removes_nothing():
    sync = pe.GradSync([WEIGHT])
    handle = sync.on_step(lambda record: None)
    sync.close()
    del sync
    handle.remove()


class _Writer:
    """A callback that is an object with its own attributes."""

    path = "steps.jsonl"

    def __call__(self, record: pe.StepRecord) -> None:
        pass


def test_attributes_of_a_callback_object_are_reached_through_its_handle(sync):
    assert sync.on_step(_Writer()).path == "steps.jsonl"
    with pytest.raises(AttributeError, match="nothing"):
        _ = sync.on_step(_Writer()).nothing
