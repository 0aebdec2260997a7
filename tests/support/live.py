"""A live server for tests: the one named by FLARE_API_TEST_URL and FLARE_API_TEST_KEY, or one started here."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.clients import ROOT

READY_SECONDS = 150


@dataclass(frozen=True, slots=True)
class Server:
    """`key` is empty for a server without authentication."""

    url: str
    key: str

    @property
    def any_key(self) -> str:
        return self.key or "any"

    def get(self, path: str) -> Any:
        request = urllib.request.Request(self.url + path, headers={"authorization": f"Bearer {self.any_key}"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    @property
    def card(self) -> dict[str, Any]:
        found: dict[str, Any] = self.get("/v1/models")["data"][0]
        return found


def named() -> Server | None:
    """The server that the environment names, if it does."""
    url = os.environ.get("FLARE_API_TEST_URL", "").rstrip("/").removesuffix("/v1")
    return Server(url, os.environ.get("FLARE_API_TEST_KEY", "")) if url else None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def scripted(folder: Path, script: Mapping[str, Any], *settings: str) -> Iterator[Server]:
    """Starts `python -m serve_app` with a scripted model on a free port; stops it at the end."""
    file = folder / "script.json"
    file.write_text(json.dumps(script))
    port = free_port()
    words = [f"model=scripted:{file}", f"port={port}", *settings]
    log = folder / "server.log"
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "serve_app", *words],
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            _wait(f"http://127.0.0.1:{port}", process, log)
            yield Server(f"http://127.0.0.1:{port}", "")
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{url}/v1/models", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    raise RuntimeError(f"the server did not start:\n{log.read_text()[-4000:]}")
