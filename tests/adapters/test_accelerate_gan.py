"""A generator and a critic in one Accelerate loop, each with its own windows."""

from __future__ import annotations

import pytest
import torch
from test_accelerate_windows import accelerated, loader
from torch import nn
from worlds import FEATURES, Remembering, Weights

pytest.importorskip("accelerate", reason="needs pyengine[adapters]")

from accelerate import Accelerator

from pyengine.adapters.accelerate import prepare

WINDOWS = {"generator": 2, "critic": 3}


def _models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(5)
    return nn.Linear(FEATURES, FEATURES), Weights()


def _critic_loss(generator, critic, x):
    return critic(generator(x).detach()).mean() - critic(x).square().mean()


def _generator_loss(generator, critic, x):
    return -critic(generator(x)).square().mean()


def _adversaries() -> tuple:
    """Train both models on every micro-batch, with a learning rate of 0 so that gradients are known."""
    with accelerated():
        generator, critic = _models()
        memories = Remembering(generator, lr=0.0), Remembering(critic, lr=0.0)
        shared, data, seen = Accelerator(cpu=True), loader(2 * 2 * 7), []
        for_g, generator, step_g, data = prepare(
            shared, generator, memories[0], data, accumulate=WINDOWS["generator"]
        )
        for_d, critic, step_d, data = prepare(shared, critic, memories[1], data, accumulate=WINDOWS["critic"])
        for (x,) in data:
            seen.append(x)
            with for_d.accumulate(critic):
                for_d.backward(_critic_loss(generator, critic, x))
                step_d.step()
            critic.requires_grad_(False)  # the generator's loss must not add to the critic's gradients
            with for_g.accumulate(generator):
                for_g.backward(_generator_loss(generator, critic, x))
                step_g.step()
            critic.requires_grad_(True)
        return seen, [memory.stepped_with for memory in memories]


def _expected(which: int, accumulate: int, by_rank: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Return each window's gradient from one float64 backward over the micro-batches of all ranks."""
    windows = []
    for start in range(0, len(by_rank[0]), accumulate):
        generator, critic = (model.double() for model in _models())
        micro_batches = [x.double() for seen in by_rank for x in seen[start : start + accumulate]]
        compute = (_generator_loss, _critic_loss)[which]
        losses = [compute(generator, critic, x) for x in micro_batches]
        params = list((generator, critic)[which].parameters())
        grads = torch.autograd.grad(torch.stack(losses).mean(), params)
        windows.append(torch.cat([grad.flatten() for grad in grads]))
    return windows


def test_generator_and_critic_step_with_means_over_windows_of_their_own(ranks):
    answers = ranks(2).run(_adversaries)
    for which, accumulate in enumerate(WINDOWS.values()):
        expected = _expected(which, accumulate, [seen for seen, _ in answers])
        for got, right in zip(answers[0][1][which], expected, strict=True):
            # Errors of about 2^-24 per operation, through two layers and a mean.
            assert ((got - right).norm() / right.norm()).item() < 1e-6
