"""Communication formats (wires): how a bucket is sent over the network and summed."""

from pyengine.comm.base import Comm, Work
from pyengine.wire.base import Wire
from pyengine.wire.cast import BF16, FP16, FP32
from pyengine.wire.encoded import FP8, Int8
from pyengine.wire.error_feedback import ErrorFeedback
from pyengine.wire.from_hook import FromHook
from pyengine.wire.memory import BucketMemory

__all__ = [
    "BF16",
    "FP8",
    "FP16",
    "FP32",
    "BucketMemory",
    "Comm",
    "ErrorFeedback",
    "FromHook",
    "Int8",
    "Wire",
    "Work",
]
