"""The running graph: Ray, Serve, proxy, ingress, engine replica and rank, in the compact layout with the demo model."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.disconnects import CHAT, quiet, settled
from tests.support.graph import Graph, wait_until
from tests.support.raw_http import RawRequest, chat, sse_events, streamed_text

pytestmark = pytest.mark.graph

LONG = chat("Write a very long story about a lighthouse.", max_tokens=400, ignore_eos=True, stream=True)


def test_the_model_answers_and_a_stream_is_the_same_answer(graph: Graph) -> None:
    body = chat("What is the capital of France?", seed=11, max_tokens=40)
    whole = graph.post(CHAT, body)
    assert "Paris" in whole["choices"][0]["message"]["content"]
    stream = RawRequest(graph.port, CHAT, {**body, "stream": True}).read_all()
    assert streamed_text(stream) == whole["choices"][0]["message"]["content"]
    assert b"data: [DONE]" in stream


def test_parallel_streams_finish(graph: Graph) -> None:
    def one(seed: int) -> int:
        request = RawRequest(graph.port, CHAT, chat("Count.", max_tokens=12, ignore_eos=True, stream=True, seed=seed))
        data = request.read_all()
        assert b"data: [DONE]" in data
        return len(sse_events(data))

    with ThreadPoolExecutor(16) as pool:
        assert all(count > 2 for count in pool.map(one, range(16)))
    quiet(graph)


def test_a_reader_that_leaves_frees_its_slot(graph: Graph) -> None:
    request = RawRequest(graph.port, CHAT, LONG)
    request.read_until(b'"content":"')
    wait_until(lambda: graph.metrics()["active_requests"] >= 1)
    request.close()
    quiet(graph)


def test_a_group_above_all_slots_is_refused_for_good(graph: Graph) -> None:
    slots = int(graph.metrics()["http_slots"])
    body = {"model": "m", "prompt": ["x"] * (slots // 100 + 1), "n": 100, "max_tokens": 1}
    answer = graph.post("/v1/completions", body)
    assert answer["status"] == 400
    assert str(slots) in answer["error"]["message"]


def test_a_large_prompt_crosses_the_graph(graph: Graph) -> None:
    """Token ids by the hundred thousand are refused for their length, not lost on the way."""
    answer = graph.post("/v1/completions", {"model": "m", "prompt": [5] * 400_000, "max_tokens": 1})
    assert answer["status"] == 400
    assert "400000" in answer["error"]["message"]


def test_unknown_paths_answer_in_json(graph: Graph) -> None:
    answer = graph.post("/v1/nothing", {})
    assert (answer["status"], answer["error"]["type"]) == (404, "invalid_request_error")


def test_one_request_id_header(graph: Graph) -> None:
    data = RawRequest(graph.port, CHAT, chat("Hi", max_tokens=1)).read_all()
    assert data.lower().count(b"x-request-id:") == 1


def test_the_server_has_one_identity(graph: Graph) -> None:
    cards = {json.dumps(graph.get("/v1/models"), sort_keys=True) for _ in range(3)}
    assert len(cards) == 1


def test_counts_add_up(graph: Graph) -> None:
    before = settled(graph)
    graph.post("/v1/completions", {"model": "m", "prompt": "One two", "n": 2, "max_tokens": 7, "ignore_eos": True})
    wait_until(lambda: graph.metrics()["requests_completed_total"] >= before["requests_completed_total"] + 2)
    after = settled(graph)
    assert after["requests_completed_total"] - before["requests_completed_total"] == 2
    # A text stop can't shorten these, but the step in flight behind the last token may add one each.
    assert 14 <= after["generated_tokens_total"] - before["generated_tokens_total"] <= 16


def test_rays_metrics_agent_shows_the_series(graph: Graph) -> None:
    """What the Ray dashboard and Grafana read: our names behind Ray's prefix, from every process of ours."""
    graph.post(CHAT, chat("Hi", max_tokens=3))
    engines = ("generated_tokens_total", "requests_completed_total", "free_kv_pages", "http_slots")
    ingresses = ("http_requests_entering", "first_response_seconds_bucket")

    def shown() -> bool:
        text = graph.ray_metrics()
        return all(f"\nray_flare_{name}{{" in text for name in engines + ingresses)

    wait_until(shown, pause=1.0)


def test_only_ranks_load_torch(graph: Graph) -> None:
    def loads_torch(pid: int) -> bool:
        return "libtorch" in (Path("/proc") / str(pid) / "maps").read_text()

    for name in ("Engine", "Ingress", "TelemetryHub"):
        pids = graph.pids(name)
        assert pids, name
        assert not any(map(loads_torch, pids)), name
    (rank,) = graph.pids("RankActor")
    assert loads_torch(rank)


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="this system has no such policies")
def test_the_model_waits_for_nobody(graph: Graph) -> None:
    """Ray would run its workers 15 steps nicer than whoever started it."""

    def policies(name: str) -> set[int]:
        (pid,) = graph.pids(name)
        found: set[int] = set()
        for entry in (Path("/proc") / str(pid) / "task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                assert os.getpriority(os.PRIO_PROCESS, int(entry.name)) == os.getpriority(os.PRIO_PROCESS, 0)
                found.add(os.sched_getscheduler(int(entry.name)))
        return found

    for name in ("Engine", "Ingress"):
        assert policies(name) == {os.SCHED_OTHER}, name
    policies("RankActor")
    (rank,) = graph.pids("RankActor")
    assert os.sched_getscheduler(rank) == os.SCHED_OTHER, "its main thread computes"
    for name in ("TelemetryHub", "gcs_server"):
        assert policies(name) == {os.SCHED_BATCH}, name


def test_it_listens_where_it_was_told(graph: Graph) -> None:
    """Only the loopback: another address of this machine refuses."""
    address = socket.gethostbyname(socket.gethostname())
    if address.startswith("127."):
        pytest.skip("this machine has no other address")
    with pytest.raises(OSError):
        socket.create_connection((address, graph.port), 2).close()
