"""Types of csrc/python.cpp: addresses and sizes in, never tensors; compared by tests/house/test_stubs.py."""

from collections.abc import Callable, Sequence
from typing import Any

BLOCK_ELEMENTS: int
EXACT_BLOCK: int
has_cuda: bool

def isa() -> str: ...
def set_isa(name: str, /) -> bool: ...
def thread_pool() -> str: ...
def learn_tensor_object(
    object: object,
    tensor: int,
    storage: int,
    keys: int,
    storage_offset: int,
    data: int,
    bytes: int,
    plain_keys: int,
    /,
) -> bool: ...
def is_plain(tensor: object, exact_types: tuple[type, ...], /) -> bool: ...
def can_read_grads() -> bool: ...

class GradStates:
    def __init__(self, /) -> None: ...
    def record(self, params: list[Any], /) -> bool: ...
    def is_unchanged(self, params: list[Any], /) -> bool: ...
    def have_memory(self, /) -> bool: ...
    def versions(self, /) -> list[int]: ...

def gather(plan: BucketPlan, tensors: list[Any], exact_types: tuple[type, ...], /) -> Table | None: ...
def checksum(weights: int, block: int, words: int, n: int, /) -> int: ...
def checksums_of(
    weights: int,
    block: int,
    tensors: list[object],
    turns: list[int],
    run: int,
    exact_types: tuple[type, ...],
    /,
) -> list[int | None]: ...

class Notes:
    def __init__(
        self,
        is_over: int,
        places: int,
        weights: int,
        arrivals: int,
        sums: int,
        last: int,
        lost: int,
        width: int,
        /,
    ) -> None: ...

class Listener:
    def __init__(
        self,
        notes: Notes,
        index: int,
        owners: tuple[object, ...],
        exact_types: tuple[type, ...],
        rest: object,
        /,
    ) -> None: ...
    def __call__(self, grad: object, /) -> None: ...

def sample(
    tensor: object,
    exact_types: tuple[type, ...],
    start: int,
    stride: int,
    num: int,
    weight: float,
    sum: int,
    last: int,
    /,
) -> bool: ...
def roof_read(src: int, numel: int, /) -> float: ...
def roof_update(dst: int, numel: int, /) -> None: ...
def roof_stream_copy(dst: int, src: int, numel: int, /) -> None: ...

class Table:
    def __init__(self, addresses: Sequence[int], dtype: int, /) -> None: ...
    @property
    def dtype(self) -> int: ...
    @property
    def device(self) -> tuple[int, int]: ...

class ExactSum:
    def __init__(self, hi: int, lo: int, bins: int, num_blocks: int, width: int, /) -> None: ...

class Codec:
    def __init__(self, format: int, block: int, numel: int, /) -> None: ...

def codec_encode(
    codec: Codec, payload: int, values: int, residual: int, key: tuple[int, int] | None, offset: int, /
) -> None: ...
def codec_sum_encode(
    codec: Codec,
    out: int,
    payloads: int,
    shape: tuple[int, int],
    residual: int,
    key: tuple[int, int] | None,
    offset: int,
    /,
) -> None: ...
def codec_sum(codec: Codec, out: int, dtype: int, payloads: int, shape: tuple[int, int], /) -> None: ...

class BucketPlan:
    def __init__(self, offsets: Sequence[int], numels: Sequence[int], /) -> None: ...
    def first_moved(self, table: Table, tensors: Sequence[object], /) -> int: ...
    @property
    def num_words(self) -> int: ...
    def write_words(self, words: int, /) -> None: ...
    def pack_(self, flat: int, dtype: int, tensors: Table, scale: int, only_if: int, /) -> None: ...
    def unpack_(self, tensors: Table, flat: int, dtype: int, scale: int, only_if: int, /) -> None: ...
    def accumulate_(self, acc: int, grads: Table, scale: int, first: bool, nonfinite: int, /) -> None: ...
    def accumulate_cast_(
        self,
        wire: int,
        dtype: int,
        acc: int,
        grads: Table,
        grad_scale: int,
        wire_scale: int,
        first: bool,
        nonfinite: int,
        /,
    ) -> None: ...
    def unscale_norm(
        self, tensors: Table, out: Table | None, scale: int, sumsq: int, nonfinite: int, /
    ) -> None: ...
    def exact_deposit_(self, sum: ExactSum, terms: Table, first: bool, nonfinite: int, /) -> None: ...
    def exact_align_(self, sum: ExactSum, bins: int, /) -> None: ...
    def exact_round_(self, sum: ExactSum, out: int, dtype: int, /) -> None: ...
    def flat_is_apart(self, flat: int, dtype: int, tensors: Table, /) -> bool: ...
    def is_disjoint(self, tensors: Table, /) -> bool: ...
    def lists_are_apart(self, out: Table, tensors: Table, /) -> bool: ...
    def is_outside(self, tensors: Table, begin: int, end: int, /) -> bool: ...

# Where the extension was built for Linux:

class SharedBlock:  # with the protocol of buffers
    def __init__(self) -> None: ...  # raises: SharedArena makes them

class SharedJob:
    def __init__(self) -> None: ...  # raises, likewise

def shared_file_size(world_size: int, /) -> int: ...

class SharedArena:
    def __init__(self, descriptor: int, rank: int, world_size: int, /) -> None: ...
    def allocate(self, bytes: int, /) -> SharedBlock: ...
    def submit(self, data: int, numel: int, kind: int, /) -> SharedJob: ...
    def serve(self, on_wait: Callable[[float], None], on_done: Callable[[SharedJob], None], /) -> None: ...
    def wait(self, job: SharedJob, seconds: float, /) -> bool: ...
    def error(self, job: SharedJob, /) -> str: ...
    def call_back(self, job: SharedJob, /) -> bool: ...
    def fail(self, why: str, /) -> None: ...
    def missing(self, /) -> list[int]: ...
    def close(self, /) -> None: ...

# Where the extension has CUDA kernels (`has_cuda`):

INLINE_SLOTS: int
MOST_INLINE_SLOTS: int

def load_kernels() -> int: ...
def uploaded(table: Table, on_device: int, stream: int, /) -> Table: ...
def codec_encode_cuda(
    stream: int,
    codec: Codec,
    payload: int,
    values: int,
    residual: int,
    key: tuple[int, int] | None,
    offset: int,
    /,
) -> None: ...
def codec_sum_encode_cuda(
    stream: int,
    codec: Codec,
    out: int,
    payloads: int,
    shape: tuple[int, int],
    residual: int,
    key: tuple[int, int] | None,
    offset: int,
    /,
) -> None: ...
def codec_sum_cuda(
    stream: int, codec: Codec, out: int, dtype: int, payloads: int, shape: tuple[int, int], /
) -> None: ...

class CudaPlan:
    def __init__(self, plan: BucketPlan, words: int, /) -> None: ...
    @property
    def scratch_bytes(self) -> int: ...
    def pack_(
        self, stream: int, flat: int, dtype: int, tensors: Table, scale: int, only_if: int, /
    ) -> None: ...
    def unpack_(
        self, stream: int, tensors: Table, flat: int, dtype: int, scale: int, only_if: int, /
    ) -> None: ...
    def accumulate_(
        self, stream: int, acc: int, grads: Table, scale: int, first: bool, nonfinite: int, /
    ) -> None: ...
    def accumulate_cast_(
        self,
        stream: int,
        wire: int,
        dtype: int,
        acc: int,
        grads: Table,
        grad_scale: int,
        wire_scale: int,
        first: bool,
        nonfinite: int,
        /,
    ) -> None: ...
    def unscale_norm(
        self,
        stream: int,
        scratch: int,
        tensors: Table,
        out: Table | None,
        scale: int,
        sumsq: int,
        nonfinite: int,
        /,
    ) -> None: ...
    def exact_deposit_(
        self, stream: int, sum: ExactSum, terms: Table, first: bool, nonfinite: int, /
    ) -> None: ...
    def exact_align_(self, stream: int, sum: ExactSum, bins: int, /) -> None: ...
    def exact_round_(self, stream: int, sum: ExactSum, out: int, dtype: int, /) -> None: ...
