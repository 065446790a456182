"""The layout of slots and buckets."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pyengine as pe
from pyengine.gradients import layout as layouts
from pyengine.gradients import own
from pyengine.gradients.layout import ALIGN_ELEMENTS, Layout, ParamSpec, backward_order
from pyengine.gradients.own_buckets import OwnBucket

FP32, BF16 = torch.float32, torch.bfloat16


def build(specs: list[ParamSpec], **options: int) -> Layout:
    return layouts.build(specs, backward_order(specs), **options)


def _specs(*shapes: tuple[int, ...], dtype: torch.dtype = FP32) -> list[ParamSpec]:
    return [ParamSpec(f"p{i}", shape, dtype) for i, shape in enumerate(shapes)]


def test_a_bucket_closes_at_the_cap_and_never_splits_a_parameter():
    """The last registered parameter comes first; a frozen one has no slot."""
    specs = _specs((1000,), (10,), (10,))
    frozen = ParamSpec("frozen", (4,), FP32, requires_grad=False)
    layout = build([*specs, frozen], cap_bytes=300)
    assert [[slot.param for slot in bucket.slots] for bucket in layout.buckets] == [[2, 1], [0]]


def test_the_first_bucket_alone_closes_earlier():
    specs = _specs((10,), (10,), (10,), (10,), (10,))
    layout = build(specs, cap_bytes=10**9, first_bytes=300)
    assert [[slot.param for slot in bucket.slots] for bucket in layout.buckets] == [[4, 3], [2, 1, 0]]
    assert len(build(specs, cap_bytes=1, first_bytes=300).buckets) == 5


def test_the_network_gets_a_mebibyte_first_whatever_the_cap():
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(4)])  # one MiB each
    with pe.GradSync(model) as sync:
        assert [len(bucket.slots) for bucket in sync.layout.buckets] == [1, 3]


SPECS = st.builds(
    ParamSpec,
    name=st.just("p"),
    shape=st.lists(st.integers(0, 70), max_size=3).map(tuple),
    dtype=st.sampled_from([FP32, BF16, torch.float64]),
    requires_grad=st.booleans(),
    group=st.integers(0, 2),
)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), specs=st.lists(SPECS, max_size=12), cap=st.integers(1, 3000))
def test_every_element_is_in_exactly_one_aligned_slot_of_its_kind(data, specs, cap):
    order = data.draw(st.permutations(backward_order(specs)))
    layout = layouts.build(specs, order, cap_bytes=cap)
    found: list[int] = []
    for bucket in layout.buckets:
        free = 0  # the first element after the previous slots
        for slot in bucket.slots:
            spec = specs[slot.param]
            assert (spec.numel, spec.dtype, spec.group) == (slot.numel, bucket.dtype, bucket.group)
            assert slot.offset >= free and slot.offset % ALIGN_ELEMENTS == 0
            free = slot.offset + slot.numel
        assert bucket.numel >= max(free, 1) and bucket.numel % ALIGN_ELEMENTS == 0
        found += [slot.param for slot in bucket.slots]
    assert sorted(found) == sorted(order)
    assert all(bucket.slots for bucket in layout.buckets)


def test_old_buckets_are_freed_before_new_ones_are_allocated(monkeypatch):
    """With both allocated, a model whose gradients take half of the memory would not fit."""
    sync = pe.GradSync(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), accumulate=1)
    reducer = sync._engine.reducer
    old, make = [ref(bucket) for bucket in reducer.buckets()], own.own_bucket

    def made(*args: Any, **kwargs: Any) -> OwnBucket:
        assert old and all(bucket() is None for bucket in old)
        return make(*args, **kwargs)

    monkeypatch.setattr(own, "own_bucket", made)
    reducer.lay_out_as([0, 1, 2, 3])
    assert [bucket.indices for bucket in reducer.buckets()] == [[0, 1, 2, 3]]
    sync.close()
