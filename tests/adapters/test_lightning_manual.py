"""Manual optimization under Lightning: the module's own backwards and steps, with one engine or several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from twin import LR, MOMENTUM, Net, Twin, loss_of, shard
from worlds import refusal

pytest.importorskip("lightning", reason="needs pyengine[adapters]")

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from test_lightning_strategy import fit

from pyengine.adapters.lightning import LogSteps, ShardedWindowStrategy, WindowStrategy

ACCUMULATE = 3
SIZES = {"left": 3, "right": 2}
STRATEGIES = [WindowStrategy, ShardedWindowStrategy]


class Manual(LightningModule):
    """A module with manual optimization, in windows of `ACCUMULATE` micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = Net()
        self.seen: list[Tensor] = []
        self.steps = 0

    def configure_model(self):
        if isinstance(self.trainer.strategy, ShardedWindowStrategy):
            shard(self.net, self.device_mesh["data_parallel"])

    def kept(self, batch, batch_idx) -> Tensor:
        """Return one or two items of the batch, depending on its index and the rank."""
        self.seen.append(batch[0][: 1 + (batch_idx + self.global_rank) % 2])
        return self.seen[-1]

    def training_step(self, batch, batch_idx):
        x, sync, optimizer = self.kept(batch, batch_idx), self.trainer.strategy.sync, self.optimizers()
        with sync.accumulate(last=self.trainer.is_last_batch):
            self.run(x, sync)
        if sync.is_sync_step:
            self.clip(sync, optimizer)
            optimizer.step()
            optimizer.zero_grad()

    def run(self, x: Tensor, sync) -> None:
        self.manual_backward(loss_of(self.net, x), count=len(x))

    def clip(self, sync, optimizer) -> None:
        """Do not clip."""

    def on_before_optimizer_step(self, optimizer):
        self.steps += 1

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=LR, momentum=MOMENTUM)


class Plain(Manual):
    """A loop that is written without windows: each batch is a window."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss_of(self.net, self.kept(batch, batch_idx)), count=len(self.seen[-1]))
        optimizer.step()


class Toggles(Manual):
    """Ends windows with `toggle_model(sync_grad=...)`, as Lightning's loops for DDP do."""

    def training_step(self, batch, batch_idx):
        x, optimizer = self.kept(batch, batch_idx), self.optimizers()
        last = (batch_idx + 1) % ACCUMULATE == 0 or self.trainer.is_last_batch
        with optimizer.toggle_model(sync_grad=last):
            self.manual_backward(loss_of(self.net, x), count=len(x))
        if last:
            optimizer.step()


class Closure(Toggles):
    def training_step(self, batch, batch_idx):
        x, optimizer = self.kept(batch, batch_idx), self.optimizers()
        last = (batch_idx + 1) % ACCUMULATE == 0 or self.trainer.is_last_batch

        def closure():
            self.manual_backward(loss_of(self.net, x), count=len(x))

        with optimizer.toggle_model(sync_grad=last):
            optimizer.step(closure) if last else closure()


class Several(Manual):
    def run(self, x, sync):
        losses = self.net(x).float().square()
        with sync.micro_batch(count=len(x)):
            self.manual_backward(losses[0].sum(), retain_graph=True)
            self.manual_backward(losses[1:].sum())


class ClipsAsLightning(Manual):
    def clip(self, sync, optimizer):
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")


class Clips(Manual):
    def clip(self, sync, optimizer):
        sync.clip_grad_norm_(0.5)


def whole(model: nn.Module) -> list[Tensor]:
    params = [param.detach() for param in model.parameters()]
    return [getattr(param, "full_tensor", param.clone)().clone() for param in params]


def _fit(module: LightningModule, strategy: type, accumulate: Any, *, micro_batches: int = 5, **options: Any):
    made = strategy()
    made.accumulate = accumulate
    num = 2 * dist.get_world_size() * micro_batches
    return fit(module, made, num, accumulate_grad_batches=1, **options)


def _trained(make: type, strategy: type, accumulate: int) -> tuple:
    module = make()
    trainer = _fit(module, strategy, accumulate)
    return module.seen, whole(module.net), module.steps, trainer.global_step


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("make", [Manual, Toggles, Closure, Several])
def test_every_window_steps_as_one_process_over_its_own_items(ranks, make, strategy):
    answers = ranks(2).run(_trained, make, strategy, ACCUMULATE)
    twin = Twin()
    twin.train([seen for seen, *_ in answers], ACCUMULATE)
    for _, weights, steps, global_step in answers:
        twin.check(weights)
        assert steps == global_step == 2  # five micro-batches are two windows


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("make", "accumulate", "clip"),
    [(Plain, 1, ""), (ClipsAsLightning, ACCUMULATE, "2"), (Clips, ACCUMULATE, "2")],
)
def test_batches_without_windows_are_one_each_and_either_name_clips(ranks, make, accumulate, clip, strategy):
    answers = ranks(2).run(_trained, make, strategy, accumulate)
    twin = Twin()
    twin.train([seen for seen, *_ in answers], accumulate, clip=clip)
    for _, weights, *_ in answers:
        twin.check(weights)


class Two(LightningModule):
    """Two nets with windows of different sizes; the loss of the left net also depends on the right net."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.left, self.right = Net(), Net()
        self.seen: list[Tensor] = []

    def training_step(self, batch, batch_idx):
        (x,) = batch
        self.seen.append(x)
        last, syncs = self.trainer.is_last_batch, self.trainer.strategy.syncs
        for name, optimizer in zip(SIZES, self.optimizers(), strict=True):
            with self.toggled_optimizer(optimizer), syncs[name].accumulate(last=last):
                loss = loss_of(getattr(self, name), x) + 0.0 * loss_of(self.right, x)
                self.manual_backward(loss, sync=syncs[name], count=len(x))
            if syncs[name].is_sync_step:
                optimizer.step()

    def configure_optimizers(self):
        nets = (self.left, self.right)
        return [torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM) for net in nets]


def _two() -> tuple:
    module = Two()
    _fit(module, WindowStrategy, SIZES)
    return module.seen, whole(module.left), whole(module.right)


def test_submodules_keep_windows_of_their_own(ranks):
    answers = ranks(2).run(_two)
    for index, accumulate in enumerate(SIZES.values()):
        twin = Twin()
        twin.train([seen for seen, *_ in answers], accumulate)
        for _, *weights in answers:
            twin.check(weights[index])


def _half() -> tuple:
    """Train in fp16 with the scaler that Lightning would create."""
    module = Manual()
    precision = MixedPrecision(
        "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=1)
    )
    _fit(module, WindowStrategy, ACCUMULATE, plugins=[precision])
    return module.seen, whole(module.net), precision.state_dict()["scale"]


def test_fp16_steps_near_the_right_parameters_with_its_own_scale(ranks):
    answers = ranks(2).run(_half)
    twin = Twin()
    twin.train([seen for seen, *_ in answers], ACCUMULATE)
    twin.check(answers[0][1], rtol=2**-8, atol=2**-8)  # 11-bit mantissas through two layers
    assert answers[0][2] == 2.0**8  # doubled after each of two windows


class StepsEarly(Manual):
    def training_step(self, batch, batch_idx):
        with self.trainer.strategy.sync.accumulate():
            self.run(self.kept(batch, batch_idx), None)
        self.optimizers().step()


class Bare(Manual):
    def training_step(self, batch, batch_idx):
        loss_of(self.net, batch[0]).backward()
        self.optimizers().step()


class Freezes(Manual):
    def run(self, x, sync):
        super().run(x, sync)
        self.net.scale.requires_grad_(False)


class OwnBackward(Manual):
    def backward(self, loss):
        loss.backward()


class SaysNoEngine(Two):
    def manual_backward(self, loss, **options):
        options.pop("sync")
        super().manual_backward(loss, **options)


class OneForBoth(Two):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=LR)


class AsksForSync(Two):
    def training_step(self, batch, batch_idx):
        self.trainer.strategy.sync  # noqa: B018


def _scaled():
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    _fit(Two(), WindowStrategy, SIZES, plugins=[precision])


def _with_ddps_options():
    fit(Manual(), WindowStrategy(static_graph=True), 4, accumulate_grad_batches=1)


def _automatic():
    module = Manual()
    module.automatic_optimization = True
    _fit(module, WindowStrategy, 4)


_REFUSED = {
    "no synchronised gradients, because gradients are being accumulated (1 of 3": lambda: _fit(
        StepsEarly(), WindowStrategy, 3
    ),
    "call self.manual_backward(loss) in place of loss.backward()": lambda: _fit(Bare(), WindowStrategy, 1),
    "OwnBackward overrides backward": lambda: _fit(OwnBackward(), WindowStrategy, 1),
    "engines for 'left', 'right', and the loss belongs to one of them": lambda: _fit(
        SaysNoEngine(), WindowStrategy, SIZES
    ),
    "optimizer 0 (SGD) holds parameters from ['left', 'right']": lambda: _fit(
        OneForBoth(), WindowStrategy, SIZES
    ),
    "optimizer 1 (SGD) holds parameters from ['None']": lambda: _fit(Two(), WindowStrategy, {"left": 2}),
    "sync: there are engines for 'left', 'right'; use syncs[name]": lambda: _fit(
        AsksForSync(), WindowStrategy, SIZES
    ),
    "names of submodules of Two to micro-batches per window; there is no 'up'": lambda: _fit(
        Two(), WindowStrategy, {"up": 2}
    ),
    "Lightning has one loss scale": _scaled,
    "static_graph: an option of DDP": _with_ddps_options,
    "accumulate=4 on the strategy is for manual optimization": _automatic,
    "toggle_optimizer could not exclude parameters of other submodules": lambda: _fit(
        Manual(), ShardedWindowStrategy, {"net": 2}
    ),
    "'net.scale' was frozen or unfrozen (by toggle_": lambda: _fit(Freezes(), ShardedWindowStrategy, 1),
}


def _refusals() -> dict[str, str]:
    return {case: refusal(run) for case, run in _REFUSED.items()}


def test_what_cannot_be_honoured_is_refused_by_name_on_every_rank(ranks):
    for found in ranks(2).run(_refusals):
        assert {case: message for case, message in found.items() if case not in message} == {}


def test_before_a_fit_there_is_no_engine():
    with pytest.raises(RuntimeError, match="there is no engine before"):
        WindowStrategy().sync  # noqa: B018


def _logged() -> list[str]:
    metrics: list[str] = []

    class Keeps:
        name, version, save_dir, root_dir, log_dir = "", "", "", "", ""

        def log_metrics(self, found, step):
            metrics.extend(f"{name} {step}" for name in found if name.endswith("/count"))

        def __getattr__(self, name):
            return lambda *args, **kwargs: None

    _fit(Two(), WindowStrategy, SIZES, micro_batches=3, callbacks=[LogSteps()], logger=Keeps())
    return metrics


def test_steps_of_each_engine_are_logged_under_its_name(ranks):
    assert ranks(1).run(_logged) == [
        ["pyengine/right/count 0", "pyengine/left/count 0", "pyengine/right/count 1"]
    ]
