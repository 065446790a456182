"""Detection of gradients that were replaced or written to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_, is_not, methodcaller
from weakref import ref

from torch import Tensor
from torch.nn import Parameter

_grad, _version, _call = attrgetter("grad"), attrgetter("_version"), methodcaller("__call__")


class GradVersions:
    """The identities and versions of the parameters' `.grad` at the last call of `record`.

    PyTorch increments the version of a tensor on every write. The native core writes by address, which does
    not change the version. This object does not keep gradients alive.

    Cost: about 0.4 µs per parameter with a gradient and 0.1 µs per parameter without a gradient, per call
    of `record` or `changed`. Nothing is read from the device.
    """

    def __init__(self, params: Sequence[Parameter]) -> None:
        self._params = list(params)

    def record(self) -> list[Tensor]:
        """Record the gradients, and return them."""
        self._indices, grads = self._grads()
        self._refs = list(map(ref, grads))
        self._versions = list(map(_version, grads))
        return grads

    def changed(self) -> list[int]:
        """Return the indices of gradients that have been replaced or written to since `record`."""
        indices, grads = self._grads()
        kept = list(map(_call, self._refs))
        versions = list(map(_version, grads))
        if indices == self._indices and versions == self._versions and all(map(is_, grads, kept)):
            return []
        before = set(zip(self._indices, map(id, kept), self._versions, strict=True))
        now = set(zip(indices, map(id, grads), versions, strict=True))
        return sorted({index for index, *_ in before ^ now})

    def _grads(self) -> tuple[Sequence[int], list[Tensor]]:
        """Return the indices of parameters with a gradient, and the gradients."""
        grads = list(map(_grad, self._params))
        if all(map(is_not, grads, repeat(None))):
            return range(len(grads)), grads
        present = [(index, grad) for index, grad in enumerate(grads) if grad is not None]
        return [index for index, _ in present], [grad for _, grad in present]
