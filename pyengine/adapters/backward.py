"""A library's call of backward, as one micro-batch or inside the caller's."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pyengine.engine.sync import Sync
from pyengine.window.header import Count

OPTIONS = ("gradient", "retain_graph", "create_graph", "inputs")


def backward(sync: Sync, loss: Tensor, *, count: Count | None, options: dict[str, Any]) -> None:
    """Run the backward of one micro-batch, or one backward of a `sync.micro_batch` block.

    Args:
        sync: the engine.
        loss, count: as for `Sync.backward`; within a block the count is the block's.
        options: of torch's backward, by name.

    Raises:
        ValueError: an option that torch's backward does not have, or a count within a block.
        RuntimeError: as `Sync.backward`.
    """
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise ValueError(
            f"backward: got {', '.join(unknown)}, need the loss, its count and options of torch's backward "
            f"({', '.join(OPTIONS)}): the engine runs it; leave the others out"
        )
    running = sync.running_micro_batch
    if running is None:
        sync.backward(loss, count=count, **options)
        if sync.is_sync_step:
            sync.flush()  # these loops read .grad after their backward
    elif count is not None:
        raise ValueError(
            f"backward: got count={count} inside `with sync.micro_batch(count=...) as mb:`, which has one "
            "count for all its backwards: pass it there, or set mb.count"
        )
    else:
        running.backward(loss, **options)
