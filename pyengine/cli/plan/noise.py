"""`plan --from`: what another global batch costs, by the gradient noise scale that a run has measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from pyengine.cli import report
from pyengine.cli.arguments import Conflict
from pyengine.cli.plan.arguments import Settings
from pyengine.cli.report import add_numbers

_NEED = "need a file that pe.telemetry.JsonLines has written in a run with sync.measure(pe.NoiseScale())"
_FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)
_SURE = 1 / 3  # largest spread over scale of a scale that is called known


@dataclass(frozen=True)
class Noise:
    """What a run has measured.

    Attributes:
        scale, spread: B_noise in samples, and its standard error, None after one window.
        windows: windows in the average.
        batch: samples a window of the run, the median.
    """

    scale: float
    spread: float | None
    windows: int
    batch: float

    def steps(self, batch: float, scale: float | None = None) -> float:
        """Return steps over the fewest possible: S / S_min = 1 + B_noise / B."""
        return 1 + (self.scale if scale is None else scale) / batch

    def samples(self, batch: float) -> float:
        """Return samples over the fewest possible: E / E_min = 1 + B / B_noise."""
        return 1 + batch / self.scale

    @property
    def low(self) -> float:
        return max(0.0, self.scale - (self.spread or 0.0))

    @property
    def high(self) -> float:
        return self.scale + (self.spread or 0.0)

    @property
    def is_sure(self) -> bool:
        return self.spread is not None and self.spread <= _SURE * self.scale


def run(settings: Settings, path: Path) -> int:
    noise = read(path)
    batches: Sequence[float] = settings.global_batches or tuple(noise.batch * factor for factor in _FACTORS)
    rows = [row(noise, batch, settings.lr, settings.from_batch or noise.batch) for batch in batches]
    Report(as_json=settings.json).noise(noise, rows)
    return 0


def read(path: Path) -> Noise:
    """Return the last estimate of a file of steps.

    Raises:
        Conflict: the file cannot be read, or has no estimate.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Conflict(f"argument --from: {path} cannot be read ({error}): {_NEED}") from None
    counts, last = [], None
    for line in text.splitlines():
        fields = _fields(line)
        if isinstance(found := fields.get("noise_scale"), dict):
            last = found
            counts.append(float(fields["count"]))
    if last is None:
        raise Conflict(f"argument --from: no line of {path} has a noise_scale: {_NEED}")
    if last["scale"] is None:
        raise Conflict(
            f"argument --from: {path} has no noise scale after {last['windows']} windows: their mean "
            "gradient cannot be distinguished from 0; train on, or with larger windows"
        )
    return Noise(float(last["scale"]), last["spread"], int(last["windows"]), median(counts))


def _fields(line: str) -> dict[str, Any]:
    """Return a line's object; empty for a line that a crash has cut off."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def row(noise: Noise, batch: float, lr: float, from_batch: float) -> dict[str, float]:
    """Return what a global batch costs: `steps` and `samples` to the same loss are over the run's."""
    steps = [noise.steps(batch, scale) / noise.steps(noise.batch, scale) for scale in (noise.low, noise.high)]
    return {
        "global_batch": batch,
        "steps": noise.steps(batch) / noise.steps(noise.batch),
        # Where the scale is a spread smaller or larger.
        "steps_low": min(steps),
        "steps_high": max(steps),
        "samples": noise.samples(batch) / noise.samples(noise.batch),
        # The learning rate whose share of the largest useful one is 1 / (1 + B_noise / B).
        "lr_noise": lr * noise.steps(from_batch) / noise.steps(batch),
        "lr_linear": lr * batch / from_batch,
        "lr_sqrt": lr * (batch / from_batch) ** 0.5,
    }


class Report(report.Report):
    def noise(self, noise: Noise, rows: Sequence[dict[str, float]]) -> None:
        """The noise scale was read; `rows` are of other global batches."""
        self._emit("noise", **asdict(noise), is_sure=noise.is_sure)
        caption = f"steps, samples: to the same loss, over those at {noise.batch:,.0f}"
        table = Table(caption=caption, caption_justify="left")
        names = ["global\nbatch", "steps", "its spread", "samples", "lr\nnoise", "lr\nlinear", "lr\nsqrt"]
        add_numbers(table, names)
        for each in rows:
            self._emit("batch", **each)
            lrs = (f"{each[name]:.4g}" for name in ("lr_noise", "lr_linear", "lr_sqrt"))
            times, more = f"{each['steps']:.2f} ×", f"{each['samples']:.2f} ×"
            spread = f"{each['steps_low']:.2f}–{each['steps_high']:.2f}"
            table.add_row(f"{each['global_batch']:,.0f}", times, spread, more, *lrs)
        self._print(table, sentences(noise))


def sentences(noise: Noise) -> list[str]:
    """Return what the noise scale suggests, and how sure that is."""
    spread = "" if noise.spread is None else f" ± {noise.spread:,.0f}"
    found = [
        (
            f"Noise scale: {noise.scale:,.0f}{spread} samples, as `count` counts them, of {noise.windows} "
            f"windows. A batch of that size takes 2 × the fewest possible steps and 2 × the fewest possible "
            f"samples. This run's batch of {noise.batch:,.0f} takes {noise.steps(noise.batch):.2f} × and "
            f"{noise.samples(noise.batch):.2f} ×."
        )
    ]
    if not noise.is_sure:
        found.append(
            "Not sure: the spread is more than a third of the scale, or not known. Train on, or with more "
            "ranks or micro-batches."
        )
    elif noise.batch < noise.low:
        found.append(f"A larger batch pays, up to about {noise.scale:,.0f}: fewer steps, few more samples.")
    elif noise.batch > noise.high:
        found.append(
            f"A smaller batch pays, down to about {noise.scale:,.0f}: fewer samples, few more steps."
        )
    else:
        found.append("The batch is right, within the spread.")
    found.append("The scale grows while the loss falls: measure again later.")
    return found
