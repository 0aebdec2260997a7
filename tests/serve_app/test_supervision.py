"""However a server is ended, no process of it stays: small trees of processes instead of Ray's."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.graph import PATIENCE_SECONDS, ROOT, wait_until

SERVER = """
import signal, subprocess, sys, time
from serve_app.supervision import supervised
# A child that ignores what is polite, with a child of its own in another session, as Ray's are.
CHILD = "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
CHILD += "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True); "
CHILD += "print('up', flush=True); time.sleep(600)"
def work():
    stop = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.append(1))
    subprocess.Popen([sys.executable, "-c", CHILD])
    while not stop:
        time.sleep(0.02)
    print("stopped", len(stop), flush=True)
    return 7
sys.exit(supervised(work))
"""


def marked(mark: str) -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                found.add(int(entry.name))
        except OSError:
            continue
    return found


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    mark = uuid.uuid4().hex
    env = {**os.environ, "SUPERVISION_TEST": mark}
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    process.args = mark
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "up\n"
        wait_until(lambda: len(marked(mark)) == 4)  # one that is just beginning has no environment to look at
        yield process
    finally:
        for pid in marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(PATIENCE_SECONDS)
        process.stdout.close()


def gone(server: subprocess.Popen[str]) -> str:
    """What it printed; all of its processes have ended."""
    assert server.stdout is not None
    text = server.stdout.read()
    server.wait(PATIENCE_SECONDS)
    wait_until(lambda: not marked(str(server.args)))
    return text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("group", [False, True])
def test_a_signal_ends_it_in_order(server: subprocess.Popen[str], number: signal.Signals, group: bool) -> None:
    (os.killpg if group else os.kill)(server.pid, number)
    assert gone(server) == "stopped 1\n"
    assert server.returncode == 7


def test_a_signal_to_process_and_group_is_one(server: subprocess.Popen[str]) -> None:
    os.kill(server.pid, signal.SIGTERM)
    os.killpg(server.pid, signal.SIGTERM)
    assert gone(server) == "stopped 1\n"


@pytest.mark.parametrize("group", [False, True])
def test_killing_it_ends_it_in_order(server: subprocess.Popen[str], group: bool) -> None:
    (os.killpg if group else os.kill)(server.pid, signal.SIGKILL)
    assert gone(server) == "stopped 1\n"


def test_killing_the_serving_half_leaves_nothing(server: subprocess.Popen[str]) -> None:
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    assert gone(server) == ""
    assert server.returncode == 128 + signal.SIGKILL
