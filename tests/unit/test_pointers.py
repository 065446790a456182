"""Ops accept tensors whose elements are stored at their address, and name the problem of other tensors."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch._subclasses import FakeTensorMode

from pyengine.ops import native
from pyengine.ops.plan import BucketPlan
from pyengine.ops.pointers import Upload

ONE = torch.tensor(1.0)
PLAN = BucketPlan([0], [4])


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(4)


def _freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def _freed_view() -> torch.Tensor:
    """Return a view of a flat parameter without memory, as in FSDP; its address is a small number."""
    whole = torch.ones(12)
    view = whole[8:]
    whole.untyped_storage().resize_(0)
    return view


def _cut() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(12)
    return tensor


def _between() -> torch.Tensor:
    return torch.frombuffer(bytearray(17), dtype=torch.float32, offset=1)


ODD = {
    "between": (_between, "whose address is not aligned to its elements"),
    "fake": (_fake, "is a FakeTensor, which does not store its elements at its address"),
    "freed": (_freed, "whose storage holds 0 bytes; expected at least 16"),
    "freed view": (_freed_view, "whose storage holds 0 bytes; expected at least 48"),
    "cut": (_cut, "whose storage holds 12 bytes; expected at least 16"),
    "negated": (lambda: torch._neg_view(torch.ones(4)), "a lazily negated, conjugated or all-zero view"),
    "imaginary": (
        lambda: torch.ones(4, dtype=torch.complex64).conj().imag,
        "lazily negated|dense contiguous",
    ),
    "zero": (lambda: torch._efficientzerotensor(4), "a lazily negated, conjugated or all-zero view"),
    "meta": (lambda: torch.ones(4, device="meta"), "on meta; expected cpu|expected meta"),
    "expanded": (lambda: torch.ones(1).expand(4), "expected a dense contiguous tensor"),
}  # fmt: skip


@pytest.fixture(params=ODD)
def odd(request):
    make, message = ODD[request.param]
    return make(), message


def test_an_odd_tensor_is_refused_and_nothing_is_written(odd):
    tensor, message = odd
    flat, fine = torch.full((4,), 7.0), [torch.ones(4)]
    sumsq, flags = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.uint8)
    for run in (
        lambda: PLAN.pack_(tensor, fine, ONE),
        lambda: PLAN.unpack_(fine, tensor, ONE),
        lambda: PLAN.pack_(flat, [tensor], ONE),
        lambda: PLAN.accumulate_(flat, [tensor], ONE, first=True, nonfinite=flags),
        lambda: PLAN.unscale_norm([tensor], None, ONE, sumsq=sumsq, nonfinite=flags),
    ):
        with pytest.raises(ValueError, match=message):
            run()
    assert torch.equal(flat, torch.full((4,), 7.0)) and torch.equal(fine[0], torch.ones(4))


def _freed_scale() -> torch.Tensor:
    scale = torch.tensor(1.0)
    scale.untyped_storage().resize_(0)
    return scale


FLAT, LIST, FLAGS = torch.zeros(4), [torch.ones(4)], torch.zeros(1, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: PLAN.pack_(FLAT, LIST, torch._neg_view(ONE)), ValueError, "lazily negated"),
        (lambda: PLAN.pack_(FLAT, LIST, _freed_scale()), ValueError, "storage holds 0 bytes"),
        (lambda: PLAN.pack_([1.0], LIST, ONE), TypeError, "flat is .*; expected a torch.Tensor"),
        (lambda: PLAN.unpack_(LIST, [1.0], ONE), TypeError, "flat is .*; expected a torch.Tensor"),
        (
            lambda: PLAN.accumulate_([1.0], LIST, ONE, first=True, nonfinite=FLAGS),
            TypeError,
            "acc is .*; expected a torch.Tensor",
        ),
        (
            lambda: PLAN.accumulate_cast_([1.0], FLAGS, LIST, ONE, ONE, first=True, nonfinite=FLAGS),
            TypeError,
            "wire is .*; expected a torch.Tensor",
        ),
        (
            lambda: PLAN.unscale_norm(LIST, None, ONE, sumsq=[1.0], nonfinite=FLAGS),
            TypeError,
            "sumsq is .*; expected a torch.Tensor",
        ),
    ],
)
def test_an_odd_scale_and_what_is_no_tensor_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_an_empty_tensor_needs_no_memory():
    BucketPlan([0, 0], [0, 1]).pack_(torch.zeros(1), [torch.ones(0), torch.ones(1)], ONE)


def test_plain_tensors_parameters_and_inference_tensors_need_no_look_from_python():
    if not native.can_gather():
        pytest.skip("the core cannot read tensors here")
    with torch.inference_mode():
        inference = torch.ones(4)
    tensors = [torch.ones(4), torch.nn.Parameter(torch.ones(4)), torch.ones(8)[4:], inference]
    plan = BucketPlan(range(0, 16, 4), [4] * 4)
    assert native.core().gather(plan._native, tensors) is not None
    odd = [make() for make, _ in ODD.values()]
    assert [native.core().is_plain(tensor) for tensor in odd] == [False] * len(odd)


@pytest.fixture(params=["core", "reference"])
def core(request, monkeypatch):
    """Run with the core, if it can read tensors, and without it."""
    if request.param == "reference":
        monkeypatch.setattr(native, "core", lambda: None)
    elif not native.can_gather():
        pytest.skip("the core cannot read tensors here")


def _set_data(tensor: torch.Tensor) -> None:
    tensor.data = torch.arange(4.0)


def _share(tensor: torch.Tensor) -> None:
    tensor.copy_(torch.arange(4.0)).share_memory_()


@pytest.mark.parametrize("move", [_set_data, _share])
@pytest.mark.usefixtures("core")
def test_pointers_follow_a_tensor_to_other_memory(move):
    plan, tensors = BucketPlan([0, 4], [4, 4]), [torch.ones(4), torch.ones(4)]
    pointers, flat, moved = plan.pointers(tensors), torch.zeros(8), tensors[1]
    tensors.clear()  # the pointers keep the tensors alive
    plan.pack_(flat, pointers, ONE)
    move(moved)
    plan.pack_(flat, pointers, ONE)
    assert torch.equal(flat[4:], torch.arange(4.0))
    plan.unpack_(pointers, torch.full((8,), 3.0), ONE)
    assert torch.equal(moved, torch.full((4,), 3.0))


@pytest.mark.usefixtures("core")
def test_pointers_to_a_storage_that_has_shrunk_are_refused():
    memory = bytearray(16)
    tensor, emptied = torch.frombuffer(memory, dtype=torch.float32), torch.ones(4)
    pointers, address = PLAN.pointers([tensor]), tensor.data_ptr()
    # An allocator may return less memory at the same address.
    shorter = torch.frombuffer(memory, dtype=torch.float32, count=2)
    tensor.set_(shorter.untyped_storage(), 0, (2,), (1,))
    assert tensor.data_ptr() == address
    with pytest.raises(ValueError, match=r"tensors\[0\] has 2 elements; expected 4"):
        PLAN.pack_(torch.zeros(4), pointers, ONE)
    pointers = PLAN.pointers([emptied])
    emptied.untyped_storage().resize_(4)
    with pytest.raises(ValueError, match=r"tensors\[0\] is .* whose storage holds 4 bytes; .*at least 16"):
        PLAN.pack_(torch.zeros(4), pointers, ONE)


def test_pointers_to_tensors_that_have_been_resized_in_place_are_refused():
    plan = BucketPlan([0, 4], [4, 0])
    tensor, empty = torch.ones(4), torch.ones(0)
    pointers = plan.pointers([tensor, empty])
    plan.pack_(torch.zeros(4), pointers, ONE)
    tensor.resize_(2)
    with pytest.raises(ValueError, match=r"tensors\[0\] has 2 elements; expected 4"):
        plan.pack_(torch.zeros(4), pointers, ONE)
    tensor.resize_(4)
    empty.data = torch.ones(1)
    with pytest.raises(ValueError, match=r"tensors\[1\] has 1 elements; expected 0"):
        plan.pack_(torch.zeros(4), pointers, ONE)


@pytest.mark.parametrize("captures", [False, True])
def test_addresses_that_only_a_replay_writes_serve_the_capture_alone(monkeypatch, captures):
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "stream")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    upload = Upload(torch.zeros(300, dtype=torch.int64), "stream", None, captured=True)
    with (
        nullcontext()
        if captures
        else pytest.raises(RuntimeError, match="Pointers of 300 tensors were created during")
    ):
        upload.wait()


def test_the_core_refuses_a_dtype_that_it_does_not_know():
    core = native.core()
    if core is None:
        pytest.skip("there is no native core")
    with pytest.raises(ValueError, match="dtype code 3; expected 0"):
        core.Table([0], 3)
    flat, table = torch.zeros(4), core.Table([torch.ones(4).data_ptr()], 0)
    with pytest.raises(ValueError, match="dtype code -1; expected 0"):
        PLAN._native.pack_(flat.data_ptr(), -1, table, ONE.data_ptr(), 0)


@pytest.mark.slow
def test_the_core_gathers_nothing_before_it_knows_tensor_objects():
    if native.core() is None:
        pytest.skip("there is no native core")
    code = (
        "import torch; from pyengine.ops import _core; plan = _core.BucketPlan([0], [1]); "
        "assert _core.gather(plan, [torch.ones(1)]) is None"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
