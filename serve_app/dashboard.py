"""A terminal dashboard over GET /metrics: `python -m serve_app.dashboard --url http://127.0.0.1:8000`.

Standard library only, so it runs wherever Python does, also over ssh. Survives the server's restart and the terminal's
resizing. What is shown is `serve_app.dashboard_view`'s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import select
import shutil
import sys
import termios
import time
import tty
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any, Final, TextIO

from serve_app.dashboard_view import History, view

FETCH_SECONDS: Final = 2.0
_ENTER: Final = "\x1b[?1049h\x1b[?25l"
_LEAVE: Final = "\x1b[?25h\x1b[?1049l"
_HOME: Final = "\x1b[H"
_REST: Final = "\x1b[K"
_BELOW: Final = "\x1b[J"
_BOLD: Final = ("\x1b[1m", "\x1b[0m")
_QUIT: Final = ("q", "Q", "\x03", "\x1b")


class Unreachable(Exception):
    """No snapshot to be had; the message says why."""


def fetch(url: str, seconds: float = FETCH_SECONDS) -> dict[str, Any]:
    """The JSON view of the server at `url`. Raises Unreachable."""
    request = urllib.request.Request(f"{url.rstrip('/')}/metrics?format=json", headers={"Accept": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            value = json.load(answer)
    except urllib.error.HTTPError as error:
        raise Unreachable(f"HTTP {error.code}") from None
    except (OSError, ValueError) as error:
        raise Unreachable(str(getattr(error, "reason", error))) from None
    if not isinstance(value, dict):
        raise Unreachable("the answer is not a JSON object")
    return value


class Watch:
    """Polls one server. `problem` is why the latest poll failed, empty when it didn't."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.history = History()
        self.problem = ""
        self._answered = time.monotonic()

    def poll(self) -> None:
        try:
            values = fetch(self.url)
        except Unreachable as error:
            self.problem = str(error)
            return
        self.problem = ""
        self._answered = time.monotonic()
        self.history.add(self._answered, values)

    def lines(self, width: int, height: int) -> list[str]:
        title = f"Flare  {self.url}"
        status = ""
        if self.problem:
            status = f"no answer for {time.monotonic() - self._answered:.0f} s: {self.problem}"
        elif self.history.restarts:
            status = f"server restarted {self.history.restarts} times since this dashboard began"
        return view(self.history, width, height, title=title, status=status)


@contextlib.contextmanager
def screen(out: TextIO) -> Iterator[None]:
    """The alternate screen with keys unbuffered; everything is put back at the end."""
    keys = sys.stdin.isatty()
    before = termios.tcgetattr(sys.stdin) if keys else None
    try:
        if keys:
            tty.setcbreak(sys.stdin)
        out.write(_ENTER)
        out.flush()
        yield
    finally:
        out.write(_LEAVE)
        out.flush()
        if before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def paint(lines: Sequence[str]) -> str:
    """One frame: written over the last one, so that nothing flickers."""
    first, *rest = lines or [""]
    return _HOME + f"{_BOLD[0]}{first}{_BOLD[1]}{_REST}" + "".join(f"\r\n{line}{_REST}" for line in rest) + _BELOW


def run(watch: Watch, interval: float, out: TextIO) -> None:
    """Shows the dashboard until somebody presses q."""
    keys = sys.stdin.isatty()
    with screen(out):
        due = time.monotonic()
        while True:
            if time.monotonic() >= due:
                watch.poll()
                due = max(due + interval, time.monotonic())
            width, height = shutil.get_terminal_size()
            out.write(paint(watch.lines(width, height)))
            out.flush()
            # Woken early enough to follow a resized terminal.
            pause = max(0.0, min(due - time.monotonic(), 0.25))
            if not keys:
                time.sleep(pause)
            elif select.select([sys.stdin], [], [], pause)[0] and sys.stdin.read(1) in _QUIT:
                return


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. `--once` prints two polls' worth of numbers and exits; 1 when the server doesn't answer."""
    parser = argparse.ArgumentParser(prog="python -m serve_app.dashboard", description="Watch a Flare server.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the server listens")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between polls")
    parser.add_argument("--once", action="store_true", help="print one view and exit")
    options = parser.parse_args(arguments)
    if not options.interval > 0:
        parser.error("--interval must be above 0")
    watch = Watch(options.url)
    if options.once or not sys.stdout.isatty():
        watch.poll()
        if not watch.problem:
            time.sleep(options.interval)
            watch.poll()
        print("\n".join(watch.lines(120, 40)))
        return 1 if watch.problem else 0
    with contextlib.suppress(KeyboardInterrupt):
        run(watch, options.interval, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
