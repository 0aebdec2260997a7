"""What the terminal dashboard shows, as pure functions: snapshots of /metrics in, lines of text out.

Absent fields count as zero, so that it reads any server's JSON view. Owns rates, plots and layout; the terminal and the
network are `serve_app.dashboard`'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

WINDOW: Final = 5.0
"""Seconds over which the numbers are averaged; plots show every sample."""
KEPT: Final = 3600
_LEVELS: Final = " ▁▂▃▄▅▆▇█"
_MARGIN: Final = 12


@dataclass(frozen=True, slots=True)
class Sample:
    """One snapshot. `at`: seconds on a monotonic clock."""

    at: float
    values: Mapping[str, Any]

    def number(self, name: str) -> float:
        """A field as a number; zero when it is absent or no number."""
        value = self.values.get(name, 0)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0

    @property
    def first_response(self) -> float | None:
        """The median in seconds, None without samples."""
        told = self.values.get("first_response")
        value = told.get("median_seconds") if isinstance(told, Mapping) else None
        return float(value) if isinstance(value, int | float) else None

    @property
    def kv_used(self) -> float:
        """The share of the KV pools in use, 0 to 1."""
        pages = self.number("total_pages") * max(1.0, self.number("engine_replicas"))
        return min(1.0, max(0.0, 1 - self.number("free_pages") / pages)) if pages else 0.0


@dataclass(slots=True)
class History:
    """Snapshots in order. A server whose totals went back has restarted: rates begin anew, plots go on."""

    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=KEPT))
    restarts: int = 0

    def add(self, at: float, values: Mapping[str, Any]) -> None:
        sample = Sample(at, values)
        if self.samples and _went_back(self.samples[-1], sample):
            self.restarts += 1
        self.samples.append(sample)

    @property
    def last(self) -> Sample | None:
        return self.samples[-1] if self.samples else None

    def rate(self, name: str, window: float = WINDOW) -> float:
        """Growth of a total a second over the last `window` seconds."""
        change, seconds = self._change((name,), window)
        return change[0] / seconds if seconds else 0.0

    def depth(self, window: float = WINDOW) -> float | None:
        """DEPTH: planned drafts a request round; None without rounds in the window."""
        (drafts, rounds), _ = self._change(("verification_drafts", "verification_rounds"), window)
        return drafts / rounds if rounds > 0 else None

    def _change(self, names: Sequence[str], window: float) -> tuple[list[float], float]:
        """How much totals grew over the window and in how many seconds, not reaching over a restart."""
        samples = list(self.samples)
        first = len(samples) - 1
        while first > 0 and samples[-1].at - samples[first].at < window:
            if _went_back(samples[first - 1], samples[first]):
                break
            first -= 1
        if first == len(samples) - 1 or not samples:
            return [0.0] * len(names), 0.0
        begin, end = samples[first], samples[-1]
        return [max(0.0, end.number(name) - begin.number(name)) for name in names], end.at - begin.at

    def rates(self, name: str) -> list[float]:
        """One rate for each pair of neighbouring samples, zero over a restart."""
        return [
            max(0.0, (after.number(name) - before.number(name)) / (after.at - before.at))
            if after.at > before.at
            else 0.0
            for before, after in pairwise(self.samples)
        ]


def _went_back(before: Sample, after: Sample) -> bool:
    return any(after.number(name) < before.number(name) for name in ("generated_tokens", "prefill_tokens", "completed"))


def quantity(value: float, unit: str = "") -> str:
    """A number in three digits or so: 0.52, 4.3, 120, 1.5k, 32M."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{_digits(value / size)}{letter}{unit}"
    return f"{_digits(value)}{unit}"


def _digits(value: float) -> str:
    if value == int(value) and abs(value) < 1000:
        return str(int(value))
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def plot(values: Sequence[float], width: int, height: int) -> list[str]:
    """A bar chart of the latest `width` values, `height` lines, scaled to its largest. Blank without values."""
    shown = list(values)[-width:]
    top = max(shown, default=0.0)
    steps = [round(value / top * height * 8) if top > 0 else 0 for value in shown]
    # Something that isn't zero is always visible.
    steps = [max(step, 1) if value > 0 else 0 for step, value in zip(steps, shown, strict=True)]
    lines = []
    for row in range(height - 1, -1, -1):
        cells = (_LEVELS[min(8, max(0, step - row * 8))] for step in steps)
        lines.append("".join(cells).rjust(width))
    return lines


@dataclass(frozen=True, slots=True)
class _Panel:
    title: str
    values: Callable[[History], Sequence[float]]
    unit: str = ""


_PANELS: Final = (
    _Panel("generated", lambda history: history.rates("generated_tokens"), " tok/s"),
    _Panel("prefill", lambda history: history.rates("prefill_tokens"), " tok/s"),
    _Panel("active", lambda history: [sample.number("active") for sample in history.samples]),
    _Panel("pending", lambda history: [sample.number("pending") for sample in history.samples]),
    _Panel("first resp.", lambda history: [sample.first_response or 0.0 for sample in history.samples], " s"),
    _Panel("kv used", lambda history: [100 * sample.kv_used for sample in history.samples], " %"),
)


def numbers(history: History) -> list[tuple[str, str]]:
    """The lines above the plots: name and text."""
    last = history.last or Sample(0.0, {})
    median = last.first_response
    depth = history.depth()
    bandwidth = last.number("decode_weight_bytes") * history.rate("verify_steps")
    pages = last.number("total_pages") * max(1.0, last.number("engine_replicas"))
    told = last.values.get("first_response")
    samples = told.get("samples", 0) if isinstance(told, Mapping) else 0
    return [
        (
            "THROUGHPUT",
            f"{quantity(history.rate('generated_tokens'))} generated  "
            f"{quantity(history.rate('prefill_tokens'))} prefill  "
            f"{quantity(history.rate('reused_tokens'))} reused  tok/s",
        ),
        (
            "REQUESTS",
            f"{last.number('active'):.0f} active  {last.number('pending'):.0f} pending  "
            f"{quantity(last.number('completed'))} completed  {quantity(last.number('failed'))} failed",
        ),
        ("FIRST", f"{'–' if median is None else quantity(median, ' s')} median of {samples} in 60 s"),
        (
            "KV",
            f"{100 * last.kv_used:.0f} % of {quantity(pages)} pages  {quantity(last.number('cached_pages'))} cached  "
            f"{quantity(last.number('free_pages'))} free",
        ),
        (
            "HOST",
            f"{quantity(last.number('host_memory_records'))} in memory  "
            f"{quantity(last.number('host_disk_records'))} on disk  {quantity(last.number('host_hits'))} hits",
        ),
        ("WEIGHTS", quantity(bandwidth, "B/s")),
        ("DEPTH", "–" if depth is None else f"{depth:.2f}"),
    ]


def view(history: History, width: int, height: int, *, title: str, status: str = "") -> list[str]:
    """At most `height` lines of at most `width` characters: numbers first, then as many plots as fit."""
    lines = [title, status, ""] if status else [title, ""]
    lines += [f"{name:<11} {text}" for name, text in numbers(history)]
    lines += _plots(history, width, height - len(lines) - 1)
    return [line[:width].rstrip() for line in lines[:height]]


def _plots(history: History, width: int, height: int) -> list[str]:
    """Plots of three lines at least, two beside each other where there is room."""
    columns = 2 if width >= 100 else 1
    rows = -(-len(_PANELS) // columns)
    while rows > 0 and height // rows < 4:
        rows -= 1
    if rows == 0:
        return []
    tall = min(8, height // rows - 1)
    wide = (width - (columns - 1) * 2) // columns
    lines: list[str] = []
    for row in range(rows):
        blocks = [_block(panel, history, wide, tall) for panel in _PANELS[row * columns : (row + 1) * columns]]
        lines.append("")
        lines += ["  ".join(line.ljust(wide) for line in cells) for cells in zip(*blocks, strict=True)]
    return lines


def _block(panel: _Panel, history: History, width: int, height: int) -> list[str]:
    """A plot with its title, latest and largest value on the left."""
    values = panel.values(history)
    inner = max(1, width - _MARGIN)
    labels = [""] * height
    labels[0] = panel.title
    if height > 1:
        labels[1] = quantity(values[-1] if values else 0.0, panel.unit)
    if height > 2:
        labels[2] = "max " + quantity(max(list(values)[-inner:], default=0.0))
    return [
        f"{label[: _MARGIN - 1]:<{_MARGIN}}{bars}"
        for label, bars in zip(labels, plot(values, inner, height), strict=True)
    ]
