"""What users see first: names of arguments and wires, and what objects print."""

from __future__ import annotations

from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from torch import nn

import pyengine as pe
from pyengine.wire.named import WIRES, WireName


@pytest.mark.parametrize(
    ("make", "args", "kwargs", "message"),
    [
        (
            pe.GradSync,
            (8,),
            {},
            r"got 8 without a name after params_or_module: .*, accumulate=8",
        ),
        (pe.GradSync, (), {"gradient_accumulation_steps": 4}, r"_steps=4: here .* called accumulate="),
        (pe.GradSync, (), {"acumulate": 4}, r"acumulate=4: here this argument is called accumulate="),
        (pe.GradSync, (), {"foo": 1}, r"foo=1: there is no such argument; the arguments are accumulate, "),
        (pe.attach, (2,), {}, "accumulate=2"),
    ],
)
def test_a_wrong_argument_is_answered_with_the_right_one(make, args, kwargs, message):
    with pytest.raises(TypeError, match=message):
        make(nn.Linear(1, 1), *args, **kwargs)


@pytest.mark.parametrize(
    ("module", "name", "remedy"),
    [
        (pe, "Dealer", "WindowSampler"),
        (pe, "Checkpoints", r"torch\.save"),
        (pe.wire, "Hierarchical", "shared_memory=True"),
        (pe, "Dealr", ""),
        (pe.wire, "FP33", ""),
    ],
)
def test_a_removed_name_is_answered_with_what_to_use_instead(module, name, remedy):
    assert not hasattr(module, name)
    with pytest.raises(AttributeError, match=f"{name}.*{'removed' if remedy else ''}.*{remedy}"):
        getattr(module, name)


@pytest.mark.parametrize("name", WIRES)
def test_a_wire_goes_by_the_name_of_the_command_line(name):
    with pe.GradSync(nn.Linear(1, 1), wire=name) as sync:
        assert sync._engine.reducer.residuals.wire == WIRES[name]
        assert repr(sync) == (
            f"GradSync(2 parameters, accumulate=1, world_size=1, wire={WIRES[name]}, accumulator='fp32', "
            "window=0)"
        )
    assert repr(sync) == "GradSync(closed)"


def test_type_checkers_know_every_name_of_a_wire():
    assert get_args(WireName) == tuple(WIRES)


def test_a_wire_that_is_no_subclass_is_named():
    wire = SimpleNamespace(dtype=torch.float32, all_reduce_=lambda flat, comm: None)
    with pytest.raises(ValueError, match="SimpleNamespace is not a subclass of pe.wire.Wire: make it one"):
        pe.GradSync(nn.Linear(1, 1), wire=wire)


def test_windows_and_records_say_where_the_loop_is():
    model = nn.Linear(1, 1)
    sync, optimizer = pe.GradSync(model, accumulate=2), torch.optim.SGD(model.parameters(), lr=0.1)
    assert sync.last_record is None
    records: list[pe.StepRecord] = []
    said = []
    for window in sync.windows([torch.ones(1, 1)] * 3):
        for x in window:
            said.append(repr(window))
            sync.backward(model(x).sum())
        sync.step(optimizer)
        said.append(repr(sync.last_record)[:18])
        sync.on_step(records.append)
    assert said == [
        "<window 0, 1 of 2 micro-batches handed out>",
        "<window 0, 2 of 2 micro-batches handed out>",
        "StepRecord(step=0,",
        "<window 1, 1 of 2 micro-batches handed out>",
        "StepRecord(step=1,",
    ]
    assert records == [sync.last_record] and records[0] is sync.last_record
    assert repr(window) == "<window 1, which is over>"


def test_audits_say_how_many_windows_they_have_checked():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pe.audit(model, optimizer, every=2) as watch:
        for _ in range(3):
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert repr(watch) == "Audit(2 tensors, every=2, 2 of 3 windows checked)"
    sync = pe.GradSync(model)
    checks = sync.audit(every=2)
    for _ in range(3):
        with sync.accumulate():
            sync.backward(model(torch.ones(1, 1)).sum())
        sync.step(optimizer)
    assert repr(checks) == "WindowAudit(every=2, 2 of 3 windows checked)"


def test_dir_has_what_is_public():
    assert sorted({*pe.__all__, "__version__"}) == sorted(dir(pe))


def test_a_policy_that_has_been_removed_is_answered_with_what_to_use():
    with pytest.raises(ValueError, match=r"^(rank 0: )?use nonfinite='skip' or 'raise': .* has been removed"):
        pe.GradSync(nn.Linear(1, 1), nonfinite="drop_micro_batch")
