"""Accelerate's API in a loop with windows: clipping, schedulers, skipped steps, and unsupported calls."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
from test_accelerate_windows import accelerated, loader, loop
from worlds import CLOSE, Remembering, Weights, mean_of_windows, refusal

pytest.importorskip("accelerate", reason="needs pyengine[adapters]")

from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
)

from pyengine.adapters.accelerate import prepare


def _prepared(num: int = 16, **options):
    model = Weights()
    memory = Remembering(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(memory, lambda step: 0.5**step)
    accelerator = Accelerator(cpu=True, **options)
    return memory, *prepare(accelerator, model, memory, loader(num), scheduler, accumulate=2)


def _clipped(how: str) -> tuple:
    with accelerated():
        memory, accelerator, model, optimizer, data, _ = _prepared()
        seen, norms = [], []
        for (x,) in data:
            with accelerator.accumulate(model):
                seen.append(x)
                accelerator.backward(model(x).mean())
                if accelerator.sync_gradients and how == "value":
                    accelerator.clip_grad_value_(model.parameters(), 1.0)
                elif accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=float(how)))
                optimizer.step()
        return seen, memory.stepped_with, norms


@pytest.mark.parametrize("norm_type", ["2", "inf"])
def test_gradients_are_clipped_to_the_norm_of_the_window(ranks, norm_type):
    answers = ranks(2).run(_clipped, norm_type)
    expected = mean_of_windows([seen for seen, *_ in answers], 2)
    for grad, norm, mean in zip(answers[0][1], answers[0][2], expected, strict=True):
        whole = mean.double().norm(float(norm_type))
        torch.testing.assert_close(norm.double(), whole, rtol=1e-6, atol=0)
        # PyTorch's clipping divides by norm + 1e-6.
        torch.testing.assert_close(grad.double(), mean.double() / (whole + 1e-6), rtol=1e-6, atol=0)


def test_gradients_are_clipped_by_value_after_they_were_averaged(ranks):
    answers = ranks(2).run(_clipped, "value")
    expected = mean_of_windows([seen for seen, *_ in answers], 2)
    torch.testing.assert_close(answers[0][1], [mean.clamp(-1, 1) for mean in expected], **CLOSE)


def _scheduled() -> tuple:
    """Train two windows, the first with a nan loss.

    Return, after every micro-batch, the learning rate, whether the parameters are unchanged, and whether the
    step was skipped; also return the number of collectives of each window.
    """
    with accelerated():
        _, accelerator, model, optimizer, data, scheduler = _prepared()
        after, records = [], []
        accelerator.sync.on_step(records.append)
        for index, (x,) in enumerate(data):
            before = accelerator.unwrap_model(model).weight.detach().clone()
            with accelerator.accumulate(model):
                accelerator.backward(model(x).mean() * (float("nan") if index == 1 else 1.0))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            still = torch.equal(before, accelerator.unwrap_model(model).weight)
            after.append((scheduler.get_last_lr()[0], still, accelerator.optimizer_step_was_skipped))
        return after, [record.collectives for record in records]


def test_a_finite_window_moves_parameters_once_and_the_scheduler_once_a_process(ranks):
    after, collectives = ranks(2).run(_scheduled)[0]
    assert [lr for lr, *_ in after] == [0.25, 0.25, 0.25, 0.25 / 4]  # one step per process, as in Accelerate
    assert [still for _, still, _ in after] == [True, True, True, False]
    assert [skipped for *_, skipped in after] == [False, True, True, False]
    assert collectives[1] == 2  # a header and one bucket


def _saved(folder: str) -> bool:
    with accelerated():
        _, accelerator, model, optimizer, data, _ = _prepared()
        loop(accelerator, model, optimizer, data)
        accelerator.save_state(folder)
        weight = accelerator.unwrap_model(model).weight
        kept = weight.detach().clone()
        weight.data.zero_()
        accelerator.load_state(folder)
        return torch.equal(accelerator.unwrap_model(model).weight, kept)


def test_the_accelerator_saves_and_loads_what_it_prepared(ranks, tmp_path):
    assert ranks(1).run(_saved, str(tmp_path / "state")) == [True]


def test_a_prepared_optimizer_can_be_pickled_and_its_copy_steps_nothing():
    with accelerated():
        _, accelerator, model, optimizer, data, _ = _prepared()
        loop(accelerator, model, optimizer, data)
        twin = pickle.loads(pickle.dumps(optimizer))
        assert torch.equal(twin.param_groups[0]["params"][0], optimizer.param_groups[0]["params"][0])
        with pytest.raises(RuntimeError, match="belongs to no engine"):
            twin.step()


def _logged() -> tuple:
    """Return the losses as diffusers' scripts compute them, and as in the step records.

    The last window is short.
    """
    with accelerated():
        _, accelerator, model, optimizer, data, _ = _prepared(12)
        theirs, ours, train_loss = [], [], 0.0
        accelerator.sync.on_step(lambda record: ours.append(record.loss))
        for (x,) in data:
            with accelerator.accumulate(model):
                loss = model(x).mean()
                train_loss += accelerator.gather(loss.repeat(len(x))).mean().item() / 2
                accelerator.backward(loss)
                optimizer.step()
            if accelerator.sync_gradients:
                theirs.append(train_loss)
                train_loss = 0.0
        return theirs, ours


def test_the_loss_of_a_record_is_what_scripts_gather_and_divide_except_in_short_windows(ranks):
    for theirs, (full, short) in ranks(2).run(_logged):
        assert theirs == pytest.approx([full, short / 2], rel=1e-6)


def _resized(sizes: list) -> tuple:
    """Change the window size before each epoch; return each epoch's micro-batches and gradients."""
    with accelerated():
        memory, accelerator, model, optimizer, data, _ = _prepared(2 * 2 * 5)
        epochs = []
        for size in sizes:
            accelerator.gradient_accumulation_steps = size
            assert accelerator.gradient_accumulation_steps == size
            before = len(memory.stepped_with)
            seen = loop(accelerator, model, optimizer, data)
            epochs.append((seen, memory.stepped_with[before:]))
        return epochs


def test_gradient_accumulation_steps_can_be_set_between_windows(ranks):
    sizes = [1, 4, 2]
    answers = ranks(2).run(_resized, sizes)
    for size, epoch in zip(sizes, zip(*answers, strict=True), strict=True):
        expected = mean_of_windows([seen for seen, _ in epoch], size)
        for _, grads in epoch:
            torch.testing.assert_close(grads, expected, **CLOSE)


def test_gradient_accumulation_steps_are_not_changed_in_the_middle_of_a_window():
    with accelerated():
        _, accelerator, model, optimizer, data, _ = _prepared()
        for index, (x,) in enumerate(data):
            with accelerator.accumulate(model):
                accelerator.backward(model(x).mean())
                if index == 0:
                    with pytest.raises(RuntimeError, match="in the middle of window 0"):
                        accelerator.gradient_accumulation_steps = 4
                with pytest.raises(ValueError, match="gradient_accumulation_steps=0: expected micro-batches"):
                    accelerator.gradient_accumulation_steps = 0
                optimizer.step()
                if index == 1:
                    accelerator.gradient_accumulation_steps = 1
        assert accelerator.sync.window == 7 - 1  # one window of two micro-batches, and six of one


def test_what_is_set_on_the_accelerator_reaches_the_one_behind_it():
    with accelerated():
        own = Accelerator(cpu=True)
        accelerator, _ = prepare(own, Weights(), accumulate=2)
        accelerator.even_batches = False
        assert own.even_batches is False


def _prepares(make: Callable[[], Accelerator]):
    """Return a case that prepares only the model, with the accelerator that `make` returns."""
    return lambda model, optimizer: prepare(make(), model, accumulate=2)


def _two(model, optimizer):
    prepare(Accelerator(cpu=True), model, Weights(), accumulate=2)


def _two_under_one_optimizer(model, optimizer):
    other = Weights()
    optimizer.add_param_group({"params": list(other.parameters())})
    prepare(Accelerator(cpu=True), model, other, optimizer, accumulate=2)


def _old_accelerator(model, optimizer):
    """Train with the accelerator that was passed to `prepare`, not with the one that it returned."""
    old = Accelerator(cpu=True)
    _, model, optimizer = prepare(old, model, optimizer, accumulate=2)
    for _ in range(4):
        with old.accumulate(model):
            old.backward(model(torch.ones(2, 3)).mean())
            optimizer.step()
            optimizer.zero_grad()


def _old_backward(model, optimizer):
    old = Accelerator(cpu=True)
    accelerator, model, optimizer, data = prepare(old, model, optimizer, loader(16), accumulate=2)
    for (x,) in data:
        with accelerator.accumulate(model):
            old.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()


def _without_a_loader(model, optimizer):
    accelerator, model, _ = prepare(Accelerator(cpu=True), model, optimizer, accumulate=2)
    accelerator.accumulate(model)


def _every_batch() -> Accelerator:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    return Accelerator(cpu=True, gradient_accumulation_plugin=plugin)


def _scaled() -> Accelerator:
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu")
    return accelerator


def _stranger(model, optimizer):
    accelerator, model, _ = prepare(Accelerator(cpu=True), model, loader(4), accumulate=2)
    accelerator.accumulate(Weights())


def _strange_scheduler(model, optimizer):
    scheduler = torch.optim.lr_scheduler.LambdaLR(Remembering(Weights()), lambda step: 1.0)
    prepare(Accelerator(cpu=True), model, optimizer, scheduler, accumulate=2)


def _closure(model, optimizer):
    _, _, optimizer = prepare(Accelerator(cpu=True), model, optimizer, accumulate=2)
    optimizer.step(lambda: None)


def _outside(model, optimizer):
    accelerator, model, _ = prepare(Accelerator(cpu=True), model, optimizer, accumulate=2)
    accelerator.backward(model(torch.ones(1, 3)).mean())


def _sharded() -> Accelerator:
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = DistributedType.DEEPSPEED
    return accelerator


def _bare() -> Accelerator:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare_model = lambda model, **_: model
    return accelerator


def _join(model, optimizer):
    accelerator, _ = prepare(Accelerator(cpu=True), model, accumulate=2)
    accelerator.join_uneven_inputs([model])


def _options_of_backward(model, optimizer):
    accelerator, model, _ = prepare(Accelerator(cpu=True), model, loader(4), accumulate=2)
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 3)).mean(), retain_graph=True, learning_rate=0.1)


def _clips_early(call: str, *arguments):
    def clip(model, optimizer):
        accelerator, model, _ = prepare(Accelerator(cpu=True), model, loader(4), accumulate=2)
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 3)).mean())
            getattr(accelerator, call)(*arguments or (model.parameters(), 1.0))

    return clip


def _asks_for(name: str):
    def ask(model, optimizer):
        accelerator, model = prepare(Accelerator(cpu=True), model, accumulate=2)
        getattr(accelerator, name)(model)

    return ask


def _sets_sync_gradients(model, optimizer):
    accelerator, model = prepare(Accelerator(cpu=True), model, accumulate=2)
    accelerator.sync_gradients = True


def _comm_hook() -> Accelerator:
    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)
    return Accelerator(cpu=True, kwargs_handlers=[hook])


def _evaluated_first(model, optimizer):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare_model(model, evaluation_mode=True)
    prepare(accelerator, model, accumulate=2)


def _local_sgd(model, optimizer):
    own = Accelerator(cpu=True)
    _, model, _ = prepare(own, model, optimizer, accumulate=2)
    with LocalSGD(own, model, local_sgd_steps=2):
        pass


def _sets_sync_gradients_of_the_state(model, optimizer):
    accelerator, model = prepare(Accelerator(cpu=True), model, accumulate=2)
    accelerator.gradient_state._set_sync_gradients(True)


def _strange_loader(model, optimizer):
    own = Accelerator(cpu=True)
    accelerator, model, _ = prepare(own, model, loader(8), accumulate=2)
    for _ in own.prepare(loader(8)):
        with accelerator.accumulate(model):
            pass


_REFUSED = {
    "leave out LocalSGD": _local_sgd,
    "did not prepare the loader that this loop iterates over": _strange_loader,
    "sync_gradients=True: a window ends when": _sets_sync_gradients_of_the_state,
    "backward: unexpected arguments learning_rate": _options_of_backward,
    "clip_grad_norm_: put this call under `if accelerator.sync_gradients:`": _clips_early("clip_grad_norm_"),
    "clip_grad_value_: put this call under `if accelerator.sync_gradients": _clips_early("clip_grad_value_"),
    "unscale_gradients: put this call under `if accelerator.sync_gradients:`": _clips_early(
        "unscale_gradients", None
    ),
    "no_sync: gradients are reduced in a window's last backward only": _asks_for("no_sync"),
    "lomo_backward: ": _asks_for("lomo_backward"),
    "prepare_optimizer: ": _asks_for("prepare_optimizer"),
    "prepare_scheduler: ": _asks_for("prepare_scheduler"),
    "sync_gradients=True: a window ends": _sets_sync_gradients,
    "comm_hook=BF16": _prepares(_comm_hook),
    "was prepared for evaluation only": _evaluated_first,
    "call pyengine.adapters.accelerate.prepare once per model": _two,
    "since one optimizer steps both models, put them into one nn.Module": _two_under_one_optimizer,
    "pass the Accelerator first: prepare(accelerator, model, optimizer": lambda *both: prepare(
        *both, accumulate=2
    ),
    "call backward, accumulate and clip_grad_norm_ on the accelerator that prepare": _old_accelerator,
    "call sync.backward(loss) in place of loss.backward()": _old_backward,
    "no loader was prepared": _without_a_loader,
    "gradient_accumulation_steps=8": _prepares(lambda: Accelerator(cpu=True, gradient_accumulation_steps=8)),
    "sync_each_batch=True": _prepares(_every_batch),
    "has its own rules for loss scaling": _prepares(_scaled),
    "no model has been prepared": lambda _, optimizer: prepare(
        Accelerator(cpu=True), optimizer, accumulate=2
    ),
    "a model that this accelerator did not prepare": _stranger,
    "a scheduler without its optimizer": _strange_scheduler,
    "got a closure": _closure,
    "backward outside a window": _outside,
    "distributed_type is DEEPSPEED": _prepares(_sharded),
    "expected a DistributedDataParallel": _prepares(_bare),
    "join_uneven_inputs: windows do not need it": _join,
}


def _refusals() -> dict[str, str]:
    found = {}
    for case, run in _REFUSED.items():
        with accelerated():
            model = Weights()
            found[case] = refusal(partial(run, model, Remembering(model)))
    return found


def _freed_no_sync() -> bool:
    with accelerated():
        accelerator, model = prepare(Accelerator(cpu=True), Weights(), accumulate=2)
        accelerator.free_memory()
        with model.no_sync():
            return model.require_backward_grad_sync


def test_a_model_of_freed_memory_has_no_sync_of_ddp_again(ranks):
    assert ranks(2).run(_freed_no_sync) == [False, False]


def test_what_cannot_be_honoured_is_refused_by_name(ranks):
    found = ranks(2).run(_refusals)[0]
    assert {case: message for case, message in found.items() if case not in message} == {}


def _several_backwards() -> tuple:
    with accelerated():
        memory, accelerator, model, optimizer, data, _ = _prepared()
        seen = []
        for (x,) in data:
            seen.append(x)
            with accelerator.accumulate(model):
                losses = model(x)
                with accelerator.sync.micro_batch(count=len(x)):
                    accelerator.backward(losses[0].sum(), retain_graph=True)
                    accelerator.backward(losses[1:].sum())
                    with pytest.raises(ValueError, match="which has one count for all its backwards"):
                        accelerator.backward(losses.sum(), count=2)
                optimizer.step()
        return seen, memory.stepped_with


def test_several_backwards_with_options_of_torch_make_one_micro_batch(ranks):
    answers = ranks(2).run(_several_backwards)
    torch.testing.assert_close(answers[0][1], mean_of_windows([seen for seen, _ in answers], 2), **CLOSE)


def _prepared_again(how: str) -> tuple:
    """Train a model, free it, and train another model with the same accelerator."""
    with accelerated():
        memory, accelerator, model, optimizer, data, _ = _prepared()
        first = accelerator.sync
        for turn in range(2):
            if turn:
                model = optimizer = data = None
                memory = Remembering(fresh := Weights())
                if how == "prepare of the module":
                    accelerator.free_memory()
                    accelerator, model, optimizer, data = prepare(
                        accelerator, fresh, memory, loader(16), accumulate=2
                    )
                else:
                    getattr(accelerator, how)()
                    model, optimizer, data = accelerator.prepare(fresh, memory, loader(16))
            seen = loop(accelerator, model, optimizer, data)
        assert accelerator.sync is not first
        with pytest.raises(RuntimeError, match="has been closed"):
            first.step(memory)
        return seen, memory.stepped_with


@pytest.mark.parametrize("how", ["clear", "prepare of the module"])
def test_freed_memory_lets_another_model_be_prepared(ranks, how):
    answers = ranks(2).run(_prepared_again, how)
    torch.testing.assert_close(answers[0][1], mean_of_windows([seen for seen, _ in answers], 2), **CLOSE)


def test_an_accelerator_without_a_model_ends_its_training():
    with accelerated():
        _, accelerator, *_ = _prepared()
        accelerator.free_memory()
        accelerator.end_training()
        with pytest.raises(RuntimeError, match="no model has been prepared"):
            accelerator.sync.flush()
