"""`on_step` returns a handle like PyTorch's hooks, and works as a decorator."""

from __future__ import annotations

import pytest
import torch
from torch.utils.hooks import RemovableHandle

import pyengine as pe


def _engine() -> tuple[torch.nn.Parameter, pe.Sync]:
    weight = torch.nn.Parameter(torch.zeros(1))
    return weight, pe.GradSync([weight])


def _step(weight: torch.nn.Parameter, sync: pe.Sync) -> None:
    with sync.accumulate():
        sync.backward(weight.sum())
    sync.step(torch.optim.SGD([weight], lr=0.0))


def test_a_removed_callback_is_not_called_any_more_and_others_are():
    weight, sync = _engine()
    first: list[int] = []
    second: list[int] = []
    handle = sync.on_step(lambda record: first.append(record.step))
    sync.on_step(lambda record: second.append(record.step))
    assert isinstance(handle, RemovableHandle)
    _step(weight, sync)
    handle.remove()
    handle.remove()  # again does nothing
    _step(weight, sync)
    assert (first, second) == ([0], [0, 1])


def test_a_handle_is_a_context():
    weight, sync = _engine()
    seen: list[int] = []
    with sync.on_step(lambda record: seen.append(record.step)):
        _step(weight, sync)
    _step(weight, sync)
    assert seen == [0]


def test_a_decorated_function_can_still_be_called_and_taken_off():
    weight, sync = _engine()
    seen: list[int] = []

    @sync.on_step
    def note(record: pe.StepRecord) -> None:
        """Note the step."""
        seen.append(record.step)

    _step(weight, sync)
    note(pe.StepRecord(step=7, **_numbers()))
    note.remove()
    _step(weight, sync)
    assert seen == [0, 7] and note.__name__ == "note" and note.__doc__ == "Note the step."


def _numbers() -> dict[str, object]:
    numbers = dict.fromkeys(("micro_batches", "count", "grad_norm", "bytes_on_wire", "collectives"), 1)
    seconds = dict.fromkeys(("backward_s", "exposed_sync_s", "step_s"), 0.0)
    return {**numbers, **seconds, "loss": None, "skipped": False, "reason": ""}


def test_a_callback_may_remove_itself():
    weight, sync = _engine()
    seen: list[int] = []

    @sync.on_step
    def once(record: pe.StepRecord) -> None:
        seen.append(record.step)
        once.remove()

    sync.on_step(lambda record: seen.append(record.step + 10))
    _step(weight, sync)
    _step(weight, sync)
    assert seen == [0, 10, 11]


def test_one_function_given_twice_is_called_twice_and_removed_once():
    weight, sync = _engine()
    seen: list[int] = []
    handles = [sync.on_step(lambda record: seen.append(record.step)) for _ in range(2)]
    _step(weight, sync)
    handles[0].remove()
    _step(weight, sync)
    assert seen == [0, 0, 1]


def test_a_handle_that_outlives_its_engine_removes_nothing():
    _, sync = _engine()
    handle = sync.on_step(lambda record: None)
    sync.close()
    del sync
    handle.remove()


class _Writer:
    """A callback with a life of its own."""

    path = "steps.jsonl"

    def __call__(self, record: pe.StepRecord) -> None:
        pass


def test_attributes_of_a_callback_object_are_reached_through_its_handle():
    _, sync = _engine()
    assert sync.on_step(_Writer()).path == "steps.jsonl"
    with pytest.raises(AttributeError, match="nothing"):
        _ = sync.on_step(_Writer()).nothing
