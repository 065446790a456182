"""Assignment of samples to micro-batches, and of micro-batches to windows and ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from copy import copy
from numbers import Integral

import torch
from torch import Tensor
from torch.utils.data import Sampler

from pyengine.data.rng import derive, rank_and_world_size, whole
from pyengine.ops.device import HOST
from pyengine.window.counter import share


class WindowSampler(Sampler[list[int]]):
    """Split an epoch into windows of micro-batches that are the same for every world size.

    Use the sampler as a DataLoader's `batch_sampler`, in place of `DistributedSampler`. The order of samples
    depends only on the seed and the epoch. The samples are split into micro-batches, which are grouped into
    windows. A full window has global_batch / micro_batch micro-batches (`micro_batches`). Rank r of W gets
    the micro-batches [r * micro_batches // W, (r + 1) * micro_batches // W) of every window. Without
    `drop_last` no sample is added, repeated or dropped: the last micro-batch and the last window of an epoch
    may be short, and `count` keeps the mean correct.

    A short window is split between ranks at the same indices as a full window, so the last ranks may get
    fewer micro-batches, or none. `sync.windows` supports such windows, and all ranks run the same windows for
    any world size and `micro_batches`. Each rank must pass its own `accumulate` to `GradSync`, because the
    value differs between ranks if W does not divide `micro_batches`. With `sync.accumulate()` every rank
    needs the same number of windows, which requires `drop_last` and W <= micro_batches.

    Args:
        dataset: the dataset, of which only the length is used; or the length itself, as a whole number.
        seed: seed of the run, equal on every rank; 0 by default, as in `DistributedSampler`.
        micro_batch: number of samples in a micro-batch.
        global_batch: number of samples in a window, over all ranks; a multiple of `micro_batch`.
        shuffle: whether to permute every epoch (reproducibly for one version of PyTorch) or to keep the
            dataset's order.
        drop_last: whether to drop the samples at the end of an epoch that do not fill a window.
        num_replicas, rank: as in `DistributedSampler`, the number of loaders and the index of this loader.
            None means the size and rank of the default process group, or 1 and 0 without a group. Ranks that
            share a batch (tensor parallelism) pass the size and rank of their data-parallel group. See
            `shard`.

    Attributes:
        rank, world_size: this rank and the number of ranks, as given or from the default process group.
        micro_batches: number of micro-batches in a full window, over all ranks.
        num_windows: number of windows in an epoch; equal on every rank.

    Raises:
        TypeError, ValueError: an argument is invalid, or `drop_last` would leave no window.

    Example:
        >>> sampler = WindowSampler(data, seed=42, micro_batch=8, global_batch=96)  # doctest: +SKIP
        >>> loader = DataLoader(data, batch_sampler=sampler, num_workers=2)  # doctest: +SKIP
        >>> exact = pe.Exact(micro_batches=sampler.micro_batches)  # doctest: +SKIP
        >>> sync = pe.GradSync(model, accumulate=sampler.accumulate, accumulator=exact)  # doctest: +SKIP
        >>> for epoch in range(epochs):  # doctest: +SKIP
        ...     sampler.set_epoch(epoch)
        ...     for step, window in enumerate(sync.windows(loader), start=epoch * sampler.num_windows):
        ...         for x, y in window:
        ...             with pe.micro_batch_rng(42, step=step, index=sync.place):
        ...                 sync.backward(loss_sum(model(x), y), count=len(y))
        ...         sync.step(optimizer)
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        seed: int = 0,
        micro_batch: int,
        global_batch: int,
        shuffle: bool = True,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        self.dataset_size = _size(dataset)
        (self.seed,) = whole(seed=seed)
        self.micro_batch, global_batch = whole(micro_batch=micro_batch, global_batch=global_batch)
        if self.micro_batch < 1:
            raise ValueError(f"micro_batch={micro_batch}: expected at least 1 sample")
        if global_batch < self.micro_batch or global_batch % self.micro_batch:
            lower = global_batch // self.micro_batch * self.micro_batch
            nearest = f"{lower} and {lower + self.micro_batch}" if lower else f"{self.micro_batch}"
            raise ValueError(
                f"global_batch={global_batch} is not a multiple of micro_batch={self.micro_batch}; nearest: "
                f"{nearest}"
            )
        self.micro_batches = global_batch // self.micro_batch
        self._kept = self.dataset_size - (self.dataset_size % global_batch if drop_last else 0)
        if self._kept == 0:
            raise ValueError(
                f"dataset_size={self.dataset_size} gives no window of global_batch={global_batch} with "
                f"drop_last={drop_last}: expected at least {global_batch if drop_last else 1} samples"
            )
        self.shuffle = shuffle
        self.num_windows = -(-self._kept // global_batch)
        self.rank, self.world_size = _place(rank, num_replicas)
        self.set_epoch(0)

    def shard(self, *, rank: int, world_size: int) -> WindowSampler:
        """Return a copy of this sampler for another rank or world size.

        Use this method with your own process group, or to inspect another rank's samples.
        """
        whole(rank=rank, world_size=world_size)
        if rank >= world_size:
            raise ValueError(f"rank={rank}: expected 0 to {world_size - 1}, since world_size={world_size}")
        other = copy(self)
        other.rank, other.world_size = rank, world_size
        return other

    def set_epoch(self, epoch: int, *, window: int = 0) -> None:
        """Set the epoch of the next iteration, and its first window.

        A run can resume with any world size.

        Args:
            epoch: number of the epoch, which determines the order of the samples.
            window: index of the first window in the epoch.
        """
        whole(epoch=epoch, window=window)
        if window >= self.num_windows:
            raise ValueError(
                f"window={window}: an epoch has {self.num_windows} windows, counted from 0 in each epoch; "
                "to convert a number counted over the whole run, such as sync.window, use epoch, window = "
                f"divmod({window}, {self.num_windows})"
            )
        self.epoch, self.window = epoch, window

    @property
    def first(self) -> int:
        """The index of this rank's first micro-batch in its window, over all ranks."""
        return self._own.start

    @property
    def accumulate(self) -> int:
        """The value of `accumulate` for `GradSync`: this rank's micro-batches in a full window.

        The value is 1 on a rank without micro-batches, although the loader of this rank is empty.
        """
        return max(1, len(self._own))

    def __len__(self) -> int:
        windows = range(self.window, self.num_windows)
        ends = {windows[0], windows[-1]}  # only the first and the last window can be short
        return sum(len(self._share(window)) for window in ends) + len(self._own) * (len(windows) - len(ends))

    def __iter__(self) -> Iterator[list[int]]:
        order, size = self._order(), self.micro_batch
        for window in range(self.window, self.num_windows):
            for index in self._share(window):
                yield order[index * size : (index + 1) * size].tolist()

    @property
    def _own(self) -> range:
        """This rank's micro-batches of a full window, as indices in the window."""
        return share(self.micro_batches, rank=self.rank, world_size=self.world_size)

    def _share(self, window: int) -> list[int]:
        """Return this rank's micro-batches of a window, as indices in the epoch."""
        begin, there_are = window * self.micro_batches, -(-self._kept // self.micro_batch)
        return [begin + index for index in self._own if begin + index < there_are]

    def _order(self) -> Tensor:
        """Return the sample indices of the epoch in order, as an int64 tensor of shape `[kept]`."""
        if not self.shuffle:
            return torch.arange(self._kept, dtype=torch.int64, device=HOST)
        generator = torch.Generator().manual_seed(derive("epoch", "torch", self.seed, self.epoch) % 2**64)
        return torch.randperm(self.dataset_size, generator=generator, device=HOST)[: self._kept]


def _size(dataset: Sized | int) -> int:
    if isinstance(dataset, Integral):
        (size,) = whole(dataset=dataset)
        return size
    try:
        return len(dataset)  # type: ignore[arg-type]  # raises TypeError if it has no length
    except TypeError:
        raise TypeError(
            f"dataset is a {type(dataset).__name__} without a length: expected a dataset with a length, or "
            "the number of samples; an iterable dataset has no order that could be divided"
        ) from None


def _place(rank: int | None, num_replicas: int | None) -> tuple[int, int]:
    """Return the rank and world size, as given or from the default process group."""
    own_rank, own_size = rank_and_world_size()
    place, size = (
        own_rank if rank is None else rank,
        own_size if num_replicas is None else num_replicas,
    )
    place, size = whole(rank=place, num_replicas=size)
    if size < 1:
        raise ValueError(f"num_replicas={size}: expected a whole number of at least 1")
    if place >= size:
        raise ValueError(
            f"rank={place}: expected 0 to {size - 1}, since num_replicas={size}; the defaults come from "
            f"the default process group, here {own_rank} and {own_size}"
        )
    return place, size
