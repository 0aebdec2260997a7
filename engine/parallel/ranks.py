"""RankGroup: the ranks of one engine as the scheduler sees them, and the inline group of one rank on a thread.

Also RankLink, the rank's side of the same thing, so that a rank runs unchanged behind a socket, on a thread or in a
test.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from engine.config import EngineConfig, Manifest
from engine.scheduler.step import LateInputs, RankReport, Step, StepResult

log = logging.getLogger(__name__)


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

    def check(self) -> None:
        """While no step is in flight: raises RankGroupFailed when a rank is gone. Doesn't block."""
        ...

    def close(self) -> None: ...


class RankLink(Protocol):
    """A rank's end of the step link. A step with gated rows is followed by its LateInputs, before any other step."""

    def report(self, report: RankReport) -> None:
        """Tells that the rank is loaded. Every rank reports; rank 0's report is the group's."""
        ...

    def receive(self) -> Step | LateInputs | None:
        """The next message in the scheduler's order; blocks. None ends the rank."""
        ...

    def send(self, result: StepResult) -> None:
        """Answers a step (rank 0 only), in the order of the steps."""
        ...

    def fail(self, message: str) -> None:
        """Tells why this rank can't go on."""
        ...


class _ThreadLink:
    """RankLink over two queues in one process."""

    def __init__(self) -> None:
        self.down: queue.SimpleQueue[Step | LateInputs | None] = queue.SimpleQueue()
        self.up: queue.SimpleQueue[StepResult | RankReport | RankGroupFailed] = queue.SimpleQueue()

    def report(self, report: RankReport) -> None:
        self.up.put(report)

    def receive(self) -> Step | LateInputs | None:
        return self.down.get()

    def send(self, result: StepResult) -> None:
        self.up.put(result)

    def fail(self, message: str) -> None:
        self.up.put(RankGroupFailed(message))


class InlineRanks:
    """A RankGroup of one rank on a thread of this process. Messages pass by reference, never encoded.

    `rank` runs on the thread with its link until the link's `receive` gives None; what it raises becomes
    RankGroupFailed. The constructor blocks until the rank has reported, at most `start_timeout` seconds.
    """

    def __init__(self, rank: Callable[[RankLink], None], start_timeout: float = 600.0) -> None:
        self._link = _ThreadLink()
        self._thread = threading.Thread(target=self._run, args=(rank,), name="rank-0", daemon=True)
        self._thread.start()
        try:
            first = self._link.up.get(timeout=start_timeout)
        except queue.Empty:
            self.close()
            raise RankGroupFailed(f"the rank was not ready within {start_timeout:g} s") from None
        if isinstance(first, RankGroupFailed):
            raise first
        if not isinstance(first, RankReport):
            raise RankGroupFailed("the rank answered before it reported")
        self.report = first

    @classmethod
    def load(cls, config: EngineConfig, manifest: Manifest) -> InlineRanks:
        """The real rank. Loads torch into this process."""
        from engine.execution.rank import rank_main

        return cls(lambda link: rank_main(config, manifest, 0, 1, link, None))

    def send(self, step: Step) -> None:
        self._link.down.put(step)

    def send_late(self, late: LateInputs) -> None:
        self._link.down.put(late)

    def receive(self, timeout: float) -> StepResult:
        try:
            message = self._link.up.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"no step result within {timeout:g} s") from None
        if isinstance(message, RankGroupFailed):
            raise message
        if not isinstance(message, StepResult):
            raise RankGroupFailed(f"the rank sent {type(message).__name__} instead of a result")
        return message

    def check(self) -> None:
        if not self._thread.is_alive():
            self.receive(0.0)

    def close(self) -> None:
        """Ends the rank after its current step. A hung rank is left behind: a thread can't be killed."""
        self._link.down.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    def _run(self, rank: Callable[[RankLink], None]) -> None:
        try:
            rank(self._link)
        except Exception as error:
            log.exception("the inline rank failed")
            self._link.fail(f"{type(error).__name__}: {error}")
        else:
            self._link.fail("the rank has ended")
