"""pe.ops without an engine: on every device, without the core, and compiled, against plain PyTorch."""

import functools
import math
import shutil

import numpy
import pytest
import torch
from op_cases import DTYPES, INF, NAN, assert_same_bits, clone, random_values
from torch.utils._pytree import tree_leaves

import pyengine as pe
from pyengine.ops import functional, native

SHAPES = [(3, 5), (0,), (), (7,), (2, 33, 65)]


@pytest.fixture(params=["core", "reference", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """Return the device of the tensors; "reference" is the CPU without the core."""
    if request.param == "cuda":
        return request.getfixturevalue("gpu") and torch.device("cuda", 0)
    if request.param == "reference":
        monkeypatch.setattr(native, "core", lambda: None)
        # Start with an empty cache: it may contain plans that were created with the core.
        monkeypatch.setattr(functional, "_plan", functools.cache(functional._plan.__wrapped__))
    return torch.device("cpu")


def make(dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    numels = [torch.Size(shape).numel() for shape in SHAPES]
    values = [random_values(numel, dtype, seed) for seed, numel in enumerate(numels)]
    return [flat.view(shape).to(device) for flat, shape in zip(values, SHAPES, strict=True)]


def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def product(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    return tensor.float() * torch.tensor(scale, device=tensor.device)


# ---- each op against plain PyTorch ----


@pytest.mark.parametrize("dst", DTYPES)
@pytest.mark.parametrize("src", DTYPES)
def test_flatten_and_unflatten_scale_and_cast_as_torch_does(device, src, dst):
    tensors = make(src, device)
    flat = pe.ops.flatten(tensors, scale=0.3, dtype=dst)
    assert_same_bits(flat, product(joined(tensors), 0.3).to(dst))
    back = [torch.empty_like(tensor) for tensor in tensors]
    pe.ops.unflatten_(back, flat, scale=torch.tensor(0.7, device=device))
    assert_same_bits(joined(back), product(flat, 0.7).to(src))


@pytest.mark.parametrize("dtype", DTYPES)
def test_flatten_keeps_the_dtype_or_writes_into_out(device, dtype):
    tensors = make(dtype, device)
    out = torch.full((len(joined(tensors)) + 1,), 9.0, device=device)
    assert_same_bits(pe.ops.flatten(tensors), joined(tensors))
    assert pe.ops.flatten(tensors, out=out) is out
    assert_same_bits(out[:-1], joined(tensors).float())
    assert out[-1] == 9


@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulate_rounds_product_and_sum_one_by_one(device, dtype):
    tensors = make(dtype, device)
    acc = torch.full((len(joined(tensors)),), NAN, device=device)
    assert pe.ops.accumulate_(acc, tensors, scale=0.3, first=True) is acc
    want = product(joined(tensors), 0.3)
    assert_same_bits(acc, want)
    pe.ops.accumulate_(acc, tensors, scale=torch.tensor(0.7, device=device))
    assert_same_bits(acc, want + product(joined(tensors), 0.7))


@pytest.mark.parametrize("dtype", DTYPES)
def test_unscale_norm_is_the_float64_norm_of_what_is_written(device, dtype):
    tensors = make(dtype, device)
    before = clone(tensors)
    read_norm, read_inf = pe.ops.unscale_norm(tensors, 0.3)
    assert_same_bits(joined(tensors), joined(before))
    norm, found_inf = pe.ops.unscale_norm_(tensors, torch.tensor(0.3, device=device))
    assert_same_bits(joined(tensors), product(joined(before), 0.3).to(dtype))
    for got, values in ((norm, joined(tensors)), (read_norm, product(joined(before), 0.3))):
        assert got.dtype == torch.float32 and got.shape == ()
        # One rounding to float32; the error of the float64 sum is far smaller.
        want = torch.linalg.vector_norm(values.double())
        assert abs(got.double() - want) <= 2**-23 * want
    assert found_inf.dtype == torch.float32 and found_inf.item() == read_inf.item() == 0


@pytest.mark.parametrize("bad", [-INF, NAN])
@pytest.mark.parametrize("dtype", DTYPES)
def test_found_inf_is_one_wherever_the_value_or_the_product_is_not_finite(device, dtype, bad):
    tensors = [torch.ones(n, dtype=dtype, device=device) for n in (5, 2000)]
    tensors[1][1999] = bad
    assert pe.ops.unscale_norm(tensors)[1].item() == 1
    assert pe.ops.unscale_norm_(tensors)[1].item() == 1
    largest = [torch.full((3,), 3e38, device=device)]
    assert pe.ops.unscale_norm(largest)[1].item() == 0
    assert pe.ops.unscale_norm(largest, 2.0)[1].item() == 1


# ---- lists ----


def test_parameters_without_a_gradient_take_their_place(device):
    like = [torch.empty(numel, device=device) for numel in (2, 3, 1)]
    grads = [torch.ones(2, device=device), None, torch.ones(1, device=device)]
    assert pe.ops.flatten(grads, like=like).tolist() == [1, 1, 0, 0, 0, 1]
    acc = torch.full((6,), 5.0, device=device)
    assert pe.ops.accumulate_(acc, grads, like=like).tolist() == [6, 6, 5, 5, 5, 6]
    assert pe.ops.accumulate_(acc, grads, first=True, like=iter(like)).tolist() == [1, 1, 0, 0, 0, 1]
    pe.ops.unflatten_(grads, torch.tensor([0.0, 3, 1, 1, 1, 4], device=device), like=like)
    assert grads[0].tolist() == [0, 3] and grads[1] is None and grads[2].tolist() == [4]
    assert pe.ops.unscale_norm_([None, *grads], 2.0)[0].item() == 10
    assert grads[2].tolist() == [8]


def test_the_norm_is_of_all_dtypes_together(device):
    narrow = torch.full((4,), 3.0, dtype=torch.bfloat16, device=device)
    wide = torch.full((7,), 2.0, device=device)
    norm, found_inf = pe.ops.unscale_norm_((tensor for tensor in (narrow, None, wide)), 2.0)
    assert (norm.item(), found_inf.item()) == (16.0, 0.0)
    assert narrow.tolist() == [6] * 4 and wide.tolist() == [4] * 7


@pytest.mark.parametrize("tensors", [[], [None, None], [torch.empty(0)]])
def test_of_nothing_the_norm_is_zero(device, tensors):
    results = *pe.ops.unscale_norm(tensors), *pe.ops.unscale_norm_(tensors)
    assert [value.item() for value in results] == [0, 0, 0, 0]


def test_parameters_are_flattened_and_written_past_autograd(device):
    param = torch.nn.Parameter(torch.ones(2, 2, device=device))
    flat = pe.ops.flatten(iter([param]), scale=2.0)
    assert not flat.requires_grad
    pe.ops.unflatten_([param], flat)
    assert param.tolist() == [[2, 2], [2, 2]] and param.is_leaf


# ---- compiled ----

# Each takes a flat float32 buffer of 26 elements, tensors of 15, 4 and 7 elements, and a scale.
SIZES = [15, 4, 7]


def compiled_flatten(flat, a, b, c, scale):
    return pe.ops.flatten([a + 1, None, c], scale=scale, dtype=torch.bfloat16, like=[a, b, c])


def compiled_unflatten_(flat, a, b, c, scale):
    pe.ops.unflatten_([a, None, c], flat * 2, scale=scale, like=[a, b, c])
    return a + 1, c


def compiled_accumulate_(flat, a, b, c, scale):
    return pe.ops.accumulate_(flat, [a * 2, None, c], scale=scale, like=[a, b, c])


def compiled_unscale_norm(flat, a, b, c, scale):
    norm, found_inf = pe.ops.unscale_norm([a + 1, None, c], scale)
    return norm + 1, found_inf


def compiled_unscale_norm_(flat, a, b, c, scale):
    norm, found_inf = pe.ops.unscale_norm_([a, None, c], scale)
    return norm, found_inf, a + 1, c


COMPILED = [
    compiled_flatten,
    compiled_unflatten_,
    compiled_accumulate_,
    compiled_unscale_norm,
    compiled_unscale_norm_,
]


@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("call", COMPILED, ids=lambda call: call.__name__)
@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compilers_trace_through_without_a_graph_break(call, place, backend, request):
    if place == "cuda":
        request.getfixturevalue("gpu")
    # Integers and a power of two: every result but a norm is exact.
    numbers = torch.Generator().manual_seed(1)
    values = [torch.randint(-8, 9, (n,), generator=numbers).float() for n in (sum(SIZES), *SIZES)]
    values = [value.to(place) for value in (*values, torch.tensor(0.5))]
    eager, compiled = clone(values), clone(values)
    want = call(*eager)
    got = torch.compile(call, fullgraph=True, backend=backend)(*compiled)
    for left, right in zip(tree_leaves(got), tree_leaves(want), strict=True):
        assert_same_bits(left, right)
    for left, right in zip(compiled, eager, strict=True):
        assert_same_bits(left, right)


def test_other_numbers_and_sizes_compile_too():
    compiled = torch.compile(
        lambda grads, scale: pe.ops.flatten(grads, scale=scale), fullgraph=True, backend="aot_eager"
    )
    for numel, scale in ((3, 0.5), (4, 0.25), (5, 0.125)):
        assert compiled([torch.ones(numel), torch.ones(2)], scale).tolist() == [scale] * (numel + 2)


def test_parameters_compile_past_autograd():
    def double_(param):
        pe.ops.unflatten_([param], pe.ops.flatten([param], scale=2.0))

    param = torch.nn.Parameter(torch.ones(3))
    torch.compile(double_, fullgraph=True, backend="aot_eager")(param)
    assert param.tolist() == [2, 2, 2]


OPERATORS = {
    "flatten_": (torch.zeros(6), [torch.ones(2), None, torch.ones(3)], torch.tensor(0.5), [2, 1, 3]),
    "unflatten_": ([torch.ones(2), torch.ones(3)], torch.zeros(6), torch.tensor(0.5), [2, 1, 3], [0, 2]),
    "accumulate_": (torch.zeros(5), [torch.ones(2), None], torch.tensor(0.5), [2, 3], False),
    "unscale_norm": ([torch.ones(2), torch.ones(3)], torch.tensor(0.5), [0, 2]),
    "unscale_norm_": ([torch.ones(2), torch.ones(3).bfloat16()], torch.tensor(0.5), [0, 2]),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_passes_opcheck(name):
    torch.library.opcheck(getattr(torch.ops.pyengine, name), OPERATORS[name])


def test_every_operator_serves_a_public_function():
    names = [name.partition("::") for name in torch._C._dispatch_get_all_op_names()]
    registered = {name for space, _, name in names if space == "pyengine"}
    assert registered == set(OPERATORS)
    assert {name.rstrip("_") for name in registered} == {n.rstrip("_") for n in pe.ops.__all__ if n.islower()}


# ---- on a GPU ----


@pytest.mark.gpu
def test_nothing_waits_for_the_device_but_a_layouts_first_call(gpu):
    grads = [torch.ones(1000, dtype=torch.bfloat16, device="cuda") for _ in range(300)]
    acc = torch.empty(300_000, device="cuda")

    def step():
        pe.ops.accumulate_(acc, grads, scale=0.5, first=True)
        norm, _ = pe.ops.unscale_norm_([acc], 0.5)
        pe.ops.unflatten_(grads, acc, scale=1.0)
        return norm, pe.ops.flatten(grads)

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- what does not fit ----

TWO, WIDE = [torch.ones(2), torch.ones(3)], torch.ones(2).double()
PARAM = torch.nn.Parameter(torch.ones(2))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: pe.ops.flatten([None, *TWO]), TypeError, r"tensors\[0\] is NoneType; expected .*pass like="),
        (
            lambda: pe.ops.flatten(TWO, like=[*TWO, 3]),
            TypeError,
            r"like\[2\] is int; expected a torch.Tensor",
        ),
        (lambda: pe.ops.flatten(TWO, like=TWO[:1]), ValueError, "tensors has 2 tensors; expected 1"),
        (lambda: pe.ops.flatten(TWO, like=TWO[::-1]), ValueError, r"tensors\[0\] has 2 elements; expected 3"),
        (lambda: pe.ops.flatten([None], like=TWO[:1]), ValueError, "tensors contains no tensor.* pass out="),
        (lambda: pe.ops.flatten(TWO, out=torch.ones(5), dtype=torch.float16), ValueError, "dtype=.* and out"),
        (lambda: pe.ops.flatten(TWO, out=torch.ones(4)), ValueError, r"out is .*\(4,\).*at least 5"),
        (lambda: pe.ops.flatten(TWO, scale=torch.ones(1)), ValueError, "scale is .*0-dim"),
        (lambda: pe.ops.unflatten_(torch.ones(5), TWO), TypeError, "flat is list; expected a torch.Tensor"),
        (lambda: pe.ops.accumulate_(torch.ones(5).half(), TWO), TypeError, "acc is torch.float16"),
        (lambda: pe.ops.accumulate_(torch.ones(5), [None, TWO[1]]), TypeError, r"grads\[0\] is NoneType"),
        (lambda: pe.ops.unscale_norm([*TWO, 3.0]), TypeError, r"tensors\[2\] is float"),
        (lambda: pe.ops.unscale_norm_([TWO[0], WIDE], 0.5), TypeError, r"tensors\[1\] is torch.float64"),
        (lambda: pe.ops.unscale_norm_([None, PARAM]), TypeError, r"tensors\[1\] is a Parameter"),
        (lambda: pe.ops.unscale_norm_([TWO[0], TWO[0]]), ValueError, r"\[\d\] shares memory with tensors"),
    ],
)
def test_arguments_that_do_not_fit_are_named(call, error, words):
    with pytest.raises(error, match=words):
        call()
    assert TWO[0].tolist() == [1, 1]  # nothing was written


@pytest.mark.parametrize(
    ("scale", "error"),
    [
        *((scale, ValueError) for scale in (1e300, -1e300, 2**200, -(10**400), 3.5e38)),
        *((scale, TypeError) for scale in (1j, "0.5", None, [0.5])),
    ],
    ids=lambda value: repr(value)[:9],
)
@pytest.mark.parametrize("op", ["flatten", "unflatten_", "accumulate_", "unscale_norm", "unscale_norm_"])
def test_a_scale_that_is_no_float32_is_named(op, scale, error):
    tensors = [tensor.clone() for tensor in TWO]
    with pytest.raises(error, match="scale(=| is ).*; expected a (real )?number"):
        {
            "flatten": lambda: pe.ops.flatten(tensors, scale=scale),
            "unflatten_": lambda: pe.ops.unflatten_(tensors, torch.zeros(5), scale=scale),
            "accumulate_": lambda: pe.ops.accumulate_(torch.zeros(5), tensors, scale=scale),
            "unscale_norm": lambda: pe.ops.unscale_norm(tensors, scale),
            "unscale_norm_": lambda: pe.ops.unscale_norm_(tensors, scale),
        }[op]()
    assert all(tensor.eq(1).all() for tensor in tensors)


@pytest.mark.parametrize("scale", [2, True, 3e38, -3e38, math.inf, 1e-300, numpy.float32(0.5)])
def test_a_number_in_the_range_of_float32_is_a_scale(scale):
    assert pe.ops.flatten(TWO, scale=scale)[0] == torch.tensor(float(scale))


MEMORY = torch.ones(8)


@pytest.mark.parametrize(
    "tensors",
    [
        [MEMORY[:4], MEMORY[2:4].view(torch.bfloat16)],
        [MEMORY[2:4].view(torch.float16), None, MEMORY[:4]],
        [MEMORY[:2], MEMORY[2:4].view(torch.bfloat16), MEMORY[3:].view(torch.float16)],
        [MEMORY[:1], MEMORY.view(torch.bfloat16)[1:3]],
    ],
)
def test_tensors_of_several_types_that_share_memory_are_named_before_any_is_written(tensors, device):
    if device.type == "cuda":
        pytest.skip("memory of the host")
    with pytest.raises(ValueError, match=r"tensors\[\d\] shares memory with tensors\[\d\]"):
        pe.ops.unscale_norm_(tensors, 0.5)
    with pytest.raises(ValueError, match=r"tensors\[\d\] shares memory with inv_scale"):
        pe.ops.unscale_norm_([MEMORY[:2], MEMORY[4:6].view(torch.bfloat16)], MEMORY[5])
    assert MEMORY.tolist() == [1] * 8


def test_neighbours_of_several_types_in_one_memory_are_scaled():
    memory = torch.ones(8)
    pe.ops.unscale_norm_([memory[:3], memory[3:5].view(torch.bfloat16).fill_(1), memory[5:]], 0.5)
    assert memory[:3].tolist() == memory[5:].tolist() == [0.5] * 3
    assert memory[3:5].view(torch.bfloat16).tolist() == [0.5] * 4
