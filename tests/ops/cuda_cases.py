"""Memory and layouts for the tests of the CUDA kernels, and each op as a function of them."""

import ctypes
import itertools
import mmap

import torch
from emulated_cuda import EmulatedPlan
from op_cases import NUMELS, assert_same_bits, flags, make_flat, make_plan, make_tensors, sums

from pyengine.ops.plan import BucketPlan

POISON, MARGIN = 0xAB, 64


# ---- where ops run ----


class Host:
    """The CPU ops, with the current number of threads and instruction set."""

    plan = BucketPlan

    def place(self, tensor, shift=0):
        return tensor.clone()


class Reference(Host):
    """Plain PyTorch, which defines the right results."""

    def plan(self, offsets, numels):
        plan = BucketPlan(offsets, numels)
        plan._runners[torch.device("cpu")] = None
        return plan


class Device:
    """Memory with poisoned margins on "cuda" ("cpu" for the emulator), and plans that run the kernels."""

    def __init__(self, name, plan):
        self.name, self.plan, self._placed = name, plan, []

    @classmethod
    def emulated(cls, kernels):
        return cls("cpu", lambda offsets, numels: EmulatedPlan(kernels, offsets, numels))

    def place(self, tensor, shift=0):
        """Copy a tensor to memory that begins `shift` elements after a multiple of 64 bytes."""
        begin = MARGIN + shift * tensor.element_size()
        end = begin + tensor.numel() * tensor.element_size()
        memory = torch.full((end + MARGIN,), POISON, dtype=torch.uint8, device=self.name)
        self._placed.append((memory, begin, end))
        return memory[begin:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def check_margins(self):
        for memory, begin, end in self._placed:
            assert memory[:begin].eq(POISON).all() and memory[end:].eq(POISON).all()


class Walled(Device):
    """Tensors that begin or end at a protected page; an emulated launch that accesses the page fails."""

    def __init__(self, kernels, at_end):
        super().__init__("cpu", lambda offsets, numels: EmulatedPlan(kernels, offsets, numels))
        self.at_end = at_end

    def place(self, tensor, shift=0):
        size = tensor.numel() * tensor.element_size()
        room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        pages = mmap.mmap(-1, room + 2 * mmap.PAGESIZE)
        begin = mmap.PAGESIZE + (room - size if self.at_end else 0)
        result = torch.frombuffer(pages, dtype=tensor.dtype, count=tensor.numel(), offset=begin)
        libc, first = ctypes.CDLL(None), result.data_ptr() - begin
        for wall in (first, first + mmap.PAGESIZE + room):
            assert libc.mprotect(ctypes.c_void_p(wall), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
        return result.view(tensor.shape).copy_(tensor)


def place_all(device, tensors, shift=0):
    return [None if t is None else device.place(t, shift) for t in tensors]


# ---- layouts ----


def aligned_plan(numels):
    """Return a plan whose slots begin at multiples of 64 elements, so that vector accesses are aligned."""
    return BucketPlan(itertools.accumulate((-(-n // 64) * 64 for n in numels[:-1]), initial=0), numels)


SIZES = [*NUMELS, 7, 8, 9, 255, 256, 257, 8192]
PLANS = {"odd offsets": make_plan(SIZES), "aligned offsets": aligned_plan(SIZES)}
# A list that needs the larger size of a kernel's parameters, and a list that needs two uploads.
MANY = {
    "300 slots": make_plan([i % 41 for i in range(300)]),
    "5000 slots": make_plan([i % 3 for i in range(5000)]),
}


# ---- ops: what they write on a device, from the same values on every device ----


def assert_same(got, want):
    """Compare what the kernels and the CPU op have written to each tensor or list of tensors."""
    for a, b in zip(got, want, strict=True):
        assert_same_bits([t if t is None else t.cpu() for t in a] if isinstance(a, list) else a.cpu(), b)


def pack_and_unpack_if(device, layout, dtype, only_if, scale):
    plan, flat = device.plan(layout.offsets, layout.numels), device.place(make_flat(layout, torch.float32))
    tensors = place_all(device, make_tensors(layout, dtype))
    back, scalars = place_all(device, make_tensors(layout, dtype, 1)), map(device.place, (scale, only_if))
    scale, only_if = scalars
    plan.pack_(flat, tensors, scale, only_if=only_if)
    plan.unpack_(back, flat, scale, only_if=only_if)
    return flat, back


def pack(device, layout, src, dst, shifts, scale):
    plan, flat = device.plan(layout.offsets, layout.numels), device.place(make_flat(layout, dst), shifts[1])
    plan.pack_(flat, place_all(device, make_tensors(layout, src), shifts[0]), device.place(scale))
    return (flat,)


def unpack(device, layout, src, dst, shifts, scale):
    plan, flat = device.plan(layout.offsets, layout.numels), device.place(make_flat(layout, src), shifts[1])
    tensors = place_all(device, make_tensors(layout, dst), shifts[0])
    plan.unpack_(tensors, flat, device.place(scale))
    return (tensors,)


def accumulate(device, layout, dtype, first, shifts, scale):
    plan = device.plan(layout.offsets, layout.numels)
    acc = device.place(make_flat(layout, torch.float32), shifts[1])
    grads, seen = place_all(device, make_tensors(layout, dtype), shifts[0]), device.place(flags(layout))
    plan.accumulate_(acc, grads, device.place(scale), first=first, nonfinite=seen)
    return acc, seen


def accumulate_cast(device, layout, dtype, wire_dtype, first, shifts, scale):
    plan = device.plan(layout.offsets, layout.numels)
    acc = device.place(make_flat(layout, torch.float32), shifts[1])
    grads, seen = place_all(device, make_tensors(layout, dtype), shifts[0]), device.place(flags(layout))
    wire = acc if wire_dtype == "acc" else device.place(make_flat(layout, wire_dtype), shifts[1])
    scales = device.place(scale), device.place(torch.tensor(1.7))
    plan.accumulate_cast_(wire, acc, grads, *scales, first=first, nonfinite=seen)
    return wire, acc, seen


def unscale_norm(device, layout, dtype, out_dtype, shifts, scale):
    plan, sumsq = device.plan(layout.offsets, layout.numels), device.place(sums(layout))
    tensors, seen = place_all(device, make_tensors(layout, dtype), shifts[0]), device.place(flags(layout))
    out = tensors if out_dtype == "in place" else None
    if isinstance(out_dtype, torch.dtype):
        out = place_all(device, make_tensors(layout, out_dtype), shifts[1])
        out[-1] = None  # this slot is only read
    plan.unscale_norm(tensors, out, device.place(scale), sumsq=sumsq, nonfinite=seen)
    return sumsq, seen, tensors, out or []


class EveryOp:
    """Runs each op at least once on its own memory; a second run gives the same results."""

    def __init__(self, device, layout, dtype=torch.bfloat16, plan=None):
        self.plan = plan or device.plan(layout.offsets, layout.numels)
        self.scale, self.one = device.place(torch.tensor(0.3)), device.place(torch.tensor(1.0))
        self.grads = place_all(device, make_tensors(layout, dtype))
        self.back = place_all(device, make_tensors(layout, torch.float32), 1)
        self.acc, self.wire = (device.place(make_flat(layout, t)) for t in (torch.float32, torch.float16))
        self.flat = device.place(make_flat(layout, torch.bfloat16), 1)
        self.sumsq, self.seen = device.place(sums(layout)), device.place(flags(layout))
        self._written = [
            self.acc,
            self.wire,
            self.flat,
            self.sumsq,
            self.seen,
            *filter(torch.is_tensor, self.back),
        ]
        self._before = [t.clone() for t in self._written]

    def run(self):
        plan, scale, one, seen = self.plan, self.scale, self.one, self.seen
        plan.accumulate_(self.acc, self.grads, scale, first=True, nonfinite=seen)
        plan.accumulate_(self.acc, self.grads, one, first=False, nonfinite=seen)
        plan.accumulate_cast_(self.wire, self.acc, self.grads, one, scale, first=False, nonfinite=seen)
        plan.unpack_(self.back, self.wire, scale)
        plan.unscale_norm(self.back, self.back, scale, sumsq=self.sumsq, nonfinite=seen)
        plan.pack_(self.flat, self.back, scale)

    @property
    def results(self):
        return self.acc, self.wire, self.back, self.flat, self.sumsq, self.seen

    def restore(self):
        """Restore everything that was written to its values before the first run."""
        for tensor, before in zip(self._written, self._before, strict=True):
            tensor.copy_(before)


def on_host(layout, dtype=torch.bfloat16):
    ops = EveryOp(Host(), layout, dtype)
    ops.run()
    return ops.results
