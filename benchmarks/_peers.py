"""The contestants that `bench_peers.py` adds to those of `python -m pyengine bench`.

Their packages (`requirements.txt`) are needed only for benchmarks. Each peer is used as its documentation
recommends.
"""

from __future__ import annotations

import math
import threading
import time
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

import pyengine as pe
from pyengine.cli.bench import variants
from pyengine.cli.bench.variants import VARIANTS, Attach, Engine, NoSyncBF16, NoSyncView, Variant


class NoSyncViewAgain(NoSyncView):
    """`no_sync_view` once more; the difference between the two is the noise of a run."""

    label = "the same again (control)"


class NoSyncBF16Small(NoSyncBF16):
    """`no_sync_bf16` with buckets of pyengine's default size."""

    label = "DDP + no_sync, views, bf16 hook, 8 MiB buckets"
    bucket_cap_mb = 8


def _take_parameters(variant: Variant) -> None:
    """Replace the optimizer's parameters with the sharded parameters."""
    variant.optimizer.param_groups.clear()
    variant.optimizer.add_param_group({"params": list(variant.model.parameters())})


class FSDP2(Variant):
    """`fully_shard` with its default arguments, on every block and on the model.

    It reduces gradients in every micro-batch, and gathers parameters twice per micro-batch.
    """

    label = "FSDP2, reduce every micro-batch"
    is_deferred = False
    wrap: Any = staticmethod(fully_shard)

    def setup(self) -> None:
        for block in getattr(self.model, "blocks", ()):
            self.wrap(block)
        self.wrap(self.model)
        _take_parameters(self)

    def micro_batch(self, x: Tensor, *, last: bool) -> None:
        if self.is_deferred:
            self.model.set_requires_gradient_sync(last)
        super().micro_batch(x, last=last)

    def epilogue(self) -> Tensor:
        norm: Any = super().epilogue()
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


class FSDP2Deferred(FSDP2):
    """`FSDP2` with set_requires_gradient_sync(False) in all but the last micro-batch."""

    label = "FSDP2, reduce in the last"
    is_deferred = True


class Replicate(FSDP2):
    """torch's `replicate`, i.e. FSDP2's code for unsharded parameters; reduces in every micro-batch."""

    label = "replicate(), reduce every micro-batch"
    wrap = staticmethod(replicate)


class ReplicateDeferred(Replicate):
    """`Replicate` with set_requires_gradient_sync(False) in all but the last micro-batch."""

    label = "replicate(), reduce in the last"
    is_deferred = True


class AttachFSDP2(Engine):
    """pyengine.attach over fully_shard."""

    label = "attach over FSDP2"
    deferral: dict[str, Any] = {}  # noqa: RUF012 - never written

    def make(self) -> pe.Sync:
        for block in getattr(self.model, "blocks", ()):
            fully_shard(block)
        fully_shard(self.model)
        _take_parameters(self)
        return pe.attach(self.model, accumulate=len(self.micro_batches), **self.deferral)


class AttachFSDP2None(AttachFSDP2):
    """`AttachFSDP2` that reduces in every micro-batch."""

    label = 'attach over FSDP2, defer="none"'
    deferral = {"defer": "none"}  # noqa: RUF012


class AttachFSDP2Gathered(AttachFSDP2):
    """`AttachFSDP2` with parameters that stay gathered for the whole window."""

    label = "attach over FSDP2, defer_budget_mb=math.inf"
    deferral = {"defer_budget_mb": math.inf}  # noqa: RUF012


def _shard_states(variant: Variant) -> None:
    """Shard the states of the variant's optimizer over the ranks."""
    (group,) = variant.optimizer.param_groups
    kind = type(variant.optimizer)
    settings = {name: value for name, value in group.items() if name in signature(kind).parameters}
    del settings["params"]
    variant.optimizer = ZeroRedundancyOptimizer(group["params"], optimizer_class=kind, **settings)


class ZeroRedundancy(NoSyncView):
    """DDP with no_sync and bucket views; each rank steps and broadcasts a share of the parameters."""

    label = "DDP + no_sync, views, ZeroRedundancyOptimizer"

    def setup(self) -> None:
        super().setup()
        _shard_states(self)


class EngineZeroRedundancy(Engine):
    label = "GradSync, ZeroRedundancyOptimizer"

    def setup(self) -> None:
        super().setup()
        _shard_states(self)


class AttachZeroRedundancy(Attach):
    label = "attach, ZeroRedundancyOptimizer"

    def setup(self) -> None:
        super().setup()
        _shard_states(self)


class Fabric(Variant):
    """Lightning Fabric with no_backward_sync in all but the last micro-batch."""

    label = "Lightning Fabric"
    needs = "lightning"

    def setup(self) -> None:
        from lightning.fabric import Fabric as LightningFabric

        self.fabric = LightningFabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
        self.fabric.launch()
        self.forward, self.optimizer = self.fabric.setup(self.model, self.optimizer)

    def micro_batch(self, x: Tensor, *, last: bool) -> None:
        with self.fabric.no_backward_sync(self.forward, enabled=not last):
            self.fabric.backward(self.scaler.scale(self.forward(x) / len(self.micro_batches)))

    def epilogue(self) -> Tensor:
        self.scaler.unscale_(self.optimizer.optimizer)
        return nn.utils.clip_grad_norm_(self.model.parameters(), variants.MAX_NORM)

    def step(self) -> None:
        self.scaler.step(self.optimizer.optimizer)
        self.scaler.update()
        self.optimizer.optimizer.zero_grad(set_to_none=True)


class Trainer(Variant):
    """Lightning's Trainer with accumulate_grad_batches.

    The Trainer runs the training loop itself. Therefore it runs in a thread, which waits for its turn before
    every window. It has no loss scaler on a CPU, so nothing is unscaled. Clipping and the optimizer step are
    timed together.
    """

    label = "Lightning Trainer"
    needs = "lightning"
    is_whole = False  # it does not report the norm

    def setup(self) -> None:
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.marks: list[float] = []
        self.has_failed = False
        self.grad_norm = torch.tensor(math.nan)
        threading.Thread(target=self._fit, daemon=True).start()
        self._wait()

    def _wait(self) -> None:
        self.done.acquire()
        if self.has_failed:
            raise RuntimeError("Lightning's Trainer has ended; its thread has said why")

    def _fit(self) -> None:
        from _trainer import fit

        try:
            fit(self)
        finally:  # it trains forever, so it has failed if it ends; the log shows why
            self.has_failed = True
            self.done.release()

    def begin(self) -> None:
        """Wait in the Trainer's thread until the next window may begin."""
        self.done.release()
        self.go.acquire()

    def window(self) -> dict[str, float]:
        self.marks = [time.perf_counter()]
        self.go.release()
        self._wait()
        start, early, last = self.marks[0], self.marks[-2], self.marks[-1]
        end = time.perf_counter()
        return {
            "early": early - start,
            "last": last - early,
            "epilogue": math.nan,
            "optimizer": math.nan,
            "window": end - start,
        }


class DeepSpeedZero0(Variant):
    """DeepSpeed's engine without sharding, which clips and steps itself.

    Its fp32 training has no loss scaler, so nothing is unscaled. Clipping and the optimizer step are timed
    together.
    """

    label = "DeepSpeed, ZeRO-0"
    needs = "deepspeed"
    is_whole = False  # it does not report the norm
    stage = 0

    def setup(self) -> None:
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": len(self.micro_batches),
            "gradient_clipping": variants.MAX_NORM,
            "zero_optimization": {"stage": self.stage},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        }
        self.engine, self.optimizer, *_ = deepspeed.initialize(
            model=self.model, optimizer=self.optimizer, config=config, dist_init_required=False
        )

    def micro_batch(self, x: Tensor, *, last: bool) -> None:
        self.engine.backward(self.engine(x))
        if not last:
            self.engine.step()

    def epilogue(self) -> Tensor:
        return torch.tensor(math.nan)

    def step(self) -> None:
        self.engine.step()

    def window(self) -> dict[str, float]:
        return super().window() | {"epilogue": math.nan, "optimizer": math.nan}


class DeepSpeedZero1(DeepSpeedZero0):
    """DeepSpeed's engine with sharded optimizer states."""

    label = "DeepSpeed, ZeRO-1"
    stage = 1


class Megatron(Variant):
    """megatron-core's DistributedDataParallel, without overlap.

    It accumulates in fp32 main_grad, and runs one fp32 all-reduce per bucket. On a CPU it runs only if torch
    is patched for the whole process.

    Megatron unscales and clips in its optimizer; the epilogue here does the same work on main_grad with
    torch's calls. Megatron's DistributedOptimizer, which shards the states, does not work on a CPU: its
    constructor creates CUDA tensors, and raises a TypeError for parameters that are not `torch.cuda` tensors.
    """

    label = "megatron-core"
    needs = "megatron"

    def setup(self) -> None:
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel as MegatronDDP
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.transformer import TransformerConfig

        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel()
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        self.ddp = MegatronDDP(
            config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False),
            self.model,
        )
        self.forward = self.ddp

    def micro_batch(self, x: Tensor, *, last: bool) -> None:
        super().micro_batch(x, last=last)
        if last:
            self.ddp.finish_grad_sync()

    def epilogue(self) -> Tensor:
        for p in self.model.parameters():
            main_grad: Tensor = p.main_grad  # type: ignore[attr-defined]
            p.grad = main_grad.to(p.dtype) if p.dtype != main_grad.dtype else main_grad
        return super().epilogue()

    def step(self) -> None:
        super().step()
        self.ddp.zero_grad_buffer()


CONTESTANTS: dict[str, type[Variant]] = VARIANTS | {
    "no_sync_view_again": NoSyncViewAgain,
    "no_sync_bf16_small": NoSyncBF16Small,
    "fsdp2": FSDP2,
    "fsdp2_deferred": FSDP2Deferred,
    "replicate": Replicate,
    "replicate_deferred": ReplicateDeferred,
    "attach_fsdp2": AttachFSDP2,
    "attach_fsdp2_none": AttachFSDP2None,
    "attach_fsdp2_gathered": AttachFSDP2Gathered,
    "zero_redundancy": ZeroRedundancy,
    "engine_zero_redundancy": EngineZeroRedundancy,
    "attach_zero_redundancy": AttachZeroRedundancy,
    "fabric": Fabric,
    "trainer": Trainer,
    "zero0": DeepSpeedZero0,
    "zero1": DeepSpeedZero1,
    "megatron": Megatron,
}
