"""Transformers' Trainer with windows: exact token means, also where the Trainer scales a loss wrongly."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from worlds import Remembering, launched

pytest.importorskip("transformers", reason="needs pyengine[adapters]")

import transformers
from accelerate.state import AcceleratorState, GradientState
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, TrainingArguments

from pyengine.adapters.transformers import Trainer, Windows

ACCUMULATE, LENGTH, VOCABULARY = 4, 6, 11
# A float32 forward and backward through a few small layers, against float64: each error is about 2^-24.
CLOSE = 1e-5


def _model(kind: str) -> torch.nn.Module:
    torch.manual_seed(7)
    config = GPT2Config(
        vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=1, n_positions=LENGTH, n_embd=8,
        n_layer=1, n_head=2, pad_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, summary_first_dropout=0.0, num_labels=1,
    )  # fmt: skip
    if kind == "regression":
        return GPT2ForSequenceClassification(config)
    return _lora(GPT2LMHeadModel(config)) if kind == "lora" else GPT2LMHeadModel(config)


def _lora(model: transformers.PreTrainedModel) -> torch.nn.Module:
    import peft

    adapters = {"target_modules": ["c_attn"], "fan_in_fan_out": True, "r": 2, "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **adapters))


def dataset(kind: str, num: int) -> list[dict[str, torch.Tensor]]:
    """Return sequences with different numbers of labelled tokens, or for regression with a number as label.

    For "tokens" and "lora", one sequence has no labelled token.
    """
    generator = torch.Generator().manual_seed(3)
    rows = []
    for index in range(num):
        ids = torch.randint(1, VOCABULARY, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: index % LENGTH + (index == 1)] = -100
        if index == 2 and kind in ("tokens", "lora"):
            labels = torch.full_like(labels, -100)
        rows.append(
            {"input_ids": ids, "labels": torch.tensor(float(index)) if kind == "regression" else labels}
        )
    return rows


class Plain(torch.nn.Module):
    """A model from outside the library; its loss is the mean over the labelled tokens of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(VOCABULARY, VOCABULARY)
        torch.nn.init.ones_(self.table.weight)

    def forward(self, input_ids, labels):
        return (torch.nn.functional.cross_entropy(self.table(input_ids).transpose(1, 2), labels),)


class Watching:
    def training_step(self, model, inputs, *args):
        self.seen = [*getattr(self, "seen", []), {name: value.clone() for name, value in inputs.items()}]
        return super().training_step(model, inputs, *args)


class Alone(Watching, transformers.Trainer):
    """The library's own Trainer."""


class WithWindows(Watching, Trainer):
    """pyengine's Trainer."""


class OwnLoss(Watching, Windows, transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the mean over the labelled tokens (nan if there are none), without the Trainer's count."""
        logits = model(input_ids=inputs["input_ids"]).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.transpose(1, 2), inputs["labels"][:, 1:])


def _train(make: type, kind: str, num: int, folder: str, **options) -> tuple:
    """Train one epoch by default; return the micro-batches, the gradients of the steps, and the logs."""
    options = {
        "learning_rate": 0.0, "max_grad_norm": 0.0, "save_strategy": "no", "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": ACCUMULATE, "logging_steps": 1, "num_train_epochs": 1, **options,
    }  # fmt: skip
    with launched():
        try:
            model = Plain() if kind == "plain" else _model(kind)
            memory = Remembering(model, lr=options["learning_rate"])
            args = TrainingArguments(
                output_dir=folder, use_cpu=True, report_to="none", disable_tqdm=True,
                lr_scheduler_type="constant", **options,
            )  # fmt: skip
            schedule = torch.optim.lr_scheduler.LambdaLR(memory, lambda _: 1.0)
            data = dataset(kind, num)
            trainer = make(model=model, args=args, train_dataset=data, optimizers=(memory, schedule))
            trainer.train()
            return (
                trainer.seen,
                memory.stepped_with,
                [log for log in trainer.state.log_history if "loss" in log],
            )
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def _oracle(kind: str, answers: list[tuple]) -> list[tuple[torch.Tensor, float]]:
    """Return each window's gradient and mean loss, from one float64 backward over the items of all ranks."""
    windows = []
    for start in range(0, len(answers[0][0]), ACCUMULATE):
        micro_batches = [b for seen, *_ in answers for b in seen[start : start + ACCUMULATE]]
        rows = {name: torch.cat([b[name] for b in micro_batches]) for name in ("input_ids", "labels")}
        model = _model(kind).double()
        logits = model(input_ids=rows["input_ids"]).logits
        if kind == "regression":
            loss = torch.nn.functional.mse_loss(logits.squeeze(-1), rows["labels"].double())
        else:
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), rows["labels"][:, 1:])
        loss.backward()
        grads = [param.grad.flatten() for param in model.parameters() if param.grad is not None]
        windows.append((torch.cat(grads), loss.item()))
    return windows


def _errors(kind: str, answers: list[tuple]) -> list[float]:
    """Return the relative error of each window's gradient."""
    grads, expected = answers[0][1], [grad for grad, _ in _oracle(kind, answers)]
    return [
        ((mine - right).norm() / right.norm()).item() for mine, right in zip(grads, expected, strict=True)
    ]


@pytest.mark.parametrize("kind", ["tokens", "regression", "lora"])
def test_every_window_steps_with_the_mean_over_its_own_items_which_is_logged(ranks, tmp_path, kind):
    if kind == "lora":
        pytest.importorskip("peft")
    answers = ranks(2).run(_train, WithWindows, kind, 12, str(tmp_path))
    assert len(answers[0][1]) == 2  # the second window is short
    assert max(_errors(kind, answers)) < CLOSE
    logged = [log["loss"] for log in answers[0][2]]
    assert logged == pytest.approx([loss for _, loss in _oracle(kind, answers)], rel=1e-5)


def test_a_loss_of_ones_own_is_weighted_by_its_items(ranks, tmp_path):
    answers = ranks(2).run(_train, OwnLoss, "tokens", 12, str(tmp_path))
    assert max(_errors("tokens", answers)) < CLOSE
    logged = [log["loss"] for log in answers[0][2]]
    assert logged == pytest.approx([loss for _, loss in _oracle("tokens", answers)], rel=1e-5)


class SavesAdapters(WithWindows):
    """Records which parameters are trainable, which have changed, and which equal the saved ones."""

    def train(self):
        import peft

        before = copy.deepcopy(self.model)
        super().train()
        self.save_model()
        self.accelerator.wait_for_everyone()
        loaded = peft.PeftModel.from_pretrained(_model("tokens"), self.args.output_dir).parameters()
        pairs = zip(self.model.parameters(), before.parameters(), loaded, strict=True)
        self.seen = [
            (param.requires_grad, not torch.equal(param, old), torch.equal(param, saved))
            for param, old, saved in pairs
        ]


def test_only_adapters_of_peft_change_and_are_saved(ranks, tmp_path):
    pytest.importorskip("peft")
    for seen, *_ in ranks(2).run(_train, SavesAdapters, "lora", 12, str(tmp_path), learning_rate=0.1):
        assert {is_trained for is_trained, *_ in seen} == {True, False}
        assert all(changed == is_trained and saved for is_trained, changed, saved in seen)


class Overflows(WithWindows):
    def compute_loss(self, model, inputs, **options):
        loss = super().compute_loss(model, inputs, **options)
        return loss if self.state.global_step != 1 else loss * math.inf


@pytest.mark.parametrize("is_filtered", [True, False])
def test_a_loss_that_is_not_finite_is_logged_as_by_the_trainer(tmp_path, is_filtered):
    options = {"logging_steps": 2, "logging_nan_inf_filter": is_filtered}
    answer = _train(Overflows, "tokens", 8, str(tmp_path), **options)
    first = _oracle("tokens", [answer])[0][1]
    (log,) = answer[2]
    # For a loss that is not finite, the Trainer adds the sum so far, divided by the steps so far plus one.
    assert log["loss"] == pytest.approx((first + first / 2) / 2 if is_filtered else math.inf, rel=1e-5)


class DividedByTheWindow(WithWindows):
    """Divides its loss by the micro-batches of its window, and says so with `loss_is_scaled_for_ga`."""

    loss_is_scaled_for_ga = True

    def compute_loss(self, model, inputs, return_outputs=False, **options):
        steps = self.current_gradient_accumulation_steps
        assert steps == (ACCUMULATE if self.state.global_step == 0 else 2)
        return super().compute_loss(model, inputs, **options) / steps


@pytest.mark.parametrize("make", [WithWindows, DividedByTheWindow])
def test_micro_batches_of_a_model_that_takes_no_counts_weigh_the_same(ranks, tmp_path, make):
    answers = ranks(2).run(_train, make, "plain", 12, str(tmp_path))
    for window, got in enumerate(answers[0][1]):
        part = slice(window * ACCUMULATE, (window + 1) * ACCUMULATE)
        micro_batches = [batch for seen, *_ in answers for batch in seen[part]]
        model = Plain().double()
        sum(model(**batch)[0] for batch in micro_batches).backward()
        right = model.table.weight.grad.flatten() / len(micro_batches)
        assert ((got - right).norm() / right.norm()).item() < CLOSE


def test_the_trainer_alone_multiplies_a_regression_loss_by_micro_batches_and_ranks(ranks, tmp_path):
    answers = ranks(2).run(_train, Alone, "regression", 12, str(tmp_path))
    assert _errors("regression", answers) == pytest.approx([2 * 4 - 1, 2 * 2 - 1], rel=1e-4)


def test_gradients_are_clipped_to_max_grad_norm_and_the_norm_is_logged(ranks, tmp_path):
    answers = ranks(2).run(_train, WithWindows, "tokens", 12, str(tmp_path), max_grad_norm=0.01)
    norms = [grad.norm().item() for grad, _ in _oracle("tokens", answers)]
    assert [log["grad_norm"] for log in answers[0][2]] == pytest.approx(norms, rel=1e-5)
    # PyTorch's clipping divides by norm + 1e-6.
    clipped = [0.01 * norm / (norm + 1e-6) for norm in norms]
    assert [grad.norm().item() for grad in answers[0][1]] == pytest.approx(clipped, rel=1e-5)


class Scaled(transformers.Trainer):
    """Trains in fp16 with a loss scaler on the CPU, which Accelerate does only on a GPU."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.native_amp = True
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)


class Half(Watching, Windows, Scaled):
    """Resumes from its checkpoint for another epoch, and records the loss scale of each micro-batch of it."""

    def train(self):
        super().train()
        seen, self.scales = self.seen, []
        self.args.num_train_epochs = 2
        super().train(resume_from_checkpoint=True)
        self.seen = seen, self.scales

    def training_step(self, *args):
        self.scales = [*getattr(self, "scales", []), self.sync.scaler.get_scale()]
        return super().training_step(*args)


def test_autocast_to_fp16_stays_near_the_right_gradient_and_the_scale_is_resumed(ranks, tmp_path):
    options = {"fp16": True, "save_strategy": "epoch"}
    answers = ranks(2).run(_train, Half, "tokens", 12, str(tmp_path), **options)
    first = [(seen, grads[:2]) for (seen, _), grads, _ in answers]
    assert max(_errors("tokens", first)) < 2**-8  # products of 11-bit mantissas through a few layers
    for (_, scales), *_ in answers:
        assert scales == [2.0**9] * 6  # the scale grew after two windows


class TrainsTwice(WithWindows):
    def train(self):
        super().train()
        sent = []
        self.sync.on_step(lambda record: sent.append(record.collectives))
        super().train()
        self.seen = [*sent, math.isfinite(self.state.log_history[-1]["train_loss"])]


def test_training_goes_on_when_train_is_called_again_and_gradients_travel_once_a_window(ranks, tmp_path):
    sent, *_ = ranks(2).run(_train, TrainsTwice, "tokens", 12, str(tmp_path))[0]
    assert sent == [2, 2, True]  # a header and one bucket in each of two windows


class Stopping(transformers.TrainerCallback):
    def __init__(self, what):
        self.what = what

    def on_substep_end(self, args, state, control, **options):
        setattr(control, self.what, bool(self.what))
        self.what = ""


class Stopped(WithWindows):
    """Is stopped by a callback, and continues with the next epoch or with another call of `train`."""

    def train(self):
        is_epoch = self.args.num_train_epochs == 2
        self.add_callback(Stopping("should_epoch_stop" if is_epoch else "should_training_stop"))
        super().train()
        if not is_epoch:
            super().train()
        self.seen = self.seen[1:]  # without the micro-batch of the dropped window


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_window_that_a_callback_has_left_adds_nothing_to_the_next(ranks, tmp_path, epochs):
    answers = ranks(2).run(_train, Stopped, "tokens", 12, str(tmp_path), num_train_epochs=epochs)
    assert len(answers[0][1]) == 2
    assert max(_errors("tokens", answers)) < CLOSE


def test_unequal_numbers_of_batches_are_refused_where_the_trainers_loop_could_not_wait(ranks, tmp_path):
    uneven = {"accelerator_config": {"even_batches": False}}
    with pytest.raises(AssertionError, match="has even_batches=False, so the Trainer's loop"):
        ranks(2).run(_train, WithWindows, "tokens", 6, str(tmp_path), **uneven)


@pytest.mark.parametrize("optim", ["lomo", "galore_adamw_layerwise"])
def test_an_optimizer_that_steps_inside_the_backward_is_refused(tmp_path, optim):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, optim=optim)
    with pytest.raises(ValueError, match="steps inside the backward"):
        Trainer(model=_model("tokens"), args=args)


class EvaluatesFirst(WithWindows):
    def train(self):
        self.evaluate(dataset("tokens", 4))
        return super().train()


def test_evaluation_before_training_is_refused_on_several_ranks_with_the_argument_to_set(ranks, tmp_path):
    with pytest.raises(AssertionError, match="prepared for evaluation only") as caught:
        ranks(2).run(_train, EvaluatesFirst, "tokens", 12, str(tmp_path))
    assert str(caught.value).count("eval_on_start=True") == 2  # on every rank


def test_one_process_without_a_group_may_be_evaluated_first(tmp_path):
    answer = _train(EvaluatesFirst, "tokens", 6, str(tmp_path))
    assert max(_errors("tokens", [answer])) < CLOSE


class EvaluatesOnStart(WithWindows):
    def __init__(self, **options):
        super().__init__(eval_dataset=dataset("tokens", 4), **options)
        self.args.eval_on_start = True


def test_evaluation_on_start_trains_on_several_ranks(ranks, tmp_path):
    answers = ranks(2).run(_train, EvaluatesOnStart, "tokens", 12, str(tmp_path))
    assert max(_errors("tokens", answers)) < CLOSE


class RunsOutOfMemory(WithWindows):
    def training_step(self, model, inputs, *args):
        if len(inputs["input_ids"]) > 1:
            raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")
        return super().training_step(model, inputs, *args)


def test_auto_find_batch_size_trains_with_the_size_that_fits(ranks, tmp_path):
    options = {
        "auto_find_batch_size": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
    }
    for _, grads, _ in ranks(2).run(_train, RunsOutOfMemory, "tokens", 8, str(tmp_path), **options):
        assert len(grads) == 2  # each window has two micro-batches of one sequence per rank


def _divided(loss: torch.Tensor, steps: int, how: str) -> torch.Tensor:
    if how == "in place":
        loss /= steps
        return loss
    return {"/": lambda: loss / steps, "div": lambda: loss.div(steps), "part": lambda: loss / steps + loss}[
        how
    ]()


class Divides(WithWindows):
    """Divides the loss in `compute_loss`, in the way that `how` names."""

    how = "/"

    def compute_loss(self, model, inputs, return_outputs=False, **options):
        loss = super().compute_loss(model, inputs, **options)
        return _divided(loss, self.args.gradient_accumulation_steps, self.how)


class DividesOnce(Watching, transformers.Trainer):
    """Runs forward and backward itself and divides the loss, as old Trainers do."""

    def training_step(self, model, inputs, *args):
        loss = super().compute_loss(model, self._prepare_inputs(inputs))
        self.accelerator.backward(loss / self.args.gradient_accumulation_steps)
        return loss.detach()


class Final(Windows, DividesOnce):
    """The mixin before the class whose training step divides the loss."""


@pytest.mark.parametrize("kind", ["tokens", "plain"])
@pytest.mark.parametrize("how", ["/", "div", "in place", "part"])
def test_a_loss_divided_by_the_number_of_micro_batches_is_refused(tmp_path, how, kind):
    make = type("DividesSo", (Divides,), {"how": how})
    with pytest.raises(ValueError, match="^do not divide the loss by args.gradient_accumulation_steps"):
        _train(make, kind, 4, str(tmp_path))


def test_a_training_step_of_ones_own_that_divides_is_refused(ranks, tmp_path):
    with pytest.raises(AssertionError, match="do not divide the loss by args.gradient_accumulation_steps"):
        ranks(2).run(_train, Final, "tokens", 12, str(tmp_path))


class DividesElsewhere(WithWindows):
    """Divides the loss only where the backward does not use the quotient, or where the divisor is 1."""

    def compute_loss(self, model, inputs, return_outputs=False, **options):
        loss, steps = super().compute_loss(model, inputs, **options), self.args.gradient_accumulation_steps
        assert (steps, steps % 3, [0] * steps, f"{steps}") == (4, 1, [0, 0, 0, 0], "4")
        assert torch.zeros(steps).shape == (4,)
        assert type(copy.deepcopy(steps)) is int
        self.reported = loss.detach() / steps, loss / steps
        return loss / self.accelerator.gradient_accumulation_steps / self.current_gradient_accumulation_steps


def test_divisions_that_leave_the_loss_as_it_is_are_accepted(ranks, tmp_path):
    answers = ranks(2).run(_train, DividesElsewhere, "tokens", 12, str(tmp_path))
    assert max(_errors("tokens", answers)) < CLOSE


class OwnStep(transformers.Trainer):
    """Runs forward and backward itself."""

    def training_step(self, model, inputs, *args):
        with self.accelerator.accumulate(model):
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
            self.accelerator.backward(loss)
        return loss.detach()


class Behind(Watching, Windows, OwnStep):
    """The mixin before the class with the training step."""


class InFront(Windows, transformers.Trainer):
    """The training step before the mixin."""

    training_step = OwnStep.training_step


def test_a_training_step_of_ones_own_stands_behind_the_mixin(ranks, tmp_path):
    answers = ranks(2).run(_train, Behind, "tokens", 12, str(tmp_path))
    assert max(_errors("tokens", answers)) < CLOSE


def test_a_training_step_in_front_of_the_mixin_is_refused_with_the_order_of_classes(ranks, tmp_path):
    with pytest.raises(AssertionError, match="list Windows before the class whose training_step") as caught:
        ranks(2).run(_train, InFront, "tokens", 12, str(tmp_path))
    assert str(caught.value).count("class Final(Windows, Mine)") == 2  # on every rank


class BareStep(InFront):
    def training_step(self, model, inputs, *args):
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        loss.backward()
        return loss.detach()


def test_a_bare_backward_in_a_training_step_is_refused_with_what_replaces_it(tmp_path):
    with pytest.raises(RuntimeError, match="^call self.accelerator.backward.loss. in training_step"):
        _train(BareStep, "tokens", 4, str(tmp_path))
