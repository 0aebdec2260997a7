"""The dashboard: rates, plots and layout as functions, and the command on a real terminal against a real server."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app import dashboard
from serve_app.dashboard_view import History, Sample, numbers, plot, quantity, view


def history(*snapshots: dict[str, Any], step: float = 1.0) -> History:
    made = History()
    for index, snapshot in enumerate(snapshots):
        made.add(index * step, snapshot)
    return made


def shown(made: History) -> dict[str, str]:
    return dict(numbers(made))


def test_rates_over_the_window() -> None:
    made = history(*({"generated_tokens": 100 * index} for index in range(20)))
    assert made.rate("generated_tokens") == 100
    made.add(20.0, {"generated_tokens": 1900})
    assert made.rate("generated_tokens") == 80
    assert made.rates("generated_tokens") == [100.0] * 19 + [0.0]


def test_depth_is_drafts_over_rounds_in_the_window() -> None:
    made = history(
        {"verification_drafts": 1000, "verification_rounds": 10},
        {"verification_drafts": 1003, "verification_rounds": 14},
        {"verification_drafts": 1012, "verification_rounds": 20},
    )
    assert made.depth() == pytest.approx(1.2)
    assert shown(made)["DEPTH"] == "1.20"
    assert history({"verification_drafts": 5, "verification_rounds": 5}).depth() is None
    assert history({}, {}).depth() is None


def test_weights_bandwidth_is_bytes_times_steps() -> None:
    made = history(
        {"decode_weight_bytes": 90_000_000, "verify_steps": 0}, {"decode_weight_bytes": 90_000_000, "verify_steps": 20}
    )
    assert shown(made)["WEIGHTS"] == "1.80GB/s"


def test_absent_and_odd_fields_are_zero() -> None:
    sample = Sample(0.0, {"active": None, "pending": "3", "learned_drafter": True, "first_response": None})
    assert [sample.number(name) for name in ("active", "pending", "learned_drafter", "missing")] == [0, 0, 0, 0]
    assert sample.first_response is None and sample.kv_used == 0
    assert shown(history({}))["REQUESTS"].startswith("0 active  0 pending")
    assert shown(History())["FIRST"].startswith("– median of 0")


def test_first_response_and_kv() -> None:
    made = history(
        {
            "first_response": {"median_seconds": 0.25, "samples": 7},
            "total_pages": 100,
            "free_pages": 50,
            "engine_replicas": 2,
        }
    )
    assert shown(made)["FIRST"] == "0.25 s median of 7 in 60 s"
    assert shown(made)["KV"].startswith("75 % of 200 pages")


def test_a_restart_begins_rates_anew() -> None:
    made = history(
        {"generated_tokens": 1000}, {"generated_tokens": 1100}, {"generated_tokens": 10}, {"generated_tokens": 40}
    )
    assert made.restarts == 1
    assert made.rate("generated_tokens") == 30
    assert made.rates("generated_tokens") == [100.0, 0.0, 30.0]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.5, "0.50"),
        (4.26, "4.26"),
        (42.4, "42.4"),
        (120.4, "120"),
        (999, "999"),
        (1500, "1.50k"),
        (3e9, "3G"),
    ],
)
def test_quantities(value: float, text: str) -> None:
    assert quantity(value) == text


def test_plot_scales_to_its_largest() -> None:
    assert plot([0, 1, 2], 3, 1) == [" ▄█"]
    assert plot([8, 16], 4, 2) == ["   █", "  ██"]
    assert plot([1, 1000], 2, 1) == ["▁█"], "something that isn't zero is visible"
    assert plot([], 3, 2) == ["   ", "   "]
    assert plot([0, 0], 2, 1) == ["  "]
    assert plot([1, 2, 3, 4], 2, 1) == ["▆█"], "the latest are kept"


numeric = st.integers(0, 10**15)
snapshots = st.lists(
    st.dictionaries(st.sampled_from(["generated_tokens", "active", "total_pages", "free_pages", "completed"]), numeric),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200), st.integers(1, 60), snapshots)
def test_every_size_fits(width: int, height: int, given: list[dict[str, Any]]) -> None:
    lines = view(history(*given), width, height, title="Flare", status="all well")
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)


def test_wide_and_tall_terminals_show_every_plot() -> None:
    lines = "\n".join(view(history({}, {}), 120, 45, title="Flare"))
    for title in ("generated", "prefill", "active", "pending", "first resp.", "kv used"):
        assert title in lines


# --- the command


class Server:
    """A stand-in for a server's /metrics, which can go away and come back on its port."""

    def __init__(self, port: int = 0) -> None:
        owner = self
        self.tokens = 0

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.tokens += 50
                content = json.dumps({"generated_tokens": owner.tokens, "active": 3}).encode()
                self.send_response(200 if self.path == "/metrics?format=json" else 404)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None: ...

        self._server = HTTPServer(("127.0.0.1", port), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


@contextlib.contextmanager
def server(port: int = 0) -> Iterator[Server]:
    made = Server(port)
    try:
        yield made
    finally:
        made.close()


def test_fetching() -> None:
    with server() as made:
        assert dashboard.fetch(f"http://127.0.0.1:{made.port}/")["active"] == 3
        with pytest.raises(dashboard.Unreachable, match="HTTP 404"):
            dashboard.fetch(f"http://127.0.0.1:{made.port}/elsewhere")
    with pytest.raises(dashboard.Unreachable):
        dashboard.fetch(f"http://127.0.0.1:{made.port}")


def test_once(capsys: pytest.CaptureFixture[str]) -> None:
    with server() as made:
        url = f"http://127.0.0.1:{made.port}"
        assert dashboard.main(["--once", "--url", url, "--interval", "0.05"]) == 0
        assert "3 active" in capsys.readouterr().out
    assert dashboard.main(["--once", "--url", url]) == 1
    assert "no answer" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        dashboard.main(["--interval", "0"])


class Terminal:
    """The dashboard on a pseudo-terminal."""

    def __init__(self, url: str) -> None:
        self.master, slave = pty.openpty()
        self.resize(30, 100, slave)
        command = [sys.executable, "-m", "serve_app.dashboard", "--url", url, "--interval", "0.1"]
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
        os.close(slave)

    def resize(self, rows: int, columns: int, descriptor: int | None = None) -> None:
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(self.master if descriptor is None else descriptor, termios.TIOCSWINSZ, size)

    def frame(self) -> list[str]:
        """The next whole frame, without what colours it."""
        text = ""
        deadline = time.monotonic() + 20
        while text.count("\x1b[H") < 2 and time.monotonic() < deadline:
            if select.select([self.master], [], [], 0.2)[0]:
                text += os.read(self.master, 65536).decode()
        frame = text.split("\x1b[H")[-2]
        for code in ("\x1b[K", "\x1b[J", "\x1b[1m", "\x1b[0m"):
            frame = frame.replace(code, "")
        return [line.rstrip("\r") for line in frame.split("\n")]

    def until(self, fragment: str) -> list[str]:
        for _ in range(200):
            lines = self.frame()
            if any(fragment in line for line in lines):
                return lines
        raise AssertionError(f"{fragment!r} never came up")

    def quit(self) -> int:
        os.write(self.master, b"q")
        return self.process.wait(20)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)


def test_on_a_terminal() -> None:
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(contextlib.closing(Server()))
        terminal = stack.enter_context(Terminal(f"http://127.0.0.1:{first.port}"))
        lines = terminal.until("█")
        assert len(lines) <= 30
        assert any("3 active" in line for line in lines)
        terminal.resize(8, 40)
        for _ in range(50):
            lines = terminal.frame()
            if len(lines) <= 8:
                break
        assert len(lines) <= 8 and max(map(len, lines)) <= 40
        terminal.resize(30, 100)
        first.close()
        terminal.until("no answer for")
        with server(first.port):
            terminal.until("server restarted 1 times")
            assert terminal.quit() == 0
