"""Accelerate with even_batches=False: no sample is repeated, and a rank that has run out goes on with the others' windows."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from test_accelerate_windows import accelerated
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from worlds import CLOSE, FEATURES, Remembering, Weights, items, mean_of_windows

pytest.importorskip("accelerate", reason="needs pyengine[adapters]")

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import GradientAccumulationPlugin

from pyengine.adapters.accelerate import prepare

ACCUMULATE = 2
UNEVEN = DataLoaderConfiguration(even_batches=False)


class Normed(nn.Sequential):
    """Has running statistics."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 1))


def _loader(num: int) -> DataLoader:
    return DataLoader(TensorDataset(items(num)), batch_size=2)


def _train(
    num: int, epochs: int = 1, model: type = Weights, clip: bool = False, accumulator: str = "fp32"
) -> tuple:
    """Return the batches that counted here, what the optimizer stepped with, how the model ends, and the body's runs."""
    with accelerated():
        torch.manual_seed(3)
        module = model()
        memory = Remembering(module)
        scheduler = torch.optim.lr_scheduler.LambdaLR(memory, lambda step: 0.5**step)
        accelerator, forward, optimizer, data, check, scheduler = prepare(
            Accelerator(cpu=True, dataloader_config=UNEVEN), module, memory, _loader(num), _loader(2 * dist.get_world_size()),
            scheduler, accumulate=ACCUMULATE, accumulator=accumulator,
        )  # fmt: skip
        seen, runs = [], 0
        for _ in range(epochs):
            for (x,) in data:
                runs += 1
                with accelerator.accumulate(forward):
                    if not accelerator.is_beyond_data:
                        seen.append(x)
                    accelerator.backward(forward(x).mean())
                    if accelerator.sync_gradients and clip:
                        accelerator.clip_grad_norm_(forward.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:  # where all ranks are
                    assert len(list(check)) == 1
        state = {name: value.clone() for name, value in module.state_dict().items()}
        return seen, memory.stepped_with, state, scheduler.get_last_lr(), runs


@pytest.mark.parametrize("num", [2 * 3, 2 * 5 - 1, 2 * 7, 2 * 9])
@pytest.mark.parametrize("world", [2, 3])
def test_every_window_steps_with_the_mean_over_the_items_there_are(ranks, world, num):
    answers = ranks(world).run(_train, num)
    assert sum(len(x) for seen, *_ in answers for x in seen) == num
    for _, grads, state, rate, _ in answers:
        # The last batch may be smaller, and its mean weighs as much as another's.
        torch.testing.assert_close(grads, _means([seen for seen, *_ in answers]), **CLOSE)
        torch.testing.assert_close(state, answers[0][2], rtol=0, atol=0)
        assert rate == answers[0][3]


def _means(by_rank: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return mean_of_windows([[x.double().mean(0, keepdim=True) for x in seen] for seen in by_rank], ACCUMULATE)


def test_a_rank_runs_the_body_once_a_window_that_others_still_have_in_every_epoch(ranks):
    answers = ranks(2).run(_train, 2 * 9, epochs=2)
    assert [(len(seen), runs) for seen, *_, runs in answers] == [(10, 10), (8, 10)]  # three windows and two
    epoch = _means([seen[: len(seen) // 2] for seen, *_ in answers])
    for _, grads, *_ in answers:
        torch.testing.assert_close(grads, epoch * 2, **CLOSE)


def test_clipping_is_the_same_on_a_rank_that_has_run_out(ranks):
    answers = ranks(2).run(_train, 2 * 5, clip=True)
    means = _means([seen for seen, *_ in answers])
    for _, grads, *_ in answers:
        # PyTorch's clipping divides by norm + 1e-6.
        torch.testing.assert_close(grads, [mean / (mean.norm() + 1e-6) for mean in means], rtol=1e-6, atol=0)


def test_batches_that_do_not_count_move_no_running_statistics(ranks):
    # With exact sums those of every rank are replayed; with others DDP broadcasts rank 0's.
    answers = ranks(2).run(_train, 2 * 5, model=Normed, accumulator="exact")
    for _, _, state, *_ in answers:
        assert state["0.num_batches_tracked"] == 5
        torch.testing.assert_close(state, answers[0][2], rtol=0, atol=0)


def _refusal(case: str) -> str:
    with accelerated():
        plugin = GradientAccumulationPlugin(
            num_steps=2, sync_with_dataloader=case != "sync_with_dataloader=False"
        )
        shared = Accelerator(cpu=True, dataloader_config=UNEVEN, gradient_accumulation_plugin=plugin)
        try:
            *_, data = prepare(shared, Weights(), _loader(2), accumulate=2)
            if "another model" in case:
                prepare(shared, Weights(), data, accumulate=2)
            next(iter(data))
        except ValueError as error:
            return str(error)
        return "nothing was refused"


@pytest.mark.parametrize(
    "case",
    [
        "ranks [1] have no batch at all",
        "this loader ends another model's windows",
        "sync_with_dataloader=False",
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name_on_every_rank(ranks, case):
    for message in ranks(2).run(_refusal, case):
        assert case in message
