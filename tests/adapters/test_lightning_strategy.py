"""Lightning's Trainer with the window strategy: correct gradients where Lightning's are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from worlds import CLOSE, FEATURES, Remembering, Weights, items, launched, mean_of_windows, refusal

pytest.importorskip("lightning", reason="needs pyengine[adapters]")

from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, Strategy

import pyengine as pe
from pyengine.adapters.lightning import LogSteps, WindowStrategy

ACCUMULATE = 4


class Module(LightningModule):
    """Records its micro-batches, the gradients of its steps, and the gradients that its hook sees."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Weights()
        self.seen: list[torch.Tensor] = []
        self.hooked: list[torch.Tensor] = []
        self.memory = Remembering(self.model)

    def training_step(self, batch, batch_idx):
        self.seen.append(batch[0])
        return self.model(batch[0]).mean()

    def on_before_optimizer_step(self, optimizer):
        self.hooked.append(self.model.weight.grad.detach().clone().flatten())

    def configure_optimizers(self):
        return self.memory


class Counted(Module):
    """Uses one or two items of each micro-batch, and returns their number."""

    def training_step(self, batch, batch_idx):
        kept = batch[0][: 1 + (batch_idx + dist.get_rank()) % 2]
        self.seen.append(kept)
        return {"loss": self.model(kept).sum(), "count": len(kept)}


class EndsEpoch(Module):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if (self.current_epoch, batch_idx) == (0, ACCUMULATE + 1) else None


class OwnScaler(torch.amp.GradScaler):
    """A subclass, which could scale in a different way."""


class StepsWithOptions(Module):
    """Passes an additional argument to the optimizer's step."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.step(closure=optimizer_closure, momentum_now=0.5)


def fit(
    module: LightningModule, strategy: Strategy, num: int, *, ckpt_path: str | None = None, **options
) -> LightningTrainer:
    """Train on `num` items, two per micro-batch."""
    with launched():
        options = {"accumulate_grad_batches": ACCUMULATE, "max_epochs": 1, "logger": False, **options}
        trainer = LightningTrainer(
            accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, enable_progress_bar=False,
            plugins=[TorchElasticEnvironment(), *options.pop("plugins", [])], enable_checkpointing=False,
            enable_model_summary=False, **options,
        )  # fmt: skip
        trainer.fit(module, DataLoader(TensorDataset(items(num)), batch_size=2), ckpt_path=ckpt_path)
        return trainer


def _trained(make: type, strategy: type, micro_batches: int, **options) -> tuple:
    module = make()
    fit(module, strategy(), 2 * dist.get_world_size() * micro_batches, **options)
    return module.seen, module.memory.stepped_with, module.hooked


def _expected(answers: list[tuple], accumulate: int = ACCUMULATE) -> list[torch.Tensor]:
    return mean_of_windows([seen for seen, *_ in answers], accumulate)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("micro_batches", [4, 5, 7])
def test_every_window_steps_with_the_mean_over_its_own_items(ranks, world, micro_batches):
    answers = ranks(world).run(_trained, Module, WindowStrategy, micro_batches)
    for _, grads, _ in answers:
        torch.testing.assert_close(grads, _expected(answers), **CLOSE)


def test_lightning_alone_shrinks_the_short_last_window(ranks):
    answers = ranks(2).run(_trained, Module, DDPStrategy, 5)
    (full, short), expected = answers[0][1], _expected(answers)
    torch.testing.assert_close(full, expected[0], **CLOSE)
    torch.testing.assert_close(short, expected[1] / ACCUMULATE, **CLOSE)


def test_summed_losses_with_counts_give_the_mean_over_items_which_hooks_see(ranks):
    answers = ranks(2).run(_trained, Counted, WindowStrategy, 5)
    torch.testing.assert_close(answers[0][1], _expected(answers), **CLOSE)
    torch.testing.assert_close(answers[0][2], _expected(answers), **CLOSE)


def test_lightning_clips_the_mean_gradient(ranks):
    answers = ranks(2).run(_trained, Module, WindowStrategy, 5, gradient_clip_val=1.0)
    # PyTorch's clipping divides by norm + 1e-6.
    expected = [mean / (mean.norm() + 1e-6) for mean in _expected(answers)]
    torch.testing.assert_close(answers[0][1], expected, rtol=1e-6, atol=0)


class Sets(Callback):
    """Sets the window size directly, without a `GradientAccumulationScheduler`."""

    def on_train_epoch_start(self, trainer, pl_module):
        trainer.accumulate_grad_batches = 1 + 2 * trainer.current_epoch


def _scheduled(is_planned: bool) -> tuple:
    module, schedule = Module(), GradientAccumulationScheduler({0: 1, 1: 3}) if is_planned else Sets()
    fit(module, WindowStrategy(), 2 * 2 * 4, accumulate_grad_batches=1, callbacks=[schedule], max_epochs=2)
    return module.seen, module.memory.stepped_with


def test_a_window_in_which_the_module_ends_the_epoch_is_dropped(ranks):
    answers = ranks(2).run(_trained, EndsEpoch, WindowStrategy, ACCUMULATE + 2, max_epochs=2)
    for seen, *_ in answers:
        del seen[ACCUMULATE]  # the micro-batch of the dropped window
    for gradient, right in zip(answers[0][1], _expected(answers), strict=True):
        torch.testing.assert_close(gradient, right, **CLOSE)


@pytest.mark.parametrize("is_planned", [True, False])
def test_windows_follow_a_schedule_by_epoch(ranks, is_planned):
    answers = ranks(2).run(_scheduled, is_planned)
    first, second = (
        mean_of_windows([seen[part] for seen, _ in answers], accumulate)
        for part, accumulate in ((slice(0, 4), 1), (slice(4, 8), 3))
    )
    torch.testing.assert_close(answers[0][1], first + second, **CLOSE)


class Normalised(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(FEATURES, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _averaged() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch norm's running mean after weight averaging, and the mean of its inputs."""
    module, swa = Normalised(), StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
    fit(module, WindowStrategy(), 24, accumulate_grad_batches=2, max_epochs=3, callbacks=[swa])
    linear, norm, _ = module.net
    return norm.running_mean, linear(items(24)).mean(0).detach()


@pytest.mark.slow
def test_averaged_weights_get_their_batch_norm_statistics(ranks):
    ((running, whole),) = ranks(1).run(_averaged)
    torch.testing.assert_close(running, whole, rtol=1e-5, atol=1e-6)


def _half(num_fits: int) -> tuple:
    """Train in fp16, where the gradients of `Weights` are exact, with the scaler Lightning would create."""
    module = Module()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    precision = MixedPrecision("16-mixed", "cpu", scaler)
    for _ in range(num_fits):
        strategy = WindowStrategy()
        fit(module, strategy, 2 * 2 * 5, plugins=[precision])
    assert precision.scaler is strategy.sync.scaler  # Lightning saves this scaler's state
    return module.seen, module.memory.stepped_with, precision.state_dict()["scale"]


def test_fp16_steps_with_the_unscaled_mean_and_goes_on_with_its_scale(ranks):
    answers = ranks(2).run(_half, 2)
    fits = [[seen[part] for seen, *_ in answers] for part in (slice(0, 5), slice(5, 10))]
    expected = [grad for seen in fits for grad in mean_of_windows(seen, ACCUMULATE)]
    torch.testing.assert_close(answers[0][1], expected, **CLOSE)
    assert answers[0][2] == 2.0**14  # doubled after each of four windows


def _logged(folder: str) -> str:
    logger = CSVLogger(folder, flush_logs_every_n_steps=1)
    fit(Module(), WindowStrategy(), 2 * 2 * 5, logger=logger, callbacks=[LogSteps()])
    return logger.log_dir


def test_records_of_steps_reach_the_loggers(ranks, tmp_path):
    folder = ranks(2).run(_logged, str(tmp_path))[0]
    lines = (Path(folder) / "metrics.csv").read_text().splitlines()
    names = lines[0].split(",")
    rows = [dict(zip(names, line.split(","), strict=True)) for line in lines[1:]]
    assert [(row["step"], float(row["pyengine/micro_batches"])) for row in rows] == [("0", 8.0), ("1", 2.0)]


def _refusal(case: str) -> str:
    hooked = DDPStrategy if case.startswith("LogSteps") else WindowStrategy
    hooks = {"ddp_comm_hook": pe.comm_hook, "ddp_comm_wrapper": pe.comm_hook, "model_averaging_period": 4}
    options = {name: value for name, value in hooks.items() if case == f"{name}: not supported"}
    module = StepsWithOptions() if case.startswith("optimizer_step") else Module()
    plugins = [MixedPrecision("16-mixed", "cpu", OwnScaler("cpu"))] if "OwnScaler" in case else []
    return refusal(lambda: fit(module, hooked(**options), 4, callbacks=[LogSteps()], plugins=plugins))


REFUSED = [
    "optimizer_step: got momentum_now",
    "ddp_comm_hook: not supported",
    "ddp_comm_wrapper: not supported",
    "model_averaging_period: not supported",
    "LogSteps: strategy is a DDPStrategy",
    "the loss scaler is a OwnScaler",
]


def _refusals() -> dict[str, str]:
    return {case: _refusal(case) for case in REFUSED}


def test_what_cannot_be_honoured_is_refused_by_name(ranks):
    found = ranks(2).run(_refusals)[0]
    assert {case: message for case, message in found.items() if case not in message} == {}


class WithBackbone(LightningModule):
    """A head over a backbone, which `BackboneFinetuning` freezes and unfreezes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone, self.head = nn.Linear(FEATURES, 3, bias=False), nn.Linear(3, 1, bias=False)
        self.after: list[torch.Tensor] = []

    def training_step(self, batch, batch_idx):
        return self.head(self.backbone(batch[0])).mean()

    def on_train_epoch_end(self):
        self.after.append(self.backbone.weight.detach().clone())

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


def _finetuned(accumulate: int) -> list[torch.Tensor]:
    """Train three epochs of one window; return the backbone's weights before and after each epoch."""
    module = WithBackbone()
    callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.1, verbose=False)
    before = module.backbone.weight.detach().clone()
    options = {"accumulate_grad_batches": accumulate, "callbacks": [callback]}
    fit(module, WindowStrategy(), 4 * ACCUMULATE, max_epochs=3, **options)
    return [before, *module.after]


def test_layers_that_a_callback_unfreezes_are_reduced_from_then_on(ranks):
    """Two ranks train like one rank; under Lightning's DDP their parameters would diverge."""
    first, second = ranks(2).run(_finetuned, ACCUMULATE)
    assert torch.equal(first[0], first[1])  # frozen in the first epoch
    assert not torch.equal(first[1], first[2]) and not torch.equal(first[2], first[3])
    assert all(map(torch.equal, first, second))
    torch.testing.assert_close(first, ranks(1).run(_finetuned, 2 * ACCUMULATE)[0], rtol=1e-5, atol=1e-6)
