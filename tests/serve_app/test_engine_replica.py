"""What an Engine replica tells Serve and the hub of itself, over an engine that is only asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.engine import EngineHealth
from engine.scheduler.counters import EngineStats
from engine.scheduler.step import RankReport
from serve_app.engine_replica import EngineReplica
from serve_app.metrics_table import TABLE
from serve_app.telemetry import base_name


class StillEngine:
    """An engine in a given state."""

    def __init__(self, state: Any = "running", age: float = 0.0, rebuilding: float = 0.0) -> None:
        self.state, self.age, self.rebuilding = state, age, rebuilding
        self.config = SimpleNamespace(step_timeout=10.0)
        self.context = 512
        self.report = RankReport(8, 64, 1000, 320, "cpu", "cpu", "invariant", "auto")
        self.paused, self.failed_waiting = False, False

    def health(self) -> EngineHealth:
        return EngineHealth(self.state, self.age, self.rebuilding, "rank 1 died")

    def stats(self) -> EngineStats:
        counted = {name: number for number, name in enumerate(EngineStats.__dataclass_fields__, 1)}
        return EngineStats(**counted)

    def pause(self, *, fail_waiting: bool = False) -> None:
        self.paused, self.failed_waiting = True, fail_waiting

    def resume(self) -> None:
        self.paused = False


class Told(EngineReplica):
    """A replica without Ray, ranks and sockets, and so with nothing to close."""

    def __del__(self) -> None:  # type: ignore[override]
        """Nothing."""


def replica(engine: StillEngine) -> Any:
    made: Any = object.__new__(Told)
    made.__dict__.update(
        _engine=engine,
        _rebuild_seconds=60.0,
        _process="engine-1",
        _replica="r1",
        _groups=SimpleNamespace(completed=5, failed=2, held=3, slots=9, paused=False),
    )
    return made


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (StillEngine(), None),
        (StillEngine(age=9.0), None),
        (StillEngine(age=11.0), "no step for 11 s"),
        (StillEngine("rebuilding", rebuilding=5.0), "reloaded for 5 s: rank 1 died"),
        (StillEngine("down"), "down: rank 1 died"),
    ],
)
def test_health_tells_what_is_wrong(engine: StillEngine, words: str | None) -> None:
    import asyncio

    name, told = asyncio.run(replica(engine).health())
    assert name == "r1"
    assert told is None if words is None else words in told


def test_serve_leaves_a_rebuilding_replica_alone_within_its_bound() -> None:
    replica(StillEngine()).check_health()
    replica(StillEngine("rebuilding", rebuilding=59.0)).check_health()
    with pytest.raises(RuntimeError, match="did not recover within 60 s"):
        replica(StillEngine("rebuilding", rebuilding=61.0)).check_health()
    with pytest.raises(RuntimeError, match="down"):
        replica(StillEngine("down")).check_health()


def test_admission_is_paused_by_user_config() -> None:
    engine = StillEngine()
    made = replica(engine)
    made.reconfigure({"paused": True})
    assert (made._groups.paused, engine.failed_waiting) == (True, False)
    made.reconfigure({"paused": True, "fail_waiting": True})
    assert engine.failed_waiting
    made.reconfigure({})
    assert made._groups.paused is False
    with pytest.raises(ValueError, match="'pause'"):
        made.reconfigure({"pause": True})


def test_every_reported_series_is_in_the_table() -> None:
    report = replica(StillEngine())._report()
    names = {metric.name: metric for metric in TABLE}
    for series in report["totals"]:
        assert names[base_name(series, names) or ""].combine == "total", series
    for series in report["gauges"]:
        assert names[base_name(series, names) or ""].combine != "total", series
    assert report["totals"]["requests_completed_total"] == 5
    assert report["gauges"]["http_slots_in_use"] == 3
    assert report["facts"]["numerics"] == "invariant"
