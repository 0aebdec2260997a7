"""The full layout with two engines of two ranks and a scripted model: disconnects, stalled readers, and deaths.

The script counts, so that a token lost or repeated in a recovery is seen in the text.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.disconnects import CHAT, MOMENTS, nothing_leaks, quiet, settled
from tests.support.graph import PATIENCE_SECONDS, Graph, start_graph, wait_until
from tests.support.raw_http import RawRequest, answered, chat, streamed_text
from tests.support.scripted import script, turn

pytestmark = pytest.mark.graph

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
COUNTED = "".join(f"{number} " for number in range(1, 151))
FAST = "".join(f"{number} " for number in range(1, 31))
ENGINE = "ServeReplica:engine:Engine"
SLOW = chat("count slowly", max_tokens=2000, stream=True)
LAYOUT = (
    "layout=full",
    "engines=2",
    "tensor_parallel=2",
    "threads=1",
    "max_http_requests=8",
    "heartbeat_seconds=1",
    "drain_seconds=30",
)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Graph]:
    directory = tmp_path_factory.mktemp("full")
    turns = [
        turn(FAST),
        turn(COUNTED, when="count slowly", delay_ms=15),
        turn("word ", when="endless", then="repeat", delay_ms=15),
        turn(FAST, when="think long", prefill_delay_ms=1500),
    ]
    source = script(directory, turns, name="counting", chat_template=TEMPLATE)
    running = start_graph(directory / "log", f"model={source}", f"cache_dir={directory / 'cache'}", *LAYOUT)
    yield running
    assert running.stop() == 0


def counted(request: RawRequest) -> str:
    data = request.read_all()
    assert b"data: [DONE]" in data, data[-1000:]
    return streamed_text(data)


def test_the_layout(full: Graph) -> None:
    assert len(full.pids("RankActor")) == 4
    assert len(full.pids(ENGINE)) == 2
    for name in ("openai", "messages", "responses", "engine:Preprocessor"):
        assert full.pids(f"ServeReplica:{name}"), name


def test_every_family_answers_at_its_prefix(full: Graph) -> None:
    assert answered(full.post(CHAT, chat("hi"))) == FAST
    answer = full.post("/v1/responses", {"model": "m", "input": "hi"})
    assert answer["status"] == "completed"
    assert full.post("/v1/messages", {"model": "m"})["type"] == "error"
    assert full.post("/v1/messagesx", {})["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("moment", MOMENTS)
def test_no_disconnect_leaks(full: Graph, moment: str) -> None:
    body = chat("think long", stream=True) if moment == "pre" else SLOW
    nothing_leaks(full, body, moment, 10)


def test_readers_that_leave_disturb_nobody(full: Graph) -> None:
    reader = RawRequest(full.port, CHAT, SLOW)
    for number in range(6):
        other = RawRequest(full.port, CHAT, SLOW)
        time.sleep(0.01 * number)
        other.close()
    assert counted(reader) == COUNTED
    quiet(full)


def test_a_half_closed_request_counts_as_gone(full: Graph) -> None:
    import socket

    request = RawRequest(full.port, CHAT, SLOW)
    request.read_until(b'"content":"')
    request.socket.shutdown(socket.SHUT_WR)
    quiet(full)
    request.close()


def test_a_paused_reader_loses_nothing_and_holds_no_model_slot(full: Graph) -> None:
    request = RawRequest(full.port, CHAT, SLOW)
    request.read_until(b'"content":"')
    wait_until(lambda: full.metrics()["active_requests"] == 0)
    assert counted(request) == COUNTED
    quiet(full)


def test_one_full_replica_sends_the_group_to_the_other_and_two_answer_429(full: Graph) -> None:
    """Two groups of eight choices take the eight slots of both engines; a third finds none."""
    body = {"model": "m", "prompt": "endless", "n": 8, "max_tokens": 1500, "stream": True}
    groups = [RawRequest(full.port, "/v1/completions", body) for _ in range(2)]
    try:
        for group in groups:
            group.read_until(b'"text":"')
        answer = full.post(CHAT, chat("hi"))
        assert (answer["status"], answer["error"]["type"]) == (429, "rate_limit_error")
        wait_until(lambda: full.metrics()["http_slots_in_use"] == 16)
        oversized = full.post("/v1/completions", {**body, "n": 9, "stream": False})
        assert oversized["status"] == 400
    finally:
        for group in groups:
            group.close()
    quiet(full)


def test_a_killed_ingress_frees_its_slots(full: Graph) -> None:
    reader = RawRequest(full.port, CHAT, chat("endless", max_tokens=1500, stream=True))
    reader.read_until(b'"content":"')
    wait_until(lambda: full.metrics()["http_slots_in_use"] == 1)
    killed = full.pids("ServeReplica:openai")
    assert len(killed) == 1
    os.kill(killed[0], signal.SIGKILL)
    wait_until(lambda: full.pids("ServeReplica:openai") not in ([], killed))
    quiet(full)
    reader.close()
    assert answered(full.post(CHAT, chat("hi"))) == FAST


def test_a_killed_rank_is_a_pause(full: Graph) -> None:
    """Streams on the engine whose rank dies go on where they were: no token lost, none repeated."""
    readers = [RawRequest(full.port, CHAT, SLOW) for _ in range(6)]
    for reader in readers:
        reader.read_until(b'"content":"7')
    victim = full.pids("RankActor")[1]
    os.kill(victim, signal.SIGKILL)
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(counted, readers)) == [COUNTED] * 6
    quiet(full)
    wait_until(lambda: len(full.pids("RankActor")) == 4 and victim not in full.pids("RankActor"))


def test_a_killed_replica_hands_over_its_streams(full: Graph) -> None:
    before = settled(full)
    readers = [RawRequest(full.port, CHAT, SLOW) for _ in range(6)]
    for reader in readers:
        reader.read_until(b'"content":"7')
    victim = full.pids(ENGINE)[0]
    os.kill(victim, signal.SIGKILL)
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(counted, readers)) == [COUNTED] * 6
    after = settled(full)
    assert after["requests_failed_total"] == before["requests_failed_total"]
    assert after["generated_tokens_total"] > before["generated_tokens_total"], "totals outlive their process"
    wait_until(lambda: len(full.pids("RankActor")) == 4 and victim not in full.pids(ENGINE))
    wait_until(lambda: full.metrics()["engine_replicas"] == 2)


def test_a_killed_hub_forgets_nothing(full: Graph) -> None:
    before, card = settled(full), full.get("/v1/models")
    (hub,) = full.pids("TelemetryHub")
    os.kill(hub, signal.SIGKILL)
    wait_until(lambda: full.pids("TelemetryHub") not in ([], [hub]))
    wait_until(lambda: full.metrics()["requests_completed_total"] == before["requests_completed_total"])
    assert full.get("/v1/models") == card


def test_an_orderly_end_lets_streams_finish(full: Graph) -> None:
    """Last: it ends the graph."""
    reader = RawRequest(full.port, CHAT, SLOW)
    reader.read_until(b'"content":"')
    full.process.send_signal(signal.SIGTERM)
    assert counted(reader) == COUNTED
    assert full.process.wait(PATIENCE_SECONDS) == 0
    log = full.log.read_text()
    assert "Flare serves counting at " in log
    assert "Traceback" not in log
