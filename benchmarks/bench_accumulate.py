"""accumulate_ and accumulate_cast_ against the torch expression: python benchmarks/bench_accumulate.py [--save]."""

import torch
from _harness import Case, parse_options, report, split

from pyengine._ops import BucketPlan


class Bench:
    """One layout: gradients in tensors of their own, sums in a flat buffer."""

    def __init__(self, numel: int, pieces: int, dtype: torch.dtype) -> None:
        each = numel // pieces
        self.plan = BucketPlan(range(0, each * pieces, each), [each] * pieces)
        self.grads = split(numel, dtype, pieces)
        self.pointers = self.plan.pointers(self.grads)
        self.acc, self.acc_torch = torch.zeros(self.plan.flat_numel), torch.zeros(self.plan.flat_numel)
        self.parts = self.acc_torch.split(each)
        self.flags = torch.zeros(pieces, dtype=torch.uint8)
        self.grad_bytes = self.grads[0].element_size()
        self.one, self.half = torch.tensor(1.0), torch.tensor(0.5)

    def accumulate(self, name: str, first: bool) -> Case:
        """Powers of two keep torch's double rounding of 16-bit products out of the comparison."""

        def run():
            self.plan.accumulate_(self.acc, self.pointers, self.half, first=first, nonfinite=self.flags)

        def torch_run():
            if first:
                self.acc_torch.zero_()
            torch._foreach_add_(self.parts, self.grads, alpha=0.5)

        run()
        torch_run()
        assert torch.equal(self.acc, self.acc_torch), name
        numel = self.plan.flat_numel
        read = numel * (self.grad_bytes + (0 if first else 4))
        return Case(name, run, torch_run, read, numel * 4, "copy" if first else "update")

    def accumulate_cast(self, name: str, wire_dtype: torch.dtype) -> Case:
        wire = torch.empty(self.plan.flat_numel, dtype=wire_dtype)
        wire_torch = torch.empty(self.plan.flat_numel, dtype=wire_dtype)

        def run():
            self.plan.accumulate_cast_(
                wire, self.acc, self.pointers, self.one, self.half, first=False, nonfinite=self.flags
            )

        def torch_run():
            torch._foreach_add_(self.parts, self.grads)
            torch.mul(self.acc_torch, 0.5, out=wire_torch)

        self.acc_torch.copy_(self.acc)
        run()
        torch_run()
        assert torch.equal(wire, wire_torch), name
        read, written = (
            self.plan.flat_numel * (self.grad_bytes + 4),
            self.plan.flat_numel * wire.element_size(),
        )
        return Case(name, run, torch_run, read, written, "copy")


def main() -> None:
    options = parse_options()
    large, small = options.megabytes * 2**18, 1000 * 256
    bf16 = torch.bfloat16
    few, many, tiny = Bench(large, 8, bf16), Bench(large, 400, bf16), Bench(small, 1000, bf16)
    cases = [
        few.accumulate("acc += s*bf16, 8 tensors", first=False),
        few.accumulate("acc = s*bf16 (first), 8 tensors", first=True),
        few.accumulate_cast("bf16 wire = (acc + bf16) * s, 8 tensors", bf16),
        few.accumulate_cast("fp32 wire = (acc + bf16) * s, 8 tensors", torch.float32),
        many.accumulate("acc += s*bf16, 400 tensors", first=False),
        tiny.accumulate("acc += s*bf16, 1000 of 512 B", first=False),
        tiny.accumulate_cast("bf16 wire = (acc + bf16) * s, 1000 of 512 B", bf16),
        Bench(large, 8, torch.float32).accumulate("acc += s*fp32, 8 tensors", first=False),
    ]
    report("accumulate", cases, options)


if __name__ == "__main__":
    main()
