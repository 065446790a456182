"""The lines of a study's file as they come back: whether one is a run, before anything counts on it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from pyengine.cli.terminal import read_json

_Test = Callable[[Any], bool]


def parse(line: bytes) -> dict[str, Any]:
    """Return the object of a line.

    Raises:
        ValueError: it is none, for the reason given.
    """
    found = read_json(line)
    if not isinstance(found, dict):
        raise ValueError(f"a {type(found).__name__}, not an object")  # noqa: TRY004 - of a file
    return found


def check_run(line: dict[str, Any]) -> None:
    """Raise ValueError if a line does not say of a run what all lines say."""
    fields = line.keys() - {"event"}
    if line.get("event") != "run" or fields != _FIELDS.keys():
        parts = sorted(fields ^ _FIELDS.keys()) or ["event"]
        raise ValueError(f"not a run: look at {', '.join(map(repr, parts[:3]))}")
    for name, is_right in _FIELDS.items():
        if not is_right(line[name]):
            raise ValueError(f"{name!r} is {str(line[name])[:40]}")
    if line["status"] == "done":
        _check_lengths(line)


def _check_lengths(line: dict[str, Any]) -> None:
    for names, number in (
        (("seconds", "sync_s", "losses"), line["steps"]),
        (("cpu_share", "peak_rss_bytes"), line["workers"]),
    ):
        for name in names:
            if len(line[name]) != number:
                raise ValueError(f"{name!r} has {len(line[name])} entries, {number} would be right")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_count(value: Any) -> bool:
    return _is_whole(value) and value > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_time(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _is_optional(value: Any) -> bool:
    return value is None or _is_number(value)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and _is_whole(value[0]) and _is_optional(value[1])


def _list_of(is_right: _Test) -> _Test:
    return lambda value: isinstance(value, list) and all(map(is_right, value))


_FIELDS: dict[str, _Test] = {
    "workers": _is_count,
    "batch": _is_count,
    "repeat": _is_whole,
    "status": lambda value: value in ("done", "failed", "stalled", "timed out"),
    "reason": lambda value: isinstance(value, str),
    "steps": _is_whole,
    "global_batch": _is_count,
    "micro_batch": _is_count,
    "accumulate": _is_count,
    "wall_s": _is_time,
    "busy": _is_number,
    "seconds": _list_of(_is_time),
    "sync_s": _list_of(_is_time),
    "losses": _list_of(_is_optional),
    "accuracy": _list_of(_is_pair),
    "cpu_share": _list_of(_is_number),
    "peak_rss_bytes": _list_of(_is_whole),
    "bytes_on_wire": _is_whole,
}
