"""`GradSync`: a loop of one's own, whose gradients the engine owns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyengine.accumulator import Exact
from pyengine.agreement import Settings, agree, problems_of
from pyengine.batch_norm import BatchNormReplay, batch_norm_problems, replayed
from pyengine.comm import comm_for
from pyengine.engine import Engine
from pyengine.host import is_lazy
from pyengine.layout import Layout, ParamSpec
from pyengine.reducer import BucketReducer, Storage
from pyengine.sync import Sync
from pyengine.wire import FP32, Wire
from pyengine.xla import XlaReducer, problems_of_device


class GradSync(Sync):
    """Own the gradients of a model in flat buckets, and reduce each bucket once a window.

    Every rank makes it over the same parameters; rank 0's values (and a module's buffers) are copied to the others.

    Args:
        params_or_module: a module, or its parameters, or `(name, parameter)` pairs. All that require a gradient.
        accumulate: micro-batches a window, per rank.
        wire: how a bucket travels: `pe.wire.FP32()`, `BF16()`, `FP16()`.
        accumulator: "fp32" sums in fp32 whatever the parameters' type; "native" sums in their own type; "exact" gives the
            same bits for every world size (docs/reproducible.md), over the fp32 wire only, with whole-numbered counts;
            given a module, not its parameters, it keeps BatchNorm's running statistics alike too. `pe.Exact(
            micro_batches=...)` is the same where the window is not the sum of `accumulate` over ranks.
        group: the process group; None is the default group, or this process alone if there is none. On an XLA device
            all replicas (docs/xla.md).
        bucket_cap_mb: size of a bucket in MiB of gradients; on an XLA device all gradients of a type are one bucket.
        nonfinite: "skip" leaves the parameters alone in a step with inf or nan; "raise" raises FloatingPointError on
            every rank, and has every micro-batch checked so that the message names it.

    Raises:
        ValueError: an argument is off, or the ranks' parameters differ, or "exact" meets a SyncBatchNorm; raised on
            every rank.

    Cost: fp32 parameters need one buffer of their size, which `.grad` views. Narrow parameters with
    `accumulator="fp32"` need 4 bytes an element for the sum and their own size for the wire.
    """

    def __init__(
        self,
        params_or_module: nn.Module | Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
        *,
        accumulate: int,
        wire: Wire = FP32(),  # noqa: B008 - frozen
        accumulator: str | Exact = "fp32",
        group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = 25,
        nonfinite: str = "skip",
    ) -> None:
        named, buffers = _named(params_or_module)
        params = [param for _, param in named]
        device = params[0].device if params else torch.get_default_device()
        comm = comm_for(device, group)
        specs = [ParamSpec(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in named]
        settings = Settings(accumulate, wire, accumulator, nonfinite, bucket_cap_mb)
        module = replayed(params_or_module, is_exact=settings.kind == "exact")
        problems = [*problems_of(named), *batch_norm_problems(module)]
        problems += problems_of_device(device, comm, settings)
        shares = agree(comm, specs, settings, problems)
        comm.broadcast_([*params, *buffers])
        storage = Storage(wire, settings.kind, watch=nonfinite == "raise", terms=shares.terms)
        kind = XlaReducer if is_lazy(device) else BucketReducer
        reducer = kind(specs, params, cap_bytes=int(bucket_cap_mb * 2**20), comm=comm, storage=storage)
        norms = BatchNormReplay(module, most=shares.most, total=shares.total)
        super().__init__(Engine(reducer, comm, settings, norms, shares=shares))
        self._reducer = reducer

    @property
    def layout(self) -> Layout:
        """Where every gradient lies, by bucket and slot."""
        return self._reducer.layout


def _named(source: Any) -> tuple[list[tuple[str, nn.Parameter]], list[Tensor]]:
    if isinstance(source, nn.Module):
        named, buffers = list(source.named_parameters()), list(source.buffers())
    else:
        items = list(source)
        named = [item if isinstance(item, tuple) else (f"param{i}", item) for i, item in enumerate(items)]
        named, buffers = _unique(named), []
    return named, buffers


def _unique(named: list[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
    """Number names that come again, as those of two modules do."""
    seen: Counter[str] = Counter()
    unique = []
    for name, param in named:
        seen[name] += 1
        unique.append((name if seen[name] == 1 else f"{name}#{seen[name]}", param))
    return unique
