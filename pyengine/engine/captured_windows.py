"""Capture of a window as a CUDA graph; later windows with the same shapes replay the graph."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from pyengine.engine.engine import Engine
from pyengine.engine.window import Stepped
from pyengine.engine.window_graph import CaptureStream, DeviceGraph, WindowGraph
from pyengine.gradients.own import BucketReducer
from pyengine.ops import capture
from pyengine.ops.capture import CaptureError, Rehearsal, Section, difference
from pyengine.ops.device import runs_ahead
from pyengine.step.step_record import Clock, StepRecord
from pyengine.step.window_optimizer import hyperparameters
from pyengine.window.counter import State
from pyengine.window.header import Count
from pyengine.window.verdict import Verdict

_log = logging.getLogger("pyengine.engine")

# The minimum number of windows of the same form (equal shapes) that run before the capture. The first window
# reduces its buckets in the order of parameter registration. The next two windows are recorded and compared.
MIN_WARM_UP = 3
MAX_FORMS = 64  # the maximum number of forms; each form keeps its recorded windows and possibly a graph


@dataclass
class _Form:
    """Windows that share a graph: their micro-batches agree in number, structure, shapes and dtypes."""

    num_run: int = 0
    rehearsals: list[Rehearsal] = field(default_factory=list)  # recordings of the last two windows
    section: Section = field(default_factory=Section)
    counts: Sequence[Count] = ()  # the counts of the last recorded window
    graph: WindowGraph | None = None
    problem: str = ""  # the reason why windows of this form never get a graph


class CapturedWindows:
    """Trains windows, most of them by replaying one CUDA graph; see `sync.capture`.

    Attributes:
        num_captured, num_replayed, num_eager: numbers of captured graphs, of windows that replayed a graph,
            and of windows that ran without a graph.
        unused: names of parameters without a gradient in the last captured window. These parameters get no
            gradient in replayed windows either, even if another rank begins to use them.
    """

    def __init__(
        self, engine: Callable[[], Engine], train_window: Callable[[list[Any]], object], *, warm_up: int
    ) -> None:
        self._engine_of, self._train, self._warm_up = engine, train_window, warm_up
        self._forms: dict[object, _Form] = {}
        self._stream = CaptureStream()
        self._has_warned = self._has_too_many = False
        self.num_captured = self.num_replayed = self.num_eager = 0
        self.unused: list[str] = []

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.num_captured} graphs, {self.num_replayed} windows replayed, "
            f"{self.num_eager} run without a graph)"
        )

    @property
    def problems(self) -> list[str]:
        """The reasons why windows of some forms run without a graph; empty if there are none."""
        return [form.problem for form in self._forms.values() if form.problem]

    def __call__(self, window: Iterable[Any]) -> StepRecord | None:
        """Train one window of `sync.windows`.

        Returns:
            The record of the last step whose outcome the host knows (see `sync.last_record`), usually the
                step of the previous window.

        Raises:
            ValueError: the counts of the window were read ahead.
            RuntimeError: `train_window` did not call `sync.step`; also for the same reasons as in that call.
        """
        engine, batches = self._engine_of(), list(window)
        if engine.window.denominators is not None:
            raise ValueError(
                "with count= in sync.windows the host reads a window's totals in advance, but a captured "
                "window would reuse the totals of another window: pass each count to sync.backward instead, "
                "as a tensor"
            )
        leaves, structure = tree_flatten(batches)
        key = structure, tuple(map(_kind_of, leaves))
        form = self._form_of(key)
        if form.graph is not None and self._is_stale(form.graph, engine):
            form = self._forms[key] = _Form()
        if form.problem or not batches:
            self._run(engine, leaves, structure)
        elif form.num_run < self._warm_up - 2:
            form.num_run = min(form.num_run + 1, self._warm_up - 2)
            self._run(engine, leaves, structure)
        elif not is_regular(engine):
            self._run(engine, leaves, structure)
        elif form.num_run < self._warm_up:
            self._rehearse(engine, form, leaves, structure)
        elif form.graph is None:
            self._capture(engine, form, leaves, structure)
        elif len(engine.verdicts.last_use().factors) != len(form.graph.factors):
            self._run(engine, leaves, structure)  # the previous window was clipped differently
        else:
            form.graph.take([leaf for leaf in leaves if isinstance(leaf, Tensor)])
            run_again(engine, form.graph)
            self.num_replayed += 1
        if engine.counter.state is not State.USED:
            raise RuntimeError(_NOT_STEPPED)
        make = engine.records.make_last
        return None if make is None else make()

    def _form_of(self, key: Hashable) -> _Form:
        if key not in self._forms and len(self._forms) == MAX_FORMS:
            other = _Form(problem=f"windows have had more than {MAX_FORMS} forms")
            if not self._has_too_many:
                self._has_too_many = True
                self._give_up(
                    other, [f"{other.problem}: pad tensors, and leave strings and objects out of batches"]
                )
            return other
        return self._forms.setdefault(key, _Form())

    # ---- windows without a graph ----

    def _run(self, engine: Engine, leaves: list[Any], structure: Any) -> None:
        self.num_eager += 1
        batches = tree_unflatten(_on(engine.device, leaves), structure)
        with self._on_stream(engine):
            self._train(batches)

    def _rehearse(self, engine: Engine, form: _Form, leaves: list[Any], structure: Any) -> None:
        """Run, record and compare one of the last two windows before the capture."""
        section, layout = form.section, _buckets_of(engine).layout
        section.rewind()
        leaves = _on(engine.device, leaves)  # copy before the recording, which reports copies
        with capture.running(section, is_capture=False), Rehearsal(_is_on_device) as rehearsal:
            self._run(engine, leaves, structure)
        if _buckets_of(engine).layout is not layout:
            return  # this window has changed the bucket layout to the order of arrival; later windows keep it
        form.num_run += 1
        form.rehearsals.append(rehearsal)
        before, form.counts = form.counts, engine.window.counts.counts
        found = [*section.problems]
        for index, (was, now) in enumerate(zip(before, form.counts, strict=False)):
            if not _is_unread(now) and (_is_unread(was) or float(now) != float(was)):
                found.append(
                    f"count of micro-batch {index} is {float(now):g} on the host, but was different in the "
                    "previous window: pass it as a tensor on the device"
                )
        for index, loss in enumerate(engine.window.counts.losses):
            if loss is not None and not _is_unread(loss):
                found.append(f"loss of micro-batch {index} is on the host: pass it as a tensor on the device")
        if len(form.rehearsals) == 2 and not found and (text := difference(*form.rehearsals)):
            found = [text]
        if found:
            self._give_up(form, found)

    def _give_up(self, form: _Form, found: Sequence[str]) -> None:
        """Stop trying to capture windows of this form, and warn with the reason."""
        each = list(dict.fromkeys(found))
        more = f"; and {len(each) - 3} more" if len(each) > 3 else ""
        form.problem = "; ".join(each[:3]) + more
        warnings.warn(f"sync.capture: windows of this form run without a graph: {form.problem}", stacklevel=4)

    # ---- the capture ----

    def _capture(self, engine: Engine, form: _Form, leaves: list[Any], structure: Any) -> None:
        """Capture the window as a graph, and run it."""
        form.rehearsals = []
        if torch.is_autocast_enabled(engine.device.type) and torch.is_autocast_cache_enabled():
            self._give_up(
                form,
                ["autocast around train_window would reuse a stale cache: enter autocast inside it"],
            )
            self._run(engine, leaves, structure)
            return
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        inputs = [torch.empty_like(tensor, device=engine.device) for tensor in given]
        use = engine.verdicts.last_use()
        graph = WindowGraph(
            DeviceGraph(), form.section, inputs, [factor.detach().clone() for factor in use.factors]
        )
        use.factors[:] = graph.factors
        graph.take(given)
        statics = iter(inputs)
        leaves = [next(statics) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        traffic = engine.comm.traffic
        sent = traffic.collectives, traffic.bytes_sent
        try:
            with (
                capture.running(form.section, is_capture=True),
                self._on_stream(engine),
                graph.work.capture(self._stream),
            ):
                self._train(tree_unflatten(leaves, structure))
                _keep(engine, graph)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for this window
            _log.debug("capture failed", exc_info=True)
            rewind(engine)
            self._give_up(form, [f"its capture failed: {error}"])
            self._run(engine, leaves, structure)
            return
        graph.collectives, graph.bytes_sent = traffic.collectives - sent[0], traffic.bytes_sent - sent[1]
        graph.memory = _memory_of(graph.stepped, engine)
        form.graph = graph
        self.num_captured += 1
        run_captured(engine, graph)
        named = zip(engine.reducer.names, graph.grads, strict=True)
        self.unused = [name for name, grad in named if grad is None]

    def _is_stale(self, graph: WindowGraph, engine: Engine) -> bool:
        """Whether memory or values that the graph uses have changed in the model, sums or optimizers."""
        if not graph.fits(_memory_of(graph.stepped, engine)):
            _log.debug("memory of the captured window has changed: capture again")
            return True
        for step in graph.stepped:
            now, _ = hyperparameters(step.optimizer)
            if now != step.done.numbers:
                if not self._has_warned:
                    self._has_warned = True
                    pairs = zip(now, step.done.numbers, strict=True)
                    (name, value), (_, was) = next((new, old) for new, old in pairs if new != old)
                    # A graph keeps the value that a Python number had during the capture.
                    warnings.warn(
                        f"sync.capture: {name} of {step.done.name} is {value} but was {was} in the captured "
                        "window, so the window is captured again. If a number changes often, make it a "
                        f"tensor, {name}=torch.tensor({was}, device=...), which schedulers change in place",
                        stacklevel=4,
                    )
                return True
        return False

    @contextmanager
    def _on_stream(self, engine: Engine) -> Iterator[None]:
        """Run the body on the capture stream, so that autograd accumulates gradients on this stream."""
        with self._stream.current(engine.device):
            engine.ownership.follow()
            yield


def capture_problems(engine: Engine) -> Iterator[str]:
    """Yield the reasons why windows of an engine cannot be captured; they are the same on all ranks."""
    yield from DeviceGraph.problems(engine.device)
    if isinstance(engine.reducer, BucketReducer):
        yield from engine.reducer.capture_problems
    else:
        owner = type(engine.reducer).__name__
        yield f"gradients owned by {owner} cannot be captured: use pe.GradSync, or attach to a DDP model"
    if engine.metrics:
        yield f"with sync.measure the host reads values in every window: leave out {engine.metrics}"
    if engine.raises:
        yield "with nonfinite='raise' the host waits for every window: use 'skip'"
    if engine.window.slots.size > 1:
        yield "accumulator=pe.Exact(slots=...) requires reading micro-batches one by one: leave slots out"


def _buckets_of(engine: Engine) -> BucketReducer:
    assert isinstance(engine.reducer, BucketReducer)  # `capture_problems` has refused other reducers
    return engine.reducer


def _keep(engine: Engine, graph: WindowGraph) -> None:
    """Store those objects of the window that later replays need; called inside the capture."""
    window, verdict = engine.window, engine.window.verdict
    if engine.counter.state is not State.USED or window.header is None or verdict is None:
        raise CaptureError(_NOT_STEPPED)
    if len(verdict.use.factors) != len(graph.factors):
        raise CaptureError("the window clips or steps differently from the previous window")
    for mine, factor in zip(graph.factors, verdict.use.factors, strict=True):
        mine.copy_(factor)
    verdict.use.factors[:] = graph.factors
    graph.header, graph.outcome, graph.report = window.header, verdict.outcome, verdict.report
    graph.counts, graph.final, graph.stepped = window.counts, dict(vars(engine.final)), window.stepped
    graph.grads = [param.grad for param in engine.reducer.params]


# ---- replay ----


def is_regular(engine: Engine) -> bool:
    """Whether the open window can replay the graph of an earlier window.

    True if the previous window was stepped and left no unused gradients, no audit is due, and no problem was
    found.
    """
    if engine.window.faults or engine.kept_grads.has_left() or _is_written(engine):
        return False
    if any(observer.has_work_in(engine.counter.index) for observer in engine.observers):
        return False
    engine.verdicts.reach_earlier(engine.counter.index)
    return bool(engine.verdicts.last_use().steps)


def _is_written(engine: Engine) -> bool:
    """Whether code outside the engine has written to gradients since the last check."""
    if engine.window.has_begun and engine.counter.state is State.OPEN:
        return bool(engine.foreign.in_window())
    return engine.foreign.between_windows() is not None


def run_captured(engine: Engine, graph: WindowGraph) -> None:
    """Run the window that was just captured; a capture only records work."""
    engine.window.clock.start()
    graph.header.fill()
    graph.work.replay()
    _buckets_of(engine).run_again()
    engine.window.clock.stop()
    for readback in graph.section.readbacks:  # the values that the host requested during the capture
        readback.start(readback.captured)
    engine.foreign.marks.record_published()


def run_again(engine: Engine, graph: WindowGraph) -> None:
    """Replay the graph of an earlier window for a window whose micro-batches have all been read.

    Collectives, states, counts and reports are the same as with the methods from `begin` to `step`. Requires
    that `is_regular` is true.
    """
    counter, window = engine.counter, engine.window
    window.clock = Clock(engine.device)
    window.has_begun = window.has_backward = True
    for observer in engine.observers:
        observer.begin(counter.index)
    window.counts.take(graph.counts)
    counter.done = counter.handed
    graph.copy_factors(engine.verdicts.last_use())
    window.header = header = graph.header.again(
        local=window.counts,
        position=engine.position(),
        has_more=window.has_more,
        digest=engine.header_digest(),
    )
    header.fill()
    counter.state = State.SENT
    graph.work.replay()
    _buckets_of(engine).run_again()
    engine.comm.traffic.collectives += graph.collectives
    engine.comm.traffic.bytes_sent += graph.bytes_sent
    vars(engine.final).update(graph.final)
    report = replace(graph.report, index=counter.index, local=window.counts)
    window.verdict = verdict = Verdict(header, graph.outcome, report, comm=engine.comm, raises=engine.raises)
    engine.verdicts.append(verdict)
    window.is_scale_updated = True
    for param, grad in zip(engine.reducer.params, graph.grads, strict=True):
        if param.grad is not grad:
            param.grad = grad
    engine.foreign.marks.record_published()
    record = engine.record_of(verdict, engine.final.norm_before_clipping())
    engine.verdicts.count_step()
    counter.state = State.USED
    verdict.use.factors += graph.factors
    for step in graph.stepped:
        verdict.use.steps.append(step.done)
        engine.foreign.trained.notice_step(step.indices)
        engine.kept_grads.use(step.indices, engine.final.found_inf)
    for step in graph.stepped:
        engine.call_once_known(verdict, step.scheduler, None)
    engine.call_once_known(verdict, None, record)


def rewind(engine: Engine) -> None:
    """Reset the open window after a failed capture, which has run none of the window's work."""
    if engine.window.verdict is not None:
        engine.verdicts.forget(engine.window.verdict)
    engine.new_window()
    engine.counter.state, engine.counter.done = State.OPEN, 0


def _memory_of(
    stepped: Sequence[Stepped], engine: Engine
) -> tuple[list[Tensor], list[tuple[int, bool]], object]:
    """Return the current value for the attribute `memory` of a `WindowGraph`."""
    tensors: list[Tensor] = []
    for optimizer in (step.optimizer for step in stepped):
        for group in optimizer.param_groups:
            tensors += group["params"]
            tensors += [value for value in group.values() if isinstance(value, Tensor)]
            for param in group["params"]:
                state = optimizer.state.get(param, {})
                tensors += [value for value in state.values() if isinstance(value, Tensor)]
    reducer = engine.reducer
    addresses = [(param.data_ptr(), param.requires_grad) for param in reducer.params]
    return tensors, addresses, _buckets_of(engine).layout


def _on(device: torch.device, leaves: list[Any]) -> list[Any]:
    return [leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _is_on_device(tensor: Tensor) -> bool:
    return runs_ahead(tensor.device)


def _is_unread(value: Count) -> bool:
    return isinstance(value, Tensor) and _is_on_device(value)


def _kind_of(leaf: object) -> object:
    """Return the properties of an input that are fixed in a graph: for a tensor, all except its values."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.layout
    return leaf if isinstance(leaf, str | int | float | bool | None) else id(leaf)


_NOT_STEPPED = (
    "train_window returned without calling sync.step(optimizer): it must run the backward of every "
    "micro-batch, then call sync.step"
)
