"""Plain-data shapes of telemetry between processes: what each process reports and what the hub answers.

A *series* is a metric name without its `flare_` prefix, with its labels in Prometheus text form when it has any:
`generated_tokens_total`, `checkpoint_skips_total{reason="storage"}`. Histograms travel as their `_bucket{le=...}`,
`_sum` and `_count` series among the totals. How gauges combine is decided where they are shown.
"""

from __future__ import annotations

from typing import Literal, TypedDict

ProcessKind = Literal["engine", "ingress", "preprocessor"]


class Report(TypedDict):
    """One process's own counts. `process` is unique to one life of one process, so that totals of a dead process can
    be kept and never counted twice. `totals` only grow; `gauges` hold while the process lives. `samples`: (Unix time,
    seconds) of first responses in the window, oldest first; `truncated` when the window held more than was kept.
    `facts`: constants for people (device, attention, numerics, dtype)."""

    process: str
    kind: ProcessKind
    totals: dict[str, int]
    gauges: dict[str, int]
    samples: list[tuple[float, float]]
    truncated: bool
    facts: dict[str, str]


class Snapshot(TypedDict):
    """The whole server. `instance` and `created` (Unix seconds) are drawn once and stay until the server restarts;
    `totals` are summed over all processes that ever reported to this instance; `processes` are the latest reports of
    the live ones."""

    instance: str
    created: int
    totals: dict[str, int]
    processes: list[Report]
