"""`GradSync`: the engine that owns the gradients of a model without DDP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pyengine.comm.axes import Axes
from pyengine.engine.engine_ranks import EngineRanks
from pyengine.engine.handshake import group_problems, prepare_wire, problems_of_source, unwrapped
from pyengine.engine.make_engine import make_engine
from pyengine.engine.misnamed import explained
from pyengine.engine.sync import Sync
from pyengine.gradients.exact_sums import Terms
from pyengine.gradients.layout import ParamSpec
from pyengine.gradients.own import BucketReducer
from pyengine.gradients.settings import Accumulator, Exact, NonFinite, Settings, as_accumulator
from pyengine.gradients.xla import XlaReducer, problems_of_device
from pyengine.ops.device import bucket_cap_mb as default_bucket_cap_mb
from pyengine.ops.device import is_lazy
from pyengine.wire import FP32
from pyengine.wire.named import WireLike, as_wire


class GradSync(Sync):
    """An engine that owns a model's gradients in flat buckets and reduces each bucket once per window.

    Every rank creates an engine with the same parameters. Rank 0's parameters, and the buffers of a
    module, are copied to the other ranks, with a warning if values differ. An error is raised for parameters
    that other packages have sharded.

    Args:
        params_or_module: a module, its parameters, or `(name, parameter)` pairs. Include all parameters that
            require a gradient.
        accumulate: micro-batches per window, on each rank.
        wire: how a bucket is sent: `pe.wire.FP32()`, `BF16()`, `Int8()` and so on (docs/wires.md); or a name,
            for example "bf16" or "int8-ef"; or torch.float32, torch.bfloat16, torch.float16.
        accumulator: "fp32", or torch.float32, sums in fp32 for parameters of any dtype; "native" sums in the
            parameters' dtype; "exact" produces the same bits for every world size (docs/reproducible.md), and
            requires the fp32 wire and integer counts. Use `pe.Exact(micro_batches=...)` for exact sums if the
            window's size is not the sum of `accumulate` over ranks, and
            `pe.Exact(micro_batches=..., slots=...)` to sum exactly only over slots (groups of micro-batches),
            which costs less.
        process_group: None means the default group, or this process alone if there is no default group. On an
            XLA device, None means all replicas (docs/xla.md).
        device_mesh, axes: instead of a group, the mesh of all ranks and the meaning of its axes
            (docs/mesh.md); DTensor parameters have their own meshes. `axes` also names parameters that are
            reduced over separate groups, for example experts.
        bucket_cap_mb: size of a bucket in MiB of gradients. The default is 8 on the CPU, and 100 on CUDA and
            other accelerators with streams. The bucket that is sent first is about one MiB, so that
            communication begins early. On an XLA device all gradients of the same dtype form one bucket.
        nonfinite: "skip" skips the optimizer step if a gradient has inf or nan; "raise" raises
            FloatingPointError on every rank, and checks every micro-batch so that the message can name the
            micro-batch.
        stall_after_s: how many seconds a rank waits for other ranks before a warning names the missing ranks
            and the position of every rank (docs/reliability.md). If a rank dies, all other ranks raise an
            error within seconds. None or 0 disables both features and starts no monitoring thread.
        shared_memory: if True, ranks on the same host whose parameters are on the CPU reduce gradients in
            shared memory. Ranks whose GPUs communicate over NCCL use memory registered with NCCL, which GPUs
            access without copies (docs/wires.md). If False, the process group is used.

    Raises:
        ValueError: an argument is invalid, or the ranks' parameters differ; raised on every rank.

    Cost: fp32 parameters need one buffer of their size, of which the `.grad` tensors are views. bf16 or fp16
    parameters with `accumulator="fp32"` need 4 bytes per element for the sum, plus their own size for
    communication.
    """

    @explained
    def __init__(
        self,
        params_or_module: nn.Module | Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
        *,
        accumulate: int = 1,
        wire: WireLike = FP32(),  # noqa: B008 - frozen
        accumulator: Accumulator | Exact | torch.dtype = "fp32",
        bucket_cap_mb: float | None = None,
        nonfinite: NonFinite = "skip",
        stall_after_s: float | None = 30.0,
        process_group: dist.ProcessGroup | None = None,
        device_mesh: DeviceMesh | None = None,
        axes: Axes = Axes(),  # noqa: B008 - frozen
        shared_memory: bool = False,
    ) -> None:
        params_or_module = unwrapped(params_or_module)
        named, buffers = _named(params_or_module)
        params = [param for _, param in named]
        device = params[0].device if params else torch.get_default_device()
        wrong_group = list(group_problems(process_group, device_mesh))
        group = None if wrong_group else process_group
        ranks = EngineRanks(
            named, device, group=group, mesh=device_mesh, axes=axes, shared_memory=shared_memory
        )
        comm = ranks.comm
        settings = Settings(
            accumulate,
            as_wire(wire),
            as_accumulator(accumulator),
            nonfinite,
            default_bucket_cap_mb(device) if bucket_cap_mb is None else bucket_cap_mb,
            stall_after_s=stall_after_s,
            shared_memory=shared_memory,
        )
        problems = [*wrong_group, *problems_of_source(params_or_module)]
        problems += problems_of_device(device, comm, settings)

        def reducer(specs: list[ParamSpec], terms: Terms) -> BucketReducer | XlaReducer:
            groups = ranks.groups()
            prepare_wire(settings.wire, groups.comms, comm)
            ranks.broadcast([*named, *buffers], groups)
            if is_lazy(device):
                return XlaReducer(specs, params, comm=comm, settings=settings)
            return BucketReducer(specs, params, groups=groups, settings=settings, terms=terms)

        source = params_or_module
        super().__init__(make_engine(named, ranks, settings, reducer, source=source, problems=problems))


def _named(source: Any) -> tuple[list[tuple[str, nn.Parameter]], list[tuple[str, Tensor]]]:
    """Return parameters and buffers by name; repeated names, for example from two modules, get a suffix."""
    if isinstance(source, nn.Module):
        return list(source.named_parameters()), list(source.named_buffers())
    if isinstance(source, Tensor) or not isinstance(source, Iterable):
        raise TypeError(
            f"params_or_module is a {type(source).__name__}: expected a module, its parameters, or (name, "
            "parameter) pairs"
        )
    pairs = []
    for index, item in enumerate(source):
        pair = item if isinstance(item, tuple) else (f"param{index}", item)
        if len(pair) != 2 or not isinstance(pair[0], str) or not isinstance(pair[1], Tensor):
            raise TypeError(
                f"params_or_module: got a {type(item).__name__} at index {index}; expected parameters or "
                "(name, parameter) pairs, for example model.parameters(), not a state_dict or param_groups"
            )
        pairs.append(pair)
    given, seen = {name for name, _ in pairs}, Counter[str]()
    named: dict[str, nn.Parameter] = {}
    for name, param in pairs:
        unique = name
        while unique in named or (unique != name and unique in given):
            seen[name] += 1
            unique = f"{name}#{seen[name] + 1}"
        named[unique] = param
    return list(named.items()), []
