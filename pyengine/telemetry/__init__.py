"""Listeners for the records of steps: `sync.on_step(JsonLines("steps.jsonl"))`.

`telemetry.tensorboard` needs tensorboard.
"""

from pyengine.telemetry.base import Listener, numbers
from pyengine.telemetry.jsonl import JsonLines
from pyengine.telemetry.profile import chrome_trace
from pyengine.telemetry.wandb import Wandb

__all__ = ["JsonLines", "Listener", "Wandb", "chrome_trace", "numbers"]
