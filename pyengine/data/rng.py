"""Random streams that depend on the micro-batch or sample, not on the rank that computes it.

Every stream starts at `derive(purpose, generator, *key)`. A micro-batch or a sample therefore draws the same
numbers on every rank or worker and for any world size, regardless of earlier draws.
"""

from __future__ import annotations

import os
import random
import struct
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from importlib import import_module
from importlib.util import find_spec
from numbers import Integral
from typing import Any, NamedTuple, SupportsIndex

import torch
import torch.distributed as dist

from pyengine.ops import capture


def seed_everything(seed: int, *, deterministic: bool = False) -> int:
    """Seed Python's random, numpy, torch on every device, and XLA.

    Each generator is seeded by its own seed function. pyengine never calls `seed_everything` itself. The call
    does not initialize CUDA; CUDA's generators are seeded when CUDA is initialized later. numpy is seeded if
    it is installed (torch imports it in any case), and XLA if torch_xla has been imported. Seeding XLA opens
    the XLA device, so if you spawn processes, call `seed_everything` in each of them.

    Args:
        seed: 0 to 2**64 - 1. numpy's seeds have 32 bits, so numpy gets a larger seed as several words.
        deterministic: whether to restrict torch to deterministic algorithms until this process ends. True
            calls `torch.use_deterministic_algorithms(True)`, disables cuDNN benchmarking, and sets
            `CUBLAS_WORKSPACE_CONFIG=:4096:8` unless the variable is set. An op without a deterministic
            algorithm then raises RuntimeError. False changes no setting.

    Returns:
        The seed.

    Raises:
        TypeError: the seed is not a whole number.
        ValueError: the seed is out of range.

    Warns:
        RuntimeWarning: `deterministic` sets `CUBLAS_WORKSPACE_CONFIG` after CUDA was initialised. cuBLAS does
            not read the variable again after its first matrix product.

    Cost: with `deterministic`, torch uses slower kernels, for example for `scatter`, `index_add`, pooling and
        the backward of attention, and fills the memory that `torch.empty` returns
        (`torch.utils.deterministic.fill_uninitialized_memory`).

    Example:
        >>> seed_everything(42)
        42
    """
    (seed,) = whole(seed=seed)
    _seed_all(lambda generator: seed)
    if deterministic:
        _use_deterministic_algorithms()
    return seed


def _use_deterministic_algorithms() -> None:
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    name = "CUBLAS_WORKSPACE_CONFIG"  # the only setting that makes cuBLAS deterministic
    if name in os.environ:
        return
    os.environ[name] = ":4096:8"
    if torch.cuda.is_initialized():
        warnings.warn(
            f"deterministic=True sets {name}=:4096:8, but CUDA has been initialised: matrix products stay "
            "nondeterministic if any has already run. Call seed_everything before the first use of CUDA, or "
            f"export {name}=:4096:8 before the process starts",
            RuntimeWarning,
            stacklevel=3,
        )


def seed_rank(seed: int) -> None:
    """Seed the generators of `seed_everything`, with a different stream on each rank.

    Use this function for random numbers outside `micro_batch_rng`. After `seed_everything` alone, all ranks
    draw the same numbers, and micro-batches on different ranks get the same dropout masks. Call `seed_rank`
    after the process group is initialized. A model that is built after `seed_rank` differs between ranks
    (`GradSync` copies the model of rank 0). Unlike with `micro_batch_rng`, results depend on the world size.

    Args:
        seed: seed of the run. The rank is the rank in the default process group, or 0 without a group.

    Raises:
        TypeError, ValueError: an argument is invalid for `seed_everything`.

    Example:
        >>> seed_rank(42)
    """
    (seed,) = whole(seed=seed)
    rank = rank_and_world_size()[0]
    _seed_all(lambda generator: derive("rank", generator, seed, rank))


@contextmanager
def micro_batch_rng(seed: int, *, step: int, index: int) -> Iterator[None]:
    """Run one micro-batch with separate random streams, and restore the previous streams.

    The previous streams are also restored after an exception. Run both forward and backward inside the
    context, so that the recomputation of activation checkpointing draws the same numbers. The context covers
    Python's random, numpy, torch's CPU generator, the generator of the current device (CUDA, XPU, MTIA) if
    its backend is initialized, and XLA's generator. The context does not cover Generator objects that you
    create.

    Args:
        seed: seed of the run.
        step: optimizer step, or another number that is unique to the window within the run.
        index: index of the micro-batch in its window, over all ranks. `WindowSampler.first` is the index of
            this rank's first micro-batch.

    torch's CPU generator uses 32 bits of its seed and the other generators 64 or more, so on a CPU any two
    micro-batches share torch's stream with a probability of 2**-32. The random numbers of a GPU also depend
    on its number of multiprocessors (pytorch #87992), so equal masks require GPUs of the same model.

    Cost: about 0.2 ms on the host, mostly for numpy's state. The host does not wait for a device.

    Example:
        >>> with micro_batch_rng(42, step=7, index=3):
        ...     mask = torch.rand(4)
        >>> with micro_batch_rng(42, step=7, index=3):  # another rank, another day
        ...     assert torch.equal(mask, torch.rand(4))
    """
    key = whole(seed=seed, step=step, index=index)
    capture.report(
        "micro_batch_rng seeds on the host, which a replay does not repeat: leave it out of a captured window"
    )
    with _streams([*_host(), *_accelerator(), *_xla()], "micro_batch", key):
        yield


@contextmanager
def sample_rng(seed: int, *, epoch: int, index: int) -> Iterator[None]:
    """Run the augmentation of one sample with separate random streams, and restore the previous streams.

    The previous streams are also restored after an exception. The context covers Python's random, numpy and
    torch's CPU generator. Use it in a dataset, with or without workers.

    Args:
        seed: seed of the run.
        epoch: number of the epoch; a sample gets different random numbers in every epoch.
        index: index of the sample in the dataset.

    Cost: see `micro_batch_rng`.

    Example:
        >>> class Noisy(torch.utils.data.Dataset):
        ...     def __init__(self, data, *, seed):
        ...         self.data, self.seed = data, seed
        ...         self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # workers see it too
        ...
        ...     def __len__(self):
        ...         return len(self.data)
        ...
        ...     def __getitem__(self, index):
        ...         with sample_rng(self.seed, epoch=int(self.epoch), index=index):
        ...             return self.data[index] + torch.randn(())
        >>> data = Noisy(torch.zeros(4), seed=42)
        >>> assert data[2] == data[2] != data[3]
        >>> first = data[2]
        >>> _ = data.epoch.fill_(1)  # before the epoch's loop, with sampler.set_epoch(1)
        >>> assert data[2] != first
    """
    with _streams(_host(), "sample", whole(seed=seed, epoch=epoch, index=index)):
        yield


def worker_init(seed: int) -> Callable[[int], None]:
    """Return a picklable `worker_init_fn` that seeds the streams of a DataLoader worker.

    The streams depend on the seed, the rank and the worker's seed. Use this function for random numbers
    outside `sample_rng`. Different ranks, workers and epochs then get different numbers, and a run is
    reproducible after `seed_everything` (or with the DataLoader's `generator`). The world size determines
    which worker loads a sample, so only `sample_rng` makes augmentation independent of the world size.

    Args:
        seed: seed of the run. The rank is the rank in the default process group, or 0 without a group.

    Example:
        >>> loader = torch.utils.data.DataLoader(range(8), num_workers=2, worker_init_fn=worker_init(42))
    """
    (seed,) = whole(seed=seed)
    return partial(_seed_worker, seed, rank_and_world_size()[0])


def rng_states() -> dict[str, Any]:
    """Return the states of all generators of `micro_batch_rng` by name, as tensors or plain values."""
    states = {source.name: source.get() for source in [*_host(), *_accelerator(), *_xla()]}
    if "numpy" in states:
        kind, keys, *rest = states["numpy"]
        states["numpy"] = [kind, keys.tolist(), *rest]  # torch.load with weights_only=True can read this
    return states


def set_rng_states(states: dict[str, Any]) -> None:
    """Restore the states that `rng_states` returned; generators that do not exist here are skipped."""
    for source in [*_host(), *_accelerator(), *_xla()]:
        if source.name in states:
            _put(source, states[source.name])


def rng_problem(states: dict[str, Any]) -> str:
    """Return why `states` cannot come from `rng_states`, or an empty string if they can."""
    names = set(states)
    if not names.issuperset(_ALWAYS) or not names.issubset(_GENERATORS):
        return (
            f"states of the generators {sorted(names)}, expected {', '.join(_ALWAYS)} and optionally others "
            f"of {', '.join(_GENERATORS)}"
        )
    wrong = [name for name in states if not _GENERATORS[name](states[name])]
    return (
        f"rng[{wrong[0]!r}], which is not a state of that generator: load another checkpoint" if wrong else ""
    )


def rng_refusal(states: dict[str, Any]) -> str:
    """Return why `set_rng_states` cannot restore `states`, or an empty string; no generator is changed."""
    sources = [source for source in [*_host(), *_accelerator()] if source.name in states]
    before = [source.get() for source in sources]
    try:
        for source in sources:
            _put(source, states[source.name])
    except Exception as error:  # noqa: BLE001 - any error of a generator
        return f"rng[{source.name!r}], which the generator here does not accept ({error})"
    finally:
        for source, state in zip(sources, before, strict=True):
            source.put(state)
    return ""


def derive(purpose: str, generator: str, *key: int) -> int:
    """Return the 128-bit seed of a generator's stream.

    The seed is the BLAKE2b-128 hash of the key as little-endian 64-bit words, with `purpose` as the
    personalization and `generator` as the salt. Seeds are part of the checkpoint format, because a run that
    resumes from an older version's checkpoint must draw the same numbers.

    Args:
        purpose: purpose of the stream, at most 16 bytes: "micro_batch", "sample", "worker", "epoch", "rank".
        generator: name of the generator, at most 16 bytes: "random", "numpy", "torch", "accelerator", "xla".
        key: whole numbers from 0 to 2**64 - 1.
    """
    words = struct.pack(f"<{len(key)}Q", *key)
    digest = blake2b(words, digest_size=16, person=purpose.encode(), salt=generator.encode())
    return int.from_bytes(digest.digest(), "little")


def whole(**values: SupportsIndex) -> list[int]:
    """Return the values as ints; raise an error unless all are whole numbers from 0 to 2**64 - 1."""
    need = "expected a whole number from 0 to 2**64 - 1"
    for name, value in values.items():
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r} is a {type(value).__name__}: {need}, for example 42")
        if not 0 <= int(value) < 2**64:
            raise ValueError(f"{name}={value}: {need}; modulo 2**64 it is {int(value) % 2**64}")
    return [int(value) for value in values.values()]


def rank_and_world_size() -> tuple[int, int]:
    """Return (rank, world_size) in the default process group; (0, 1) if there is none."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def _seed_all(seed_of: Callable[[str], int]) -> None:
    """Seed every generator, on all devices, with `seed_of(name)`."""
    random.seed(seed_of("random"))
    torch.manual_seed(seed_of("torch") % 2**64)  # this seeds torch on every device
    for source in (*_numpy(), *_xla()):
        source.seed(seed_of(source.name))


class _Source(NamedTuple):
    """A random number generator: functions to read, seed (up to 128 bits) and restore its state."""

    name: str
    get: Callable[[], Any]
    seed: Callable[[int], Any]
    put: Callable[[Any], Any]


@contextmanager
def _streams(sources: list[_Source], purpose: str, key: list[int]) -> Iterator[None]:
    states = [source.get() for source in sources]
    try:
        for source in sources:
            source.seed(derive(purpose, source.name, *key))
        yield
    finally:
        for source, state in zip(sources, states, strict=True):
            source.put(state)


def _seed_worker(seed: int, rank: int, worker_id: int) -> None:
    # The worker's seed is the base seed of the epoch + worker_id. Without the base seed every epoch would
    # draw the same numbers.
    for source in _host():
        source.seed(derive("worker", source.name, seed, rank, torch.initial_seed() - worker_id, worker_id))


def _put(source: _Source, state: Any) -> None:
    # map_location may have put a state on any device; generators expect it on the host.
    source.put(state.cpu() if isinstance(state, torch.Tensor) else state)


_WORDS = 624  # Number of words in a Mersenne twister's state.
# The fields of torch's CPU state: seed, left, seeded, next, words, normal samples, flag.
_TORCH = struct.Struct(f"=QiiQ{_WORDS}Q3di4xfB3x")


def _is_from(value: Any, begin: int, end: int) -> bool:
    return type(value) is int and begin <= value < end


def _is_twister(words: Sequence[Any], at: Any) -> bool:
    """Whether a Mersenne twister can have this state; a larger position would cause out-of-bounds reads."""
    are_words = len(words) == _WORDS and all(_is_from(word, 0, 2**32) for word in words)
    return are_words and any(words) and _is_from(at, 0, _WORDS + 1)


def _is_python(state: Any) -> bool:
    if not (type(state) is tuple and len(state) == 3 and type(state[1]) is tuple and state[1]):
        return False
    version, (*words, at), normal = state
    return _is_from(version, 3, 4) and _is_twister(words, at) and (normal is None or type(normal) is float)


def _is_numpy(state: Any) -> bool:
    if not (type(state) is list and len(state) == 5 and type(state[1]) is list):
        return False
    kind, words, at, has_normal, normal = state
    is_normal = _is_from(has_normal, 0, 2) and type(normal) is float
    return type(kind) is str and kind == "MT19937" and _is_twister(words, at) and is_normal


def _are_bytes(state: Any) -> bool:
    is_plain = isinstance(state, torch.Tensor) and state.layout is torch.strided
    return is_plain and state.dtype == torch.uint8 and state.dim() == 1


def _is_torch(state: Any) -> bool:
    if not _are_bytes(state) or state.numel() != _TORCH.size:
        return _are_bytes(state)  # a state of another torch version; `set_state` checks the size
    _, left, seeded, at, *words, _, _, _, _, _, flag = _TORCH.unpack(bytes(state.tolist()))
    # `left` - 1 words are drawn, starting at `at`, before new words are generated. `set_state` checks each of
    # the two numbers, but not both together.
    is_inside = _is_from(left, 1, _WORDS + 1) and (left == 1 or left + at <= _WORDS + 1)
    return _is_twister(words, at) and is_inside and seeded == 1 and flag in (0, 1)


# The generators whose states `rng_states` may return, each with a function that checks its state.
_GENERATORS: dict[str, Callable[[Any], bool]] = {
    "random": _is_python,
    "numpy": _is_numpy,
    "torch": _is_torch,
    "accelerator": _are_bytes,
    "xla": lambda state: _is_from(state, -(2**63), 2**64),
}
_ALWAYS = ("random", "torch")


def _host() -> list[_Source]:
    python = _Source("random", random.getstate, random.seed, random.setstate)
    return [python, *_numpy(), _torch("torch", torch.default_generator)]


def _torch(name: str, generator: torch.Generator) -> _Source:
    return _Source(
        name, generator.get_state, lambda key: generator.manual_seed(key % 2**64), generator.set_state
    )


def _numpy() -> list[_Source]:
    if find_spec("numpy") is None:
        return []
    legacy = import_module("numpy.random")  # this is the global state; users seed their own Generator objects

    def seed(key: int) -> None:
        # Keys of 2**32 and above are passed as four words. Python's random uses the same algorithm, but
        # starts from only as many words as the key has.
        legacy.seed(key if key < 2**32 else struct.unpack("<4I", key.to_bytes(16, "little")))

    return [_Source("numpy", legacy.get_state, seed, legacy.set_state)]


def _accelerator() -> list[_Source]:
    """Return the generator of the current device, or no generator if its backend is not initialized yet."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return []
    generators = getattr(torch.get_device_module(accelerator), "default_generators", ())
    return [_torch("accelerator", generators[torch.accelerator.current_device_index()])] if generators else []


def _xla() -> list[_Source]:
    if "torch_xla" not in sys.modules:
        return []
    model = import_module("torch_xla.core.xla_model")
    get, put = model.get_rng_state, model.set_rng_state
    return [_Source("xla", get, lambda key: put(key % 2**64), put)]
