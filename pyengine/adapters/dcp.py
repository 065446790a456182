"""torch.distributed.checkpoint: load an engine that another number of ranks has saved."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import Any

from torch.distributed.checkpoint import DefaultLoadPlanner, Metadata
from torch.distributed.checkpoint.planner import ReadItem

from pyengine.checkpoint.loading import load

_PART = re.compile(r"rank \d+ of \d+")


class LoadPlanner(DefaultLoadPlanner):
    """DCP's own planner, which also loads an engine saved by another number of ranks.

    On the same number of ranks every rank reads its own entry, as with DCP's planner. On another number every
    rank reads the entries of all ranks. Of an open window `sync.load_state_dict` then divides the sums and
    the remaining micro-batches among the ranks, with accumulator="exact"; it refuses other sums of an open
    window, on every rank. The arguments are those of `DefaultLoadPlanner`.

    Entries other than tensors are read as data. They are refused if they have anything but tensors and plain
    values; DCP's own planner would unpickle them. DCP's file `.metadata` is a pickle, which DCP reads before
    it calls a planner: load only folders of people whose code you would run.

    Cost: on another number of ranks every rank reads the sums of all entries: 8 bytes an element each.

    Example:
        >>> from pyengine.adapters.dcp import LoadPlanner  # doctest: +SKIP
        >>> checkpoint = {"model": model.state_dict(), "sync": sync}  # doctest: +SKIP
        >>> dcp.load(checkpoint, checkpoint_id=folder, planner=LoadPlanner())  # doctest: +SKIP
    """

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Request the entries that other ranks have saved; called by DCP."""
        saved = [] if metadata is None else list(metadata.state_dict_metadata)
        for prefix, state in _states(state_dict, ""):
            own = next(filter(_PART.fullmatch, state))
            parts = [name.removeprefix(prefix) for name in saved if name.startswith(prefix)]
            if f"{prefix}{own}" not in saved and (parts := list(filter(_PART.fullmatch, parts))):
                del state[own]
                state.update(dict.fromkeys(parts))
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Read an entry other than a tensor, without unpickling it; called by DCP."""
        name = read_item.dest_index.fqn
        try:
            loaded = load(value)
        except Exception as error:
            raise ValueError(f"checkpoint entry {name!r}: {error}") from error
        tree: Any = self.original_state_dict if self.flatten_state_dict else self.state_dict
        *outer, last = self.mappings[name] if self.flatten_state_dict else [name]
        for key in outer:
            tree = tree[key]
        tree[last] = loaded


def _states(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every engine's state in a checkpoint, with the prefix of its names."""
    for key, value in tree.items():
        if isinstance(value, dict):
            inner = f"{prefix}{key}."
            is_state = {"version", "window", "steps"} <= value.keys()
            if is_state and len([name for name in value if _PART.fullmatch(str(name))]) == 1:
                yield inner, value
            else:
                yield from _states(value, inner)
