"""Where the Trainer's windows end: data without a length, changed window sizes, resumed training."""

from __future__ import annotations

import pytest
import torch
from worlds import CLOSE, FEATURES, items, launched, refusal

pytest.importorskip("transformers", reason="needs pyengine[adapters]")

import transformers
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import IterableDataset
from transformers import TrainingArguments

from pyengine.adapters.transformers import Trainer


class Mean(torch.nn.Module):
    """A model whose gradient is the mean of its input rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(FEATURES))

    def forward(self, x):
        return ((x @ self.weight).mean(),)


class Rows(IterableDataset):
    """A dataset without a length."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __iter__(self):
        return iter([{"x": x} for x in items(self.num)])


class Promising(Rows):
    """A dataset with fewer rows than its length."""

    def __len__(self) -> int:
        return self.num + 3


class Recording(torch.optim.SGD):
    """Records the gradient of every step and the micro-batches since the previous step."""

    def __init__(self, model: Mean) -> None:
        super().__init__(model.parameters(), lr=0.0)
        self.open: list[torch.Tensor] = []
        self.windows: list[tuple[list[torch.Tensor], torch.Tensor]] = []

    def step(self, closure=None):
        (param,) = self.param_groups[0]["params"]
        self.windows.append((self.open, param.grad.clone()))
        self.open = []
        super().step()


class Noting:
    recording: Recording

    def training_step(self, model, inputs, *args):
        self.recording.open.append(inputs["x"].clone())
        return super().training_step(model, inputs, *args)


class Watching(Noting, Trainer):
    """pyengine's Trainer."""


class Skips(Noting, Trainer):
    """Skips the micro-batches whose indices are in `left_out`."""

    left_out = range(0)
    index = -1

    def training_step(self, model, inputs, *args):
        self.index += 1
        return torch.zeros(()) if self.index in self.left_out else super().training_step(model, inputs, *args)


class ExactSums(Watching):
    accumulator = "exact"


class Alone(Noting, transformers.Trainer):
    """The library's own Trainer."""


class Sets(transformers.TrainerCallback):
    """Changes the micro-batches per window once, in the given hook, after `behind` steps."""

    def __init__(self, hook: str, steps: int, *, behind: int = 1) -> None:
        self.steps, self.behind = steps, behind
        setattr(self, hook, self._set)

    def _set(self, args, state, control, **options):
        if self.steps and state.global_step >= self.behind:
            args.gradient_accumulation_steps, self.steps = self.steps, 0


class Stops(transformers.TrainerCallback):
    """Stops the first epoch in the middle of its first window."""

    has_stopped = False

    def on_substep_end(self, args, state, control, **options):
        control.should_epoch_stop = not self.has_stopped
        self.has_stopped = True


def _train(folder, data, *callbacks, accumulate=3, make=Watching, resumed="", **options):
    """Train; return the windows, and the micro-batches that were not used by a step."""
    options = {"num_train_epochs": 1, "save_strategy": "no", **options}
    with launched():
        try:
            args = TrainingArguments(
                output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True,
                max_grad_norm=0.0, per_device_train_batch_size=1, gradient_accumulation_steps=accumulate,
                **options,
            )  # fmt: skip
            recording = Recording(model := Mean())
            schedule = torch.optim.lr_scheduler.LambdaLR(recording, lambda _: 1.0)
            trainer = make(
                model=model, args=args, train_dataset=data, optimizers=(recording, schedule),
                data_collator=transformers.default_data_collator, callbacks=[*callbacks],
            )  # fmt: skip
            trainer.recording = recording
            trainer.train(resume_from_checkpoint=resumed or None)
            return recording.windows, recording.open
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def _check(answers, sizes):
    """Check the number of micro-batches and the gradient of every window, and that no micro-batch is left."""
    for windows, left in answers:
        assert [len(seen) for seen, _ in windows] == sizes
        assert not left
    for index, (_, grad) in enumerate(answers[0][0]):
        seen = [x for windows, _ in answers for x in windows[index][0]]
        torch.testing.assert_close(grad, torch.cat(seen).mean(0), **CLOSE)


def _rows(num):
    return [{"x": x} for x in items(num)]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("num", "sizes"),
    [(8, [3, 3, 2, 3, 3]), (6, [3, 3, 3, 3, 3]), (2, [2, 2, 2, 2, 2]), (4, [3, 1, 3, 1, 3])],
)
def test_data_without_a_length_end_with_a_short_window_in_every_epoch(ranks, tmp_path, world, num, sizes):
    options = {"max_steps": 5, "accelerator_config": {"dispatch_batches": False}}
    _check(ranks(world).run(_train, tmp_path, Rows(num * world), **options), sizes)


def test_ranks_that_get_their_batches_from_the_first_one_end_together(ranks, tmp_path):
    options = {"max_steps": 4, "accelerator_config": {"dispatch_batches": True}}
    _check(ranks(2).run(_train, tmp_path, Rows(7), **options), [3, 1, 3, 1])


def test_the_last_of_max_steps_may_be_a_short_window(tmp_path):
    _check([_train(tmp_path, Rows(8), max_steps=3)], [3, 3, 2])


def test_data_that_are_fewer_than_their_length_says_end_with_a_short_window(tmp_path):
    _check([_train(tmp_path, Promising(8), num_train_epochs=2)], [3, 3, 2, 3, 3, 2])


CHANGES = [(3, 2, [3, 1, 2, 2]), (2, 3, [2, 1, 3, 3, 2]), (1, 4, [1, 3, 4, 3]), (4, 1, [4, 1, 1])]


@pytest.mark.parametrize(("before", "after", "sizes"), CHANGES)
def test_a_callback_changes_the_number_of_micro_batches_between_windows(
    ranks, tmp_path, before, after, sizes
):
    _check(ranks(2).run(_changed, tmp_path, "on_step_end", before, after), sizes)


def _changed(folder, hook, before, after, num=22, **options):
    return _train(folder, _rows(num), Sets(hook, after), accumulate=before, **options)


@pytest.mark.parametrize(("before", "after", "sizes"), CHANGES)
def test_the_trainer_alone_ends_windows_at_the_same_micro_batches(ranks, tmp_path, before, after, sizes):
    for windows, _ in ranks(2).run(_changed, tmp_path, "on_step_end", before, after, make=Alone):
        assert [len(seen) for seen, _ in windows][: len(sizes) - 1] == sizes[:-1]


@pytest.mark.parametrize(
    ("hook", "before", "after", "sizes"),
    [
        ("on_step_begin", 2, 3, [2, 4, 3, 2]),
        ("on_step_begin", 3, 2, [3, 3, 2, 2]),
        ("on_epoch_begin", 3, 2, [3, 3, 3, 2, 2, 2, 2, 1]),
        ("on_epoch_begin", 2, 3, [2, 2, 2, 2, 2, 1, 3, 3, 3, 2]),
        ("on_substep_end", 3, 2, [3, 3, 2, 2]),
    ],
)
def test_other_hooks_change_it_too(tmp_path, hook, before, after, sizes):
    options = {"num_train_epochs": 1 + (hook == "on_epoch_begin")}
    _check([_changed(tmp_path, hook, before, after, num=11, **options)], sizes)


def test_data_without_a_length_end_with_a_short_window_also_after_a_change(tmp_path):
    _check([_train(tmp_path, Rows(9), Sets("on_step_end", 2), max_steps=6)], [3, 1, 2, 2, 1, 2])


def test_a_number_that_the_open_window_cannot_have_is_refused_with_the_hook_to_use(tmp_path):
    refused = refusal(lambda: _changed(tmp_path, "on_substep_end", 2, 5))
    assert refused.startswith("change args.gradient_accumulation_steps between windows, for example in on_st")


def test_exact_sums_refuse_more_micro_batches_and_say_with_how_many_to_begin(tmp_path):
    refused = refusal(lambda: _changed(tmp_path, "on_step_end", 2, 3, make=ExactSums))
    assert refused.startswith("begin the training with the largest number of micro-batches per window, 3;")
    _check([_changed(tmp_path, "on_step_end", 3, 2, num=6, make=ExactSums)], [3, 1])


def test_an_epoch_that_a_callback_stops_adds_nothing_to_the_next(tmp_path):
    windows, left = _train(tmp_path, Rows(8), Stops(), max_steps=3)
    assert not left
    assert [len(seen) for seen, _ in windows] == [1 + 3, 3, 2]  # the first micro-batch was dropped
    for seen, grad in windows:
        torch.testing.assert_close(grad, torch.cat(seen[-3:]).mean(0), **CLOSE)


def test_a_resumed_epoch_ends_with_its_short_window(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1}
    whole, _ = _train(tmp_path, Rows(8), max_steps=5, **options)
    resumed = _train(tmp_path, Rows(8), max_steps=5, resumed=str(tmp_path / "checkpoint-2"), **options)
    _check([resumed], [2, 3, 3])
    for (_, grad), (_, right) in zip(resumed[0], whole[2:], strict=True):
        assert torch.equal(grad, right)


@pytest.mark.parametrize("left_out", [[2], [0, 2], [5, 7], [0, 1, 2]])
def test_a_training_step_may_leave_micro_batches_out(ranks, tmp_path, left_out):
    windows, left = ranks(2).run(_skipped, tmp_path, left_out)[0]
    sizes = [3, 3, 2]
    for index in left_out:
        sizes[index // 3] -= 1
    assert [len(seen) for seen, _ in windows] == [size for size in sizes if size]  # without empty windows
    assert not left


def _skipped(folder, left_out):
    make = type("SkipsSome", (Skips,), {"left_out": left_out})
    windows, left = _train(folder, _rows(8 * 2), make=make)
    return windows, left
