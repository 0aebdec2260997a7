"""A rank's life: load, report, then one long loop over the step link until the scheduler hangs up.

Steps are launched as they come, so that on an asynchronous device the next one is on its way before the last one's
tokens are read. Knows nothing of who runs it: an actor, a process or a thread.
"""

from __future__ import annotations

import queue
import threading
from collections import deque

from engine.config import EngineConfig, Manifest
from engine.execution.device import open_device
from engine.execution.runner import Pending, Runner
from engine.parallel.collectives import join
from engine.parallel.ranks import RankLink
from engine.scheduler.step import LateInputs, Step

_POLL_SECONDS = 0.0002
"""How often an asynchronous device is asked whether the oldest step is done, while no new one comes."""

Message = Step | LateInputs | None


class _Inbox:
    """What the scheduler sends, readable with a time limit: a thread reads ahead where a rank must not block."""

    def __init__(self, link: RankLink, ahead: bool) -> None:
        self._link = link
        self._queue: queue.SimpleQueue[Message] | None = queue.SimpleQueue() if ahead else None
        if ahead:
            threading.Thread(target=self._read, name="step-link", daemon=True).start()

    def next(self) -> Message:
        return self._link.receive() if self._queue is None else self._queue.get()

    def soon(self) -> tuple[bool, Message]:
        """(whether something came within a poll interval, the message)."""
        if self._queue is None:
            return False, None
        try:
            return True, self._queue.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            return False, None

    def _read(self) -> None:
        message: Message = LateInputs(-1)
        while message is not None and self._queue is not None:
            message = self._link.receive()
            self._queue.put(message)


class _Answers:
    """Launched steps whose results aren't sent yet, oldest first."""

    def __init__(self, link: RankLink, answers: bool) -> None:
        self._link, self._answers = link, answers
        self._pending: deque[Pending] = deque()

    def __bool__(self) -> bool:
        return bool(self._pending)

    def add(self, pending: Pending) -> None:
        if self._answers:
            self._pending.append(pending)

    def send_ready(self) -> None:
        while self._pending and self._pending[0].ready():
            self._send()

    def send_all(self) -> None:
        while self._pending:
            self._send()

    def _send(self) -> None:
        self._link.send(self._pending.popleft()())


def rank_main(
    config: EngineConfig, manifest: Manifest, rank: int, size: int, link: RankLink, rendezvous: str | None
) -> None:
    """Runs rank `rank` of `size` until the scheduler is gone. `rendezvous`: a torch.distributed init method, needed
    for several ranks. What goes wrong is told over the link, then raised."""
    try:
        _serve(config, manifest, rank, size, link, rendezvous)
    except Exception as error:
        link.fail(f"{type(error).__name__}: {error}")
        raise


def _serve(
    config: EngineConfig, manifest: Manifest, rank: int, size: int, link: RankLink, rendezvous: str | None
) -> None:
    if size > 1 and rendezvous is None:
        raise ValueError(f"{size} ranks need a rendezvous address")
    device = open_device(config.device, rank, size, config.threads)
    group = join(rank, size, rendezvous or "", device.torch)
    try:
        runner = Runner(config, manifest, group, device)
        link.report(runner.report)
        _loop(runner, _Inbox(link, ahead=runner.asynchronous), _Answers(link, answers=rank == 0))
    finally:
        group.close()


def _loop(runner: Runner, inbox: _Inbox, answers: _Answers) -> None:
    def late() -> LateInputs:
        answers.send_all()  # the scheduler commits the step before it knows these inputs
        message = inbox.next()
        if message is None:
            raise ConnectionError("the scheduler hung up while a step waited for its late inputs")
        if not isinstance(message, LateInputs):
            raise ValueError(f"step {message.number} came where late inputs were due")
        return message

    while True:
        came, message = inbox.soon() if answers else (True, inbox.next())
        if came:
            if message is None:
                return
            if isinstance(message, LateInputs):
                raise ValueError(f"late inputs of step {message.number} came without a step that waits for them")
            answers.add(runner.launch(message, late))
        answers.send_ready()
