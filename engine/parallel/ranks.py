"""RankGroup: the ranks of one engine as the scheduler sees them, and the inline group of one rank on a thread."""

from __future__ import annotations

from typing import Protocol

from engine.scheduler.step import LateInputs, RankReport, Step, StepResult


class RankGroupFailed(RuntimeError):
    """A rank died or hung. The scheduler starts a new group and recomputes what ran."""


class RankGroup(Protocol):
    """One scheduler's ranks. Every rank gets every Step; only rank 0 answers. At most two steps are in flight."""

    @property
    def report(self) -> RankReport: ...

    def send(self, step: Step) -> None: ...

    def send_late(self, late: LateInputs) -> None: ...

    def receive(self, timeout: float) -> StepResult:
        """The oldest unread result; blocks. Raises RankGroupFailed, or TimeoutError."""
        ...

    def close(self) -> None: ...
