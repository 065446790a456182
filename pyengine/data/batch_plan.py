"""The split of a global batch over any number of workers, and its learning rate.

`WindowSampler` computes the split.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, get_args

from torch.optim.lr_scheduler import LinearLR, LRScheduler, SequentialLR

from pyengine.data.sampler import WindowSampler
from pyengine.window.counter import share

Rule = Literal["linear", "sqrt"]

# The largest published increase: from 256 to 8192 in Goyal et al. 2017 (figure 1: the error rises beyond
# 8192), and from 128 to 4096 in Hoffer et al. 2017.
_LARGEST_SHOWN = 32


@dataclass(frozen=True, repr=False)
class BatchPlan:
    """The split of a global batch over ranks; created by `plan_batch`.

    Attributes:
        global_batch: samples per optimizer step, over all ranks.
        micro_batch: samples per backward.
        world_size: number of ranks.
        shares: micro-batches per window, by rank; the numbers differ by at most one.
    """

    global_batch: int
    micro_batch: int
    world_size: int
    shares: tuple[int, ...]

    def __repr__(self) -> str:
        each = f"{min(self.shares)} or {max(self.shares)}" if self.idle else self.accumulate
        return (
            f"BatchPlan(global_batch={self.global_batch}, micro_batch={self.micro_batch}, "
            f"world_size={self.world_size}, accumulate={each})"
        )

    @property
    def accumulate(self) -> int:
        """The value of `accumulate` for `GradSync`: micro-batches per window on each rank.

        Raises ValueError if the number differs between ranks (see `shares`).
        """
        if self.idle:
            raise ValueError(
                f"accumulate: ranks have {min(self.shares)} or {max(self.shares)} micro-batches per window "
                f"({self.micro_batches} on world_size={self.world_size}): use shares[rank], or a "
                "WindowSampler"
            )
        return self.shares[0]

    @property
    def micro_batches(self) -> int:
        """Micro-batches per window, over all ranks."""
        return sum(self.shares)

    @property
    def idle(self) -> int:
        """Idle micro-batches per window: one for each rank that runs one micro-batch fewer than others."""
        return self.world_size * max(self.shares) - self.micro_batches

    def steps_per_epoch(self, dataset_size: int, *, drop_last: bool = False) -> int:
        """Return the number of optimizer steps in an epoch, which is equal for every world size.

        Args:
            dataset_size: number of samples in the dataset.
            drop_last: whether to drop the samples that do not fill a window. If False, the last window may be
                short.

        Raises:
            TypeError, ValueError: an argument is invalid for `WindowSampler`.

        Example:
            >>> pe.plan_batch(global_batch=256, micro_batch=8, world_size=4).steps_per_epoch(50_000)
            196
        """
        return _sampler(self.global_batch, self.micro_batch, dataset_size, drop_last).num_windows


def plan_batch(*, global_batch: int, micro_batch: int, world_size: int, uneven: bool = False) -> BatchPlan:
    """Split a global batch into micro-batches and distribute them over ranks.

    The result of training depends on the global batch, not on its split. When workers join or leave, keep
    the global batch and its learning rate, and change `accumulate`.

    Args:
        global_batch: samples per optimizer step, over all ranks; a multiple of `micro_batch`.
        micro_batch: samples per backward; as many as fit on the device.
        world_size: number of ranks.
        uneven: whether some ranks may have one micro-batch more than others. If so, pass `shares[rank]` to
            `GradSync`, whose mean stays correct; `WindowSampler` assigns the samples to the ranks.

    Raises:
        TypeError: an argument is not a whole number.
        ValueError: the batch cannot be split; the message names the nearest batch that can be split.

    Example:
        >>> plan = pe.plan_batch(global_batch=4096, micro_batch=8, world_size=64)
        >>> plan.accumulate, plan.micro_batches
        (8, 512)
        >>> pe.plan_batch(global_batch=80, micro_batch=8, world_size=4, uneven=True).shares  # 2 have fewer
        (2, 3, 2, 3)
    """
    _positive(global_batch=global_batch, micro_batch=micro_batch, world_size=world_size)
    if not uneven and global_batch % (micro_batch * world_size):
        raise ValueError(_not_even(global_batch, micro_batch, world_size))
    num = _sampler(global_batch, micro_batch, dataset_size=global_batch).micro_batches
    if num < world_size:
        raise ValueError(
            f"world_size={world_size} with global_batch={global_batch} in micro-batches of {micro_batch}: "
            f"only {num} of the ranks would have a micro-batch; use a world_size of at most {num}, or a "
            "smaller micro_batch"
        )
    shares = tuple(len(share(num, rank=rank, world_size=world_size)) for rank in range(world_size))
    return BatchPlan(int(global_batch), int(micro_batch), int(world_size), shares)


def scale_lr(lr: float, *, from_batch: int, to_batch: int, rule: Rule) -> float:
    """Return the learning rate for another global batch.

    With k = to_batch / from_batch, "linear" returns lr × k (for SGD with `warm_up`; Goyal et al. 2017, §2.1),
    and "sqrt" returns lr × √k (for Adam; Malladi et al. 2022 also scale betas and eps). Both rules are
    approximations for moderate batches. Very large batches converge worse with every rule; the limit depends
    on the model and the data, and must be measured (Shallue et al. 2019). docs/batch.md lists the sources.

    Args:
        lr: learning rate tuned for `from_batch`.
        from_batch, to_batch: samples per optimizer step, over all ranks (`BatchPlan.global_batch`).
        rule: "linear" or "sqrt".

    Raises:
        TypeError, ValueError: an argument is invalid.

    Warns:
        UserWarning: `to_batch` is more than 32 × `from_batch`, the largest increase in the papers behind the
            rules.

    Example:
        >>> pe.scale_lr(0.1, from_batch=256, to_batch=1024, rule="linear")
        0.4
        >>> pe.scale_lr(3e-4, from_batch=256, to_batch=1024, rule="sqrt")
        0.0006
    """
    _positive(from_batch=from_batch, to_batch=to_batch)
    _check_number("lr", lr)
    if not (0 < lr < math.inf):
        raise ValueError(f"lr={lr}: expected a finite number above 0")
    if rule not in get_args(Rule):
        raise ValueError(f"rule={rule!r}: expected 'linear' (SGD) or 'sqrt' (Adam)")
    factor = to_batch / from_batch
    if factor > _LARGEST_SHOWN:
        warnings.warn(
            f"to_batch={to_batch} is {factor:g} × from_batch={from_batch}; the papers behind the rules go "
            f"up to × {_LARGEST_SHOWN}. Very large batches converge worse: compare with a smaller "
            "batch before relying on this one (docs/batch.md)",
            stacklevel=2,
        )
    return lr * (factor if rule == "linear" else math.sqrt(factor))


def warm_up(after: LRScheduler, *, steps: int, start_factor: float) -> SequentialLR:
    """Warm up the learning rate over the first optimizer steps, before another scheduler starts.

    This is the gradual warm-up of Goyal et al. 2017, §2.2: the learning rate grows linearly from the value
    for the small batch to the value for the large batch, over five epochs in the paper.

    Args:
        after: scheduler that starts after the warm-up, so its length does not include the warm-up steps;
            `ConstantLR(optimizer, factor=1.0)` keeps the learning rate.
        steps: optimizer steps of the warm-up, at least 1.
        start_factor: factor applied to the learning rate in the first step, above 0 and at most 1. With the
            linear rule, the factor `from_batch / to_batch` starts at the learning rate of the small batch.

    Returns:
        A torch `SequentialLR`. Step it once per optimizer step: `sync.step(optimizer, scheduler)`.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Example:
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
        >>> cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=900)
        >>> scheduler = pe.warm_up(cosine, steps=100, start_factor=256 / 1024)
        >>> scheduler.get_last_lr()
        [0.1]
    """
    _positive(steps=steps)
    if not isinstance(after, LRScheduler):
        raise TypeError(f"after is a {type(after).__name__}: expected a torch.optim.lr_scheduler scheduler")
    _check_number("start_factor", start_factor)
    if not 0 < start_factor <= 1:
        raise ValueError(f"start_factor={start_factor}: expected a number above 0 and at most 1")
    ramp = LinearLR(after.optimizer, start_factor=start_factor, total_iters=steps)
    return SequentialLR(after.optimizer, [ramp, after], milestones=[steps])


def _sampler(
    global_batch: int, micro_batch: int, dataset_size: int, drop_last: bool = False
) -> WindowSampler:
    return WindowSampler(
        dataset_size, seed=0, micro_batch=micro_batch, global_batch=global_batch, drop_last=drop_last
    )


def _positive(**values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise TypeError(
                f"{name}={value!r} is a {type(value).__name__}: expected a whole number of at least 1"
            )
        if value < 1:
            raise ValueError(f"{name}={value}: expected a whole number of at least 1")


def _check_number(name: str, value: object) -> None:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: expected a number")


def _not_even(global_batch: int, micro_batch: int, world_size: int) -> str:
    together = micro_batch * world_size
    lower = global_batch // together * together
    nearest = f"nearest are {lower} and {lower + together}" if lower else f"nearest is {together}"
    text = (
        f"global_batch={global_batch} is not a multiple of micro_batch × world_size = {together}; {nearest}"
    )
    micro_batches, remainder = divmod(global_batch, micro_batch)
    if remainder or micro_batches < world_size:
        return text
    return f"{text}, or split its {micro_batches} micro-batches with uneven=True"
