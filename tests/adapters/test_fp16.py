"""fp16 with Accelerate: the engine takes over the loss scaler, and the optimizer gets unscaled gradients.

Accelerate creates a scaler only on a GPU; these tests set one, and autocast to fp16 runs on the CPU. The
gradients of `Weights` are small integers times powers of two, which are exact in fp16.
"""

from __future__ import annotations

import pytest
import torch
from test_accelerate_windows import accelerated, loader, prepared
from worlds import CLOSE, Remembering, Weights, mean_of_windows

pytest.importorskip("accelerate", reason="needs pyengine[adapters]")

from accelerate import Accelerator

SCALE, OVERFLOWS = 2.0**10, 2.0**18  # 7 * 2^18 exceeds fp16's maximum


def _accelerator(init_scale: float) -> Accelerator:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=3)
    return accelerator


def _with_windows(init_scale: float, clip: str, accumulate: int) -> tuple:
    with accelerated():
        stock = _accelerator(init_scale)
        memory, accelerator, model, optimizer, data = prepared(stock, 40, accumulate)
        seen, after = [], []
        for (x,) in data:
            with accelerator.accumulate(model):
                seen.append(x)
                out = model(x)
                accelerator.backward(out.mean())
                if accelerator.sync_gradients and clip:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=float(clip))
                optimizer.step()
                optimizer.zero_grad()
            after.append((accelerator.optimizer_step_was_skipped, accelerator.scaler.get_scale()))
        assert stock.scaler.get_scale() == init_scale  # unchanged, for models without windows
        return seen, memory.stepped_with, after


def _alone(init_scale: float) -> list:
    with accelerated():
        model = Weights()
        accelerator = _accelerator(init_scale)
        model, optimizer, data = accelerator.prepare(model, Remembering(model), loader(40))
        after = []
        for (x,) in data:
            accelerator.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
            after.append((accelerator.optimizer_step_was_skipped, accelerator.scaler.get_scale()))
        return after


def test_accelerates_windows_step_with_the_unscaled_mean(ranks):
    answers = ranks(2).run(_with_windows, SCALE, "", 4)
    expected = mean_of_windows([seen for seen, *_ in answers], 4)
    for _, grads, after in answers:
        torch.testing.assert_close(grads, expected, **CLOSE)
        assert after[-1][1] == 2 * SCALE  # the scale grew after three windows


def test_clipping_comes_after_unscaling(ranks):
    answers = ranks(2).run(_with_windows, SCALE, "2", 4)
    expected = mean_of_windows([seen for seen, *_ in answers], 4)
    clipped = [mean / (mean.norm() + 1e-6) for mean in expected]
    torch.testing.assert_close(answers[0][1], clipped, rtol=1e-6, atol=0)


def test_windows_of_one_skip_and_scale_as_accelerate_alone(ranks):
    alone = ranks(2).run(_alone, OVERFLOWS)[0]
    assert [skipped for skipped, _ in alone][:3] == [True, True, True]
    assert not alone[-1][0]
    assert ranks(2).run(_with_windows, OVERFLOWS, "", 1)[0][2] == alone


def _saved(folder: str) -> list[float]:
    """Train two models in one process, save, overwrite the loss scales, and load."""
    with accelerated():
        shared, sets = _accelerator(SCALE), []
        for factor in (1.0, torch.inf):
            sets.append((factor, *prepared(shared, 8, 2)))
        for factor, _, accelerator, model, optimizer, data in sets:
            for (x,) in data:
                with accelerator.accumulate(model):
                    accelerator.backward(model(x).mean() * factor)
                    optimizer.step()
        shared.save_state(folder)
        before = [accelerator.scaler.get_scale() for _, _, accelerator, *_ in sets]
        for _, _, accelerator, *_ in sets:
            accelerator.scaler.update(1.0)
        shared.load_state(folder)
        return [*before, *(accelerator.scaler.get_scale() for _, _, accelerator, *_ in sets)]


def test_every_model_has_a_scale_of_its_own_that_is_saved_with_the_accelerators_state(ranks, tmp_path):
    (scales,) = ranks(1).run(_saved, str(tmp_path / "state"))
    assert scales == [SCALE, SCALE / 4] * 2
