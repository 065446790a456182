"""A frozen parameter needs no bucket, so it may have any dtype or layout, or be a tensor subclass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import error_of, me, recorded_warnings
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

import pyengine as pe


class Packed(torch.Tensor):
    """A float32 tensor that is stored as codes and scales, like the base weights of a QLoRA model."""

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor) -> Packed:  # noqa: PYI034 - Self came with 3.11
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self.codes, self.scales = codes, scales

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: None, size: Any, stride: Any) -> Packed:
        return Packed(inner["codes"], inner["scales"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Packed(args[0].codes, args[0].scales)
        args, kwargs = tree_map(lambda x: x.dense() if isinstance(x, Packed) else x, (args, kwargs or {}))
        return func(*args, **kwargs)

    def dense(self) -> Tensor:
        return self.codes.float() * self.scales


class Opaque(torch.Tensor):
    """A tensor subclass that does not expose its inner tensors: it has no `__tensor_flatten__`."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Opaque:  # noqa: PYI034 - likewise
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Opaque(args[0].inner)
        args, kwargs = tree_map(lambda x: x.inner if isinstance(x, Opaque) else x, (args, kwargs or {}))
        return func(*args, **kwargs)


KINDS = {
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "uint16": lambda x: x.to(torch.uint16),
    "bool": lambda x: x > 1,
    "complex": lambda x: x + 1j,
    "expanded": lambda x: x[:1].expand(4),
    "strided": lambda x: x.repeat_interleave(2)[::2],
    "subclass": lambda x: Packed(x.to(torch.uint8), x[:1]),
}
KEPT = {
    "quint8": lambda x: torch.quantize_per_tensor(x, 0.5, 0, torch.quint8),
    "sparse": lambda x: x.to_sparse(),
    "subclass": Opaque,
}


def _of_rank(rank: int) -> Tensor:
    return torch.full((4,), 1.0 + rank)


def _model(base: Tensor) -> nn.Module:
    model = nn.Linear(3, 1)
    model.base = nn.Parameter(base, requires_grad=False)
    return model


def _trains(sync: pe.Sync, model: nn.Module) -> None:
    """Train a window, check its known gradient, and reload the engine's own state."""
    for window in sync.windows([torch.ones(1, 3)] * 2):
        for x in window:
            sync.backward(model(x).sum(), count=1)
        sync.unscale_()
        grad = model.weight.grad
        assert torch.equal(grad.full_tensor() if isinstance(grad, DTensor) else grad, torch.ones(1, 3))
        assert bool(sync.step(torch.optim.SGD(model.parameters(), lr=0.1)))
    sync.load_state_dict(sync.state_dict())


@pytest.mark.parametrize("accumulator", ["fp32", "exact"])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_a_frozen_parameter_of_any_kind_gets_the_values_of_rank_0(kind, accumulator):
    rank, _ = me()
    model, want = _model(KINDS[kind](_of_rank(rank))), KINDS[kind](_of_rank(0))
    model.register_buffer("shown", KINDS[kind](_of_rank(rank)))
    sync = pe.GradSync(model, accumulate=2, accumulator=accumulator)
    sync.audit(every=1, module=model)
    for held in (model.base, model.shown):
        if kind == "subclass":
            held, want = held.detach().dense(), want.dense() if isinstance(want, Packed) else want
        assert held.tolist() == want.tolist()
    _trains(sync, model)


@pytest.mark.parametrize("kind", KEPT)
@on_ranks(2)
def test_a_frozen_parameter_that_cannot_be_copied_is_named_and_trained_beside(kind):
    torch.manual_seed(0)
    model = _model(KEPT[kind](_of_rank(0)))
    with recorded_warnings() as messages:
        sync = pe.GradSync(model, accumulate=2)
    sync.audit(every=1)
    _trains(sync, model)
    (text,) = messages
    assert text.startswith("load 'base' with the same values on every rank")


@on_ranks(2)
def test_ranks_whose_frozen_parameters_differ_in_kind_are_named():
    rank, _ = me()
    base = Packed(torch.zeros(4, dtype=torch.uint8), torch.ones(1)) if rank else torch.zeros(4)
    assert (
        "rank 1 has 'base' [4] float32, requires_grad=False, a Packed of [4] uint8, [1] float32"
        in error_of(pe.GradSync, _model(base))
    )


@pytest.mark.parametrize("kind", ["float8", "uint16"])
@on_ranks(2)
def test_a_frozen_parameter_of_any_type_is_sharded(kind):
    model = fully_shard(_model(KINDS[kind](_of_rank(0))))
    _trains(pe.attach(model, accumulate=2), model)
