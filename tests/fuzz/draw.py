"""Choices out of bytes: every input is a case, and a small change of one is a small change of the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")

# Around what int32, int64 and the ops' own limits can hold.
LARGE = (2**24, 2**31 - 1, 2**31, 2**40, 2**40 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 2**70)


class Draw:
    """Draws choices from bytes; behind their end come zeros, so that short inputs are plain cases."""

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
        """Return one of some items; the first one where the bytes are at their end."""
        return items[self.below(len(items))]

    def once_in(self, times: int) -> bool:
        """Return True in one of so many cases; False where the bytes are at their end."""
        return self.byte() % times == times - 1

    def large(self) -> int:
        """Return a number that does not fit everywhere, of either sign."""
        return self.pick(LARGE) * self.pick((1, -1))

    def rest(self) -> bytes:
        rest, self._at = self._data[self._at :], len(self._data)
        return rest
