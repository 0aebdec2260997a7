"""Each process's own series, mirrored to Ray's metrics agent, so that Ray's dashboard and Grafana show them.

Ray prefixes the names with `ray_` and labels them with the process, so nothing is combined here. Latency histograms
exist here alone: `/metrics` has none. Updating costs microseconds a series, and happens every few seconds.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, Final

from ray.util import metrics

from engine.types.telemetry import Report
from serve_app.metrics_table import TABLE
from serve_app.telemetry import base_name

PERIOD_SECONDS: Final = 2.0
_LABEL: Final = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_SECONDS: Final = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0]
_NAMES: Final = {metric.name: metric for metric in TABLE}


class Mirror:
    """Wraps a process's `collect`: call the mirror in its place, and Ray's metrics follow."""

    def __init__(self, collect: Callable[[], Report], clock: Callable[[], float] = time.monotonic) -> None:
        self._collect = collect
        self._clock = clock
        self._due = float("-inf")
        self._metrics: dict[str, Any] = {}
        self._counted: dict[str, int] = {}
        self._latest_sample = float("-inf")

    def __call__(self) -> Report:
        report = self._collect()
        now = self._clock()
        if now >= self._due:
            self._due = now + PERIOD_SECONDS
            self.update(report)
        return report

    def update(self, report: Report) -> None:
        """Counters grow by what was counted since the last time; gauges are set; new samples are observed."""
        for series, value in report["totals"].items():
            grown = value - self._counted.get(series, 0)
            if grown > 0:
                counter, tags = self._find(series, metrics.Counter)
                if counter is not None:
                    counter.inc(grown, tags)
                self._counted[series] = value
        for series, value in report["gauges"].items():
            gauge, tags = self._find(series, metrics.Gauge)
            if gauge is not None:
                gauge.set(value, tags)
        self._observe(report["samples"])

    def _observe(self, samples: list[tuple[float, float]]) -> None:
        fresh = [(at, seconds) for at, seconds in samples if at > self._latest_sample]
        if not fresh:
            return
        name = "flare_first_response_seconds"
        if name not in self._metrics:
            about = "Seconds from HTTP admission to the first offered text."
            self._metrics[name] = metrics.Histogram(name, description=about, boundaries=_SECONDS)
        for at, seconds in fresh:
            self._metrics[name].observe(seconds)
            self._latest_sample = at

    def _find(self, series: str, kind: Any) -> tuple[Any, dict[str, str]]:
        """The Ray metric of a series and its tags; None for a name that the table doesn't know."""
        name = series.partition("{")[0]
        base = base_name(series, _NAMES)
        if base is None:
            return None, {}
        tags = {label: re.sub(r"\\(.)", r"\1", value) for label, value in _LABEL.findall(series)}
        if name not in self._metrics:
            self._metrics[name] = kind(f"flare_{name}", description=_NAMES[base].help, tag_keys=tuple(tags))
        return self._metrics[name], tags
