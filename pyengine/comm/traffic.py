"""What a transport has sent so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Traffic:
    """Counters of one transport.

    Attributes:
        collectives: collectives launched.
        bytes_sent: bytes that this rank sends for them, by the ring's formula.
    """

    collectives: int = 0
    bytes_sent: int = 0
