"""`sync.audit`: ranks compared while they train."""

from __future__ import annotations

from torch import nn

from pyengine.audit.handle import check_device, check_every
from pyengine.engine.has_engine import HasEngine
from pyengine.engine.window_audit import WindowAudit


class Audited(HasEngine):
    """The part of `Sync` that compares ranks while they train."""

    def audit(self, *, every: int = 100, module: nn.Module | None = None) -> WindowAudit:
        """Compare, in every `every`-th window and before its step, what ranks must agree on.

        Parameters, gradients, optimizer state and hyperparameters by checksums; the reduced gradients with
        what the micro-batches brought; and what the window was divided by with what was counted. Every rank
        calls this at the same point, between windows. See docs/reliability.md, and `pe.audit` for a loop
        without an engine.

        Args:
            every: windows from one check to the next; the first one is checked.
            module: whose buffers are compared too; a model under `attach` is known.

        Returns:
            A handle: `remove()` takes the audit off.

        Raises:
            TypeError, ValueError: an argument is off.
            RuntimeError: the engine is audited already, or lies on an XLA device.
            AuditError: later, where a window lands (`step`, clipping), on every rank: what has parted, where,
                since when, and the likely cause. Nothing is stepped with the window. On an accelerator when
                the next window begins.

        Cost: as `pe.audit`, and nothing in windows that are not checked.
        """
        engine = self._engine
        check_device(engine.device)
        if engine.parts.audit is not None:
            raise RuntimeError("this engine is audited already: remove() that audit first")
        made = WindowAudit(engine, every=check_every(every), module=module)
        engine.parts.audit = made
        return made
