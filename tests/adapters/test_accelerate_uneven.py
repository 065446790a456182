"""Accelerate with even_batches=False: no sample is repeated, and a rank that has run out goes on with the others' windows."""

from __future__ import annotations

import copy

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
from pyengine.adapters.boundary import Together

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


def _prepared(num: int, accumulate: int = ACCUMULATE, also: int = 2) -> tuple:
    """Return accelerator, model, an optimizer that remembers, its prepared self, and two prepared loaders."""
    module = Weights()
    memory = Remembering(module)
    accelerator, model, optimizer, data, other = prepare(
        Accelerator(cpu=True, dataloader_config=UNEVEN), module, memory, _loader(num), _loader(also),
        accumulate=accumulate,
    )  # fmt: skip
    return accelerator, model, memory, optimizer, data, other


def _body(accelerator, model, optimizer, x: torch.Tensor) -> list[torch.Tensor]:
    """Run one micro-batch; return what counted."""
    with accelerator.accumulate(model):
        accelerator.backward(model(x).mean())
        optimizer.step()
    return [] if accelerator.is_beyond_data else [x]


def _leaving_out(num: int, accumulate: int, left_out: tuple[int, ...]) -> tuple:
    with accelerated():
        accelerator, model, memory, optimizer, data, _ = _prepared(num, accumulate)
        seen = []
        for step, (x,) in enumerate(data):
            is_bad = dist.get_rank() == dist.get_world_size() - 1 and step in left_out
            if not is_bad or accelerator.is_beyond_data:
                seen += _body(accelerator, model, optimizer, x)
        return seen, memory.stepped_with


@pytest.mark.parametrize("left_out", [(3,), (2, 3), (0, 3)])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("world", "num"), [(2, 2 * 9), (3, 2 * 13)])
def test_a_rank_whose_last_batches_never_come_to_accumulate_goes_on(ranks, world, num, accumulate, left_out):
    answers = ranks(world).run(_leaving_out, num, accumulate, left_out)
    assert [len(seen) for seen, _ in answers] == [5, *[4] * (world - 2), 4 - len(left_out)]
    seen = [[x.mean(0, keepdim=True) for x in seen] for seen, _ in answers]
    for _, grads in answers:
        torch.testing.assert_close(grads, mean_of_windows(seen, accumulate), **CLOSE)


def _resumed(num: int, skipped: int) -> tuple:
    with accelerated():
        accelerator, model, memory, optimizer, data, _ = _prepared(num)
        seen, runs = [], 0
        for (x,) in accelerator.skip_first_batches(data, skipped):
            runs += 1
            seen += _body(accelerator, model, optimizer, x)
        return seen, memory.stepped_with, runs


@pytest.mark.parametrize(("world", "num"), [(2, 2 * 9), (3, 2 * 13), (3, 2 * 14)])
def test_a_rank_with_nothing_left_of_a_resumed_epoch_goes_on_with_the_others(ranks, world, num):
    answers = ranks(world).run(_resumed, num, 4)
    assert sum(len(seen) for seen, *_ in answers) == num // 2 - 4 * world
    for _, grads, runs in answers:
        torch.testing.assert_close(grads, _means([seen for seen, *_ in answers]), **CLOSE)
        assert runs == 1


def _evaluated(early: bool) -> tuple:
    with accelerated():
        accelerator, model, _, optimizer, data, check = _prepared(2 * 9)
        seen = []
        for (x,) in data:
            _body(accelerator, model, optimizer, x)
            if accelerator.sync_gradients:
                seen += [next(iter(check), None) if early else len(list(check))]
        return seen


def test_evaluation_on_fewer_batches_than_ranks_is_not_refused_and_repeats_nothing(ranks):
    assert ranks(3).run(_evaluated, False) == [[1, 1], [0, 0], [0, 0]]
    assert [[x is None for x in seen] for seen in ranks(2).run(_evaluated, True)] == [[False] * 3, [True] * 3]


def _left_by_break(num: int) -> int:
    with accelerated():
        accelerator, model, _, optimizer, data, _ = _prepared(num)
        for step, (x,) in enumerate(data):
            _body(accelerator, model, optimizer, x)
            if step == 3:
                break
        return len(list(data))


def test_a_loop_left_with_the_last_batch_leaves_nothing_to_a_later_reading(ranks):
    assert ranks(2).run(_left_by_break, 2 * 9) == [5, 4]


def _as_its_loader() -> None:
    with accelerated():
        *_, data, _ = _prepared(2 * 9)
        assert copy.copy(data).loader is data.loader
        with pytest.raises(AttributeError):
            _ = Together.__new__(Together).dataset
        data.iteration = 7
        assert data.loader.iteration == 7
        assert "iteration" not in vars(data)


def test_a_loader_that_waits_can_be_copied_and_hands_on_what_is_set(ranks):
    ranks(2).run(_as_its_loader)


def _one_ahead(data):
    waiting = []
    for batch in data:
        yield from waiting
        waiting = [batch]
    yield from waiting


def _misread(case: str, num: int) -> str:
    with accelerated():
        accelerator, model, _, optimizer, data, other = _prepared(num, also=num)
        reader = {
            "zip": lambda: (x for x, _ in zip(data, other, strict=False)),
            "one ahead": lambda: _one_ahead(data),
            "list": lambda: list(data),
        }[case]
        try:
            for (x,) in reader():
                _body(accelerator, model, optimizer, x)
        except ValueError as error:
            return str(error)
        return "nothing was refused"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("zip", "more than one prepared loader is being read"),
        ("one ahead", "every rank has read further than the first batch"),
        ("list", "every rank has read further than the first batch"),
    ],
)
@pytest.mark.parametrize(("world", "num"), [(2, 2 * 9), (2, 2 * 3), (3, 2 * 7)])
def test_readers_that_would_leave_a_rank_behind_are_refused_on_every_rank(ranks, case, message, world, num):
    for answer in ranks(world).run(_misread, case, num):
        assert message in answer


@pytest.mark.parametrize("case", ["one ahead", "list"])
def test_a_rank_without_a_batch_is_not_waited_for_by_a_loop_that_is_refused(ranks, case):
    *refused, gone = ranks(3).run(_misread, case, 2 * 2)
    assert all("every rank has read further" in message for message in refused)
    assert gone == "nothing was refused"


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
        "this loader ends another model's windows",
        "sync_with_dataloader=False",
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name_on_every_rank(ranks, case):
    for message in ranks(2).run(_refusal, case):
        assert case in message
