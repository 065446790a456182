"""An accelerator that is simulated on the CPU: every operation belongs to a stream, and races are found.

Operations run immediately, one after the other, so results are right. A race is an error that could occur if
streams ran concurrently: two accesses to the same memory, at least one of them a write, that no event orders;
or memory that is freed on its stream while another stream may still use it. The order is kept as vector
clocks (Mattern, 1989): for each stream, the last operation of every other stream that it has waited for.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor
from torch.futures import Future
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyengine.comm import staged
from pyengine.gradients.ddp import hook
from pyengine.ops import native

HOST = "host"
Times = dict[str, int]


def _join(one: Times, other: Times) -> None:
    for name, time in other.items():
        one[name] = max(one.get(name, 0), time)


@dataclass
class _Access:
    stream: str
    time: int
    begin: int
    end: int
    writes: bool
    what: str


@dataclass
class _Memory:
    """A storage: the stream that allocated it, the streams given to `record_stream`, and all accesses."""

    alive: StorageWeakRef
    stream: str
    recorded: set[str] = field(default_factory=set)
    accesses: list[_Access] = field(default_factory=list)


class Machine:
    """The streams of a device, and the races found.

    Attributes:
        races: descriptions of the races.
        current: name of the current stream.
        events_are_done: result of `Event.query`.
    """

    def __init__(self, *, events_are_done: bool = False) -> None:
        self.races: list[str] = []
        self.current, self.num_streams, self.events_are_done = "main", 0, events_are_done
        self.clocks: defaultdict[str, Times] = defaultdict(dict)
        self._memories: dict[int, _Memory] = {}

    def now(self, stream: str) -> Times:
        """Return the clock of a stream: for every stream, the last operation that it has waited for."""
        _join(self.clocks[stream], self.clocks[HOST])
        return self.clocks[stream]

    def run(self, what: str, read: list[Tensor], written: list[Tensor]) -> None:
        """Record an operation on the current stream."""
        self.look_for_freed()
        stream, known = self.current, self.now(self.current)
        known[stream] = known.get(stream, 0) + 1
        for tensors, writes in ((read, False), (written, True)):
            for tensor in tensors:
                if tensor.numel() > 0:
                    self._use(tensor, _Access(stream, known[stream], *_span(tensor), writes, what))

    def record_use(self, tensor: Tensor, stream: Stream) -> None:
        """Record that memory is not reused before a stream has reached this point."""
        self._memory(tensor).recorded.add(stream.name)

    def look_for_freed(self) -> None:
        """Find memory that was freed since the last call, and report streams that may still use it."""
        for key in [key for key, memory in self._memories.items() if memory.alive.expired()]:
            memory = self._memories.pop(key)
            known = self.now(memory.stream)
            for use in memory.accesses:
                is_kept = use.stream == memory.stream or use.stream in memory.recorded
                if not is_kept and known.get(use.stream, 0) < use.time:
                    self.races.append(
                        f"memory of {memory.stream} is given back while {use.what} on {use.stream} may run"
                    )

    def _use(self, tensor: Tensor, access: _Access) -> None:
        memory, known = self._memory(tensor), self.clocks[access.stream]
        for other in memory.accesses:
            if (
                other.stream != access.stream
                and (other.writes or access.writes)
                and other.begin < access.end
                and access.begin < other.end
                and known.get(other.stream, 0) < other.time
            ):
                self.races.append(
                    f"{access.what} on {access.stream} does not wait for {other.what} on {other.stream}"
                )
        memory.accesses.append(access)

    def _memory(self, tensor: Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memories or self._memories[key].alive.expired():
            self._memories[key] = _Memory(StorageWeakRef(storage), self.current)
        return self._memories[key]


def _span(tensor: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.storage_offset() * tensor.element_size()
    return begin, begin + (last + 1) * tensor.element_size()


class Stream:
    """`torch.Stream` of a simulated machine."""

    machine: Machine

    def __init__(self, device: object = None, *, name: str = "", priority: int = 0) -> None:
        self.machine.num_streams += 1
        self.name = name or f"stream {self.machine.num_streams}"
        self.priority = priority
        self._before: list[str] = []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def wait_stream(self, other: Stream) -> None:
        self.machine.look_for_freed()
        _join(self.machine.clocks[self.name], self.machine.now(other.name))

    def wait_event(self, event: Event) -> None:
        self.machine.look_for_freed()
        _join(self.machine.clocks[self.name], event.times)

    def __enter__(self) -> Self:
        self._before.append(self.machine.current)
        self.machine.current = self.name
        return self

    def __exit__(self, *_: object) -> None:
        self.machine.current = self._before.pop()


class Event:
    """`torch.Event` of a simulated machine."""

    machine: Machine
    times: Times

    def __init__(self, device: object = None, *, enable_timing: bool = False) -> None:
        del device, enable_timing

    def record(self, stream: Stream) -> None:
        self.times = dict(self.machine.now(stream.name))

    def query(self) -> bool:
        if self.machine.events_are_done:
            self.synchronize()
        return self.machine.events_are_done

    def synchronize(self) -> None:
        self.machine.look_for_freed()
        _join(self.machine.clocks[HOST], self.times)

    def elapsed_time(self, other: Event) -> float:
        del other
        return 0.0


class _Watch(TorchDispatchMode):
    """Reports every operation to a machine, with the tensors that it reads and writes."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.is_view or "detach" in func.__name__:
            return result
        read, written = [], []
        named = [*zip(func._schema.arguments, args, strict=False)]
        named += [(a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs]
        for argument, value in named:
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            writes = argument.alias_info is not None and argument.alias_info.is_write
            (written if writes else read).extend(tensors)
        known = {id(tensor) for tensor in [*read, *written]}
        new = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and id(leaf) not in known]
        self._machine.run(func.__name__, read, [*written, *new])
        return result


@contextmanager
def machine(*, finds_races: bool = True, **options: bool) -> Iterator[Machine]:
    """Simulate an accelerator in the body; pyengine's ops run in plain PyTorch, so that they are observed."""
    made = Machine(**options)
    stream, event = type("Stream", (Stream,), {"machine": made}), type("Event", (Event,), {"machine": made})
    mine = [module for name, module in sys.modules.items() if name.startswith("pyengine")]
    patches = [
        mock.patch.object(module, name, lambda device: True)
        for module in mine
        for name in ("runs_ahead", "has_events")
        if callable(getattr(module, name, None))
    ]
    patches += [
        mock.patch.object(torch, "Stream", stream),
        mock.patch.object(torch, "Event", event),
        mock.patch.object(torch.accelerator, "current_stream", lambda device=None: stream(name=made.current)),
        mock.patch.object(Tensor, "record_stream", lambda tensor, other: made.record_use(tensor, other)),
        # torch's Future does not accept a device without streams
        mock.patch.object(staged, "Future", lambda devices: Future()),
        mock.patch.object(hook, "Future", lambda devices: Future()),
        mock.patch.object(native, "core", lambda: None),
        mock.patch.object(native, "can_gather", lambda: False),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        if finds_races:
            stack.enter_context(_Watch(made))
        yield made
    made.look_for_freed()
