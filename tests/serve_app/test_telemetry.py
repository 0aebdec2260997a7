"""Counting, combining over processes, and the two views of /metrics."""

from __future__ import annotations

import re
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.types.telemetry import ProcessKind, Report, Snapshot
from protocols.errors import InvalidRequest
from serve_app.metrics_table import TABLE
from serve_app.telemetry import SAMPLE_CAPACITY, Recorder, View, base_name, wants_json

NOW = 1_700_000_100.0


def report(kind: ProcessKind = "engine", **more: Any) -> Report:
    plain: Report = {
        "process": "p",
        "kind": kind,
        "totals": {},
        "gauges": {},
        "samples": [],
        "truncated": False,
        "facts": {},
    }
    plain.update(more)  # type: ignore[typeddict-item]
    return plain


def view(*processes: Report, **totals: int) -> View:
    snapshot: Snapshot = {"instance": "i", "created": int(NOW) - 100, "totals": totals, "processes": list(processes)}
    return View(snapshot, NOW)


# --- the table

FIELDS = [
    "prefill_tokens",
    "generated_tokens",
    "decode_weight_bytes",
    "draft_steps",
    "verify_steps",
    "verification_drafts",
    "verification_rounds",
    "accepted_drafts",
    "draft_rounds",
    "active",
    "pending",
    "completed",
    "reasoning_budget_cuts",
    "failed",
    "replay_gpu_ns",
    "replay_readiness_wait_ns",
    "replay_readiness_samples",
    "reused_tokens",
    "cached_pages",
    "free_pages",
    "total_pages",
    "page_tokens",
    "host_hits",
    "host_reused_tokens",
    "host_memory_records",
    "host_disk_records",
    "host_bytes_out",
    "host_bytes_in",
    "learned_drafter",
]

NAMES = [
    "prefill_tokens_total",
    "generated_tokens_total",
    "decode_weight_bytes",
    "speculative_rounds_total",
    "verification_draft_tokens_total",
    "verification_request_rounds_total",
    "accepted_draft_tokens_total",
    "draft_request_rounds_total",
    "active_requests",
    "pending_requests",
    "requests_completed_total",
    "reasoning_budget_cuts_total",
    "requests_failed_total",
    "replay_gpu_nanoseconds_total",
    "replay_readiness_wait_nanoseconds_total",
    "replay_readiness_samples_total",
    "cache_reused_tokens_total",
    "cached_kv_pages",
    "free_kv_pages",
    "total_kv_pages",
    "kv_page_tokens",
    "host_cache_hits_total",
    "host_cache_reused_tokens_total",
    "host_cache_memory_records",
    "host_cache_disk_records",
    "host_cache_bytes_out_total",
    "host_cache_bytes_in_total",
    "checkpoint_captures_total",
    "checkpoint_skips_total",
    "checkpoint_extra_work_nanoseconds_total",
    "checkpoint_anchor_reservations",
    "host_cache_copyout_headroom_deferrals_total",
    "host_cache_held_total",
    "host_cache_dropped_total",
    "host_cache_parked_records",
    "host_cache_store_skipped_total",
    "host_cache_slots_in_use",
    "host_cache_slots_total",
    "host_cache_intake_slots",
    "history_drafts_enabled",
]


def test_every_documented_field_is_in_the_json_view() -> None:
    shown = view().json()
    assert set(FIELDS) <= set(shown)
    assert "input_decoded_images_total" in shown
    for name, value in shown.items():
        if name == "first_response":
            continue
        assert type(value) is (bool if name == "learned_drafter" else int), name


def test_every_documented_name_is_in_the_text_view() -> None:
    text = view().text().decode()
    for name in NAMES:
        assert re.search(rf"^# TYPE flare_{name} (counter|gauge)$", text, re.M), name
        assert re.search(rf"^flare_{name}({{.*}})? 0$", text, re.M), name


def test_text_view_is_valid_and_has_no_other_names() -> None:
    text = view(report(facts={"numerics": "fast", "device": 'a "b"\\'})).text().decode()
    families = list(text_string_to_metric_families(text))
    assert families
    samples = [sample.name for family in families for sample in family.samples]
    assert all(name.startswith("flare_") for name in samples)
    assert not any(name.endswith("_created") for name in samples)
    assert text.endswith("\n")


def test_the_only_histograms() -> None:
    text = view().text().decode()
    assert re.findall(r"^# TYPE (\S+) histogram$", text, re.M) == [
        "flare_host_cache_missing_tokens",
        "flare_host_cache_estimated_transfer_ns",
        "flare_host_cache_estimated_prefill_ns",
    ]
    for name in ("missing_tokens", "estimated_transfer_ns", "estimated_prefill_ns"):
        assert f'flare_host_cache_{name}_bucket{{le="+Inf"}} 0' in text
        assert f"flare_host_cache_{name}_sum 0" in text


def test_speculation_launches_rows_and_http_gauges_exist_at_zero() -> None:
    text = view().text().decode()
    for fragment in ("_by_batch_total{", "_by_width_total{", "_by_depth_total{", "flare_graph_launches_total{kind="):
        assert fragment in text
    for name in ("embedding_row_cache_hits_total", "http_slots_in_use", "http_slots", "uptime_seconds"):
        assert re.search(rf"^flare_{name} \d+$", text, re.M), name


def test_names_without_text_are_in_json_only() -> None:
    text = view(draft_steps=3).text().decode()
    assert "draft_steps" not in text and "learned_drafter" not in text
    assert view(draft_steps=3).json()["draft_steps"] == 3


def test_names_are_unique_and_label_values_documented() -> None:
    names = [metric.name for metric in TABLE]
    assert len(set(names)) == len(names)
    fields = [metric.field for metric in TABLE if metric.field]
    assert len(set(fields)) == len(fields)
    text = view().text().decode()
    for role in ("anchor", "message", "endpoint"):
        assert f'flare_checkpoint_captures_total{{role="{role}"}} 0' in text
    for reason in ("unknown_cost", "work_budget", "storage"):
        assert f'flare_checkpoint_skips_total{{reason="{reason}"}} 0' in text
    for tier in ("dram", "nvme"):
        for reason in ("end_of_chain", "oversize", "io_error"):
            assert f'flare_host_cache_dropped_total{{tier="{tier}",reason="{reason}"}} 0' in text


# --- combining


def test_totals_are_the_hubs_and_unknown_series_are_left_out() -> None:
    shown = view(generated_tokens_total=7, mystery_total=3)
    assert shown.json()["generated_tokens"] == 7
    assert "mystery" not in shown.text().decode()


def test_gauges_add_up_and_constants_do_not() -> None:
    engine = {
        "active_requests": 2,
        "pending_requests": 1,
        "free_kv_pages": 90,
        "cached_kv_pages": 5,
        "total_kv_pages": 100,
        "kv_page_tokens": 64,
        "decode_weight_bytes": 1000,
    }
    shown = view(report(gauges=engine), report(gauges=engine), report("ingress")).json()
    assert (shown["active"], shown["pending"]) == (4, 2)
    assert (shown["free_pages"], shown["cached_pages"]) == (180, 10)
    assert (shown["total_pages"], shown["page_tokens"], shown["decode_weight_bytes"]) == (100, 64, 1000)
    assert shown["engine_replicas"] == 2


def test_a_gauge_cannot_pose_as_a_total() -> None:
    assert view(report(gauges={"generated_tokens_total": 5})).json()["generated_tokens"] == 0


def test_labelled_series_and_histograms_pass_through() -> None:
    totals = {
        'checkpoint_skips_total{reason="storage"}': 4,
        'graph_launches_total{kind="decode"}': 9,
        'speculative_rounds_by_batch_total{batch="32"}': 2,
        'host_cache_missing_tokens_bucket{le="+Inf"}': 6,
        "host_cache_missing_tokens_sum": 600,
        "host_cache_missing_tokens_count": 6,
    }
    text = view(**totals).text().decode()
    for series, value in totals.items():
        assert f"\nflare_{series} {value}\n" in text


@pytest.mark.parametrize(
    ("series", "name"),
    [
        ("a_total", "a_total"),
        ('a_total{x="y"}', "a_total"),
        ('h_bucket{le="1"}', "h"),
        ("h_sum", "h"),
        ("a_total_sum", None),
        ("b", None),
    ],
)
def test_base_names(series: str, name: str | None) -> None:
    kinds = {metric.kind: metric for metric in TABLE}
    assert base_name(series, {"a_total": kinds["counter"], "h": kinds["histogram"]}) == name


def test_uptime_counts_from_the_servers_creation() -> None:
    assert "\nflare_uptime_seconds 100\n" in view().text().decode()


def test_modes_are_named_once_each() -> None:
    facts = {"attention": "cpu", "numerics": "invariant"}
    text = view(report(facts=facts), report(facts=facts), report("ingress")).text().decode()
    assert text.count('flare_engine_info{attention="cpu",numerics="invariant"} 1') == 1


# --- first responses


def test_first_responses_merge_into_one_median() -> None:
    samples = [(NOW - 1, 0.1), (NOW - 2, 0.5)], [(NOW - 3, 0.3), (NOW - 61, 9.0)]
    shown = view(*(report("ingress", samples=part) for part in samples)).json()["first_response"]
    assert shown == {
        "median_seconds": 0.3,
        "samples": 3,
        "window_seconds": 60,
        "capacity": SAMPLE_CAPACITY,
        "truncated": False,
    }


def test_first_response_without_samples() -> None:
    shown = view(report("ingress", truncated=True)).json()["first_response"]
    assert (shown["median_seconds"], shown["samples"], shown["truncated"]) == (None, 0, True)


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def test_recorder_forgets_what_left_the_window() -> None:
    clock = Clock()
    recorder = Recorder("ingress", clock=clock)
    recorder.first_response(0.5)
    clock.now += 59
    recorder.first_response(0.7)
    assert [seconds for _, seconds in recorder.report()["samples"]] == [0.5, 0.7]
    clock.now += 2
    assert [seconds for _, seconds in recorder.report()["samples"]] == [0.7]


def test_recorder_says_when_the_window_held_more_than_it_kept() -> None:
    clock = Clock()
    recorder = Recorder("ingress", clock=clock)
    for _ in range(SAMPLE_CAPACITY):
        recorder.first_response(0.1)
    assert not recorder.report()["truncated"]
    recorder.first_response(0.2)
    made = recorder.report()
    assert made["truncated"] and len(made["samples"]) == SAMPLE_CAPACITY
    clock.now += 61
    assert not recorder.report()["truncated"]


def test_recorder_reports_copies() -> None:
    recorder = Recorder("engine", gauges=lambda: {"active_requests": 1})
    recorder.add("generated_tokens_total", 2)
    made = recorder.report()
    recorder.add("generated_tokens_total")
    assert made["totals"] == {"generated_tokens_total": 2}
    assert made["gauges"] == {"active_requests": 1}
    assert recorder.report()["process"] == made["process"] != Recorder("engine").process


# --- negotiation

JSON, TEXT = True, False


@pytest.mark.parametrize(
    ("format", "accept", "expected"),
    [
        (None, None, TEXT),
        (None, "", TEXT),
        (None, "*/*", TEXT),
        (None, "application/json", JSON),
        (None, "text/plain", TEXT),
        (None, "application/json, text/plain", JSON),
        (None, "text/plain, application/json", TEXT),
        (None, "text/plain;q=0.5, application/json", JSON),
        (None, "application/json;q=0.5, text/plain", TEXT),
        (None, "application/json;q=0.5, text/*;q=0.5", JSON),
        (None, "text/*;q=0.5, application/json;q=0.5", TEXT),
        (None, "application/*", JSON),
        (None, "*/*, application/json", TEXT),
        (None, "application/json, */*", JSON),
        (None, "application/json, */*;q=0.1", JSON),
        (None, "application/json;q=0", TEXT),
        (None, "application/json;q=0, */*;q=0.5", TEXT),
        (None, "application/json;q=junk", TEXT),
        (None, "Application/JSON;Q=0.9", JSON),
        (None, "junk, application/json", JSON),
        (None, "text/html", TEXT),
        (
            None,
            "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1",
            TEXT,
        ),
        ("json", None, JSON),
        ("json", "text/plain", JSON),
        ("prometheus", "application/json", TEXT),
    ],
)
def test_negotiation(format: str | None, accept: str | None, expected: bool) -> None:
    assert wants_json(format, accept) is expected


@pytest.mark.parametrize("format", ["xml", "", "JSON", "text"])
def test_other_formats_are_400(format: str) -> None:
    with pytest.raises(InvalidRequest, match="format"):
        wants_json(format, "application/json")
