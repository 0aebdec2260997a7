"""Who waits for whom on a machine whose cores the model keeps busy all the time (Linux; elsewhere nothing happens).

A step is as slow as its slowest core, and Ray's and Serve's processes wake up a thousand times a second. Under
SCHED_BATCH a thread has the same share of a core, but doesn't take it from another one in the moment it wakes: it
waits for the kernel's next turn, where several of them run one after another, or for a core that has nothing to do.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def patient() -> None:
    """The calling thread, with all threads and processes that it starts from now on, lets others finish their turn."""
    _set("SCHED_BATCH")


def prompt() -> None:
    """The calling thread and what it starts run as soon as they wake."""
    _set("SCHED_OTHER")


def prompt_process() -> None:
    """All threads of this process and what they start: for processes that requests pass through."""
    prompt()
    with contextlib.suppress(FileNotFoundError):  # no such system
        for entry in Path("/proc/self/task").iterdir():
            _set("SCHED_OTHER", int(entry.name))


def _set(policy: str, thread: int = 0) -> None:
    number = getattr(os, policy, None)
    if number is not None:
        with contextlib.suppress(OSError):  # a sandbox without such policies, a thread that has ended
            os.sched_setscheduler(thread, number, os.sched_param(0))
