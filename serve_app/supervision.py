"""A server's processes end with it, whatever ends it (Linux).

The command splits in two before anything is started. The parent stays in the shell's process group and passes signals
on; the child runs the server in a session of its own, so that a signal to the whole group doesn't tear Ray's processes
away from the one that ends them in order. When the parent is killed, the kernel tells the child; when the child is,
its orphans fall to the parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Final

GRACE_SECONDS: Final = 3.0
"""How long what is left after the end may take to go by itself."""
REPEAT_SECONDS: Final = 1.0
"""A signal that follows so closely is the same one, sent to the process and to its group."""
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


def supervised(work: Callable[[], int]) -> int:
    """Runs `work` in a child, returns its exit status, and leaves no process behind. Call it before there are threads;
    in the child it returns too."""
    if not sys.platform.startswith("linux"):
        return work()
    parent = os.getpid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child:
        return _watch(child)
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:  # it died before the kernel knew that we care
        return 0
    try:
        return work()
    finally:
        end_descendants()


def _watch(child: int) -> int:
    """The parent's life: passes signals on until the child has ended, then clears up."""
    last: dict[int, float] = {}

    def pass_on(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - last.get(number, -REPEAT_SECONDS) >= REPEAT_SECONDS:
            last[number] = now
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == child:
            break
    end_descendants()
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def end_descendants(grace: float = GRACE_SECONDS) -> None:
    """Waits `grace` seconds for the processes below this one to end, and kills those that don't."""
    deadline = time.monotonic() + grace
    while _descendants():
        if time.monotonic() >= deadline:
            for pid in _descendants():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _descendants() -> set[int]:
    """Every process below this one; children that have ended are reaped first."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                if fields[0] != "Z":
                    children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: set[int] = set()
    waiting = [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        found.update(below)
        waiting += below
    return found


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
