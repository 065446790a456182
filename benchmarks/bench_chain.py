"""A window's whole way, accumulate, unscale, norm, clip: python benchmarks/bench_chain.py [--device cuda]
[--save].

Four micro-batches of bf16 gradients, summed in fp32, no network. Bytes an element are counted from what each
pass must read and write; the roof is 36 bytes, 10 A - 4 for A = 4, at the copy rate: nothing scaled, nothing
clipped, all in the passes that add. `share` is that roof over the time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import _cuda
import torch
from _harness import (
    Options,
    measure_and_print_yardstick,
    parse_options,
    print_cuda_header,
    print_cuda_row,
    print_roofs,
    save,
    save_cuda,
)
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from pyengine.cli.bench.kernels.case import Slots
from pyengine.cli.bench.kernels.measure import measure_roofs, time_in_turn
from pyengine.cli.machine import card

MICRO_BATCHES = 4
MAX_NORM = 1.0
ROOF_BYTES = 10 * MICRO_BATCHES - 4
F32, BF16 = torch.float32, torch.bfloat16

# Contestants and what they move, bytes an element.
OURS, OURS_F32 = "pyengine", "pyengine, fp32 wire"
TORCH, SEPARATE = "torch", "separate passes"
NUM_BYTES = {
    OURS: 6 + 10 + 10 + 8 + 4 + 4,  # store; add twice; add and cast; scale, norm and check; clip
    OURS_F32: 6 + 10 + 10 + 10 + 8 + 8,  # store; add three times; scale, norm and check; clip
    TORCH: 4 + 4 * 10 + 6 + 2 + 4,  # zero; add; scale and cast; norm and check; clip
    SEPARATE: 4 + 4 * 10 + 4 + 8 + 4 + 8,  # zero; add; check; scale; norm; clip: all in fp32
}


@dataclass(frozen=True)
class Shape:
    """A line of the table."""

    name: str
    slots: Slots


class Window:
    """The gradients of four micro-batches, as autograd would have left them."""

    def __init__(self, slots: Slots) -> None:
        self.slots, self.plan = slots, slots.plan()
        self.grads = [slots.tensors(BF16) for _ in range(MICRO_BATCHES)]
        self.inv_count = slots.scalar(2.0**-5)

    def contestants(self) -> dict[str, Callable[[], Tensor]]:
        """Return a call each; it runs the whole window and returns the norm."""
        ours = {OURS: Ours(self, BF16), OURS_F32: Ours(self, F32)}
        return ours | {TORCH: Torch(self), SEPARATE: Separate(self)}


class Ours:
    """The engine's calls: one pass divides and takes the norm, one clips."""

    def __init__(self, window: Window, wire_dtype: torch.dtype) -> None:
        slots, plan = window.slots, window.plan
        self.plan, self.one, self.inv_count = plan, slots.scalar(1.0), window.inv_count
        self.grads = [plan.pointers(grads) for grads in window.grads]
        self.acc = slots.empty(F32)
        self.wire = self.acc if wire_dtype == F32 else slots.empty(wire_dtype)
        self.wire_slots = plan.pointers(list(self.wire.split(slots.each)))
        self.sumsq = torch.empty(slots.pieces, dtype=torch.float64, device=slots.device)
        self.flags = torch.zeros(slots.pieces, dtype=torch.uint8, device=slots.device)

    def __call__(self) -> Tensor:
        plan, one = self.plan, self.one
        *earlier, last = self.grads
        for index, grads in enumerate(earlier):
            plan.accumulate_(self.acc, grads, one, first=index == 0, nonfinite=self.flags)
        if self.wire is self.acc:
            plan.accumulate_(self.acc, last, one, first=False, nonfinite=self.flags)
        else:
            plan.accumulate_cast_(self.wire, self.acc, last, one, one, first=False, nonfinite=self.flags)
        results = self.wire_slots
        plan.unscale_norm(results, results, self.inv_count, sumsq=self.sumsq, nonfinite=self.flags)
        norm = self.sumsq.cumsum(0)[-1].sqrt()
        factor = (MAX_NORM / (norm + 1e-6)).clamp(max=1.0).float()
        plan.unscale_norm(results, results, factor, sumsq=self.sumsq, nonfinite=self.flags)
        return norm


class Torch:
    """What a careful loop writes: fp32 sums by foreach, a bf16 wire,
    clip_grad_norm_ and a look at its norm.
    """

    def __init__(self, window: Window) -> None:
        slots = window.slots
        self.grads, self.inv_count = window.grads, window.inv_count
        self.acc, self.wire = slots.empty(F32), slots.empty(BF16)
        self.sums, results = list(self.acc.split(slots.each)), list(self.wire.split(slots.each))
        self.params = [torch.nn.Parameter(part) for part in results]
        for param, part in zip(self.params, results, strict=True):
            param.grad = part

    def __call__(self) -> Tensor:
        self.acc.zero_()
        for grads in self.grads:
            torch._foreach_add_(self.sums, grads)
        torch.mul(self.acc, self.inv_count, out=self.wire)
        norm = clip_grad_norm_(self.params, MAX_NORM)
        self.found_inf = ~torch.isfinite(norm)
        return norm


class Separate:
    """A pass for everything, on fp32 main gradients: the shape of Megatron's and apex' chains."""

    def __init__(self, window: Window) -> None:
        slots = window.slots
        self.grads, self.inv_count = window.grads, window.inv_count
        self.main = slots.empty(F32)
        self.main_grads = list(self.main.split(slots.each))

    def __call__(self) -> Tensor:
        self.main.zero_()
        for grads in self.grads:
            for main_grad, grad in zip(self.main_grads, grads, strict=True):
                main_grad.add_(grad)
        self.check = self.main.norm()
        self.main.mul_(self.inv_count)
        norm = torch.stack(torch._foreach_norm(self.main_grads)).norm()
        torch._foreach_mul_(self.main_grads, (MAX_NORM / (norm + 1e-6)).clamp(max=1.0))
        return norm


def build(shape: Shape) -> dict[str, Callable[[], Tensor]]:
    """Make one set of operands and check that everybody finds the same norm."""
    runs = Window(shape.slots).contestants()
    norms = {name: float(run()) for name, run in runs.items()}
    # bf16 norms of bf16 wires: 2^-9 from the wire and 2^-9 from torch's result, well below a wrong formula
    assert all(abs(norm - norms[OURS]) <= 1e-2 * norms[OURS] for norm in norms.values()), norms
    return runs


def shapes(options: Options) -> list[Shape]:
    sizes = options.sizes
    found = [
        Shape("8 tensors", sizes.few),
        Shape("400 tensors", sizes.many),
        Shape("1000 of 1 KB", sizes.tiny),
    ]
    large, size = _cuda.huge(sizes)
    more = [
        Shape(f"8 tensors, {size}", large),
        Shape("one 25 MiB bucket", _cuda.bucket(sizes)),
    ]
    return [*found, *more] if sizes.is_cuda else found


def run_cuda(options: Options) -> None:
    """Time everything on the device."""
    yardstick = measure_and_print_yardstick(options)
    print_cuda_header()
    rows = []
    for shape in shapes(options):
        roof_bytes = ROOF_BYTES * shape.slots.numel
        sets = [build(shape) for _ in range(_cuda.num_sets(roof_bytes))]
        times = _cuda.compete(sets, options.seconds)
        del sets
        row = _cuda.row(shape.name, roof_bytes, times, yardstick)
        for name, mine in row["contestants"].items():
            mine["bytes_an_element"] = NUM_BYTES[name]
        rows.append(row)
        print_cuda_row(row)
        share = row["contestants"][OURS]["share_of_copy"]
        print(
            f"    {ROOF_BYTES} bytes at the copy rate over our time: {share:.1%} (target 90.9 %: within 10 %)"
        )
        if options.save:  # now: a run that is stopped keeps what it has
            save_cuda("chain", yardstick, {"roof_bytes": ROOF_BYTES, "rows": rows})


def run_cpu(options: Options) -> None:
    """Time everything on one thread; the roof is the best copy's rate."""
    roofs = measure_roofs(options.megabytes, options.seconds)
    print_roofs(options.threads, roofs)
    print(f"{'case':44} {'B/elem':>6} {'min ms':>8} {'p50 ms':>8} {'share':>6}")
    rows = []
    for shape in shapes(options):
        runs = build(shape)
        roof = ROOF_BYTES * shape.slots.numel / roofs["copy"] / 1e9
        contestants = {}
        for name, times in zip(runs, time_in_turn(list(runs.values()), options.seconds), strict=True):
            best, median = min(times), statistics.median(times)
            contestants[name] = {
                "bytes_an_element": NUM_BYTES[name],
                "min_ms": best * 1e3,
                "p50_ms": median * 1e3,
                "share_of_copy": roof / best,
            }
            label = f"{shape.name}, {name}"
            print(f"{label:44} {NUM_BYTES[name]:6} {best * 1e3:8.3f} {median * 1e3:8.3f} {roof / best:6.1%}")
        rows.append({"case": shape.name, "contestants": contestants})
    if options.save:
        content = {"roofs_gb_per_s": roofs, "roof_bytes": ROOF_BYTES, "rows": rows}
        print("wrote", save("chain", {"machine": card(options.threads)} | content))


if __name__ == "__main__":
    options = parse_options(__doc__)
    (run_cuda if options.sizes.is_cuda else run_cpu)(options)
