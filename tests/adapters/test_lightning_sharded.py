"""Lightning's ModelParallelStrategy with windows over FSDP2, against one float64 process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from twin import CLOSE, LR, MOMENTUM, Net, Twin, loss_of, shard, weights_of
from worlds import refusal

pytestmark = pytest.mark.slow
pytest.importorskip("lightning", reason="needs pyengine[adapters]")

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import FSDPStrategy
from test_lightning_strategy import fit

from pyengine.adapters.lightning import LogSteps, ShardedWindowStrategy, WindowStrategy

ACCUMULATE = 3


class Sharded(LightningModule):
    """Shards its net, and records its micro-batches and the gradients that its hook sees."""

    def __init__(self, *, counts: bool = True, broken: int = -1) -> None:
        super().__init__()
        self.net, self.counts, self.broken = Net(), counts, broken
        self.seen: list[Tensor] = []
        self.hooked: list[Tensor] = []

    def configure_model(self):
        shard(self.net, self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        """Return a mean loss, or a summed loss with its count; counts differ between ranks."""
        x = batch[0][: 1 + (batch_idx + self.global_rank) % 2] if self.counts else batch[0]
        self.seen.append(x)
        loss = loss_of(self.net, x) * self._factor(batch_idx)
        return {"loss": loss, "count": len(x)} if self.counts else loss / len(x)

    def _factor(self, batch_idx: int) -> float:
        return math.nan if batch_idx == self.broken and self.global_rank == 0 else 1.0

    def on_before_optimizer_step(self, optimizer):
        self.hooked.append(self.net.scale.grad.full_tensor().clone())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=LR, momentum=MOMENTUM)


def _fit(module: LightningModule, micro_batches: int = 5, **options: Any):
    strategy = options.pop("strategy", None) or ShardedWindowStrategy()
    for name in ("defer", "defer_budget_mb"):
        if name in options:
            setattr(strategy, name, options.pop(name))
    options = {"accumulate_grad_batches": ACCUMULATE, **options}
    return fit(module, strategy, 2 * dist.get_world_size() * micro_batches, **options)


def _trained(how: dict[str, Any], options: dict[str, Any]) -> tuple:
    module = Sharded(**how)
    _fit(module, **options)
    return module.seen, weights_of(module.net), module.hooked


def _check(answers: list, **loop: Any) -> None:
    twin = Twin()
    twin.train([seen for seen, *_ in answers], ACCUMULATE, **loop)
    for _, weights, _ in answers:
        twin.check(weights)


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_window_steps_as_one_process_over_its_own_items(ranks, world, counts):
    _check(ranks(world).run(_trained, {"counts": counts}, {}))  # the last window is short


def test_lightning_clips_the_mean_gradient_which_hooks_have_seen(ranks):
    answers = ranks(2).run(_trained, {}, {"gradient_clip_val": 0.5})
    _check(answers, clip="2")
    twin, seen = Net().double(), torch.cat([x for seen, *_ in answers for x in seen[:ACCUMULATE]]).double()
    (twin(seen).square().sum() / len(seen)).backward()
    for *_, hooked in answers:
        torch.testing.assert_close(hooked[0].double(), twin.scale.grad, **CLOSE)


@pytest.mark.parametrize("broken", [1, 4])
def test_a_window_that_is_not_finite_on_one_rank_is_stepped_on_none(ranks, broken):
    _check(ranks(2).run(_trained, {"broken": broken}, {}), broken=broken)


def test_autocast_to_bf16_stays_near_the_right_parameters(ranks):
    answers = ranks(2).run(_trained, {}, {"precision": "bf16-mixed"})
    twin = Twin()
    twin.train([seen for seen, *_ in answers], ACCUMULATE)
    twin.check(answers[0][1], rtol=2**-5, atol=2**-5)  # 8-bit mantissas through two layers


def test_a_budget_is_that_of_attach(ranks):
    _check(ranks(2).run(_trained, {}, {"defer_budget_mb": math.inf}))


class Saves(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def _resumed(folder: str) -> tuple:
    path = f"{folder}/saved.ckpt"
    undisturbed = Sharded()
    _fit(undisturbed, max_epochs=2, callbacks=[Saves(path)])
    gone_on = Sharded()
    _fit(gone_on, max_epochs=2, ckpt_path=path)
    return weights_of(undisturbed.net), weights_of(gone_on.net), len(gone_on.seen)


def test_training_goes_on_from_lightnings_checkpoint(ranks, tmp_path):
    for undisturbed, gone_on, micro_batches in ranks(2).run(_resumed, str(tmp_path)):
        assert micro_batches == 5
        torch.testing.assert_close(gone_on, undisturbed, rtol=0, atol=0)


class Raises(Sharded):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and len(self.seen) < 2:
            raise ArithmeticError
        return super().training_step(batch, batch_idx)


def _fitted_again() -> tuple:
    module = Raises()
    with pytest.raises(ArithmeticError):
        _fit(module)
    module.seen.clear()
    module.seen += [torch.empty(0)] * 2
    _fit(module)
    return module.seen[2:], weights_of(module.net), []


def test_a_fit_that_was_left_by_an_exception_leaves_nothing_behind(ranks):
    _check(ranks(2).run(_fitted_again))


class Bare(Sharded):
    """Shards nothing."""

    def configure_model(self):
        """Do nothing."""


class Parts(Sharded):
    """Shards two blocks, but no module that contains both."""

    def configure_model(self):
        for part in (self.net.first, self.net.second):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])


class Outside(Sharded):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(1, 1)


class UnderDDP(Sharded):
    def __init__(self) -> None:
        super().__init__()
        fully_shard(self.net)

    def configure_model(self):
        """Do nothing."""


_REFUSED = {
    "fully_shard was called on no module of Bare; expected one": lambda: _fit(Bare()),
    "on 2 separate modules ('net.first', 'net.second') of Parts": lambda: _fit(Parts()),
    "'head.weight' of Outside is trained, but is outside of 'net'": lambda: _fit(Outside()),
    "tensor_parallel_size=2: several ranks share each batch": lambda: _fit(
        Sharded(), strategy=ShardedWindowStrategy(data_parallel_size=1, tensor_parallel_size=2)
    ),
    "by FSDP2 ('net'), which DDP does not support": lambda: _fit(UnderDDP(), strategy=WindowStrategy()),
    "sums gradients in bfloat16, and accumulator='fp32'": lambda: _fit(Sharded(), precision="bf16-true"),
}


def _refusal(case: str) -> str:
    return refusal(_REFUSED[case])


@pytest.mark.parametrize("case", _REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name_on_every_rank(ranks, case):
    for message in ranks(2).run(_refusal, case):
        assert case in message


def test_lightnings_own_strategy_for_fsdp1_is_refused_by_name():
    class Stub:  # FSDPStrategy refuses to be set up on a CPU
        strategy = FSDPStrategy()

    with pytest.raises(TypeError, match=r"FSDPStrategy, but FSDP1 reduces .* use ShardedWindowStrategy"):
        LogSteps().on_train_start(Stub(), Sharded())
