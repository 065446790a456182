"""A file from an unknown writer holds tensors and plain values, or is refused with the reason."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import pytest
import torch
from torch import Tensor

from pyengine.checkpoint.checksum import checksum
from pyengine.checkpoint.loading import check_loads, check_tensors, load


def _file(value: Any, **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file, **options)
    file.seek(0)
    return file


def _sparse(shape: list[int], index: list[int]) -> Tensor:
    """Return a sparse tensor of one element, wherever its index is, as `torch.load` makes it."""
    indices, values = torch.tensor(index)[:, None], torch.ones(1)
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)


@pytest.mark.parametrize("index", [[3], [-1], [2**40]])
def test_a_sparse_tensor_with_an_index_outside_of_its_shape_is_refused(index):
    outside = _sparse([3], index)
    with pytest.raises(ValueError, match=r"state\['a'\]\[1\] is a sparse tensor of shape \[3\] with indices"):
        load(_file({"a": [torch.ones(1), outside]}))
    with pytest.raises(TypeError, match=r"a sparse tensor of shape \[3\] with indices outside"):
        checksum(outside)


def test_a_sparse_tensor_with_indices_inside_of_its_shape_loads_whatever_the_default_device():
    file = _file(_sparse([3, 4], [2, 3]))
    with torch.device("meta"):
        assert load(file).to_dense()[2, 3] == 1
    assert load(_file(torch.zeros(3, 0).to_sparse())).shape == (3, 0)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (
            lambda: _file(torch.eye(3).to_sparse_csr()),
            "of layout torch.sparse_csr: save it as",
        ),
        (
            lambda: _file(torch.eye(3).to_sparse_csc()),
            "of layout torch.sparse_csc: save it as",
        ),
        (lambda: _file(torch.ones(3), _use_new_zipfile_serialization=False), "not what torch.save writes"),
    ],
)
def test_another_layout_or_format_is_refused(file, message):
    with pytest.raises(ValueError, match=message):
        load(file())


def test_a_file_that_holds_more_than_its_bytes_is_refused():
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(_file(torch.zeros(10**5))) as stored,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as deflated,
    ):
        for name in stored.namelist():
            deflated.writestr(name, stored.read(name))
    packed.seek(0)
    with pytest.raises(ValueError, match=r"holds 4\d+ bytes in \d+: torch.save compresses nothing"):
        load(packed)


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3),
        torch.eye(2).to_sparse(),
        torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8),
        torch.ones(1).expand(5),
        torch.nn.Linear(2, 2).state_dict(),
        {"a": [1, 2.0, None, True, "x", b"x", 1j, (torch.float32, torch.Size([1]))]},
    ],
    ids=["dense", "sparse", "quantized", "expanded", "a module's", "plain values"],
)
def test_what_was_checked_when_it_was_saved_loads(value):
    check_tensors(value)
    check_loads(_file(value))
    load(_file(value))


# What a checksum reads.


def _nested(depth: int) -> Any:
    return [_nested(depth - 1)] * 2 if depth else [1.0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(1).expand(10**12), "elements that share memory"),
        (torch.zeros(9).as_strided((5, 5), (1, 1)), "elements that share memory"),
        (_sparse([10**6, 10**6], [0, 0]), "is larger than any parameter here"),
        (torch.nested.nested_tensor([torch.ones(2)]), "quantized or nested"),
        (_nested(60), "is in it twice"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_take_more_memory_or_time_than_it_has_is_refused(value, message):
    with pytest.raises(TypeError, match=message):
        checksum([value], largest=10)


def test_equal_lists_and_tensors_without_elements_are_summed_up():
    assert checksum([[1.0], [1.0], (), ()]) == checksum([(1.0,), (1.0,), [], []])
    checksum([torch.zeros(0), torch.zeros(0, 0), torch.zeros(3)[:0]])
