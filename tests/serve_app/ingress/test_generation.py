"""The shape of a generation: admission before the body, cancellation in every state, groups, and what is enqueued."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from engine.types.events import TokenRecord, Update
from engine.types.request import RequestError
from protocols.errors import InvalidRequest, SlotsExhausted, Unavailable
from serve_app.delivery import Response
from serve_app.ingress.generation import _call_ids
from serve_app.ingress.service import IngressSettings
from tests.support.ingress import CHAT, Call, Reply, World, asynchronous, call

CHAT_PATH = "/v1/chat/completions"
both = pytest.mark.parametrize("stream", [False, True], ids=["buffered", "streamed"])


def chat(stream: bool, **more: Any) -> dict[str, Any]:
    return {**CHAT, "stream": stream, **more}


def quiet(world: World) -> bool:
    """Nothing of any request is left in the ingress."""
    pool = world.service.pool
    return (pool.requests, pool.held_bytes) == (0, 0)


async def settle(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


# --- admission


@asynchronous
async def test_a_full_pool_answers_before_the_body_is_read() -> None:
    world = World(settings=IngressSettings(under_serve=False, request_pool=2))
    waiting = [Call(world.app, "POST", CHAT_PATH, None) for _ in range(2)]
    await settle(lambda: world.service.pool.requests == 2)
    reply = await Call(world.app, "POST", CHAT_PATH, None).done()
    assert (reply.status, reply.json["error"]["type"]) == (429, "rate_limit_error")
    assert reply.header("retry-after")
    assert world.service.recorder.totals == {"requests_failed_total": 1}
    for request in waiting:
        request.leave()
        await request.done()
    assert (await call(world.app, "POST", CHAT_PATH, CHAT)).status == 200


@asynchronous
async def test_discovery_and_counts_need_no_place() -> None:
    world = World(settings=IngressSettings(under_serve=False, request_pool=1))
    waiting = Call(world.app, "POST", CHAT_PATH, None)
    await settle(lambda: world.service.pool.requests == 1)
    version = [("anthropic-version", "2023-06-01")]
    for method, path, body in [
        ("GET", "/health", b""),
        ("GET", "/metrics", b""),
        ("GET", "/v1/models", b""),
        ("GET", "/api/tags", b""),
    ]:
        assert (await call(world.app, method, path, body)).status == 200, path
    assert (await call(world.app, "POST", "/api/show", {"model": "org/tiny-model"})).status == 200
    counts = await asyncio.gather(
        *(call(world.app, "POST", "/v1/messages/count_tokens", CHAT, version) for _ in range(24))
    )
    assert [reply.status for reply in counts] == [200] * 24
    assert world.engine.generations == []
    waiting.leave()
    await waiting.done()


@asynchronous
async def test_body_bytes_are_bounded_over_all_requests() -> None:
    world = World(settings=IngressSettings(under_serve=False, pool_bytes=1000))
    first = Call(world.app, "POST", CHAT_PATH, None)
    first.send(b" " * 900)
    await settle(lambda: world.service.pool.held_bytes == 900)
    assert (await call(world.app, "POST", CHAT_PATH, chat(False, user="x" * 200))).status == 429
    assert world.service.recorder.totals == {"requests_failed_total": 1}
    first.leave()
    await first.done()
    assert quiet(world)


@asynchronous
async def test_decoded_bytes_count_too() -> None:
    world = World(settings=IngressSettings(under_serve=False, pool_bytes=5000))
    first = Call(world.app, "POST", CHAT_PATH, None)
    first.send(b" " * 1000)
    await settle(lambda: world.service.pool.held_bytes == 1000)
    packed = gzip.compress(json.dumps(chat(False, user="x" * 10_000)).encode())
    assert len(packed) < 1000
    assert (await call(world.app, "POST", CHAT_PATH, packed, [("content-encoding", "gzip")])).status == 429
    first.leave()
    await first.done()
    assert (await call(world.app, "POST", CHAT_PATH, packed, [("content-encoding", "gzip")])).status == 200
    assert quiet(world)


@asynchronous
async def test_slow_counts_keep_no_other_from_its_turn() -> None:
    world = World()
    version = [("anthropic-version", "2023-06-01")]
    slow = [Call(world.app, "POST", "/v1/messages/count_tokens", None, version) for _ in range(40)]
    await asyncio.sleep(0.01)
    assert (await call(world.app, "POST", "/v1/messages/count_tokens", CHAT, version)).status == 200
    for request in slow:
        request.leave()
        await request.done()


@asynchronous
async def test_a_place_is_free_again_once_the_group_is_enqueued() -> None:
    world = World(settings=IngressSettings(under_serve=False, request_pool=1))
    world.engine.reply = None
    requests = []
    for _ in range(5):
        requests.append(Call(world.app, "POST", CHAT_PATH, chat(True)))
        await world.engine.arrival()
    assert quiet(world)
    for generation, request in zip(world.engine.generations, requests, strict=True):
        generation.end()
        assert (await request.done()).status == 200


@pytest.mark.parametrize("error", [SlotsExhausted("full"), Unavailable("queue full")])
@asynchronous
async def test_refused_groups_count_as_failed_a_choice(error: Exception) -> None:
    world = World()
    world.engine.refuse = error
    await call(world.app, "POST", CHAT_PATH, chat(False, n=3))
    assert world.service.recorder.totals == {"requests_failed_total": 3}


@pytest.mark.parametrize("error", [InvalidRequest("more choices than slots"), RequestError("too long")])
@asynchronous
async def test_what_can_never_run_has_not_failed(error: Exception) -> None:
    """A request that is wrong is the client's: counted nowhere."""
    world = World()
    for broken in (b"{", chat(False, temperature="hot")):
        assert (await call(world.app, "POST", CHAT_PATH, broken)).status == 400
    world.engine.refuse = error
    assert (await call(world.app, "POST", CHAT_PATH, chat(False, n=3))).status == 400
    assert world.service.recorder.totals == {}


# --- leaving, in every state


@both
@asynchronous
async def test_leaving_while_lowering(stream: bool) -> None:
    world = World()
    world.preprocessor.gate.clear()
    request = Call(world.app, "POST", CHAT_PATH, chat(stream))
    await settle(lambda: len(world.preprocessor.requests) == 1)
    request.leave()
    assert (await request.done()).messages == []
    await settle(lambda: world.preprocessor.cancelled == 1)
    assert quiet(world) and world.engine.generations == []


@both
@asynchronous
async def test_leaving_before_the_acknowledgement(stream: bool) -> None:
    world = World()
    world.engine.gate.clear()
    request = Call(world.app, "POST", CHAT_PATH, chat(stream))
    await settle(lambda: len(world.preprocessor.requests) == 1)
    await asyncio.sleep(0.01)
    request.leave()
    assert (await request.done()).messages == []
    await settle(lambda: world.engine.cancelled == 1)
    assert quiet(world)


@both
@pytest.mark.parametrize("tokens", [0, 3], ids=["queued or in prefill", "decoding"])
@asynchronous
async def test_leaving_while_generating(stream: bool, tokens: int) -> None:
    world = World()
    world.engine.reply = None
    request = Call(world.app, "POST", CHAT_PATH, chat(stream, n=2))
    generation = await world.engine.arrival()
    if stream:
        await request.until(lambda reply: bool(reply.messages))
    if tokens:
        generation.text("abc", 1)
        await asyncio.sleep(0.01)
    request.leave()
    await request.done()
    await asyncio.wait_for(generation.finished.wait(), 10)
    assert generation.outcomes == ("cancelled", "cancelled")
    assert quiet(world)


@both
@asynchronous
async def test_leaving_while_the_answer_waits_for_its_reader(stream: bool) -> None:
    world = World()
    slow = asyncio.Event()
    if not stream:
        world.engine.reply = "ok"
    request = Call(world.app, "POST", CHAT_PATH, chat(stream), slow=slow)
    generation = await world.engine.arrival()
    await request.until(lambda reply: bool(reply.body))
    assert generation.outcomes is None, "an answer on its way holds its slot"
    request.leave()
    await request.done()
    await asyncio.wait_for(generation.finished.wait(), 10)
    assert generation.outcomes == ("completed",)


@both
@asynchronous
async def test_cancelled_from_above_like_a_disconnect(stream: bool) -> None:
    """Serve cancels the request's task itself."""
    world = World()
    world.engine.reply = None
    request = Call(world.app, "POST", CHAT_PATH, chat(stream))
    generation = await world.engine.arrival()
    await asyncio.sleep(0.005)
    request.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request.done()
    await asyncio.wait_for(generation.finished.wait(), 10)
    assert generation.outcomes == ("cancelled",)


@asynchronous
async def test_a_storm_of_leaving_clients_leaves_nothing() -> None:
    world = World()
    world.engine.reply = None
    requests = [Call(world.app, "POST", CHAT_PATH, chat(index % 2 == 0)) for index in range(60)]
    for index, request in enumerate(requests):
        for _ in range(index % 7):
            await asyncio.sleep(0)
        request.leave()
    for request in requests:
        await request.done()
    await settle(lambda: all(generation.outcomes is not None for generation in world.engine.generations))
    assert quiet(world)
    assert len(asyncio.all_tasks()) == 1


# --- groups and what is enqueued


@asynchronous
async def test_a_group_goes_to_the_engine_whole_and_in_order() -> None:
    world = World()
    body = {"prompt": ["ab", "cde"], "n": 3, "max_tokens": 4}
    reply = await call(world.app, "POST", "/v1/completions", body)
    (generation,) = world.engine.generations
    assert [len(child.token_ids) for child in generation.request.children] == [2, 2, 2, 3, 3, 3]
    assert [choice["index"] for choice in reply.json["choices"]] == list(range(6))
    assert reply.json["usage"]["prompt_tokens"] == 5
    assert generation.outcomes == ("completed",) * 6


@asynchronous
async def test_nothing_runs_when_one_child_cant_be_prepared() -> None:
    world = World()
    world.preprocessor.fail = RequestError("prompt[2]: is too long", field="prompt[2]")
    reply = await call(world.app, "POST", "/v1/completions", {"prompt": ["a", "b", "c"], "max_tokens": 4})
    assert reply.status == 400
    assert world.engine.generations == []


@both
@asynchronous
async def test_no_tokens_asked_never_reaches_the_engine(stream: bool) -> None:
    world = World()
    body = {"prompt": ["ab", "c"], "max_tokens": 0, "stream": stream}
    reply = await call(world.app, "POST", "/v1/completions", body)
    assert reply.status == 200
    assert world.engine.generations == []
    if not stream:
        assert [choice["finish_reason"] for choice in reply.json["choices"]] == ["length", "length"]
        assert reply.json["usage"]["completion_tokens"] == 0
    else:
        assert reply.frames[-1] == "data: [DONE]"


@asynchronous
async def test_objects_of_two_requests_have_different_ids() -> None:
    world = World()
    first, second = [await call(world.app, "POST", CHAT_PATH, CHAT) for _ in range(2)]
    assert first.json["id"] != second.json["id"]


def test_call_ids_are_unique() -> None:
    draws = [_call_ids("call_") for _ in range(3)]
    ids = {draw() for draw in draws for _ in range(100)}
    assert len(ids) == 300
    assert all(id.startswith("call_") for id in ids)


# --- Chat's first delta, errors before it, keepalive


@asynchronous
async def test_observations_are_put_together_by_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    threads: list[int] = []
    whole = Response.whole

    def spy(response: Response) -> bytes:
        threads.append(threading.get_ident())
        return whole(response)

    monkeypatch.setattr(Response, "whole", spy)
    await call(world.app, "POST", CHAT_PATH, CHAT)
    reply = await call(world.app, "POST", CHAT_PATH, {**CHAT, "logprobs": True})
    assert reply.status == 200
    assert threads[0] == threading.get_ident() != threads[1]


@asynchronous
async def test_role_comes_with_the_first_token_only() -> None:
    world = World(settings=IngressSettings(under_serve=False, keepalive_seconds=0.02))
    world.engine.reply = None
    request = Call(world.app, "POST", CHAT_PATH, chat(True))
    generation = await world.engine.arrival()
    reply = await request.until(lambda reply: len(reply.messages) > 3)
    assert set(reply.frames) == {": keep-alive"}
    generation.say(Update(0, cached_tokens=1))
    generation.say(Update(0, (TokenRecord(ord("a")),)))
    generation.end()
    frames = [frame for frame in (await request.done()).frames if frame != ": keep-alive"]
    assert '"delta":{"role":"assistant","content":""}' in frames[0]
    assert sum("role" in frame for frame in frames) == 1
    assert frames[-1] == "data: [DONE]"


@asynchronous
async def test_failure_before_the_first_token_has_neither_role_nor_done() -> None:
    world = World()
    world.engine.reply = None
    request = Call(world.app, "POST", CHAT_PATH, chat(True))
    (await world.engine.arrival()).lose(Unavailable("the engine is gone"))
    (frame,) = (await request.done()).frames
    assert "the engine is gone" in frame and "role" not in frame


@asynchronous
async def test_a_first_token_hidden_by_a_stop_still_opens_the_answer() -> None:
    world = World()
    world.engine.reply = "x"
    reply = await call(world.app, "POST", CHAT_PATH, chat(True, stop=["x"]))
    assert '"role":"assistant"' in reply.frames[0]


@asynchronous
async def test_first_response_is_timed_from_admission() -> None:
    world = World()
    await call(world.app, "POST", CHAT_PATH, CHAT)
    await call(world.app, "POST", CHAT_PATH, chat(True))
    world.engine.reply = ""
    await call(world.app, "POST", CHAT_PATH, CHAT)
    samples = world.service.recorder.report()["samples"]
    assert len(samples) == 2
    assert all(0 <= seconds < 10 for _, seconds in samples)


@asynchronous
async def test_streamed_and_buffered_agree() -> None:
    world = World()
    world.engine.reply = "the same text"

    def folded(reply: Reply) -> str:
        frames = [json.loads(frame[6:]) for frame in reply.frames if frame.startswith("data: {")]
        return "".join(choice["delta"].get("content") or "" for frame in frames for choice in frame["choices"])

    buffered = await call(world.app, "POST", CHAT_PATH, CHAT)
    streamed = await call(world.app, "POST", CHAT_PATH, chat(True))
    assert folded(streamed) == buffered.json["choices"][0]["message"]["content"] == "the same text"


@pytest.mark.parametrize("version", [None, "2023-01-01", ""])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@asynchronous
async def test_messages_need_their_version(path: str, version: str | None) -> None:
    headers = [] if version is None else [("anthropic-version", version)]
    reply = await call(World().app, "POST", path, CHAT, headers)
    assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")
    assert "anthropic-version" in reply.json["error"]["message"]


@asynchronous
async def test_counting_needs_no_limit_and_beta_queries_are_taken() -> None:
    world = World()
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "tools": []}
    headers = [("anthropic-version", "2023-06-01"), ("anthropic-beta", "token-counting-2024-11-01")]
    reply = await call(world.app, "POST", "/v1/messages/count_tokens", body, headers, query="beta=true")
    assert (reply.status, reply.json) == (200, {"input_tokens": 5})
