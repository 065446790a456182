"""The parameters of an engine: which engine owns them, and whether the model still trains them."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from ctypes import c_uint8, c_uint16, c_uint32, c_uint64
from functools import partial
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from pyengine.ops.device import HOST, current_stream

_tensor, _version, _values = attrgetter("_cdata"), attrgetter("_version"), methodcaller("values")
_MOST_IDLE = 3  # The maximum number of consecutive steps without a gradient.
# A key in the metadata of the autograd node that accumulates a parameter's gradient. The mark lives as long
# as the node, and is not copied or saved with the parameter.
_MARK = "pyengine owner"


class Ownership:
    """An engine's mark on its parameters, valid until the engine releases it or is freed.

    A hook on the first parameter notifies the engine of every backward. The hook costs a microsecond.
    """

    def __init__(self, params: Iterable[Parameter], engine: Any) -> None:
        self._params = [param for param in params if param.requires_grad]
        self._engine = weakref.ref(engine)
        self._nodes: list[Any] = []
        self._hook: Any = None
        self._stream: torch.Stream | None = None
        self._mark()

    def follow(self) -> None:
        """Accumulate gradients on the current stream from now on, if the stream has changed.

        The stream changes if a loop trains or captures a graph on a separate stream. Autograd nodes that
        are still referenced, by a live forward graph or by DDP, keep their stream.
        """
        is_same = not self._params or current_stream(self._params[0].device) == self._stream
        if is_same or not all(param.requires_grad for param in self._params):
            return  # a frozen parameter has no node and could not be marked again
        self.release()
        self._nodes = []  # a parameter has one autograd node at a time, so free the old nodes first
        self._mark()

    def _mark(self) -> None:
        # autograd accumulates a parameter's gradient on the stream that was current when the parameter's node
        # was created. While the nodes are alive they share that stream, and autograd makes the stream wait
        # for the streams of each backward.
        self._nodes = nodes_of(self._params)
        self._stream = current_stream(self._params[0].device) if self._params else None
        for node in self._nodes:
            node.metadata[_MARK] = self._engine
        if self._nodes:
            self._hook = self._nodes[0].register_hook(partial(_report, self._engine, self._params[0]))

    def release(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        for node in self._nodes:
            node.metadata.pop(_MARK, None)


def _report(engine: weakref.ref[Any], param: Parameter, *_: object) -> None:
    owner = engine()
    if owner is not None:
        owner.notice_backward(param)


def nodes_of(params: Sequence[Parameter]) -> list[Any]:
    """Return the autograd nodes that accumulate parameters' gradients, like `get_gradient_edge`."""
    with torch.enable_grad():
        views: list[Any] = [param.view_as(param) for param in params]
        return [view.grad_fn.next_functions[0][0] for view in views]


def owner(param: Parameter) -> object | None:
    return next(_owners([param]), None)


def _owners(params: Iterable[Parameter]) -> Iterator[object | None]:
    """Yield the engine that owns each trained parameter, or None."""
    for node in nodes_of([param for param in params if param.requires_grad]):
        mark: weakref.ref[object] | None = node.metadata.get(_MARK)
        yield None if mark is None else mark()


def owned_problems(named: Sequence[tuple[str, Parameter]]) -> Iterator[str]:
    """Report parameters that belong to another engine, if that engine still exists."""
    trained = {name: param for name, param in named if param.requires_grad and param.is_leaf}

    def owned() -> list[str]:
        owners = zip(trained, _owners(trained.values()), strict=True)
        return [name for name, engine in owners if engine is not None]

    if taken := owned():
        gc.collect()  # free engines that are no longer referenced
        taken = owned()
    if taken:
        more = f" and {len(taken) - 1} more" if len(taken) > 1 else ""
        yield (
            f"call sync.close() on the old engine first, or use the old engine: parameter {taken[0]!r}{more} "
            "belongs to an engine that still exists, and two engines would write the same gradients"
        )


# ---- whether the model still trains the parameters ----


class TrainedParameters:
    """Compares the parameters of an engine with the current parameters of its model, if the model is known.

    Cost: each check takes 0.4 µs per parameter and 0.1 µs per module.
    """

    def __init__(self, names: Sequence[str], params: Sequence[Parameter], module: nn.Module | None) -> None:
        self._names, self._params, self._module = names, params, module
        self._tensors = list(map(_tensor, params))
        # Includes parameters that the caller reduces. The references keep the ids from being reused.
        self._known = [*params, *([] if module is None else module.parameters())]
        self._replaced: list[str] = []
        self._added: list[tuple[str, Parameter]] = []
        self._frozen = [(n, p) for n, p in zip(names, params, strict=True) if not p.requires_grad]
        self._idle: Counter[int] = Counter()  # consecutive steps without a gradient, by parameter
        self._has_warned = False
        self._remember()

    def problems(self) -> Iterator[str]:
        """Report replaced or added parameters, and optimizers that step inside the backward.

        Must not be called inside a forward.
        """
        if self._module is not None:
            now = self._members()
            if len(now) != len(self._tree) or not all(map(is_, now, self._tree)):
                self._remember()
                self._compare(self._module)
        exchanged, tensors = list(self._replaced), list(map(_tensor, self._params))
        if tensors != self._tensors:
            each = zip(self._names, tensors, self._tensors, strict=True)
            exchanged += [name for name, now, before in each if now != before]
        yield from in_backward_problems(zip(self._names, self._params, strict=True))
        if exchanged:
            one = f"parameter {exchanged[0]!r} has"
            some = f"parameters {exchanged[0]!r} and {len(exchanged) - 1} more have"
            yield (
                f"{some if len(exchanged) > 1 else one} been replaced since the engine was made: call "
                "sync.close(), then make a new engine (with pe.attach after fully_shard) and a new optimizer "
                "for the model as it is now. Anything that replaces parameters (fully_shard, "
                "load_state_dict(assign=True), swap_tensors, weight_norm and other parametrizations, a new "
                "layer) must come before both"
            )

    def notice_step(self, stepped: AbstractSet[int]) -> None:
        """Warn once if a parameter has no gradient for several steps while other parameters have gradients.

        Not needed if the module is known, because `problems` then detects replaced parameters.
        """
        if self._module is not None or self._has_warned:
            return
        params = self._params
        idle = {index for index in stepped if params[index].grad is None and params[index].requires_grad}
        if len(idle) == len(stepped):
            return
        for index in self._idle.keys() & (stepped - idle):
            del self._idle[index]
        self._idle.update(idle)
        found = [self._names[index] for index, steps in sorted(self._idle.items()) if steps >= _MOST_IDLE]
        if found:
            self._has_warned = True
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            warnings.warn(
                f"no rank had a gradient for parameter {found[0]!r}{more} in {_MOST_IDLE} steps in a row. If "
                "the model has replaced it (a new layer, load_state_dict(assign=True), weight_norm), make a "
                "new engine and a new optimizer: the new parameter is not trained. GradSync(model) detects "
                "this by itself, GradSync(model.parameters()) cannot. (If no loss depends on the parameter "
                "yet, nothing is wrong)",
                stacklevel=4,
            )

    def _remember(self) -> None:
        modules = [] if self._module is None else [*self._module.modules()]
        self._dicts = [
            each
            for module in modules
            for each in (module._parameters, module._modules)  # noqa: SLF001 - the dicts themselves
        ]
        self._tree = self._members()

    def _members(self) -> list[object]:
        return [*chain.from_iterable(map(_values, self._dicts))]

    def _compare(self, module: nn.Module) -> None:
        """Find parameters that the engine does not know, and the engine's parameters that they replaced."""
        named, known = dict(module.named_parameters()), set(map(id, self._known))
        self._added = [(name, p) for name, p in named.items() if p.requires_grad and id(p) not in known]
        present = set(map(id, named.values()))
        gone = [
            name
            for name, param in zip(self._names, self._params, strict=True)
            if param.requires_grad and id(param) not in present
        ]
        self._replaced = gone if self._added else []

    def strangers(self) -> list[str]:
        """Return the names of unfrozen or added parameters that have a gradient but belong to no engine.

        Cost: reads `.grad` of each parameter that was frozen or missing when the engine was created.
        """
        if not (self._frozen or self._added):
            return []
        late = [(name, param) for name, param in self._frozen if param.requires_grad]
        added = [] if self._replaced else self._added  # `problems` has reported replaced parameters
        return [name for name, param in [*late, *added] if param.grad is not None and owner(param) is None]


class WrittenParameters:
    """Detects writes to trained parameters by code outside the engine since the last `record`.

    A write usually changes the version of a parameter, but a write to `.data` does not. On the host, writes
    to `.data` are detected by comparing the bits of one element of each parameter.

    Cost: 0.2 µs per parameter and check, with three checks per window.
    """

    def __init__(self, params: Sequence[Parameter]) -> None:
        self._params = params
        self._then: tuple[list[int], list[int]] | None = None
        # Whether the host compares elements; False for parameters on an accelerator and for shards.
        is_plain = all(type(param) is Parameter and param.layout is torch.strided for param in params)
        self._is_read = is_plain and params[0].device.type == HOST.type
        # The address of each parameter.
        self._addresses: list[int] = []
        # The middle element of each parameter, read with ctypes.
        self._elements: list[Any] = []

    def record(self) -> None:
        self._then = self._look()

    def forget(self) -> None:
        """Allow all writes until the next `record`."""
        self._then = None

    def written(self) -> list[int]:
        """Return the indices of parameters that were written to since `record`; empty without a record."""
        if self._then is None or (now := self._look()) == self._then:
            return []
        pairs = enumerate(zip(*now, *self._then, strict=True))
        return [
            index
            for index, (version, bits, old_version, old_bits) in pairs
            if (version, bits) != (old_version, old_bits) and self._params[index].requires_grad
        ]

    def _look(self) -> tuple[list[int], list[int]]:
        if not self._is_read:
            return list(map(_version, self._params)), [0] * len(self._params)
        if (addresses := list(map(Tensor.data_ptr, self._params))) != self._addresses:
            self._addresses, self._elements = addresses, list(map(_element, self._params))
        return list(map(_version, self._params)), list(map(_value, self._elements))


def _element(param: Parameter) -> Any:
    """Return the bits of the element in the middle of a parameter's memory; 0 if it has no elements."""
    kind = _BITS.get(param.element_size())
    if kind is None or not param.numel() or param.layout != torch.strided:
        return c_uint8(0)
    middle = sum((size // 2) * stride for size, stride in zip(param.shape, param.stride(), strict=True))
    return kind.from_address(param.data_ptr() + middle * param.element_size())


_value = attrgetter("value")
_BITS: dict[int, Any] = {1: c_uint8, 2: c_uint16, 4: c_uint32, 8: c_uint64}


def in_backward_problems(named: Iterable[tuple[str, Parameter]]) -> list[str]:
    """Report the first parameter whose optimizer steps inside the backward."""
    names = [name for name, param in named if hasattr(param, "_in_backward_optimizers")]
    return [
        f"parameter {name!r} has an optimizer that steps inside the backward (_apply_optimizer_in_backward), "
        "before gradients are reduced: leave that out, and step all parameters with sync.step(optimizer)"
        for name in names[:1]
    ]
