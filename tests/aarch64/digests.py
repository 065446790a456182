"""Run every op of the core on fixed values, without torch, and print a digest of each result, one per line.

    python digests.py CORE    # the path of _core*.so; the generic instruction set is used

Two machines that print the same lines compute the same bits. `make aarch64` compares this machine with an
aarch64 machine that QEMU emulates.
"""

from __future__ import annotations

import hashlib
import importlib.util
import random
import struct
import sys
from array import array
from collections.abc import Iterator
from typing import Any

NUMELS = (1, 64, 1000, 40_000)  # a tail, a block, several segments, several chunks
OFFSETS = (0, 64, 128, 1152)
TOTAL = 41_216  # whole blocks of 64
FLOAT, BFLOAT, HALF = 0, 1, 2  # the core's types
SIZES = {FLOAT: 4, BFLOAT: 2, HALF: 2}
ROWS = 3  # payloads that are added up
# Names in the core without arithmetic: settings, access to tensors, shared memory, bandwidth measurements.
UNTESTED = {
    *("isa", "set_isa", "thread_pool", "has_cuda", "learn_tensor_object"),
    *("is_plain", "can_read_grads", "GradStates", "gather"),
    *("checksums_of", "Notes", "Listener", "sample", "roof_read", "roof_update"),
    *("roof_stream_copy", "SharedBlock", "SharedJob", "shared_file_size", "SharedArena"),
}


class Memory:
    """Bytes with an address."""

    def __init__(self, content: bytes) -> None:
        self._bytes = array("B", content)
        self.at = self._bytes.buffer_info()[0]

    @classmethod
    def zeros(cls, num_bytes: int) -> Memory:
        return cls(bytes(num_bytes))

    @property
    def digest(self) -> str:
        return hashlib.sha256(self._bytes).hexdigest()[:16]

    def digest_of(self, dtype: int) -> str:
        """Return the digest of the elements; all nans are equal, because their bits depend on the machine."""
        infinity = {FLOAT: 0x7F800000, BFLOAT: 0x7F80, HALF: 0x7C00}[dtype]
        elements = array("I" if dtype == FLOAT else "H", self._bytes.tobytes())
        above = infinity << 1 | 1  # compared after a left shift, which drops the sign
        mask = (1 << 8 * SIZES[dtype]) - 1
        plain = [infinity + 1 if (each << 1 & mask) >= (above & mask) else each for each in elements]
        return hashlib.sha256(repr(plain).encode()).hexdigest()[:16]


class Values:
    """Random floats of all magnitudes, including denormals and both zeros; the same on every machine."""

    def __init__(self) -> None:
        self._random = random.Random(20)

    def of(self, numel: int, dtype: int, *, infinite: bool = False) -> Memory:
        return Memory(b"".join(self._value(dtype, infinite=infinite) for _ in range(numel)))

    def _value(self, dtype: int, *, infinite: bool) -> bytes:
        sign = self._random.getrandbits(1)
        mantissa = self._random.getrandbits(23)
        # Most values are near 1, one in sixteen has any magnitude, none is nan: machines differ in its bits.
        is_odd = self._random.getrandbits(4) == 0
        exponent = self._random.randrange(0, 200) if is_odd else self._random.randrange(115, 130)
        if infinite and self._random.getrandbits(9) == 0:
            exponent, mantissa = 255, 0
        bits = sign << 31 | exponent << 23 | mantissa
        if dtype == FLOAT:
            return struct.pack("<I", bits)
        if dtype == BFLOAT:
            return struct.pack("<H", bits >> 16)
        half_exponent = 31 if exponent == 255 else max(0, min(30, exponent - 112))
        return struct.pack("<H", sign << 15 | half_exponent << 10 | mantissa >> 13)


def scale(value: float) -> Memory:
    return Memory(struct.pack("<f", value))


def lines(core: Any) -> Iterator[tuple[str, str]]:
    """Yield the name of each call and a digest of its results."""
    values = Values()
    for dtype in (FLOAT, BFLOAT, HALF):
        yield from _plan_lines(core, values, dtype)
    yield from _exact_lines(core, values)
    for code in range(5):
        yield from _codec_lines(core, values, code)
    weights = Memory(b"".join(struct.pack("<q", 2 * i * i + 1) for i in range(512)))
    words = values.of(5000, FLOAT, infinite=True)
    yield "checksum", str(core.checksum(weights.at, 512, words.at, 5000))


def _plan_lines(core: Any, values: Values, dtype: int) -> Iterator[tuple[str, str]]:
    plan = core.BucketPlan(OFFSETS, NUMELS)
    grads = [values.of(numel, dtype, infinite=numel == 1000) for numel in NUMELS]
    table = core.Table([grads[0].at, 0, *(each.at for each in grads[2:])], dtype)  # one has no gradient
    third, acc = scale(1 / 3), values.of(TOTAL, FLOAT)
    for wire in (FLOAT, BFLOAT, HALF):
        flat, flags = Memory.zeros(TOTAL * SIZES[wire]), Memory.zeros(len(NUMELS))
        plan.pack_(flat.at, wire, table, third.at, 0)
        yield f"pack_ {dtype} {wire}", flat.digest
        for first in (True, False):
            plan.accumulate_cast_(flat.at, wire, acc.at, table, third.at, third.at, first, flags.at)
            yield f"accumulate_cast_ {dtype} {wire} {first}", flat.digest + flags.digest
        out = [Memory.zeros(numel * SIZES[dtype]) for numel in NUMELS]
        plan.unpack_(flat.at, wire, core.Table([each.at for each in out], dtype), third.at, 0)
        yield f"unpack_ {dtype} {wire}", "".join(each.digest for each in out)
        out = [Memory.zeros(numel * SIZES[wire]) for numel in NUMELS]
        for there in (None, core.Table([each.at for each in out], wire)):
            sumsq = Memory.zeros(8 * len(NUMELS))
            plan.unscale_norm(table, there, third.at, sumsq.at, flags.at)
            left = sumsq.digest + flags.digest + "".join(each.digest for each in out)
            yield f"unscale_norm {dtype} {wire} {there is not None}", left
    for first in (True, False):
        flags = Memory.zeros(len(NUMELS))
        plan.accumulate_(acc.at, table, third.at, first, flags.at)
        yield f"accumulate_ {dtype} {first}", acc.digest + flags.digest


def _exact_lines(core: Any, values: Values) -> Iterator[tuple[str, str]]:
    plan, num_blocks = core.BucketPlan(OFFSETS, NUMELS), TOTAL // 64
    hi, lo, bins = Memory.zeros(4 * TOTAL), Memory.zeros(4 * TOTAL), Memory.zeros(num_blocks)
    flags, total = Memory.zeros(len(NUMELS)), core.ExactSum(hi.at, lo.at, bins.at, num_blocks, 26)
    for number, dtype in enumerate((FLOAT, BFLOAT, HALF, FLOAT)):
        grads = [values.of(numel, dtype, infinite=numel == 64) for numel in NUMELS]
        terms = core.Table([each.at for each in grads], dtype)
        plan.exact_deposit_(total, terms, number == 0, flags.at)
        yield f"exact_deposit_ {number}", hi.digest + lo.digest + bins.digest + flags.digest
    larger = Memory(bytes(min(255, each + 1) for each in bins._bytes))
    plan.exact_align_(total, larger.at)
    yield "exact_align_", hi.digest + lo.digest + bins.digest
    for dtype in (FLOAT, BFLOAT, HALF):
        out = Memory.zeros(TOTAL * SIZES[dtype])
        plan.exact_round_(total, out.at, dtype)
        yield f"exact_round_ {dtype}", out.digest


def _codec_lines(core: Any, values: Values, code: int) -> Iterator[tuple[str, str]]:
    numel, block = 5003, 32 if code < 3 else 1
    num_bytes = 4 * (-(-numel // block)) + numel if code < 3 else 2 * numel
    pitch = -(-num_bytes // 16) * 16
    codec, rows = core.Codec(code, block, numel), Memory.zeros(ROWS * pitch)
    for key in (None, (7, 11)):
        for row in range(ROWS):
            residual = values.of(numel, FLOAT)
            flat = values.of(numel, FLOAT)
            core.codec_encode(codec, rows.at + row * pitch, flat.at, residual.at, key, 64)
            yield f"codec_encode {code} {key} {row}", rows.digest + residual.digest
        out, lost = Memory.zeros(pitch), values.of(numel, FLOAT)
        core.codec_sum_encode(codec, out.at, rows.at, (ROWS, pitch), lost.at, key, 64)
        yield f"codec_sum_encode {code} {key}", out.digest + lost.digest
    for dtype in (FLOAT, BFLOAT, HALF):
        flat = Memory.zeros(numel * SIZES[dtype])
        core.codec_sum(codec, flat.at, dtype, rows.at, (ROWS, pitch))
        yield f"codec_sum {code} {dtype}", flat.digest_of(dtype)


def load(path: str) -> Any:
    """Load the core from a file of any name."""
    spec = importlib.util.spec_from_file_location("_core", path)
    assert spec is not None and spec.loader is not None
    core = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(core)
    assert core.set_isa("generic")
    return core


if __name__ == "__main__":
    for name, digest in lines(load(sys.argv[1])):
        print(name, digest)
