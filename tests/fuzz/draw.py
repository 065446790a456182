"""Choices drawn from bytes: every input is a case, and a small change of an input changes its case little."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")

# Around the limits of int32, int64 and the ops.
LARGE = (2**24, 2**31 - 1, 2**31, 2**40, 2**40 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 2**70)


class Draw:
    """Draws choices from bytes; zeros follow the last byte, so that short inputs are simple cases."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def below(self, end: int) -> int:
        """Return a number from 0 to end - 1."""
        value = self.byte()
        for _ in range((end - 1).bit_length() > 8 and (end - 1).bit_length() // 8):
            value = value << 8 | self.byte()
        return value % end

    def pick(self, items: Sequence[Item]) -> Item:
        """Return one of `items`; the first one if no bytes are left."""
        return items[self.below(len(items))]

    def once_in(self, times: int) -> bool:
        """Return True in one of `times` cases; False if no bytes are left."""
        return self.byte() % times == times - 1

    def large(self) -> int:
        """Return a number of either sign that may be too large for an integer type or an op."""
        return self.pick(LARGE) * self.pick((1, -1))

    def rest(self) -> bytes:
        rest, self._at = self._data[self._at :], len(self._data)
        return rest
