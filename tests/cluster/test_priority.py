"""Policies go from a thread to what it starts, and back without privileges."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, subprocess, sys, threading
from cluster.priority import patient, prompt, prompt_process
found = []
def note():
    found.append(os.sched_getscheduler(0))
def thread():
    started = threading.Thread(target=note)
    started.start()
    started.join()
patient()
note()
thread()
child = "import os; print(os.sched_getscheduler(0))"
found.append(int(subprocess.run([sys.executable, "-c", child], capture_output=True, check=True).stdout))
prompt()
note()
thread()
patient()
other = threading.Thread(target=prompt_process)
other.start()
other.join()
note()
print(*found)
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="this system has no such policies")
def test_what_a_thread_starts_has_its_policy() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    batch, other = str(os.SCHED_BATCH), str(os.SCHED_OTHER)
    assert done.stdout.split() == [batch, batch, batch, other, other, other]
