"""Metrics: what a process counts, and the text and JSON views of the whole server.

Names, kinds and rules are in `serve_app.metrics_table`; processes meet in `cluster.telemetry_hub`. Counting is adding
to a dict of ints; everything dearer happens when somebody asks.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, Final

from engine.types.telemetry import ProcessKind, Report, Snapshot
from protocols.errors import InvalidRequest
from serve_app.metrics_table import TABLE, Metric

WINDOW_SECONDS: Final = 60.0
SAMPLE_CAPACITY: Final = 1024
"""First responses that one ingress process remembers."""
TEXT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"


class Recorder:
    """What one process counts. `gauges` is asked for the current ones whenever a report is made."""

    def __init__(
        self,
        kind: ProcessKind,
        gauges: Callable[[], Mapping[str, int]] = dict,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.process = f"{kind}-{uuid.uuid4().hex}"
        self.totals: dict[str, int] = {}
        self.facts: dict[str, str] = {}
        self.gauges = gauges
        self._kind: ProcessKind = kind
        self._clock = clock
        self._samples: deque[tuple[float, float]] = deque()
        self._evicted = float("-inf")

    def add(self, series: str, count: int = 1) -> None:
        self.totals[series] = self.totals.get(series, 0) + count

    def first_response(self, seconds: float) -> None:
        """A request's first answer or reasoning text was offered `seconds` after its HTTP admission."""
        if len(self._samples) == SAMPLE_CAPACITY:
            self._evicted = self._samples.popleft()[0]
        self._samples.append((self._clock(), seconds))

    def report(self) -> Report:
        oldest = self._clock() - WINDOW_SECONDS
        while self._samples and self._samples[0][0] < oldest:
            self._samples.popleft()
        return {
            "process": self.process,
            "kind": self._kind,
            "totals": dict(self.totals),
            "gauges": dict(self.gauges()),
            "samples": list(self._samples),
            "truncated": self._evicted >= oldest,
            "facts": self.facts,
        }


class View:
    """A snapshot, combined by the table's rules. `values`: series → number, every declared series present."""

    def __init__(self, snapshot: Snapshot, now: float | None = None) -> None:
        self._snapshot = snapshot
        self._now = time.time() if now is None else now
        self.values = dict.fromkeys((series for metric in TABLE for series in metric.series), 0)
        names = {metric.name: metric for metric in TABLE}
        for series, value in snapshot["totals"].items():
            if base_name(series, names) is not None:
                self.values[series] = value
        for series, values in self._gauges().items():
            name = base_name(series, names)
            if name is not None and names[name].combine != "total":
                self.values[series] = sum(values) if names[name].combine == "sum" else max(values)
        self.values["uptime_seconds"] = max(0, int(self._now) - snapshot["created"])
        self.values["engine_replicas"] = sum(report["kind"] == "engine" for report in snapshot["processes"])

    def _gauges(self) -> dict[str, list[int]]:
        gathered: dict[str, list[int]] = {}
        for report in self._snapshot["processes"]:
            for series, value in report["gauges"].items():
                gathered.setdefault(series, []).append(value)
        return gathered

    def text(self) -> bytes:
        """Prometheus text exposition format 0.0.4."""
        by_name: dict[str, list[str]] = {}
        names = {metric.name: metric for metric in TABLE}
        for series in self.values:
            name = base_name(series, names)
            if name is not None:
                by_name.setdefault(name, []).append(series)
        lines: list[str] = []
        for metric in TABLE:
            if metric.text:
                lines.append(f"# HELP flare_{metric.name} {metric.help}")
                lines.append(f"# TYPE flare_{metric.name} {metric.kind}")
                lines += [f"flare_{series} {self.values[series]}" for series in by_name[metric.name]]
        lines += self._modes()
        return ("\n".join(lines) + "\n").encode()

    def _modes(self) -> list[str]:
        """One series a combination of facts that live engines report: device, attention, numerics, dtype."""
        found = dict.fromkeys(
            ",".join(f'{name}="{escape(value)}"' for name, value in sorted(report["facts"].items()))
            for report in self._snapshot["processes"]
            if report["facts"]
        )
        head = ["# HELP flare_engine_info Modes in force.", "# TYPE flare_engine_info gauge"]
        return [*head, *(f"flare_engine_info{{{labels}}} 1" for labels in found)] if found else []

    def json(self) -> dict[str, Any]:
        """The JSON object: integers, one boolean, and first_response."""
        shown: dict[str, Any] = {}
        for metric in TABLE:
            if metric.field == "learned_drafter":
                shown[metric.field] = bool(self.values[metric.name])
            elif metric.field is not None:
                shown[metric.field] = self.values[metric.name]
        shown["first_response"] = self.first_response()
        return shown

    def first_response(self) -> dict[str, Any]:
        """The median over all ingress processes' samples of the window."""
        oldest = self._now - WINDOW_SECONDS
        reports = self._snapshot["processes"]
        seconds = [taken for report in reports for at, taken in report["samples"] if at >= oldest]
        return {
            "median_seconds": median(seconds) if seconds else None,
            "samples": len(seconds),
            "window_seconds": int(WINDOW_SECONDS),
            "capacity": SAMPLE_CAPACITY,
            "truncated": any(report["truncated"] for report in reports),
        }


def base_name(series: str, names: Mapping[str, Metric]) -> str | None:
    """The metric that `series` belongs to: without labels and, for a histogram, its suffix. None when unknown."""
    name = series.partition("{")[0]
    if name in names:
        return name
    stem, _, suffix = name.rpartition("_")
    if suffix in ("bucket", "sum", "count") and stem in names and names[stem].kind == "histogram":
        return stem
    return None


def escape(value: str) -> str:
    """A label value in text format."""
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def wants_json(format: str | None, accept: str | None) -> bool:
    """Which view a request gets. `format` wins; without it, JSON needs a higher quality than text, or the same from an
    earlier media range. Raises InvalidRequest for an unknown format."""
    if format is not None:
        if format not in ("json", "prometheus"):
            raise InvalidRequest(f"format: must be json or prometheus, not {format[:40]!r}", field="format")
        return format == "json"
    ranges = _media_ranges(accept or "")
    json, text = _quality(ranges, "application", "json"), _quality(ranges, "text", "plain")
    if json[0] != text[0]:
        return json[0] > text[0]
    return json[0] > 0 and json[1] < text[1]


def _media_ranges(accept: str) -> list[tuple[str, str, float]]:
    """(type, subtype, quality) in order; malformed ranges are left out."""
    found: list[tuple[str, str, float]] = []
    for part in accept.split(","):
        media, *parameters = (piece.strip().lower() for piece in part.split(";"))
        kind, slash, subtype = media.partition("/")
        if not slash:
            continue
        quality = 1.0
        for parameter in parameters:
            name, _, value = parameter.partition("=")
            if name.strip() == "q":
                quality = _number(value)
        found.append((kind, subtype, quality))
    return found


def _number(value: str) -> float:
    try:
        return min(max(float(value), 0.0), 1.0)
    except ValueError:
        return 0.0


def _quality(ranges: list[tuple[str, str, float]], kind: str, subtype: str) -> tuple[float, int]:
    """The quality of a media type, by its most specific range, and that range's place."""
    best = (-1, 0.0, len(ranges))
    for place, (range_kind, range_subtype, quality) in enumerate(ranges):
        if (range_kind, range_subtype) == (kind, subtype):
            specific = 2
        elif (range_kind, range_subtype) == (kind, "*"):
            specific = 1
        elif (range_kind, range_subtype) == ("*", "*"):
            specific = 0
        else:
            continue
        if specific > best[0]:
            best = (specific, quality, place)
    return best[1], best[2]
