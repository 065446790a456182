"""Transformers' Trainer with windows and fsdp=True (Accelerate's FSDP2): gradients are exact token means."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_accelerate_sharded import sharding, tell_accelerate
from worlds import refusal

pytestmark = pytest.mark.slow
pytest.importorskip("transformers", reason="needs pyengine[adapters]")

from test_transformers_trainer import ACCUMULATE, CLOSE, LENGTH, VOCABULARY, Watching, dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from pyengine.adapters.transformers import Trainer

LR, CLIP = 0.05, 0.3


def _model() -> GPT2LMHeadModel:
    torch.manual_seed(7)
    config = GPT2Config(
        vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=1, n_positions=LENGTH, n_embd=8,
        n_layer=2, n_head=2, pad_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        tie_word_embeddings=False,  # accelerate 1.14 puts a tied weight in two units; torch 2.13 rejects that
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def _momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=LR, momentum=0.5)


class Sharded(Watching, Trainer):
    def create_optimizer(self, model=None):
        """Create an optimizer that has no state before its first step."""
        if self.optimizer is None:
            self.optimizer = _momentum(self.model.parameters())
        return self.optimizer


class Budgeted(Sharded):
    """A Trainer that may use any amount of memory in order to communicate less."""

    defer_budget_mb = math.inf


def _trainer(make: type, folder: str, num: int, *, fsdp_config: dict | None = None, **options: Any) -> Any:
    args = TrainingArguments(
        output_dir=folder, use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=1,
        per_device_train_batch_size=1, gradient_accumulation_steps=ACCUMULATE, lr_scheduler_type="constant",
        fsdp=True, fsdp_config={"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", **(fsdp_config or {})},
        **{"max_grad_norm": CLIP, "save_strategy": "no", "num_train_epochs": 1, **options},
    )  # fmt: skip
    assert args.device.type == "cpu"  # recreates Accelerate's state
    tell_accelerate()
    return make(model=_model(), args=args, train_dataset=dataset("tokens", num))


def _whole(model: torch.nn.Module) -> list[torch.Tensor]:
    return [param.full_tensor().detach().clone() for param in model.parameters()]


def _trained(make: type, folder: str, num: int, **options: Any) -> tuple:
    with sharding():
        trainer = _trainer(make, folder, num, **options)
        trainer.train()
        norms = [log["grad_norm"] for log in trainer.state.log_history if "loss" in log]
        return trainer.seen, _whole(trainer.model), norms


def _check(answers: list) -> None:
    """Compare with one float64 process that trains on each window of all ranks as one batch."""
    twin, norms = _model().double(), []
    optimizer = _momentum(twin.parameters())
    for start in range(0, len(answers[0][0]), ACCUMULATE):
        batches = [batch for seen, *_ in answers for batch in seen[start : start + ACCUMULATE]]
        ids, labels = (torch.cat([batch[name] for batch in batches]) for name in ("input_ids", "labels"))
        logits = twin(input_ids=ids).logits[:, :-1]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:]).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(twin.parameters(), CLIP).item())
        optimizer.step()
    for _, weights, logged in answers:
        assert logged == pytest.approx(norms, rel=1e-5)
        for mine, right in zip(weights, twin.parameters(), strict=True):
            torch.testing.assert_close(mine.double(), right.detach(), rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("make", [Sharded, Budgeted])
@pytest.mark.parametrize("world", [1, 2])
def test_every_window_steps_as_one_process_over_its_own_tokens(ranks, tmp_path, world, make):
    _check(ranks(world).run(_trained, make, str(tmp_path), 6 * world))  # the second window is short


def _resumed(folder: str, state_dict_type: str) -> tuple:
    options = {"fsdp_config": {"state_dict_type": state_dict_type}, "save_strategy": "epoch"}
    _, undisturbed, _ = _trained(Sharded, f"{folder}/whole", 12, num_train_epochs=2, **options)
    with sharding():
        trainer = _trainer(Sharded, f"{folder}/whole", 12, num_train_epochs=2, **options)
        trainer.train(resume_from_checkpoint=f"{folder}/whole/checkpoint-2")
        return undisturbed, _whole(trainer.model), len(trainer.seen)


@pytest.mark.parametrize("state_dict_type", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_training_goes_on_from_a_checkpoint_with_the_optimizers_states(ranks, tmp_path, state_dict_type):
    for undisturbed, gone_on, micro_batches in ranks(2).run(_resumed, str(tmp_path), state_dict_type):
        assert micro_batches == 6
        torch.testing.assert_close(gone_on, undisturbed, rtol=0, atol=0)


class SharedLoad(Sharded):
    """Behaves as if `from_pretrained` had sharded its model."""

    def train(self, *args, **kwargs):
        self.is_distributed_loading_by_transformers = True
        return super().train(*args, **kwargs)


_REFUSED = {
    "has cpu_offload": (Sharded, {"fsdp_config": {"cpu_offload": True}}),
    "sums gradients in torch.bfloat16": (Sharded, {"bf16": True}),
    "model was sharded by from_pretrained(distributed_config=...)": (SharedLoad, {}),
}


def _refusal(case: str, folder: str) -> str:
    make, options = _REFUSED[case]
    return refusal(lambda: _trained(make, folder, 4, **options))


@pytest.mark.parametrize("case", _REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name_on_every_rank(ranks, tmp_path, case):
    for message in ranks(2).run(_refusal, case, str(tmp_path)):
        assert case in message
