"""Transport rules against a running graph that is tight: two device slots, six HTTP slots, a key, a quick keepalive."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.support.disconnects import UNREAD, quiet, settled
from tests.support.graph import Graph, ready, start_graph, wait_until
from tests.support.scripted import script, turn

pytestmark = pytest.mark.graph

CHAT = "/v1/chat/completions"
WORD = b'"content":"w'
KEY = {"Authorization": "Bearer secret"}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
SETTINGS = (
    "layout=compact",
    "ingresses=2",
    "max_requests=2",
    "max_http_requests=6",
    "keepalive_seconds=0.3",
    "api_key=secret",
    "aliases=house,org/alias",
    "max_body_bytes=100000",
)


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Graph]:
    directory = tmp_path_factory.mktemp("tight")
    turns = [
        turn("all is well"),
        turn("word ", when="endless", then="repeat", delay_ms=5),
        turn("word ", when="quick", then="repeat"),
        turn("late", when="wait long", prefill_delay_ms=2500),
        turn("slow ", when="draining", then="repeat", delay_ms=400),
        turn("bad", when="break", fail_at=2),
        turn("bad", when="break at once", fail_at=0),
    ]
    source = script(directory, turns, name="rules", chat_template=TEMPLATE, context=65536)
    running = start_graph(directory / "log", f"model={source}", f"cache_dir={directory / 'cache'}", *SETTINGS)
    yield running
    assert running.stop() == 0


@pytest.fixture
def http(tight: Graph) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tight.url, headers=KEY, timeout=60) as client:
        yield client


Open = Callable[..., "Stream"]


@pytest.fixture
def stream(tight: Graph) -> Iterator[Open]:
    """Begins streams, and ends what a test leaves of them."""
    opened: list[Stream] = []

    def open(body: dict[str, Any], **options: Any) -> Stream:
        opened.append(Stream(tight, body, **options))
        return opened[-1]

    yield open
    for one in opened:
        one.leave()
    quiet(tight)


def answers(http: httpx.Client, path: str) -> bool:
    """Health and metrics say 503 when what they ask doesn't answer within a second."""
    return http.get(path).status_code == 200


def asking(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


class Stream:
    """One streamed request on a raw socket; `received` is what was read so far."""

    def __init__(
        self, tight: Graph, body: dict[str, Any], path: str = CHAT, receive_buffer: int = 0, more: str = ""
    ) -> None:
        self.socket = socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(60)
        self.socket.connect(("127.0.0.1", tight.port))
        data = json.dumps({**body, "stream": True}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nContent-Length: {len(data)}\r\n"
        self.socket.sendall(f"{head}{more}Connection: close\r\n\r\n".encode() + data)
        self.received = b""

    def until(self, mark: bytes) -> bytes:
        while mark not in self.received:
            data = self.socket.recv(65536)
            assert data, self.received[-500:]
            self.received += data
        return self.received

    def rest(self) -> bytes:
        parts = [self.received]
        while data := self.socket.recv(1 << 20):
            parts.append(data)
        self.socket.close()
        self.received = b"".join(parts)
        return self.received

    def body(self) -> bytes:
        """The whole body, its chunks joined."""
        data = self.rest()
        at = data.index(b"\r\n\r\n") + 4
        parts = []
        while at < len(data):
            start = data.index(b"\r\n", at) + 2
            size = int(data[at:start], 16)
            parts.append(data[start : start + size])
            at = start + size + 2
        return b"".join(parts)

    def leave(self) -> None:
        self.socket.close()


def test_keys_and_open_routes(tight: Graph) -> None:
    with httpx.Client(base_url=tight.url, timeout=30) as client:
        for path in ("/v1/models", "/v1/models/house", "/api/tags"):
            assert client.get(path).json()["error"]["type"] == "authentication_error"
        for path in (CHAT, "/v1/completions", "/v1/messages", "/v1/responses", "/v1/systemone", "/v1/decisions"):
            assert client.post(path, json={}).status_code == 401, path
        wait_until(lambda: client.get("/health").json() == {"status": "ok"})
        wait_until(lambda: client.get("/metrics", headers={"Authorization": "Bearer wrong"}).status_code == 200)


def test_one_request_id_everywhere(http: httpx.Client) -> None:
    answers = [
        http.post(CHAT, json=asking("hi")),
        http.post(CHAT, json=asking("hi", stream=True)),
        http.post(CHAT, json={}),
        http.get("/nope"),
        http.get("/v1/models", headers={"x-request-id": "mine-1"}),
    ]
    for answer in answers:
        assert len(answer.headers.get_list("x-request-id")) == 1
        assert "," not in answer.headers["x-request-id"]
    assert answers[-1].headers["x-request-id"] == "mine-1"


@pytest.mark.parametrize("given", [b"x" * 129, b"a b", b"\xff\xfe"])
def test_another_id_replaces_one_that_is_too_long_or_not_visible(http: httpx.Client, given: bytes) -> None:
    answer = http.get("/v1/models", headers={b"x-request-id": given})
    assert answer.status_code == 200
    (sent,) = answer.headers.get_list("x-request-id")
    assert sent.isalnum() and len(sent) == 32


@pytest.mark.parametrize(
    "header",
    [(b"x-request-timeout-seconds", b"0.001"), (b"x-session-id", b"\xff"), (b"serve_multiplexed_model_id", b"m")],
)
def test_headers_that_serve_would_obey_mean_nothing(http: httpx.Client, header: tuple[bytes, bytes]) -> None:
    assert http.post(CHAT, json=asking("wait long"), headers=[header]).status_code == 200


def test_no_header_hides_that_a_client_left(tight: Graph, stream: Open) -> None:
    endless = stream(asking("endless", max_tokens=50_000), more="x-request-disconnect-disabled: ?1\r\n")
    endless.until(WORD)
    endless.leave()
    quiet(tight)


def test_slashed_and_encoded_names_through_the_sdk(tight: Graph, http: httpx.Client) -> None:
    (card,) = http.get("/v1/models").json()["data"]
    assert card["id"] == "house"
    for name in ("org/alias", "org%2Falias", "house", card["root"]):
        assert http.get(f"/v1/models/{name}").json() == card
    with openai.OpenAI(base_url=f"{tight.url}/v1", api_key="secret", max_retries=0) as client:
        assert client.models.retrieve("org/alias").id == "house"
    assert http.head("/v1/models/org/alias").status_code == 200
    assert http.head("/metrics").content == b""


def test_bounds_and_encodings(http: httpx.Client) -> None:
    assert http.post(CHAT, json=asking("x" * 200_000)).status_code == 413
    assert http.post(CHAT, content=b"{}", headers={"Content-Encoding": "lzma"}).status_code == 415
    refused = http.post(CHAT, content=b"{")
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")


def test_headers_and_keepalive_come_while_every_device_slot_is_busy(
    tight: Graph, http: httpx.Client, stream: Open
) -> None:
    busy = [stream(asking("endless", max_tokens=50_000)) for _ in range(2)]
    for one in busy:
        one.until(WORD)
    queued = stream(asking("hi"))
    text = queued.until(b": keep-alive\n\n")
    assert text.startswith(b"HTTP/1.1 200") and b"text/event-stream" in text
    assert b"data:" not in text
    wait_until(lambda: tight.metrics()["pending_requests"] == 1)
    for one in busy:
        one.leave()
    assert b"data: [DONE]" in queued.rest()


def test_long_prefill_sends_comments_only(tight: Graph, http: httpx.Client, stream: Open) -> None:
    waiting = stream(asking("wait long"))
    before = waiting.until(b"data:").split(b"data:")[0]
    assert before.count(b": keep-alive") >= 2
    assert b"data: [DONE]" in waiting.rest()


def test_slots_are_counted_a_choice_and_refusals_tell_what_to_do(
    tight: Graph, http: httpx.Client, stream: Open
) -> None:
    assert http.post(CHAT, json=asking("hi", n=7)).status_code == 400
    holding = stream(asking("endless", n=5, max_tokens=50_000))
    holding.until(WORD)
    wait_until(lambda: tight.metrics()["http_slots_in_use"] == 5)
    full = http.post(CHAT, json=asking("hi", n=2))
    assert (full.status_code, full.json()["error"]["type"]) == (429, "rate_limit_error")
    assert int(full.headers["retry-after"]) >= 1
    for path in ("/health", "/metrics", "/v1/models", "/api/tags"):
        wait_until(functools.partial(answers, http, path))
    count = http.post("/v1/messages/count_tokens", json=asking("hi"), headers={"anthropic-version": "2023-06-01"})
    assert count.status_code == 200
    holding.leave()


@pytest.mark.parametrize("state", ["queued", "prefill", "decode", "draining"])
def test_a_killed_client_returns_every_slot_and_page(
    tight: Graph, http: httpx.Client, stream: Open, state: str
) -> None:
    before = settled(tight)
    others: list[Stream] = []
    if state == "queued":
        others = [stream(asking("endless", max_tokens=50_000)) for _ in range(2)]
        for one in others:
            one.until(WORD)
        victim = stream(asking("hi"))
        wait_until(lambda: tight.metrics()["pending_requests"] == 1)
    elif state == "prefill":
        victim = stream(asking("wait long"))
        victim.until(b"200")
    else:
        victim = stream(asking("draining" if state == "draining" else "endless", max_tokens=50_000))
        victim.until(b'"content":"')
    victim.leave()
    for one in others:
        one.leave()
    wait_until(lambda: tight.metrics()["free_kv_pages"] + tight.metrics()["cached_kv_pages"] >= before["free_kv_pages"])
    after = settled(tight)
    assert after["http_slots_in_use"] == before["http_slots_in_use"] == 0
    assert after["requests_failed_total"] == before["requests_failed_total"]


def test_a_paused_reader_holds_its_http_slot_alone_and_gets_everything(
    tight: Graph, http: httpx.Client, stream: Open
) -> None:
    ids = list(range(100))
    body = asking("quick", max_tokens=UNREAD, logprobs=True, logprob_token_ids=ids)
    before = settled(tight)["generated_tokens_total"]
    paused = stream(body, receive_buffer=4096)
    wait_until(lambda: tight.metrics()["generated_tokens_total"] >= before + UNREAD)
    wait_until(lambda: tight.metrics()["active_requests"] == 0)
    held = tight.metrics()
    assert held["http_slots_in_use"] == 1, "the answer waits for its reader"
    assert http.post(CHAT, json=asking("hi")).status_code == 200
    time.sleep(1.0)
    data = paused.body()
    frames = [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]
    assert (
        sum(len((choice["logprobs"] or {}).get("content") or ()) for f in frames for choice in f["choices"]) == UNREAD
    )
    assert b"data: [DONE]" in data


def test_failures_in_the_middle(tight: Graph, http: httpx.Client, stream: Open) -> None:
    before = settled(tight)["requests_failed_total"]
    data = stream(asking("break")).rest()
    assert b'"error"' in data and b"[DONE]" not in data
    broken = http.post(CHAT, json=asking("break"))
    assert (broken.status_code, broken.json()["error"]["type"]) == (500, "server_error")
    wait_until(lambda: tight.metrics()["requests_failed_total"] == before + 2)


def test_a_failure_before_the_first_token_has_neither_role_nor_done(stream: Open) -> None:
    data = stream(asking("break at once")).body()
    assert b'"error"' in data
    assert b"role" not in data and b"[DONE]" not in data


def test_counts_of_an_answer_that_ends_with_eos(tight: Graph, http: httpx.Client) -> None:
    before = settled(tight)
    answer = http.post(CHAT, json=asking("hi")).json()
    wait_until(lambda: tight.metrics()["requests_completed_total"] > before["requests_completed_total"])
    after = settled(tight)
    generated = after["generated_tokens_total"] - before["generated_tokens_total"]
    assert generated == answer["usage"]["completion_tokens"]
    reused = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    prefilled = after["prefill_tokens_total"] - before["prefill_tokens_total"]
    assert prefilled + reused == answer["usage"]["prompt_tokens"]


def test_first_response_and_views(tight: Graph, http: httpx.Client) -> None:
    http.post(CHAT, json=asking("hi"))
    wait_until(lambda: tight.view()["first_response"]["samples"] >= 1)
    shown = tight.view()
    assert 0 < shown["first_response"]["median_seconds"] < 60
    assert shown["total_pages"] > 0 and shown["engine_replicas"] == 1
    wait_until(lambda: answers(http, "/metrics"))
    text = http.get("/metrics")
    assert text.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'numerics="' in text.text


def test_documents_are_served(http: httpx.Client) -> None:
    assert http.get("/openapi.json").json()["openapi"] == "3.1.0"
    assert "text/html" in http.get("/docs").headers["content-type"]


def test_a_websocket_is_refused(tight: Graph) -> None:
    with socket.create_connection(("127.0.0.1", tight.port), 30) as plain:
        lines = ["GET /v1/responses HTTP/1.1", "Host: x", "Connection: Upgrade", "Upgrade: websocket"]
        lines += ["Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "", ""]
        plain.sendall("\r\n".join(lines).encode())
        assert b" 101 " not in plain.recv(4096)


def test_health_tells_of_ranks_that_are_rebuilt(tight: Graph, http: httpx.Client) -> None:
    ranks = tight.pids("RankActor")

    def unhealthy() -> bool:
        answer = http.get("/health")
        return answer.status_code == 503 and answer.json()["error"]["type"] == "server_error"

    os.kill(ranks[0], signal.SIGKILL)
    wait_until(unhealthy)
    wait_until(lambda: ready(tight))
    assert ranks[0] not in tight.pids("RankActor")
    assert http.post(CHAT, json=asking("hi")).status_code == 200


def test_every_ingress_tells_the_same_and_one_may_die(tight: Graph, stream: Open) -> None:
    """Cards are the server's, not the process's; a dead ingress takes its own streams along and nothing else."""

    def cards() -> set[str]:
        found = set()
        for _ in range(20):
            with httpx.Client(base_url=tight.url, headers=KEY, timeout=30) as client:
                found.add(client.get("/v1/models").text)
        return found

    ingresses = tight.pids("Ingress")
    assert len(ingresses) == 2
    before = cards()
    assert len(before) == 1
    running = [stream(asking("endless", max_tokens=50_000)) for _ in range(2)]
    for one in running:
        one.until(WORD)
    os.kill(ingresses[0], signal.SIGKILL)
    wait_until(lambda: len(tight.pids("Ingress")) == 2 and ingresses[0] not in tight.pids("Ingress"))
    wait_until(lambda: ready(tight))
    wait_until(lambda: cards() == before)
    assert tight.metrics()["http_slots"] == 6


def test_questions_hold_one_slot_from_the_first_to_the_last(tight: Graph, http: httpx.Client, stream: Open) -> None:
    """Five of six slots are held by others. Whoever wants the sixth is refused until the last question is answered."""
    prompts = ["endless", "hi", "hi", "hi", "hi"]
    others = stream({"model": "m", "prompt": prompts, "max_tokens": 50_000}, path="/v1/completions")
    others.until(b'"text":"w')
    first = {"type": "predicate", "instructions": "Is it time to wait long"}
    body = {"model": "m", "input": "x", "questions": [first, *[{**first, "instructions": "Is it?"}] * 63]}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(http.post, "/v1/decisions", json=body)
        wait_until(lambda: answer.done() or tight.metrics()["http_slots_in_use"] == 6)
        while not answer.done():
            another = stream(asking("endless", max_tokens=50_000))
            if b" 200 " in another.until(b"\r\n"):
                break  # and keeps its slot, so that a question still to come would be refused
            assert b" 429 " in another.received
    assert answer.result().status_code == 200, answer.result().text
    assert len(answer.result().json()["answers"]) == 64


def test_leaving_between_questions_frees_the_slot(tight: Graph, stream: Open) -> None:
    before = settled(tight)["requests_failed_total"]
    texts = ("Is it?", "Is it time to wait long?", "Is it time to wait long again?")
    questions = {text: {"type": "noul", "instructions": text} for text in texts}
    leaving = stream({"model": "m", "state": "x", "questions": questions}, path="/v1/systemone")
    wait_until(lambda: tight.metrics()["http_slots_in_use"] == 1)
    leaving.leave()
    assert settled(tight)["requests_failed_total"] == before
