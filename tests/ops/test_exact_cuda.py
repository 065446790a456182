"""The exact sum's CUDA kernels equal the CPU's bit for bit, on the emulator and on a GPU if there is one."""

import pytest
import torch
from emulated_cuda import EmulatedPlan
from exact_oracle import make_aligned_plan
from op_cases import DTYPES, assert_same_bits

from pyengine.ops.exact import ExactSum
from pyengine.ops.pointers import DTYPE_CODES

CPU = torch.device("cpu")
# An empty slot and sizes around a block of 64 and a chunk of 16384; and more slots than the smaller size of a
# kernel's parameters holds.
SIZES = [[0, 1, 63, 64, 65, 8191, 16384, 16385, 129, 4097], [3] * 300]


class EmulatedSum(ExactSum):
    """An `ExactSum` in host memory that runs the CUDA kernels; arguments are not checked."""

    def __init__(self, kernels, plan, **options):
        super().__init__(plan, device=CPU, **options)
        self._emulated = EmulatedPlan(kernels, plan.offsets, plan.numels)
        addresses = (limb.data_ptr() for limb in (self.hi, self.lo, self.bins))
        self._sum = kernels.ExactSum(*addresses, self.bins.numel(), self.width)

    def deposit_(self, tensors, *, first, nonfinite):
        with self._emulated._table(tensors) as table:
            self._emulated._plan.exact_deposit_(0, self._sum, table, first, nonfinite.data_ptr())

    def align_(self, bins):
        self._emulated._plan.exact_align_(0, self._sum, bins.data_ptr())

    def round_(self, out):
        self._emulated._plan.exact_round_(0, self._sum, out.data_ptr(), DTYPE_CODES[out.dtype])


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def make(request):
    """Return (device, a function that creates the sum under test)."""
    if request.param == "cuda":
        request.getfixturevalue("gpu")
        device = torch.device("cuda", torch.cuda.current_device())
        return device, lambda plan, **options: ExactSum(plan, device=device, **options)
    kernels = request.getfixturevalue("kernels")
    return CPU, lambda plan, **options: EmulatedSum(kernels, plan, **options)


def _term(numels, dtype, shift, seed):
    """Return values over many binades by block, with a missing slot, a nan and a -0, at a shifted address."""
    generator = torch.Generator().manual_seed(seed)
    term = []
    for numel in numels:
        exponent = torch.randint(
            -20 if dtype == torch.float16 else -100, 12, (-(-numel // 64),), generator=generator
        )
        x = torch.ldexp(torch.randn(numel, generator=generator), exponent.repeat_interleave(64)[:numel])
        term.append(torch.cat([torch.zeros(shift), x]).to(dtype)[shift:])
    term[4 + seed % 2] = None
    if seed == 2 and numels[7] > 77:
        term[7][77], term[8][0] = float("nan"), -0.0
    return term


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("terms", [1, 3, 4096])
@pytest.mark.parametrize("numels", SIZES, ids=["sizes", "many"])
def test_deposit_align_and_round_equal_the_cpu(make, numels, terms, dtype, shift):
    device, made = make
    plan, numel = make_aligned_plan(numels)
    mine = made(plan, numel=numel, terms=terms)
    theirs = ExactSum(plan, numel=numel, terms=terms, device=CPU)
    flags = [torch.zeros(len(numels), dtype=torch.uint8, device=where) for where in (device, CPU)]
    for seed in range(4):
        term = _term(numels, dtype, shift, seed)
        placed = [None if t is None else _place(t, shift, device) for t in term]
        mine.deposit_(placed, first=seed == 0, nonfinite=flags[0])
        theirs.deposit_(term, first=seed == 0, nonfinite=flags[1])
        assert torch.equal(mine.limbs.cpu(), theirs.limbs) and torch.equal(mine.bins.cpu(), theirs.bins)
        assert torch.equal(flags[0].cpu(), flags[1])
    grown = torch.where((theirs.bins > 0) & (theirs.bins < 9), theirs.bins + 1, theirs.bins)
    grown[3] = 255
    mine.align_(grown.to(device))
    theirs.align_(grown)
    assert torch.equal(mine.limbs.cpu(), theirs.limbs) and torch.equal(mine.bins.cpu(), theirs.bins)
    for out in DTYPES:
        got = torch.full((numel + 3,), 7.0, dtype=out, device=device)
        want = torch.full((numel + 3,), 7.0, dtype=out)
        mine.round_(got)
        theirs.round_(want)
        assert_same_bits(got.cpu(), want)
    mine.round_(mine.hi.view(torch.float32))
    theirs.round_(theirs.hi.view(torch.float32))
    assert_same_bits(mine.hi.cpu().view(torch.float32), theirs.hi.view(torch.float32))


def _place(tensor, shift, device):
    return torch.cat([tensor.new_zeros(shift), tensor]).to(device)[shift:]


def test_the_order_of_blocks_and_threads_does_not_matter(disordered):
    plan, numel = make_aligned_plan(SIZES[0])
    mine = EmulatedSum(disordered, plan, numel=numel, terms=8)
    theirs = ExactSum(plan, numel=numel, terms=8, device=CPU)
    flags = torch.zeros(len(SIZES[0]), dtype=torch.uint8)
    for seed in range(3):
        term = _term(SIZES[0], torch.float32, 0, seed)
        mine.deposit_(term, first=seed == 0, nonfinite=flags.clone())
        theirs.deposit_(term, first=seed == 0, nonfinite=flags.clone())
    assert torch.equal(mine.limbs, theirs.limbs) and torch.equal(mine.bins, theirs.bins)
