"""Accelerate's FSDP2 plugin with windows, compared with one float64 process: training, clipping, checkpoints.

Accelerate ignores the plugin on a CPU, but its FSDP2 code runs on gloo unchanged. `sharding` therefore sets
Accelerate's state as if the ranks had GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from test_accelerate_windows import accelerated
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset
from twin import LR, MOMENTUM, Net, Twin, decay, loss_of, weights_of
from worlds import items, refusal

pytestmark = pytest.mark.slow
pytest.importorskip("accelerate", reason="needs pyengine[adapters]")

from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from pyengine.adapters.accelerate import prepare

ACCUMULATE = 3


@contextmanager
def sharding() -> Iterator[None]:
    """Set Accelerate's state so that it shards models, although the ranks are on the CPU."""
    with accelerated():
        PartialState(cpu=True)
        tell_accelerate()
        yield


def tell_accelerate() -> None:
    """Set Accelerate's distributed type as if these ranks had GPUs."""
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def plugin(**options: Any) -> FullyShardedDataParallelPlugin:
    """Return a plugin that makes every `Block` an FSDP unit."""
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        **options,
    )


def _prepared(num: int, **options: Any) -> tuple:
    """Return an accelerator and the model, optimizer, loader and scheduler that it prepared."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=plugin(**options.pop("fsdp", {})),
        mixed_precision=options.pop("mixed_precision", None),
        parallelism_config=options.pop("parallelism_config", None),
    )
    data = DataLoader(TensorDataset(items(num)), batch_size=2)
    return prepare(accelerator, net, optimizer, data, scheduler, accumulate=ACCUMULATE, **options)


def _epoch(prepared: Sequence[Any], *, clip: str = "", broken: int = -1, kept: bool = False) -> tuple:
    """Train as in Accelerate's guide; return this rank's micro-batches and the norms before clipping.

    `kept` drops items so that counts differ; `broken` is a micro-batch whose loss is nan on the last rank.
    """
    accelerator, model, optimizer, loader, scheduler = prepared
    seen, norms = [], []
    for index, (x,) in enumerate(loader):
        x = x[: 1 + (index + accelerator.process_index) % 2] if kept else x
        seen.append(x)
        is_broken = index == broken and accelerator.is_last_process
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, x) * (math.nan if is_broken else 1.0), count=len(x))
            if accelerator.sync_gradients and clip == "value":
                accelerator.clip_grad_value_(model.parameters(), 0.25)
            elif accelerator.sync_gradients and clip:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5, norm_type=float(clip)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return seen, norms


def _trained(num: int, loop: dict[str, Any], options: dict[str, Any]) -> tuple:
    with sharding():
        prepared = _prepared(num, **options)
        records: list[Any] = []
        prepared[0].sync.on_step(records.append)
        seen, norms = _epoch(prepared, **loop)
        return seen, norms, weights_of(prepared[1]), records, prepared[4].get_last_lr()


def _check(answers: list, *, kept: bool = False, **loop: Any) -> None:
    del kept  # the answers contain only the kept items
    twin = Twin(len(answers))
    norms = twin.train([seen for seen, *_ in answers], ACCUMULATE, **loop)
    for _, mine, weights, _, lr in answers:
        torch.testing.assert_close([norm.double() for norm in mine], norms, rtol=1e-5, atol=0)
        twin.check(weights)
        assert lr == twin.scheduler.get_last_lr()


@pytest.mark.parametrize(
    "loop", [{"kept": True}, {"clip": "2"}, {"clip": "inf"}, {"clip": "1"}, {"clip": "value"}], ids=str
)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_window_steps_as_one_process_over_its_own_items(ranks, world, loop):
    answers = ranks(world).run(_trained, 2 * world * 5, loop, {})  # the last window is short
    _check(answers, **loop)


@pytest.mark.exhaustive
def test_a_hybrid_mesh_steps_alike(ranks):
    _check(ranks(4).run(_hybrid), clip="2")


def _hybrid() -> tuple:
    mesh = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    return _trained(2 * 4 * 5, {"clip": "2"}, {"parallelism_config": mesh})


NARROW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
MIXED = [
    {"fsdp": {"mixed_precision_policy": NARROW}, "mixed_precision": "bf16"},
    {"mixed_precision": "bf16", "accumulator": "native", "wire": torch.bfloat16},
    {"wire": torch.bfloat16},
]


@pytest.mark.parametrize("options", MIXED, ids=["fp32 sums", "bf16 sums", "bf16 wire"])
def test_bf16_stays_near_the_right_parameters(ranks, options):
    answers = ranks(2).run(_trained, 2 * 2 * 5, {}, options)
    twin = Twin(2)
    twin.train([seen for seen, *_ in answers], ACCUMULATE)
    twin.check(answers[0][2], rtol=2**-4, atol=2**-4)  # 8-bit mantissas through two layers and two steps


@pytest.mark.parametrize("broken", [0, 4])
def test_a_window_that_is_not_finite_on_one_rank_is_stepped_on_none(ranks, broken):
    answers = ranks(2).run(_trained, 2 * 2 * 5, {"broken": broken}, {})
    _check(answers, broken=broken)
    for *_, records, _ in answers:
        assert [record.skipped for record in records] == [broken < ACCUMULATE, broken >= ACCUMULATE]


def _raised(num: int) -> tuple:
    """Leave the first window by an exception on every rank, then train one epoch."""
    with sharding():
        prepared = _prepared(num)
        accelerator, model, _, data, scheduler = prepared
        (x,) = next(iter(data))
        with pytest.raises(ArithmeticError), accelerator.accumulate(model):
            accelerator.backward(loss_of(model, x), count=len(x))
            raise ArithmeticError
        seen, norms = _epoch(prepared)
        return seen, norms, weights_of(model), [], scheduler.get_last_lr()


def test_a_window_left_by_an_exception_leaves_nothing_behind(ranks):
    _check(ranks(2).run(_raised, 2 * 2 * 4))


@pytest.mark.parametrize("state_dict_type", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_training_goes_on_from_what_the_accelerator_has_saved(ranks, tmp_path, state_dict_type):
    answers = ranks(2).run(_resumed, str(tmp_path / "state"), state_dict_type)
    for gone_on, undisturbed in answers:
        torch.testing.assert_close(gone_on, undisturbed, rtol=0, atol=0)


def _resumed(folder: str, state_dict_type: str) -> tuple:
    """Train two epochs; load the first epoch's checkpoint into new objects and repeat the second epoch."""
    options = {"fsdp": {"state_dict_type": state_dict_type}}
    with sharding():
        prepared = _prepared(2 * 2 * 5, **options)
        _epoch(prepared)
        prepared[0].save_state(folder)
        _epoch(prepared)
        undisturbed = weights_of(prepared[1])
        prepared[0].sync.close()
    with sharding():
        prepared = _prepared(2 * 2 * 5, **options)
        prepared[0].load_state(folder)
        _epoch(prepared)
        return weights_of(prepared[1]), undisturbed


def _resized(sizes: list[int]) -> tuple:
    with sharding():
        prepared = _prepared(2 * 2 * 5)
        epochs = []
        for size in sizes:
            prepared[0].gradient_accumulation_steps = size
            epochs.append(_epoch(prepared)[0])
        return epochs, weights_of(prepared[1])


def test_gradient_accumulation_steps_can_be_set_between_windows(ranks):
    sizes = [1, 4, 2]
    answers = ranks(2).run(_resized, sizes)
    twin = Twin(2)
    for size, by_rank in zip(sizes, zip(*(epochs for epochs, _ in answers), strict=True), strict=True):
        twin.train(by_rank, size)
    twin.check(answers[0][1])


def test_the_budget_of_attach_buys_collectives(ranks):
    plain, bought = (
        ranks(2).run(_trained, 2 * 2 * 3, {}, options)
        for options in ({"defer": "none"}, {"defer_budget_mb": math.inf})
    )
    _check(plain)
    _check(bought)
    sent = [answers[0][3][0].collectives for answers in (plain, bought)]
    assert sent[0] >= 2 * sent[1]


def _refusal(case: str) -> str:
    with sharding():
        net = Net()
        message = refusal(lambda: _REFUSED[case](net))
        assert not any(isinstance(param, DTensor) for param in net.parameters())
        return message


def _refuses(make_plugin=plugin, sizes: dict[str, int] | None = None, mixed_precision=None, **options: Any):
    def refuse(net):
        config = ParallelismConfig(**sizes) if sizes else None
        accelerator = Accelerator(
            cpu=True, fsdp_plugin=make_plugin(), parallelism_config=config, mixed_precision=mixed_precision
        )
        prepare(accelerator, net, torch.optim.SGD(net.parameters()), accumulate=2, **options)

    return refuse


_REFUSED = {
    "has fsdp_version=1, but FSDP1 reduces gradients itself": _refuses(
        lambda: FullyShardedDataParallelPlugin(fsdp_version=1)
    ),
    "has cpu_offload, but gradients must be on": _refuses(lambda: plugin(cpu_offload=True)),
    "sums gradients in torch.bfloat16": _refuses(mixed_precision="bf16"),
    "with a narrower dtype; pass wire=torch.bfloat": _refuses(mixed_precision="bf16", accumulator="native"),
    "has cp_size=2, so several ranks share each batch": _refuses(sizes={"dp_shard_size": 2, "cp_size": 2}),
    "has tp_size=2, so several ranks share each batch": _refuses(sizes={"dp_shard_size": 2, "tp_size": 2}),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name_before_the_model_is_sharded(ranks, case):
    for message in ranks(4 if "_size" in case else 2).run(_refusal, case):
        assert case in message


def _on_ddp() -> str:
    with accelerated():
        return refusal(lambda: prepare(Accelerator(cpu=True), Net(), accumulate=2, defer_budget_mb=1))


def test_a_budget_for_a_model_that_is_not_sharded_is_refused(ranks):
    assert "both arguments are for models sharded by FSDP2" in ranks(2).run(_on_ddp)[0]
