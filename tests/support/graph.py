"""A running graph for tests: `python -m serve_app` in a process of its own, on a free port, stopped by its handle.

The session fixture `graph` is the compact layout with the demo model; tests that need another graph start one.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from serve_app.ray_flags import free_ports

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 240.0
PATIENCE_SECONDS = 120.0
"""How long a condition may take on a machine that runs ten other things."""
SMALL = ("kv_bytes=134217728", "drain_seconds=1")
"""Settings that keep a test's graph small and quick to stop."""


def free_port() -> int:
    """A port that Ray's own processes don't take while the server starts."""
    (port,) = free_ports(1)
    return port


@dataclass
class Graph:
    """One running server and its processes."""

    process: subprocess.Popen[str]
    port: int
    log: Path
    settings: tuple[str, ...] = field(default_factory=tuple)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, timeout: float = 10.0) -> Any:
        """The JSON body of a GET."""
        return json.loads(self.read(path, timeout))

    def read(self, path: str, timeout: float = 10.0) -> bytes:
        """The body of a GET. Raises OSError for another status than 200."""
        with urllib.request.urlopen(self.url + path, timeout=timeout) as answer:
            body: bytes = answer.read()
        return body

    def post(self, path: str, body: dict[str, Any], timeout: float = PATIENCE_SECONDS) -> Any:
        """The JSON body of a POST, whatever its status; the status is in "status" when it isn't 200."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            return {**json.load(error), "status": error.code}

    def patient(self, path: str) -> bytes:
        """The body of a GET of health or metrics, which answer 503 when what they ask doesn't answer in a second."""
        answers: list[bytes] = []

        def answered() -> bool:
            with contextlib.suppress(OSError, http.client.HTTPException):
                answers.append(self.read(path))
            return bool(answers)

        wait_until(answered)
        return answers[0]

    def view(self) -> dict[str, Any]:
        """The JSON view of the metrics."""
        shown: dict[str, Any] = json.loads(self.patient("/metrics?format=json"))
        return shown

    def metrics(self) -> dict[str, float]:
        """The text view: series without the prefix → value."""
        lines = self.patient("/metrics").decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name.removeprefix("flare_"): float(value) for name, value in pairs}

    def ray_metrics(self) -> str:
        """What this node's metrics agent exports."""
        (server,) = self.pids("gcs_server")
        logs = re.search(r"--log_dir=(\S+)", command(server))
        assert logs is not None
        (port,) = Path(logs[1]).parent.glob("metrics_export_port_*")
        with urllib.request.urlopen(f"http://127.0.0.1:{port.read_text().strip()}/metrics", timeout=60.0) as answer:
            text: str = answer.read().decode()
        return text

    def pids(self, name: str) -> list[int]:
        """Processes of this graph whose command holds `name`: "RankActor", "Engine", "Ingress", "TelemetryHub"."""
        return sorted(pid for pid in descendants(self.process.pid) if name in command(pid))

    def stop(self) -> int:
        """Ends the server as Ctrl-C does and returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            for pid in descendants(self.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait(PATIENCE_SECONDS)
            raise


def descendants(root: int) -> set[int]:
    """`root` and every process below it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
    found, grown = {root}, True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        found |= more
        grown = bool(more)
    return found & set(parents)


def command(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def launch(words: list[str], log: Path) -> subprocess.Popen[str]:
    """A server process whose output goes to `log`."""
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    with log.open("w") as out:
        return subprocess.Popen(
            words, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )


def start_graph(log: Path, *settings: str) -> Graph:
    """`python -m serve_app` with `settings`, once it answers. Raises RuntimeError with its output when it ends."""
    port = free_port()
    given = dict(word.split("=", 1) for word in (f"port={port}", *SMALL, *settings))  # a later word wins
    words = [f"{key}={value}" for key, value in given.items()]
    process = launch([sys.executable, "-m", "serve_app", *words], log)
    graph = Graph(process, port, log, settings)
    try:
        wait_until(lambda: ready(graph), START_SECONDS)
    except BaseException:
        graph.stop()
        raise
    return graph


def ready(graph: Graph) -> bool:
    """It is healthy, and its engine has told what it runs with, which model cards need."""
    if graph.process.poll() is not None:
        raise RuntimeError(f"the server ended with {graph.process.returncode}: {graph.log.read_text()}")
    try:
        healthy = graph.get("/health", 2.0) == {"status": "ok"}
        return bool(healthy and graph.get("/metrics?format=json", 2.0)["engine_replicas"])
    except (OSError, ValueError):
        return False


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE_SECONDS, pause: float = 0.1) -> None:
    """Raises AssertionError unless `condition` becomes true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(pause)


@pytest.fixture(scope="session")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Graph]:
    """The demo model in the compact layout, shared by every test that only asks."""
    running = start_graph(tmp_path_factory.mktemp("graph") / "log", "layout=compact")
    yield running
    assert running.stop() == 0
