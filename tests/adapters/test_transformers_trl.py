"""TRL's trainers with the mixin: losses are means over tokens (SFT), pairs (DPO), or by loss type (GRPO)."""

from __future__ import annotations

import copy
import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from worlds import Remembering, launched

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
pytest.importorskip("transformers", reason="needs pyengine[adapters]")

from accelerate.state import AcceleratorState, GradientState
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, logsigmoid
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pyengine.adapters.transformers import Windows

# Only the ranks import TRL, because this takes seconds.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("trl") is None, reason="needs trl: requirements-slow.txt"),
]

ACCUMULATE, BETA = 4, 0.5
WORDS = ["<pad>", "<eos>", "<unk>", *"abcdefgh"]
# A float32 forward and backward through two small layers, against float64: each error is about 2^-24.
CLOSE = 1e-5


def _tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def _model(seed: int = 7) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=8, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
        pad_token_id=0, eos_token_id=1, bos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _lora() -> Any:
    import peft

    adapters = {"target_modules": ["q_proj", "down_proj"], "r": 2, "init_lora_weights": False}
    model = _model()
    torch.manual_seed(9)
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **adapters))


NEEDS_PEFT = pytest.mark.skipif(find_spec("peft") is None, reason="needs peft: requirements-dev.txt")
MODELS = [_model, pytest.param(_lora, marks=NEEDS_PEFT)]


def _words(num: int, start: int) -> str:
    return " ".join(WORDS[3 + (start * index + index) % 8] for index in range(1, num + 1))


class Watching:
    """Keeps a copy of the inputs of every training loss."""

    def compute_loss(self, model, inputs, *args, **options):
        if self.model.training:
            kept = {name: value.clone() for name, value in inputs.items() if isinstance(value, Tensor)}
            self.seen = [*getattr(self, "seen", []), kept]
        return super().compute_loss(model, inputs, *args, **options)


def _train(
    name: str, rows: list[dict], folder: str, *, make_model: Any = _model, extra: Any = None, **options: Any
) -> tuple:
    """Train one epoch with the mixin and TRL's trainer of this name.

    Return the micro-batches, the gradients of the steps, and the logs.
    """
    import trl
    from datasets import Dataset

    trainer_of = type(name, (Watching, Windows, getattr(trl, f"{name}Trainer")), {})
    options = {
        "learning_rate": 0.0, "max_grad_norm": 0.0, "save_strategy": "no", "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": ACCUMULATE, "logging_steps": 1, "num_train_epochs": 1, **options,
    }  # fmt: skip
    with launched():
        try:
            model = make_model()
            memory = Remembering(model, lr=options["learning_rate"])
            args = getattr(trl, f"{name}Config")(
                output_dir=folder, use_cpu=True, bf16=False, report_to="none", disable_tqdm=True,
                lr_scheduler_type="constant", **options,
            )  # fmt: skip
            schedule = torch.optim.lr_scheduler.LambdaLR(memory, lambda _: 1.0)
            trainer = trainer_of(
                model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=_tokenizer(),
                optimizers=(memory, schedule), **(extra or {}),
            )  # fmt: skip
            trainer.train()
            logs = [log for log in trainer.state.log_history if "loss" in log]
            return trainer.seen, memory.stepped_with, logs
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def _errors(answers: list[tuple], loss_of: Any, make_model: Any = _model) -> list[float]:
    """Return the relative error of each window's gradient.

    `loss_of(model, micro_batches)` is the mean loss over a window's micro-batches of all ranks.
    """
    errors: list[float] = []
    for window, mine in enumerate(answers[0][1]):
        part = slice(window * ACCUMULATE, (window + 1) * ACCUMULATE)
        model = make_model().double()
        loss_of(model, [batch for seen, *_ in answers for batch in seen[part]]).backward()
        right = torch.cat([param.grad.flatten() for param in model.parameters() if param.requires_grad])
        errors.append(((mine - right).norm() / right.norm()).item())
    return errors


def _logps(model: LlamaForCausalLM, batch: dict[str, Tensor]) -> Tensor:
    """Return the log-probability of every token except the first."""
    ids = batch["input_ids"]
    logits = model(input_ids=ids, attention_mask=batch["attention_mask"]).logits[:, :-1]
    return -cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")


# ---- SFT ----

SENTENCES = [{"prompt": _words(2, i), "completion": " " + _words(1 + i * i % 5, i)} for i in range(12)]


def _mean_over_tokens(model: LlamaForCausalLM, batches: list[dict[str, Tensor]]) -> Tensor:
    loss, num = torch.zeros((), dtype=torch.float64), 0
    for batch in batches:
        labelled = batch["labels"][:, 1:] != -100
        loss, num = loss - (_logps(model, batch) * labelled).sum(), num + labelled.sum()
    return loss / num


@pytest.mark.parametrize("make_model", MODELS)
@pytest.mark.parametrize("world", [1, 2])
def test_a_window_of_sft_is_the_mean_over_the_tokens_of_all_ranks(ranks, tmp_path, world, make_model):
    answers = ranks(world).run(_train, "SFT", SENTENCES, str(tmp_path), make_model=make_model)
    nums = {int((batch["labels"] != -100).sum()) for seen, *_ in answers for batch in seen}
    assert len(nums) > 2 and len(answers[0][1]) == 3 - (world > 1)  # the last window is short on two ranks
    assert all(error < CLOSE for error in _errors(answers, _mean_over_tokens, make_model))


# ---- DPO ----

PAIRS = [
    {"prompt": _words(2, i), "chosen": " " + _words(1 + i % 4, i), "rejected": " " + _words(1 + i % 3, i + 1)}
    for i in range(12)
]


def _mean_over_pairs(model: Any, batches: list[dict[str, Tensor]]) -> Tensor:
    """Return DPO's loss; for adapters, TRL's reference model is a copy with the initial adapters."""
    losses, reference = [], copy.deepcopy(model) if hasattr(model, "peft_config") else _model(8).double()
    for batch in batches:
        mask = batch["completion_mask"][:, 1:]
        ratios = ((_logps(model, batch) - _logps(reference, batch).detach()) * mask).sum(1)
        chosen, rejected = ratios.chunk(2)
        losses.append(-logsigmoid(BETA * (chosen - rejected)))
    return torch.cat(losses).mean()


@pytest.mark.parametrize("make_model", MODELS)
@pytest.mark.parametrize("world", [1, 2])
def test_a_window_of_dpo_is_the_mean_over_the_pairs_of_all_ranks(ranks, tmp_path, world, make_model):
    options = {"beta": BETA, "make_model": make_model}
    options["extra"] = {"ref_model": _model(8)} if make_model is _model else {}
    answers = ranks(world).run(_train, "DPO", PAIRS, str(tmp_path), **options)
    assert len(answers[0][1]) == 3 - (world > 1)
    assert all(error < CLOSE for error in _errors(answers, _mean_over_pairs, make_model))


# ---- GRPO ----


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(completion.split()))) for completion in completions]


def _grpo(loss_type: str, prompts: list[dict], folder: str, **options: Any) -> tuple:
    return _train(
        "GRPO", prompts, folder, loss_type=loss_type, num_generations=2, max_completion_length=6, beta=0.0,
        per_device_train_batch_size=2, extra={"reward_funcs": _reward}, **options,
    )  # fmt: skip


def _policy_loss(model: LlamaForCausalLM, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss of every completion token; the ratio of probabilities is 1."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    logps = _logps(model, {"input_ids": ids, "attention_mask": mask})
    logps = logps[:, -batch["completion_ids"].shape[1] :]
    return (
        -torch.exp(logps - logps.detach()) * batch["advantages"].double()[:, None] * batch["completion_mask"]
    )


def _mean_of_grpo(loss_type: str, model: LlamaForCausalLM, batches: list[dict[str, Tensor]]) -> Tensor:
    losses = [_policy_loss(model, batch) for batch in batches]
    nums = [batch["completion_mask"].sum(1) for batch in batches]
    if loss_type == "grpo":  # mean over completions of the mean over tokens
        return torch.cat([loss.sum(1) / num for loss, num in zip(losses, nums, strict=True)]).mean()
    if loss_type == "dr_grpo":  # mean over the maximum number of tokens
        return torch.cat([loss.sum(1) / 6 for loss in losses]).mean()
    if loss_type == "bnpo":  # mean over micro-batches of the mean over tokens
        means = [loss.sum() / num.sum() for loss, num in zip(losses, nums, strict=True)]
        return torch.stack(means).mean()
    # Each loss is divided by the tokens generated together, and the sum by the batches' shares of them.
    made = [batch["num_items_in_batch"] for batch in batches]
    shares = [num.sum() / all_made for num, all_made in zip(nums, made, strict=True)]
    return sum(loss.sum() / all_made for loss, all_made in zip(losses, made, strict=True)) / sum(shares)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_window_of_grpo_is_the_mean_of_its_loss_type_over_all_ranks(ranks, tmp_path, world, loss_type):
    # Completions are generated for two micro-batches at a time; after three times, the last window is short.
    prompts = [{"prompt": _words(2, i)} for i in range(6 * world)]
    answers = ranks(world).run(_grpo, loss_type, prompts, str(tmp_path), steps_per_generation=2)
    assert [len(seen) for seen, *_ in answers] == [6] * world and len(answers[0][1]) == 2
    errors = _errors(answers, lambda *given: _mean_of_grpo(loss_type, *given))
    assert all(error < CLOSE for error in errors)


# ---- a loss that TRL divides by the tokens of the whole window ----


def _divergence(model: LlamaForCausalLM, batches: list[dict[str, Tensor]]) -> Tensor:
    """Return the KL divergence of the model from its teacher, as a mean over tokens."""
    total, num, teacher = torch.zeros((), dtype=torch.float64), 0, _model(8).double()
    for batch in batches:
        given = {
            "input_ids": torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1),
            "attention_mask": torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1),
        }
        part = slice(-batch["completion_ids"].shape[1] - 1, -1)
        mine, right = (each(**given).logits[:, part].log_softmax(-1) for each in (model, teacher))
        kl = kl_div(mine, right.detach(), reduction="none", log_target=True).sum(-1)
        total, num = total + (kl * batch["completion_mask"]).sum(), num + batch["completion_mask"].sum()
    return total / num


def test_a_window_of_distillation_is_the_mean_over_the_tokens_of_all_ranks(ranks, tmp_path):
    prompts, extra = [{"prompt": _words(2, i)} for i in range(16)], {"teacher_model": _model(8)}
    options = {"max_completion_length": 6, "beta": 0.0, "extra": extra}
    answers = ranks(2).run(_train, "Distillation", prompts, str(tmp_path), **options)
    assert len(answers[0][1]) == 2
    assert all(error < CLOSE for error in _errors(answers, _divergence))
