"""The Python side of the CUDA kernels, with host memory as the device: loading, streams, and long lists."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from cuda_cases import EveryOp, on_host
from op_cases import assert_same_bits, make_plan

from pyengine.ops import cuda, native
from pyengine.ops.pointers import gather


class FakeCuda:
    """The part of torch.cuda that cuda.py uses."""

    def __init__(self):
        self.device_index, self.stream, self.events, self.recorded = 0, 7, [], []

    @contextlib.contextmanager
    def device(self, device):
        before, self.device_index = self.device_index, device.index
        yield
        self.device_index = before

    def current_device(self):
        return self.device_index

    def current_stream(self, device=None):
        return f"stream {self.stream}"

    def is_current_stream_capturing(self):
        return False

    def Event(self):
        self.events.append("made")
        return SimpleNamespace(record=self.events.append)


class OnDevice(torch.Tensor):
    """Host memory that pretends to be device memory."""

    def to(self, device):
        return self

    def record_stream(self, stream):
        OnDevice.fake.recorded.append(stream)


class Kernels:
    """The emulated kernels, which record the devices that load them and the streams that upload lists."""

    def __init__(self, kernels, fake):
        self._kernels, self._fake = kernels, fake
        self.loaded_on, self.uploads = [], []

    def __getattr__(self, name):
        return getattr(self._kernels, name)

    def load_kernels(self):
        self.loaded_on.append(self._fake.device_index)
        return self._kernels.load_kernels()

    def uploaded(self, table, address, stream):
        self.uploads.append(stream)
        return self._kernels.uploaded(table, address, stream)


@pytest.fixture
def fake(monkeypatch):
    fake = OnDevice.fake = FakeCuda()
    makers = {name: _maker(make) for name, make in (("empty", torch.empty), ("zeros", torch.zeros))}
    c = SimpleNamespace(_cuda_getCurrentRawStream=lambda index: fake.stream)
    names = {"int64": torch.int64, "uint8": torch.uint8, "device": torch.device}
    monkeypatch.setattr(cuda, "torch", SimpleNamespace(cuda=fake, _C=c, **names, **makers))
    cuda._load_kernels.cache_clear()
    yield fake
    cuda._load_kernels.cache_clear()


@pytest.fixture
def core(kernels, fake, monkeypatch):
    core = Kernels(kernels, fake)
    monkeypatch.setattr(native, "_core", core)
    monkeypatch.setattr(native, "cuda_core", lambda: core)
    return core


def _maker(make):
    return lambda *size, device=None, **options: make(*size, **options).as_subclass(OnDevice)


def _device(index):
    return torch.device("cuda", index)


def _pointers(core, num):
    tensors = [torch.full((1,), float(i)) for i in range(num)]
    table = core.Table([tensor.data_ptr() for tensor in tensors], 0)
    found = gather("tensors", tensors, (1,) * num, None)
    return cuda.Pointers(found.tensors, found.numels, found.dtype, _device(0), table)


def _packed(core, pointers):
    num = len(pointers.numels)
    plan = cuda.CudaPlan(core.BucketPlan(range(num), [1] * num), _device(0))
    flat, scale = torch.zeros(num), torch.tensor(1.0)
    plan.pack_(flat.data_ptr(), 0, pointers.table, scale.data_ptr(), 0)
    return flat


def test_the_first_plan_or_function_on_a_device_loads_the_kernels_there(core):
    core.codec_sum_cuda = lambda *arguments: None
    for index in (1, 0, 1):
        cuda.CudaPlan(core.BucketPlan([0], [1]), _device(index))
    for _ in range(2):
        cuda.run(_device(2), "codec_sum", 3)
    assert core.loaded_on == [1, 0, 2]


def test_plans_of_one_layout_share_their_device_memory(core, monkeypatch):
    class Plan:
        made = 0

        def __init__(self, plan, device):
            Plan.made += 1

    monkeypatch.setattr(cuda, "CudaPlan", Plan)
    layouts = [((0, 4), (3, 2)), ((0, 4), (3, 2)), ((0, 8), (3, 2))]
    on_first = [cuda.plan_on(_device(0), None, layout) for layout in layouts]
    assert on_first[0] is on_first[1] is not on_first[2]
    assert cuda.plan_on(_device(1), None, layouts[0]) not in on_first
    assert Plan.made == 3
    del on_first
    cuda.plan_on(_device(0), None, layouts[0])
    assert Plan.made == 4  # plans that are no longer used have been freed


def test_no_op_launches_a_kernel_that_was_not_loaded_before(kernels, emulated):
    layout = make_plan([5, 0, 40_001])
    ops = EveryOp(emulated, layout)
    kernels.unload()
    with pytest.raises(RuntimeError, match="was not loaded before"):
        ops.run()
    kernels.load_kernels()
    ops.restore()
    ops.run()
    for got, want in zip(ops.results, on_host(layout), strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize(
    ("num", "two_lists", "is_uploaded"),
    [(256, True, False), (257, True, True), (4000, False, False), (4001, False, True)],
)
def test_a_list_for_one_call_is_uploaded_only_where_parameters_cannot_hold_it(
    core, fake, num, two_lists, is_uploaded
):
    pointers = _pointers(core, num)
    found = cuda.for_one_call(pointers, _device(0), two_lists=two_lists)
    assert (found is pointers) != is_uploaded
    assert core.uploads == [7] * is_uploaded and fake.events == []
    assert torch.equal(_packed(core, found), torch.arange(float(num)))


def test_a_list_for_many_calls_is_uploaded_once_and_records_an_event(core, fake):
    pointers = cuda.uploaded(_pointers(core, 257), _device(0))
    assert fake.events == ["made", "stream 7"] and core.uploads == [7]
    assert torch.equal(_packed(core, pointers), torch.arange(257.0))


def test_a_plan_s_memory_is_kept_for_every_stream_once(core, fake):
    plan = cuda.CudaPlan(core.BucketPlan([0], [1]), _device(0))
    x, flat, scale = torch.ones(1), torch.zeros(1), torch.tensor(1.0)
    table = core.Table([x.data_ptr()], 0)
    for stream in (7, 8, 7):
        fake.stream = stream
        plan.pack_(flat.data_ptr(), 0, table, scale.data_ptr(), 0)
    assert fake.recorded == ["stream 7", "stream 8"]
