"""The mirror: increments, gauges, labels and fresh samples reach Ray's metrics, each once."""

from __future__ import annotations

from typing import Any

import pytest
from ray.util import metrics

from engine.types.telemetry import Report
from serve_app.ray_metrics import PERIOD_SECONDS, Mirror

Recorded = list[tuple[str, str, float, dict[str, str]]]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Everything that is told to Ray, as (kind, name, value, tags)."""
    told: Recorded = []

    def fake(kind: str) -> type:
        class Metric:
            def __init__(self, name: str, **options: Any) -> None:
                self.name, self.tag_keys = name, options.get("tag_keys", ())

            def tell(self, value: float, tags: dict[str, str] | None = None) -> None:
                assert set(tags or {}) == set(self.tag_keys)
                told.append((kind, self.name, value, tags or {}))

            inc = set = observe = tell

        return Metric

    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(metrics, kind, fake(kind))
    return told


def report(totals: dict[str, int], gauges: dict[str, int], *samples: tuple[float, float]) -> Report:
    return {
        "process": "p",
        "kind": "engine",
        "totals": totals,
        "gauges": gauges,
        "samples": list(samples),
        "truncated": False,
        "facts": {},
    }


def test_counters_grow_by_the_difference_and_gauges_are_set(recorded: Recorded) -> None:
    mirror = Mirror(lambda: report({}, {}))
    mirror.update(report({"generated_tokens_total": 5, "unknown_total": 1}, {"active_requests": 2, "unknown": 1}))
    mirror.update(report({"generated_tokens_total": 5}, {"active_requests": 0}))
    mirror.update(report({"generated_tokens_total": 9}, {}))
    assert recorded == [
        ("Counter", "flare_generated_tokens_total", 5, {}),
        ("Gauge", "flare_active_requests", 2, {}),
        ("Gauge", "flare_active_requests", 0, {}),
        ("Counter", "flare_generated_tokens_total", 4, {}),
    ]


def test_labels_become_tags(recorded: Recorded) -> None:
    Mirror(lambda: report({}, {})).update(report({'host_cache_dropped_total{tier="dram",reason="oversize"}': 3}, {}))
    assert recorded == [("Counter", "flare_host_cache_dropped_total", 3, {"tier": "dram", "reason": "oversize"})]


def test_each_sample_is_observed_once(recorded: Recorded) -> None:
    mirror = Mirror(lambda: report({}, {}))
    mirror.update(report({}, {}, (1.0, 0.1), (2.0, 0.2)))
    mirror.update(report({}, {}, (2.0, 0.2), (3.0, 0.3)))
    assert [value for _, _, value, _ in recorded] == [0.1, 0.2, 0.3]
    assert {name for _, name, _, _ in recorded} == {"flare_first_response_seconds"}


def test_it_stands_in_for_collect_and_tells_ray_now_and_then(recorded: Recorded) -> None:
    now = 0.0
    count = 0

    def collect() -> Report:
        nonlocal count
        count += 1
        return report({"generated_tokens_total": count}, {})

    mirror = Mirror(collect, lambda: now)
    assert [mirror()["totals"]["generated_tokens_total"] for _ in range(5)] == [1, 2, 3, 4, 5]
    assert len(recorded) == 1
    now = PERIOD_SECONDS
    mirror()
    assert [value for _, _, value, _ in recorded] == [1, 5]
