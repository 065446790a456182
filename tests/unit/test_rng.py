"""Random streams that depend on what is computed: derivation, coverage, restoration, workers."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ranks import on_ranks
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import pyengine as pe
from pyengine.data.rng import derive, rng_problem, rng_refusal, rng_states

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"

GENERATORS = ("random", "numpy", "torch", "accelerator", "xla")


def plain(states: dict[str, Any]) -> dict[str, Any]:
    """Return states of generators as values that can be compared with `==`."""
    return {name: s.tolist() if isinstance(s, torch.Tensor) else s for name, s in states.items()}


def draws() -> tuple[float, ...]:
    """Draw from every global stream of the host, including normals, of which generators keep a spare."""
    host = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]
    return (*host, torch.rand(()).item(), torch.randn(()).item())


def micro_batch(step: int = 7, index: int = 3) -> tuple[float, ...]:
    with pe.micro_batch_rng(42, step=step, index=index):
        return draws()


@pytest.fixture
def device_generator(monkeypatch):
    """Pretend that a CUDA device is current and initialised."""
    generator = torch.Generator().manual_seed(1)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(torch.cuda, "default_generators", (None, generator))
    return generator


@pytest.fixture
def xla(monkeypatch):
    """Pretend that torch_xla has been imported: its state is an int."""
    model = SimpleNamespace(state=0)
    model.get_rng_state = lambda: model.state
    model.set_rng_state = lambda state: setattr(model, "state", state)
    monkeypatch.setitem(sys.modules, "torch_xla", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torch_xla.core.xla_model", model)
    return model


# --- Derivation ---


@pytest.mark.parametrize(
    ("key", "want"),
    [
        ((0, 0, 0), 0x817B4A4837C4037E672A09637A346B65),
        ((2**64 - 1, 123456, 11), 0x426F3C6E975AEE8F4FACFF1AEBE8B814),
    ],
)
def test_derived_numbers_never_change(key, want):
    assert derive("micro_batch", "torch", *key) == want


def test_every_key_generator_and_purpose_has_numbers_of_its_own():
    grid = ((seed, step, index) for seed in (0, 1) for step in range(5_000) for index in range(10))
    assert len({derive("micro_batch", "torch", *key) % 2**64 for key in grid}) == 100_000
    purposes = ("micro_batch", "sample", "worker", "epoch", "rank")
    assert len({derive(purpose, name, 1, 2, 3) for purpose in purposes for name in GENERATORS}) == 25


# --- seed_everything ---


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_seed_everything_equals_the_plain_calls(seed):
    assert pe.seed_everything(seed) == seed
    got = draws()
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    assert got == draws()


@pytest.mark.parametrize("seed", [2**32, 2**64 - 1])
def test_a_long_seed_does_not_give_numpy_the_stream_of_python(seed):
    pe.seed_everything(seed)
    got = draws()
    pe.seed_everything(np.uint64(seed))
    assert got == draws() and got[0] != got[2]


@pytest.fixture
def deterministic(monkeypatch):
    """Reset what `seed_everything(deterministic=True)` changes, as in a new process; restore it later."""
    monkeypatch.delenv(CUBLAS, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_algorithms_are_deterministic_only_on_request(recwarn):
    pe.seed_everything(1)
    assert not torch.are_deterministic_algorithms_enabled() and CUBLAS not in os.environ
    pe.seed_everything(1, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
    assert os.environ[CUBLAS] == ":4096:8" and len(recwarn) == 0


@pytest.mark.usefixtures("deterministic")
def test_a_cublas_that_may_have_started_is_named_unless_it_was_set(monkeypatch, recwarn):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.warns(RuntimeWarning, match="CUDA has been initialised.*before the first use of CUDA"):
        pe.seed_everything(1, deterministic=True)
    monkeypatch.setenv(CUBLAS, ":16:8")
    pe.seed_everything(1, deterministic=True)
    assert os.environ[CUBLAS] == ":16:8" and len(recwarn) == 0


@pytest.mark.parametrize("kind", ["fp32", "exact"])
@on_ranks(2)
def test_an_engine_trains_with_deterministic_algorithms(kind):
    pe.seed_everything(3, deterministic=True)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(8, 1))
    sync = pe.GradSync(model, accumulate=2, accumulator=kind)
    optimizer = torch.optim.AdamW(model.parameters())
    for window in sync.windows(torch.randn(4, 3, 1, 4, 4)):
        for x in window:
            sync.backward(model(x).sum(), count=len(x))
        sync.step(optimizer, max_norm=1.0)
    torch.use_deterministic_algorithms(False)
    assert torch.cat([param.detach().flatten() for param in model.parameters()]).isfinite().all()


@pytest.mark.parametrize("seed_all", [pe.seed_everything, pe.seed_rank])
def test_every_cuda_device_is_seeded(monkeypatch, seed_all):
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    seed_all(5)
    assert seeds == [torch.initial_seed()]


@pytest.mark.slow
def test_seeding_imports_no_torch_xla_and_initialises_no_device(tmp_path):
    (tmp_path / "torch_xla").mkdir()
    (tmp_path / "torch_xla" / "__init__.py").write_text("raise SystemExit('imported')")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import torch, pyengine as pe;"
        "pe.seed_everything(1); pe.seed_rank(1); context = pe.micro_batch_rng(1, step=0, index=0);"
        "context.__enter__(); context.__exit__(None, None, None);"
        "print('torch_xla' in sys.modules, torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False False"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: pe.seed_everything(1.0), TypeError, "seed=1.0 is a float: expected a whole number"),
        (lambda: pe.seed_rank(True), TypeError, "seed=True is a bool: expected a whole number"),
        (lambda: pe.seed_everything(-1), ValueError, rf"seed=-1: expected .* 2\*\*64 it is {2**64 - 1}$"),
        (lambda: pe.seed_everything(2**64), ValueError, rf"seed={2**64}: expected .* 2\*\*64 it is 0$"),
        (lambda: micro_batch(step=-1), ValueError, "step=-1"),
        (lambda: micro_batch(index=-1), ValueError, "index=-1"),
    ],
)
def test_a_bad_seed_or_key_is_named_before_anything_is_touched(call, error, message):
    before = plain(rng_states())
    with pytest.raises(error, match=f"^{message}"):
        call()
    assert plain(rng_states()) == before


# --- seed_rank ---


def of_rank(monkeypatch, rank: int, seed: int = 42) -> tuple[float, ...]:
    monkeypatch.setattr("pyengine.data.rng.rank_and_world_size", lambda: (rank, 4))
    pe.seed_rank(seed)
    return draws()


def test_every_rank_and_seed_draws_differently_from_every_generator_and_repeats_itself(monkeypatch):
    pe.seed_rank(42)
    alone = draws()
    found = [of_rank(monkeypatch, rank, seed) for seed in (42, 43, 2**64 - 1) for rank in range(4)]
    assert len({value for one in found for value in one}) == 12 * len(found[0])
    assert of_rank(monkeypatch, 2) == found[2]
    assert alone == found[0]


def test_xla_is_seeded_if_it_is_there_and_has_a_stream_of_its_own_in_a_micro_batch(xla, monkeypatch):
    pe.seed_everything(5)
    assert xla.state == 5
    with pe.micro_batch_rng(42, step=7, index=3):
        assert xla.state == derive("micro_batch", "xla", 42, 7, 3) % 2**64
    assert xla.state == 5
    of_rank(monkeypatch, 3)
    assert xla.state == derive("rank", "xla", 42, 3) % 2**64


# --- micro_batch_rng ---


def test_every_micro_batch_draws_differently_whatever_was_drawn_before():
    first = {(step, index): micro_batch(step, index) for step in range(5) for index in range(4)}
    assert len(set(first.values())) == 20
    assert micro_batch(4, 2) == first[4, 2]


@pytest.mark.parametrize("fails", [False, True])
def test_the_previous_streams_go_on(fails):
    pe.seed_everything(3)
    want = [draws(), draws()]
    pe.seed_everything(3)
    got = [draws()]
    try:
        with pe.micro_batch_rng(42, step=0, index=0):
            draws()
            random.gauss(0, 1), np.random.randn(), torch.randn(())
            assert not fails
    except AssertionError:
        assert fails
    assert [*got, draws()] == want


def test_nested_micro_batches_do_not_disturb_each_other():
    with pe.micro_batch_rng(42, step=7, index=3):
        first = draws()
        inner = micro_batch(index=4)
        second = draws()
    assert inner == micro_batch(index=4)
    with pe.micro_batch_rng(42, step=7, index=3):
        assert (draws(), draws()) == (first, second)


def test_the_current_device_has_a_stream_of_its_own_and_gets_the_old_one_back(device_generator):
    want = torch.rand(4, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        with pe.micro_batch_rng(42, step=7, index=3):
            assert device_generator.initial_seed() == derive("micro_batch", "accelerator", 42, 7, 3) % 2**64
            assert device_generator.initial_seed() != torch.default_generator.initial_seed()
            torch.rand(2, generator=device_generator)
    assert torch.equal(torch.rand(4, generator=device_generator), want)


def _dropout_grads(indices: range, *, recomputes: bool = False) -> list[torch.Tensor]:
    """Return the gradient of every micro-batch of a rank: its dropout mask."""
    found = []
    for index in indices:
        x = torch.ones(64, requires_grad=True)
        with pe.micro_batch_rng(42, step=0, index=index):
            y = checkpoint(dropout, x, 0.5, use_reentrant=False) if recomputes else dropout(x, 0.5)
            dropout(y, 0.5).sum().backward()
        found.append(x.grad)
    return found


@pytest.mark.parametrize("recomputes", [False, True])
def test_masks_are_the_same_on_whichever_rank(recomputes):
    got, world = [], 3
    for rank in range(world):
        torch.manual_seed(rank)
        got += _dropout_grads(range(rank * 12 // world, (rank + 1) * 12 // world), recomputes=recomputes)
    assert torch.equal(torch.stack(got), torch.stack(_dropout_grads(range(12))))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_draws_alike_and_gets_the_old_stream_back():
    torch.cuda.manual_seed(3)
    want = torch.rand(8, device="cuda")
    torch.cuda.manual_seed(3)
    masks = []
    for _ in range(2):
        with pe.micro_batch_rng(42, step=7, index=3):
            masks.append(dropout(torch.ones(1000, device="cuda"), 0.5))
    assert torch.equal(*masks) and torch.equal(torch.rand(8, device="cuda"), want)


# --- Samples and workers ---


class Noisy(Dataset):
    """Samples of noise, each with its own stream."""

    def __init__(self, seed: int) -> None:
        self.seed, self.epoch = seed, torch.zeros((), dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        with pe.sample_rng(self.seed, epoch=int(self.epoch), index=index):
            return torch.tensor(draws())


class Raw(Noisy):
    """Samples of noise from the worker's streams."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(draws())


def test_samples_do_not_depend_on_the_worker_and_change_with_the_epoch():
    data = Noisy(42)
    loader = DataLoader(data, batch_size=3, num_workers=2, persistent_workers=True)
    epochs = []
    for epoch in range(2):
        data.epoch.fill_(epoch)
        epochs.append(torch.cat(list(loader)))
        assert torch.equal(epochs[-1], torch.stack([data[i] for i in range(12)]))
    assert torch.cat(epochs).unique(dim=0).shape[0] == 24


def test_workers_epochs_and_ranks_draw_differently_and_a_run_repeats_itself():
    def run(init) -> torch.Tensor:
        pe.seed_everything(42)
        loader = DataLoader(Raw(42), batch_size=3, num_workers=2, worker_init_fn=init)
        return torch.cat([batch for _ in range(2) for batch in loader])

    init = pickle.loads(pickle.dumps(pe.worker_init(42)))
    first = run(init)
    other_rank = run(type(init)(init.func, 42, 1))
    assert torch.equal(first, run(init))
    assert torch.cat([first, other_rank]).unique(dim=0).shape[0] == 48


# --- Restored states ---


@pytest.mark.parametrize("name", ["random", "numpy", "torch"])
def test_a_state_that_a_generator_does_not_take_leaves_all_of_them_as_they_are(name):
    pe.seed_everything(3)
    good = rng_states()
    pe.seed_everything(4)
    before = plain(rng_states())
    short = {
        "random": (3, (1, 2), None),
        "numpy": ["MT19937", [1, 2], 0, 0, 0.0],
        "torch": torch.zeros(3, dtype=torch.uint8),
    }
    assert f"rng[{name!r}]" in rng_refusal({**good, name: short[name]})
    assert rng_refusal(good) == ""
    assert plain(rng_states()) == before


def _twister(state: Any, at: int, *, left: int | None = None) -> Any:
    """Return torch's state at a different position."""
    spoilt = state.clone()
    spoilt[16:24] = torch.tensor([at]).view(torch.uint8)
    if left is not None:
        spoilt[8:12] = torch.tensor([left], dtype=torch.int32).view(torch.uint8)
    return spoilt


def _with(state: Any, place: int, value: Any) -> Any:
    """Return a state of numpy or Python with one field replaced."""
    return type(state)([*state[:place], value, *state[place + 1 :]])


# Current libraries accept all of these states; their generators then read beyond their words, or draw wrong
# numbers.
SPOILT = {
    "numpy beyond": ("numpy", lambda state: _with(state, 2, 10**6)),
    "numpy before": ("numpy", lambda state: _with(state, 2, -5)),
    "numpy at a half": ("numpy", lambda state: _with(state, 2, 2.5)),
    "numpy with a bool": ("numpy", lambda state: _with(state, 3, True)),
    "numpy longer": ("numpy", lambda state: _with(state, 1, [*state[1], 1])),
    "numpy of halves": ("numpy", lambda state: _with(state, 1, [1.5] * 624)),
    "numpy of zeros": ("numpy", lambda state: _with(state, 1, [0] * 624)),
    "torch beyond": ("torch", lambda state: _twister(state, 624, left=624)),
    "torch near the end": ("torch", lambda state: _twister(state, 2, left=624)),
    "torch far beyond": ("torch", lambda state: _twister(state, 2**32, left=1)),
    "Python with a word": ("random", lambda state: _with(state, 2, "x")),
    "Python of large words": ("random", lambda state: _with(state, 1, (*[2**40] * 624, 624))),
    "Python of zeros": ("random", lambda state: _with(state, 1, (*[0] * 624, 624))),
}


@pytest.mark.parametrize("case", SPOILT)
def test_a_state_from_which_a_generator_would_draw_something_else_is_refused(case):
    name, spoil = SPOILT[case]
    good = rng_states()
    assert rng_problem(good) == ""
    assert f"rng[{name!r}], which is not a state" in rng_problem({**good, name: spoil(good[name])})


def test_every_state_that_a_generator_has_is_one():
    pe.seed_everything(5)
    for number in range(630):
        assert rng_problem(rng_states()) == ""
        torch.rand(1)
        if number % 100 == 0:
            draws()
            torch.zeros(1, dtype=torch.float64).normal_()
