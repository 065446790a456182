"""Load an engine from a `torch.distributed.checkpoint` saved by a different number of ranks."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, Metadata
from torch.distributed.checkpoint.planner import ReadItem

from pyengine.engine.snapshot import PART


class LoadPlanner(DefaultLoadPlanner):
    """DCP's default planner, extended to load engines saved by a different number of ranks.

    With the same number of ranks, every rank reads its own entry, as with DCP's planner. With a different
    number of ranks, every rank reads the entry of rank 0; see `sync.load_state_dict`. Accepts the arguments
    of `DefaultLoadPlanner`.

    Entries other than tensors are read with `torch.load(weights_only=True)`, and rejected if they contain
    anything except tensors and plain values; DCP's own planner would unpickle such entries. DCP's `.metadata`
    file is a pickle that DCP reads before it calls a planner. Therefore load only folders from people whose
    code you would run.

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
        """Request rank 0's entry if this rank's entry is missing; called by DCP."""
        saved = [] if metadata is None else list(metadata.state_dict_metadata)
        for prefix, state in _states(state_dict, ""):
            own = next(filter(PART.fullmatch, state))
            parts = [name.removeprefix(prefix) for name in saved if name.startswith(prefix)]
            if own not in parts and (first := [name for name in parts if _is_of_rank_0(name)]):
                del state[own]
                state[first[0]] = None
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Read an entry that is not a tensor, without running code in the entry; called by DCP."""
        name = read_item.dest_index.fqn
        try:
            with torch.sparse.check_sparse_tensor_invariants():
                loaded = torch.load(value, map_location="cpu", weights_only=True)
        except Exception as error:
            found = re.search(r"GLOBAL ([\w.]+)", str(error))
            what = f"it holds {found[1]}, which is neither a tensor nor a plain value" if found else error
            raise ValueError(f"checkpoint entry {name!r} cannot be read: {what}") from error
        tree: Any = self.original_state_dict if self.flatten_state_dict else self.state_dict
        *outer, last = self.mappings[name] if self.flatten_state_dict else [name]
        for key in outer:
            tree = tree[key]
        tree[last] = loaded


def _is_of_rank_0(name: str) -> bool:
    match = PART.fullmatch(name)
    return match is not None and match[1] == "0"


def _states(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the state of every engine in a checkpoint, with the name prefix of its entries."""
    for key, value in tree.items():
        if isinstance(value, dict):
            inner = f"{prefix}{key}."
            is_state = {"version", "window", "steps"} <= value.keys()
            if is_state and len([name for name in value if PART.fullmatch(str(name))]) == 1:
                yield inner, value
            else:
                yield from _states(value, inner)
