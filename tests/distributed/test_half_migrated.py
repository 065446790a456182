"""Leftovers of an old training loop raise an error or a warning that begins with the remedy."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import pytest
import torch
from cases import Integers, engine, error_of, integers, recorded_warnings
from ranks import on_ranks
from sharded_cases import Chain, batch, loss_of, shard
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import pyengine as pe

KINDS = ("own", "own-native", "own-exact", "attach", "attach-view", "flat", "replicate")
REMEDY = "call sync.backward(loss) in place of loss.backward()"
Loss = Callable[[int], Tensor]


def _made(kind: str, accumulate: int = 2) -> tuple[pe.Sync, nn.Module, Loss]:
    if kind in ("flat", "replicate"):
        model = shard(Chain(), kind)
        return pe.attach(model, accumulate=accumulate), model, lambda k: loss_of(model, batch(k))
    model = Integers(torch.float32)
    sync, forward = engine(kind, model, accumulate=accumulate)
    return sync, model, lambda k: forward(*integers(k))


def _in_windows(sync: pe.Sync, optimizer: torch.optim.Optimizer, loss: Loss) -> None:
    for window in sync.windows(range(4)):
        for k in window:
            loss(k).backward()
        sync.step(optimizer)


def _in_windows_with_a_bare_step(sync: pe.Sync, optimizer: torch.optim.Optimizer, loss: Loss) -> None:
    for window in sync.windows(range(4)):
        for k in window:
            loss(k).backward()
        optimizer.step()


def _in_accumulate(sync: pe.Sync, optimizer: torch.optim.Optimizer, loss: Loss) -> None:
    for k in range(2):
        with sync.accumulate():
            loss(k).backward()
    sync.step(optimizer)


def _before_a_wrapped_step(sync: pe.Sync, optimizer: torch.optim.Optimizer, loss: Loss) -> None:
    wrapped = sync.wrap(optimizer)
    for k in range(4):
        loss(k).backward()
        wrapped.step()
        wrapped.zero_grad()


def _before_a_step(sync: pe.Sync, optimizer: torch.optim.Optimizer, loss: Loss) -> None:
    for k in range(4):
        loss(k).backward()
        sync.step(optimizer)


def _before_clipping(sync: pe.Sync, optimizer: torch.optim.Optimizer, loss: Loss) -> None:
    loss(0).backward()
    sync.clip_grad_norm_(1.0)


def _behind_windows(sync: pe.Sync, optimizer: torch.optim.Optimizer, loss: Loss) -> None:
    """Train a first phase in windows, then a second phase whose loop was not migrated."""
    wrapped = sync.wrap(optimizer)
    optimizer.param_groups[0]["lr"] = 0.0  # the first phase must not change the parameters either
    for window in sync.windows(range(4)):
        for k in window:
            sync.backward(loss(k))
        wrapped.step()
    _before_a_wrapped_step(sync, optimizer, loss)


LOOPS = (
    _in_windows,
    _in_windows_with_a_bare_step,
    _in_accumulate,
    _before_a_wrapped_step,
    _before_a_step,
    _before_clipping,
    _behind_windows,
)
CASES = [(kind, loop) for kind in KINDS for loop in LOOPS]


@pytest.mark.parametrize(("kind", "loop"), CASES[::4])  # a sample with every kind and every loop
@on_ranks(2)
def test_a_bare_backward_is_answered_by_its_remedy_and_steps_nothing(kind, loop):
    sync, model, loss = _made(kind)
    before = [param.detach().clone() for param in model.parameters()]
    text = error_of(loop, sync, torch.optim.SGD(model.parameters(), lr=0.5), loss)
    if loop is not _in_windows_with_a_bare_step:  # there the caller steps before the error
        assert all(torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))
    sync.abandon()
    assert text.removeprefix("all ranks: ").startswith(REMEDY)
    assert text.count(REMEDY) == 1


@pytest.mark.parametrize("kind", ["own", "attach", "flat"])
@on_ranks(2)
def test_a_loop_that_does_not_know_its_engine_is_warned_once(kind):
    sync, model, loss = _made(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with recorded_warnings() as texts:
        for k in range(4):
            loss(k).backward()
            optimizer.step()
            optimizer.zero_grad()
    sync.close()
    (text,) = texts
    assert text.startswith(REMEDY)


@on_ranks(1)
def test_backwards_beside_windows_that_train_nothing_are_none_of_our_business():
    """For example a check before the loop, or the discriminator's part of the generator's loss."""
    sync, model, loss = _made("own")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with recorded_warnings() as texts:
        for window in range(3):
            for _ in range(2):
                loss(7).backward()
                model.zero_grad()
            for k in range(2):
                with sync.accumulate():
                    sync.backward(loss(2 * window + k))
            sync.step(optimizer)
        loss(7).backward()
        model.zero_grad()
        sync.wrap(optimizer).step()
    assert texts == []


DIVISIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "/ accumulate": lambda loss: loss / 4,
    "/ tensor": lambda loss: loss / torch.tensor(4),
    "in place": lambda loss: loss.div_(4.0),
    "cast behind it": lambda loss: (loss / 4).double(),
    "times a count": lambda loss: (loss / 4) * 3,
    "minus": lambda loss: -(loss / 4),
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda loss: loss,
    "a weight": lambda loss: 0.25 * loss,
    "two losses": lambda loss: (loss + loss) / 2,
    "by another number": lambda loss: loss / 3,
    "times": lambda loss: loss * 4,
    "and times it again": lambda loss: (loss / 4) * torch.tensor(4),
    "of a term": lambda loss: loss + loss / 4,
    "of an input": lambda loss: (loss / 4).exp(),
}


def _warned(
    loss_of: Callable[[nn.Parameter], Tensor],
    *,
    count: int | None = None,
    is_block: bool = False,
    accumulate: int = 4,
) -> list[str]:
    weight = nn.Parameter(torch.ones(3, 2))
    with pe.GradSync([weight], accumulate=accumulate) as sync, recorded_warnings() as texts:
        for window in sync.windows(range(3 * accumulate)):
            for _ in window:
                loss = loss_of(weight)
                if is_block:
                    with sync.micro_batch(count=count) as mb:
                        mb.backward(loss)
                else:
                    sync.backward(loss, count=count)
            sync.step(torch.optim.SGD([weight], lr=0.0))
    return texts


@pytest.mark.parametrize(
    ("name", "count", "is_block"),
    [(name, (None, 3)[number // 2 % 2], bool(number % 2)) for number, name in enumerate(DIVISIONS)],
)
def test_a_loss_divided_by_accumulate_is_warned_of_once(name, count, is_block):
    def loss_of(weight: Tensor) -> Tensor:
        return DIVISIONS[name](weight.mean() if count is None else weight.sum())

    (text,) = _warned(loss_of, count=count, is_block=is_block)
    assert text.startswith("leave the division by 4 out of the loss")


@pytest.mark.parametrize("name", ["/ accumulate", "times a count"])
def test_a_division_is_found_where_the_block_marks_its_last_backward(name):
    weight = nn.Parameter(torch.ones(3, 2))
    with pe.GradSync([weight], accumulate=4) as sync, recorded_warnings() as texts:
        with sync.accumulate(), sync.micro_batch(count=3) as mb:
            loss = DIVISIONS[name](weight.sum())
            with mb.last_backward(loss):
                loss.backward()
        sync.abandon()
    assert [text.startswith("leave the division by 4") for text in texts] == [True]


# With accumulate=2, a factor of one half may have other reasons, for example in losses of GANs and VAEs.
HALVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "0.5 * mse": lambda out, target: 0.5 * nn.functional.mse_loss(out, target),
    "mse / 2": lambda out, target: nn.functional.mse_loss(out, target) / 2,
    "GAN": lambda out, target: (nn.functional.softplus(out).mean() + nn.functional.softplus(-out).mean()) / 2,
    "VAE": lambda out, target: (nn.functional.mse_loss(out, target, reduction="sum") + out.sum()) / len(out),
    "LSGAN": lambda out, target: 0.5 * (out - 1).square().mean() + 0.5 * out.square().mean(),
}


@pytest.mark.parametrize("is_block", [False, True])
@pytest.mark.parametrize("name", HALVES)
def test_halves_of_two_micro_batches_are_not_warned_of(name, is_block):
    assert (
        _warned(lambda weight: HALVES[name](weight, torch.zeros(3, 2)), accumulate=2, is_block=is_block) == []
    )


@pytest.mark.parametrize("name", OTHERS)
def test_other_losses_are_not_warned_of(name):
    assert _warned(lambda weight: OTHERS[name](weight.sum()), count=3) == []


@pytest.mark.parametrize(
    ("reduction", "count", "says"),
    [
        ("sum", None, "pass the number of its items, count="),
        ("mean", 3, "leave count= out"),
        ("mean", torch.tensor(3), "leave count= out"),
        ("mean", torch.tensor(1), ""),
        ("sum", 3, ""),
        ("mean", None, ""),
        ("mean", 1, ""),
    ],
)
def test_a_sum_without_its_count_and_a_mean_with_one_are_warned_of_once(reduction, count, says):
    target = torch.zeros(3, dtype=torch.int64)
    loss_of = partial(nn.functional.cross_entropy, target=target, reduction=reduction)
    texts = _warned(loss_of, count=count)
    assert [text.startswith(says) for text in texts] == ([True] if says else [])


@pytest.mark.parametrize(("reduction", "is_warned"), [("mean", True), ("sum", False)])
@pytest.mark.parametrize("name", ["", "text"])
def test_a_mean_is_warned_of_if_counts_were_read_ahead(reduction, is_warned, name):
    weight, target = nn.Parameter(torch.zeros(3, 3)), torch.zeros(3, dtype=torch.int64)
    with pe.GradSync([weight], accumulate=2) as sync, recorded_warnings() as texts:
        for window in sync.windows(range(4), count=lambda _: {name: 3} if name else 3):
            for _ in window:
                loss = nn.functional.cross_entropy(weight, target, reduction=reduction)
                sync.backward({name: loss} if name else loss)
            sync.step(torch.optim.SGD([weight], lr=0.0))
    assert [text.startswith("leave count= out") for text in texts] == [True] * is_warned


def test_a_count_too_large_for_a_float_is_refused_as_a_count():
    weight = nn.Parameter(torch.zeros(3))
    with pe.GradSync([weight], accumulate=1) as sync, recorded_warnings():
        with pytest.raises(ValueError, match="count of micro-batch 0 is inf"), sync.accumulate():
            sync.backward(nn.functional.mse_loss(weight, torch.ones(3)), count=10**400)
        sync.abandon()


@pytest.mark.parametrize(
    ("counts", "is_warned"),
    [
        ([3, None], True),
        ([None, torch.tensor(3)], True),
        ([0, None], False),  # a count of 0 leaves the micro-batch out
        ([1, None], False),
        ([None, None], False),
        ([3, 4], False),
    ],
    ids=str,
)
@on_ranks(2)
def test_a_window_in_which_only_some_micro_batches_have_a_count_is_warned_of_once(counts, is_warned):
    model = nn.Linear(2, 1)
    with pe.GradSync(model, accumulate=2) as sync, recorded_warnings() as texts:
        for window in sync.windows([torch.ones(1, 2)] * 4):
            for x, count in zip(window, counts, strict=True):
                sync.backward(model(x).mean(), **({} if count is None else {"count": count}))
            sync.unscale_()
    warned = [text for text in texts if text.startswith("pass count= in every micro-batch of a window")]
    assert len(warned) == is_warned


def test_a_loss_is_not_read_under_a_dispatch_mode():
    with FlopCounterMode(display=False):
        assert _warned(lambda weight: 2 * weight.sum() / 4, count=3) == []


def test_windows_of_one_micro_batch_have_no_division_to_warn_of():
    assert _warned(lambda weight: weight.sum() / 1, accumulate=1) == []


@on_ranks(3)
def test_a_loss_divided_by_the_micro_batches_of_all_ranks_is_warned_of():
    (text,) = _warned(lambda weight: weight.mean() / 6, accumulate=2)
    assert text.startswith("leave the division by 6 out of the loss")


def test_one_of_several_processes_needs_a_process_group(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"^call torch\.distributed\.init_process_group\(\) before"):
        pe.GradSync(nn.Linear(2, 1))


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_one_of_several_processes_of_mpirun_or_srun_is_warned(monkeypatch, name):
    monkeypatch.setenv(name, "2")
    with pytest.warns(RuntimeWarning, match=f"^call torch.*WORLD_SIZE=1 if.*{name}=2 processes"):
        pe.GradSync(nn.Linear(2, 1)).close()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("world_size", "num_tasks"), [("1", ""), ("", "1"), ("1", "2")])
def test_one_process_needs_none(monkeypatch, world_size, num_tasks):
    monkeypatch.setenv("WORLD_SIZE", world_size)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", num_tasks)
    pe.GradSync(nn.Linear(2, 1)).close()


SCALED: dict[str, Callable[[torch.amp.GradScaler, Tensor], Tensor]] = {
    "scaled": lambda scaler, loss: scaler.scale(loss),
    "of a list": lambda scaler, loss: scaler.scale([loss, loss])[1],
    "a sum": lambda scaler, loss: scaler.scale(loss) + scaler.scale(2 * loss),
    "a multiple": lambda scaler, loss: scaler.scale(loss) / 3 * 2,
    "a term": lambda scaler, loss: loss + scaler.scale(loss),
}


def test_a_scaled_loss_is_refused_in_the_first_window_of_a_loop_that_goes_on():
    weight = nn.Parameter(torch.ones(3, 2))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), torch.amp.GradScaler("cpu")
    with pe.GradSync([weight], accumulate=1) as sync:
        for window in sync.windows([1.0]):
            for x in window:
                sync.backward(weight.sum() * x)
            sync.step(optimizer)
        state = sync.state_dict()
    with pe.GradSync([weight], accumulate=1) as sync:
        sync.load_state_dict(state)
        with pytest.raises(ValueError, match=r"^assign the loss scaler"), sync.accumulate():
            sync.backward(scaler.scale(weight.sum()))


# torch's GradScaler multiplies the losses of a list by copies of its scale, which look like other numbers.
@pytest.mark.parametrize(
    ("name", "whose"),
    [
        *((name, "the engine's") for name in SCALED),
        *((name, whose) for name in SCALED if name != "of a list" for whose in ("another", "nobody's")),
    ],
)
@pytest.mark.parametrize("is_block", [False, True])
def test_a_loss_that_was_scaled_already_is_refused_before_anything_runs(name, whose, is_block):
    weight = nn.Parameter(torch.ones(3, 2))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with pe.GradSync([weight], accumulate=1) as sync:
        if whose != "nobody's":
            sync.scaler = pe.GradScaler("cpu", init_scale=64.0) if whose == "another" else scaler
        scaler.scale(torch.ones(()))  # torch's GradScaler creates its scale at the first loss
        with pytest.raises(ValueError, match=r"^(assign|give sync\.backward)"), sync.accumulate():
            loss = SCALED[name](scaler, weight.sum())
            if is_block:
                with sync.micro_batch() as mb:
                    mb.backward(loss)
            else:
                sync.backward(loss)
        assert weight.grad is None
        with sync.accumulate():  # retry the window
            sync.backward(weight.sum() * torch.tensor(64.0))  # the user's own factor
        sync.unscale_()
        assert torch.equal(weight.grad, torch.full((3, 2), 64.0))


def test_a_loss_times_a_number_searches_no_objects(monkeypatch):
    """The search for a GradScaler takes 150 ms in a process with many objects."""
    for name in ("get_objects", "get_referrers"):
        monkeypatch.delattr(gc, name)
    model = nn.Linear(2, 1)
    sync = pe.GradSync(model, accumulate=1)
    for window in sync.windows(torch.ones(1, 1, 2)):
        for x in window:
            sync.backward(0.5 * model(x).sum(), count=1)
        sync.unscale_()
    assert model.weight.grad.tolist() == [[0.5, 0.5]]
    sync.close()
