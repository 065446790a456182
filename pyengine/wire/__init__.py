"""Wires: how a bucket crosses the network and is summed there."""

from pyengine.comm.base import Comm, Work
from pyengine.wire.base import Scatters, Wire
from pyengine.wire.cast import BF16, FP16, FP32

__all__ = ["BF16", "FP16", "FP32", "Comm", "Scatters", "Wire", "Work"]
