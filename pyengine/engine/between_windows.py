"""Collective calls that every rank makes between two windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyengine.engine.engine import Engine
from pyengine.engine.handshake import raise_problems, resized
from pyengine.window.digest import HeaderDigest
from pyengine.window.header import Header
from pyengine.window.metric import Metric, MetricContext
from pyengine.window.verdict import check_agreement, check_stage


def check_ranks_agree(
    engine: Engine, *, stage: str = "has ended its loop", problems: Sequence[str] = ()
) -> None:
    """Raise an error on every rank unless all ranks agree, are at the same `stage`, and have no problem.

    Ranks agree if they have used the gradients of the last window in the same way. Usually ranks compare this
    in the header of the next window. No header follows the last window of a loop, so this call is needed.
    Ranks may also call this function after opening a window. If a rank has dropped its window and reopens it
    while other ranks are in the middle of the window, its header is paired with their window headers, and all
    ranks raise an error.

    Cost: one all-reduce of 184 bytes, for which the host waits; nothing on a lazy device or with one rank.
    """
    engine.reach_verdicts()
    gathered: Sequence[Sequence[str]] = [problems]
    if engine.comm.world_size > 1 and not engine.is_lazy:
        local = engine.new_counts()
        for problem in problems:
            local.faults.refuse(problem)
        header = engine.launch_header_all_reduce(local, has_more=False, stage=stage)
        totals = header.totals()
        check_agreement(header, totals, engine.comm)
        gathered = engine.comm.all_gather_object([*problems]) if totals.invalid_counts else []
    raise_problems(gathered)


def check_same_call(engine: Engine, what: str) -> None:
    """Raise an error on every rank unless all ranks make this call with the same `what`.

    The positions of ranks in their loops are not compared. Used before collectives whose size differs from a
    header's: if some ranks launched such a collective while other ranks launched a header, gloo would abort
    the processes.

    Cost: one all-reduce of 184 bytes, for which the host waits; nothing on a lazy device or with one rank.
    """
    engine.reach_verdicts()
    if engine.comm.world_size > 1 and not engine.is_lazy:
        digest = HeaderDigest(what, engine.name, accumulate=engine.counter.accumulate)
        local, position = engine.new_counts(), engine.position()
        header = Header(
            engine.comm, engine.device, local=local, position=position, has_more=False, digest=digest
        )
        check_stage(header, engine.comm)


def resize(engine: Engine, accumulate: int) -> None:
    """Change the number of micro-batches of all later windows; every rank must pass the same number."""
    if not engine.is_closed:
        raise RuntimeError(
            f"gradient_accumulation_steps={accumulate} in the middle of window {engine.counter.index}, or "
            "before its step: set it after sync.step, or discard the window with sync.abandon() first"
        )
    engine.split = resized(engine.split, accumulate, is_exact=engine.is_exact)
    engine.counter.accumulate, engine.counter.share = accumulate, engine.split.of(engine.comm.rank)


def metric_context(engine: Engine) -> MetricContext:
    """Return the context for norms by parameter name; all ranks call this together.

    The context is created once and used by all later windows.

    Cost: if ranks have different parameters, one `all_gather_object` of names in the first call.
    """
    if engine.metric_context is None:
        names, trains = list(engine.reducer.names), [param.requires_grad for param in engine.reducer.params]
        by_rank: list[list[tuple[str, bool]]] = [[*zip(names, trains, strict=True)]]
        if not engine.split.are_alike:
            by_rank = engine.comm.all_gather_object(by_rank[0])
        trained: dict[str, bool] = {}
        for name, trains_it in (pair for each in by_rank for pair in each):
            trained[name] = trains_it or trained.get(name, False)
        place_of = {name: place for place, name in enumerate(trained)}
        engine.final.add_names([place_of[name] for name in names], len(trained))
        about = engine.final, engine.comm, engine.reducer, engine.holds_parts
        engine.metric_context = MetricContext([*trained], [*trained.values()], *about)
    return engine.metric_context


def measure(engine: Engine, metrics: Sequence[Any]) -> None:
    """Add metrics to all later windows; see `Sync.measure`."""
    check_same_call(engine, "calls sync.measure, which every rank must call")
    problems = []
    if not engine.is_closed:
        problems.append(
            f"measure was called in the middle of window {engine.counter.index}: call it between windows, "
            "for example before the loop"
        )
    context, kinds = metric_context(engine), {type(each) for each in engine.metrics}
    for each in metrics:
        if not isinstance(each, Metric):
            problems.append(
                f"measure: expected pe.GradNorms() or another metric, got a {type(each).__name__}"
            )
            continue
        if type(each) in kinds:
            problems.append(f"measure: got a second {type(each).__name__}: pass each kind at most once")
        elif each.is_bound:
            problems.append(f"measure: {each!r} was given to another engine: create one for each engine")
        kinds.add(type(each))
        problems += each.problems(context)
    mine = repr([*metrics])
    found, texts = zip(*engine.comm.all_gather_object((problems, mine)), strict=True)
    raise_problems(found)
    if len(set(texts)) > 1:
        raise_problems(
            [
                [f"measure got {text}, which differs between ranks: pass the same metrics on every rank"]
                for text in texts
            ]
        )
    for each in metrics:
        each.bind(context)
    engine.observers += metrics
