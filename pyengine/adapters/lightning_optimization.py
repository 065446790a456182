"""The ends of windows under Lightning: set by its loop, or by the module's training_step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.optim import Optimizer

from pyengine.adapters.backward import backward
from pyengine.engine.sync import Sync


class Optimization(Protocol):
    """A strategy's behaviour in Lightning's calls around a micro-batch."""

    def store_output(self, output: Any) -> None:
        """Store the output of training_step."""

    def backward(self, loss: Tensor, options: dict[str, Any]) -> Tensor:
        """Run the backward that Lightning requests; return the loss that it logs."""

    def without_sync(self) -> AbstractContextManager[None]:
        """Return the context of micro-batches that are not their window's last."""

    def step(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """Step after the closure; return the closure's result."""


class Automatic:
    """Lightning's loop: the closure of a step contains the window's last micro-batch.

    Args:
        strategy: its precision plugin runs the hooks.
        sync: the engine.
    """

    def __init__(self, strategy: Strategy, sync: Sync) -> None:
        self._strategy, self._sync = strategy, sync
        self._output: Mapping[str, Any] = {}

    def store_output(self, output: Any) -> None:
        """Store the loss before Lightning divides it."""
        self._output = output if isinstance(output, Mapping) else {"loss": output}

    def backward(self, loss: Tensor, options: dict[str, Any]) -> Tensor:
        """Run the backward of the loss that training_step returned; `loss` is the divided one."""
        if options:
            raise ValueError(
                f"backward: got {[*options]}, need the loss only: use manual optimization "
                "(automatic_optimization=False) for other options"
            )
        output, self._output = self._output, {}
        with _hooks(self._strategy, output["loss"]):
            self._sync.backward(output["loss"], count=output.get("count", 1))
        return loss.detach()

    def without_sync(self) -> AbstractContextManager[None]:
        """Return a micro-batch that is not its window's last as a context."""
        return self._sync.accumulate()

    def step(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """Run the window's last micro-batch, the hooks that read gradients, and the step."""
        with self._sync.accumulate(last=True):
            result = closure()
        _step(self._strategy, self._sync, optimizer)
        return result


class Manual:
    """The module's training_step: `manual_backward`, and `optimizer.step` where a window has ended.

    Args:
        strategy: as for `Automatic`.
        syncs: the engines by the name of a submodule; the engine of the whole module under "".
        optimizers: the module's, each over parameters of one engine.

    Raises:
        ValueError: an optimizer over parameters of no engine, or of several.
    """

    def __init__(
        self, strategy: Strategy, syncs: Mapping[str, Sync], optimizers: Sequence[Optimizer]
    ) -> None:
        self._strategy, self._syncs = strategy, syncs
        self._of_optimizer = {
            id(optimizer): syncs[self._owner(index, optimizer)] for index, optimizer in enumerate(optimizers)
        }

    def store_output(self, output: Any) -> None:
        """Do nothing: Lightning logs the output of training_step."""

    def backward(self, loss: Tensor, options: dict[str, Any]) -> Tensor:
        """Run a micro-batch's backward, or one of a `micro_batch` block."""
        count, sync = options.pop("count", None), options.pop("sync", None)
        if sync is None:
            sync = self._only()
        with _hooks(self._strategy, loss):
            backward(sync, loss, count=count, options=options)
        return loss.detach()

    @contextmanager
    def without_sync(self) -> Iterator[None]:
        """Only accumulate in the body's backwards: `optimizer.toggle_model(sync_grad=False)`."""
        with ExitStack() as stack:
            for sync in self._syncs.values():
                stack.enter_context(sync.no_sync())
            yield

    def step(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """Run the closure, if any, and step with the window that has ended."""
        result = closure()
        sync = self._of_optimizer[id(optimizer)]
        try:
            sync.refuse_bare_gradients()
        except RuntimeError as error:
            raise RuntimeError(
                f"call self.manual_backward(loss) in place of loss.backward(): {error}"
            ) from None
        _step(self._strategy, sync, optimizer)
        return result

    def _only(self) -> Sync:
        if len(self._syncs) > 1:
            raise ValueError(
                f"manual_backward: the strategy has engines for {', '.join(map(repr, self._syncs))}, and the "
                "loss belongs to one of them: pass it, self.manual_backward(loss, sync=strategy.syncs[name])"
            )
        return next(iter(self._syncs.values()))

    def _owner(self, index: int, optimizer: Optimizer) -> str:
        """Return the name of the engine that an optimizer's parameters belong to."""
        module = _module(self._strategy)
        named = {id(param): name for name in self._syncs for param in module.get_submodule(name).parameters()}
        params = [param for group in optimizer.param_groups for param in group["params"]]
        owners = sorted({str(named.get(id(param))) for param in params if param.requires_grad})
        if len(owners) != 1 or owners[0] not in self._syncs:
            raise ValueError(
                f"optimizer {index} ({type(optimizer).__name__}) holds parameters of {owners}, where 'None' "
                f"has no engine: need each optimizer over one of {list(self._syncs)}, whose windows end "
                "independently; name submodules in the strategy's `accumulate`, or pass one number for all"
            )
        return owners[0]


@contextmanager
def _hooks(strategy: Strategy, loss: Tensor) -> Iterator[None]:
    """Run Lightning's hooks before and after a backward, without its loss scaling."""
    module = _module(strategy)
    strategy.precision_plugin.pre_backward(loss, module)
    yield
    strategy.precision_plugin.post_backward(loss, module)


def _step(strategy: Strategy, sync: Sync, optimizer: Optimizer) -> None:
    """Run the hooks that read gradients, and step."""
    strategy.precision_plugin._after_closure(_module(strategy), optimizer)  # noqa: SLF001 - its hooks before a step
    sync.step(optimizer)


def _module(strategy: Strategy) -> LightningModule:
    assert strategy.lightning_module is not None  # from `Trainer.fit` on
    return strategy.lightning_module
