"""What every route shares: families' error shapes, request ids, keys, methods, unknown paths, WebSockets."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import brotli
import orjson
import pytest
import zstandard

from engine.types.request import RequestError
from protocols.errors import ExecutionFailed, OutputInvalid, ProtocolError, SlotsExhausted, Unavailable
from serve_app.ingress.service import IngressSettings
from tests.support.ingress import CHAT, FACTS, Call, Reply, World, asynchronous, call

VERSION = ("anthropic-version", "2023-06-01")
OPENAI = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": "ab", "max_tokens": 8}),
    ("/v1/responses", {"model": "any", "input": "hi"}),
]
GENERATION = [*OPENAI, ("/v1/messages", CHAT)]
generation_routes = pytest.mark.parametrize(("path", "body"), GENERATION, ids=[path for path, _ in GENERATION])
post_routes = pytest.mark.parametrize("path", [*(path for path, _ in GENERATION), "/v1/messages/count_tokens"])


def error_of(reply: Reply, path: str) -> dict[str, Any]:
    """The error object, after checking that its shape is the family's."""
    value = reply.json
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        assert set(value) == {"type", "error"} and value["type"] == "error"
        assert set(value["error"]) == {"type", "message"}
    else:
        assert set(value) == {"error"}
        assert set(value["error"]) == {"type", "message", "param", "code"}
        assert value["error"]["param"] is None
    assert reply.header("content-type") == "application/json"
    error: dict[str, Any] = value["error"]
    assert isinstance(error["message"], str) and error["message"]
    return error


async def post(world: World, path: str, body: Any, *headers: tuple[str, str]) -> Reply:
    given = [*headers]
    if path.startswith("/v1/messages") and not any(name == VERSION[0] for name, _ in headers):
        given.append(VERSION)
    return await call(world.app, "POST", path, body, given)


@generation_routes
@asynchronous
async def test_every_route_answers_buffered_and_streamed(path: str, body: dict[str, Any]) -> None:
    world = World()
    reply = await post(world, path, body)
    assert reply.status == 200
    assert reply.json["model"] == "org/tiny-model"
    streamed = await post(world, path, {**body, "stream": True})
    assert streamed.status == 200
    assert all(generation.outcomes == ("completed",) for generation in world.engine.generations)
    assert world.service.pool.requests == 0


def models(value: Any) -> list[str]:
    """Every model that an object names, however deep."""
    if isinstance(value, dict):
        return [found for key, part in value.items() for found in ([part] if key == "model" else models(part))]
    return [found for part in value for found in models(part)] if isinstance(value, list) else []


@generation_routes
@asynchronous
async def test_every_object_names_the_loaded_model(path: str, body: dict[str, Any]) -> None:
    world = World(facts=replace(FACTS, aliases=("", "house", "other")))
    body = {**body, "model": "gpt-9"}
    assert models((await post(world, path, body)).json) == ["house"]
    stream = await post(world, path, {**body, "stream": True})
    lines = [line for frame in stream.frames for line in frame.split("\n") if line.startswith("data: {")]
    named = [models(orjson.loads(line[6:])) for line in lines]
    assert {name for names in named for name in names} == {"house"}
    if path in ("/v1/chat/completions", "/v1/completions"):
        assert named == [["house"]] * len(lines), "every chunk"


@generation_routes
@pytest.mark.parametrize("encoding", ["identity", "gzip", "deflate", "br", "zstd"])
@asynchronous
async def test_every_encoding_on_every_generation_route(path: str, body: dict[str, Any], encoding: str) -> None:
    pack: dict[str, Callable[[bytes], bytes]] = {
        "identity": bytes,
        "gzip": gzip.compress,
        "deflate": zlib.compress,
        "br": brotli.compress,
        "zstd": zstandard.compress,
    }
    reply = await post(World(), path, pack[encoding](orjson.dumps(body)), ("content-encoding", encoding))
    assert reply.status == 200


@post_routes
@asynchronous
async def test_unknown_encoding_is_415(path: str) -> None:
    reply = await post(World(), path, b"{}", ("content-encoding", "lzma"))
    assert reply.status == 415
    assert error_of(reply, path)["type"] == "invalid_request_error"


@post_routes
@asynchronous
async def test_encoded_and_decoded_bounds_are_413(path: str) -> None:
    world = World(settings=IngressSettings(under_serve=False, max_body_bytes=2000))
    big = b'{"a":"' + b"x" * 4000 + b'"}'
    for reply in (
        await post(world, path, big),
        await post(world, path, gzip.compress(big), ("content-encoding", "gzip")),
        await post(world, path, b"", ("content-length", "2001")),
    ):
        assert reply.status == 413
        assert error_of(reply, path)["type"] == "request_too_large"
    assert (world.service.pool.requests, world.service.pool.held_bytes) == (0, 0)


@post_routes
@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'"a"', b'{"model":NaN}', b"\xff"])
@asynchronous
async def test_malformed_json_is_400(path: str, text: bytes) -> None:
    reply = await post(World(), path, text)
    assert reply.status == 400
    assert error_of(reply, path)["type"] == "invalid_request_error"


@post_routes
@asynchronous
async def test_slow_upload_is_408(path: str) -> None:
    world = World(settings=IngressSettings(under_serve=False, body_idle_seconds=0.02))
    request = Call(world.app, "POST", path, None, [VERSION])
    request.send(b'{"model":')
    reply = await request.done()
    assert reply.status == 408
    assert error_of(reply, path)["type"] == "invalid_request_error"
    assert world.service.pool.requests == 0


@post_routes
@asynchronous
async def test_cut_upload_gets_no_answer_and_leaves_nothing(path: str) -> None:
    world = World()
    request = Call(world.app, "POST", path, None, [VERSION])
    request.send(b'{"model":')
    request.leave()
    reply = await request.done()
    assert reply.messages == []
    assert (world.service.pool.requests, world.service.pool.held_bytes) == (0, 0)


FAILURES = [
    (SlotsExhausted("full"), 429, "rate_limit_error", "rate_limit_error"),
    (Unavailable("queue full"), 503, "server_error", "api_error"),
    (ExecutionFailed("broken"), 500, "server_error", "api_error"),
    (OutputInvalid("no call"), 500, "server_error", "api_error"),
    (RequestError("max_tokens: bad", field="max_tokens"), 400, "invalid_request_error", "invalid_request_error"),
    (ZeroDivisionError("bug"), 500, "server_error", "api_error"),
]


@generation_routes
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "openai", "messages"), FAILURES, ids=[str(row[0]) for row in FAILURES])
@asynchronous
async def test_refusals_before_enqueue_have_their_status(
    path: str, body: dict[str, Any], stream: bool, error: Exception, status: int, openai: str, messages: str
) -> None:
    world = World()
    world.engine.refuse = error
    reply = await post(world, path, {**body, "stream": stream})
    assert reply.status == status
    told = error_of(reply, path)
    assert told["type"] == (messages if path == "/v1/messages" else openai)
    assert (reply.header("retry-after") is not None) == (status in (429, 503))
    if isinstance(error, ZeroDivisionError):
        assert "bug" not in told["message"]
    assert world.service.pool.requests == 0


@generation_routes
@asynchronous
async def test_failures_after_enqueue_are_a_status_or_a_terminal_event(path: str, body: dict[str, Any]) -> None:
    world = World()
    world.engine.reply = None
    for stream in (False, True):
        request = asyncio.ensure_future(post(world, path, {**body, "stream": stream}))
        generation = await world.engine.arrival()
        generation.end("failed", kind="unavailable", message="admission was paused")
        reply = await request
        if stream:
            assert reply.status == 200
            assert "[DONE]" not in reply.body.decode()
            assert '"role":"assistant","content":""' not in reply.frames[-1]
            last = reply.frames[-1]
            assert "admission was paused" in last and ("api_error" in last or "server_error" in last)
            if path == "/v1/messages":
                assert last.startswith("event: error\n")
            if path == "/v1/responses":
                assert last.startswith("event: response.failed\n")
        else:
            assert reply.status == 503
            assert reply.header("retry-after") is not None
        assert generation.outcomes == ("failed",)


@asynchronous
async def test_over_context_has_its_code() -> None:
    world = World()
    world.preprocessor.fail = RequestError("prompt is too long", code="context_length_exceeded")
    reply = await post(world, *GENERATION[0])
    assert (reply.status, reply.json["error"]["code"]) == (400, "context_length_exceeded")


# --- routes and methods


@pytest.mark.parametrize(
    "path", ["/nope", "/v1/nope", "/v1/messagesx", "/", "/v1/chat/completions/x", "/v1/messages/x"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
@asynchronous
async def test_unknown_routes_are_404_in_the_familys_shape(path: str, method: str) -> None:
    reply = await call(World().app, method, path)
    assert reply.status == 404
    assert error_of(reply, path)["type"] == (
        "not_found_error" if path.startswith("/v1/messages/") else "invalid_request_error"
    )


@pytest.mark.parametrize("path", ["/api/nope", "/api/chat", "/api/generate", "/api/pull", "/api"])
@asynchronous
async def test_unknown_ollama_routes_have_ollamas_shape(path: str) -> None:
    reply = await call(World().app, "POST", path, b"{}")
    assert reply.status == 404
    assert set(reply.json) == {"error"} and isinstance(reply.json["error"], str)


@post_routes
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "BREW"])
@asynchronous
async def test_wrong_methods_are_405(path: str, method: str) -> None:
    reply = await call(World().app, method, path)
    assert reply.status == 405
    assert reply.header("allow") == "POST"
    if method == "HEAD":
        assert reply.body == b""
    else:
        error_of(reply, path)


@asynchronous
async def test_wrong_method_on_a_get_route_names_both() -> None:
    reply = await call(World().app, "POST", "/health", b"")
    assert (reply.status, reply.header("allow")) == (405, "GET, HEAD")


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/v1/models/org/tiny-model", "/api/tags", "/no"])
@asynchronous
async def test_head_is_get_without_a_body(path: str) -> None:
    world = World()
    got, head = await call(world.app, "GET", path), await call(world.app, "HEAD", path)
    assert head.body == b""
    assert head.status == got.status
    assert head.header("content-length") == got.header("content-length") == str(len(got.body))
    assert head.header("content-type") == got.header("content-type")


@asynchronous
async def test_trailing_slash_is_the_same_route() -> None:
    world = World()
    assert (await call(world.app, "GET", "/v1/models/")).status == 200
    assert (await post(world, "/v1/messages/", CHAT)).status == 200


@asynchronous
async def test_families_answer_alone_at_their_prefix() -> None:
    world = World(families=("messages",))
    scope = {"root_path": "/v1/messages"}
    request = Call(world.app, "POST", "/v1/messages", CHAT, [VERSION], scope=scope)
    assert (await request.done()).status == 200
    other = await call(world.app, "POST", "/v1/messages/batches", b"{}")
    assert other.status == 404
    error_of(other, "/v1/messages/batches")


# --- request ids


@pytest.mark.parametrize(
    ("given", "expected"),
    [("abc-1", "abc-1"), ("x" * 128, "x" * 128), ("x" * 129, None), ("a b", None), ("\xe9", None), ("", None)],
)
@asynchronous
async def test_request_id_is_kept_or_drawn_and_sent_once(given: str, expected: str | None) -> None:
    world = World()
    for method, path in [("POST", "/v1/chat/completions"), ("GET", "/nope"), ("GET", "/health")]:
        reply = await call(world.app, method, path, CHAT, [("x-request-id", given)])
        sent = reply.header("x-request-id")
        assert sent == expected if expected is not None else sent and sent != given and sent.isalnum()
    stream = await call(world.app, "POST", "/v1/chat/completions", {**CHAT, "stream": True})
    assert stream.header("x-request-id")


@asynchronous
async def test_under_serve_the_header_is_left_to_serve() -> None:
    world = World(settings=IngressSettings(under_serve=True))
    for stream in (False, True):
        reply = await call(world.app, "POST", "/v1/chat/completions", {**CHAT, "stream": stream})
        assert reply.header("x-request-id") is None


@asynchronous
async def test_the_engine_gets_ids_of_our_own() -> None:
    """Two clients may send the same request id; groups must not collide."""
    world = World()
    for _ in range(2):
        await call(world.app, "POST", "/v1/chat/completions", CHAT, [("x-request-id", "same")])
    first, second = (generation.request_id for generation in world.engine.generations)
    assert first != second and "same" not in (first, second)


# --- keys

KEY = IngressSettings(api_key="secret", under_serve=False)
GOOD, BAD = ("authorization", "Bearer secret"), ("authorization", "Bearer nope")


@post_routes
@asynchronous
async def test_missing_and_wrong_keys_are_401_before_the_body_is_read(path: str) -> None:
    world = World(settings=KEY)
    for headers in ([], [BAD]):
        request = Call(world.app, "POST", path, None, [*headers, VERSION])
        reply = await request.done()
        assert reply.status == 401
        assert error_of(reply, path)["type"] == "authentication_error"
        assert reply.header("www-authenticate") == "Bearer"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/org/tiny-model", "/api/tags"])
@asynchronous
async def test_discovery_needs_the_key_and_errors_have_openais_shape(path: str) -> None:
    world = World(settings=KEY)
    reply = await call(world.app, "GET", path)
    assert reply.status == 401
    assert error_of(reply, path)["type"] == "authentication_error"
    assert (await call(world.app, "GET", path, b"", [GOOD])).status == 200


@asynchronous
async def test_show_needs_the_key_too() -> None:
    reply = await call(World(settings=KEY).app, "POST", "/api/show", {"model": "org/tiny-model"})
    assert reply.status == 401
    assert error_of(reply, "/api/show")["type"] == "authentication_error"


@pytest.mark.parametrize("path", ["/health", "/metrics"])
@asynchronous
async def test_health_and_metrics_are_open(path: str) -> None:
    world = World(settings=KEY)
    assert (await call(world.app, "GET", path)).status == 200
    assert (await call(world.app, "GET", path, b"", [BAD])).status == 200


@post_routes
@asynchronous
async def test_without_a_key_any_is_taken(path: str) -> None:
    for headers in ([], [("authorization", "Bearer any")], [("x-api-key", "any")], [("authorization", "nonsense")]):
        assert (await post(World(), path, b"{}", *headers)).status == 400, "the body is what is wrong"


@asynchronous
async def test_messages_take_either_header_and_both_must_match() -> None:
    world = World(settings=KEY)
    x_good, x_bad = ("x-api-key", "secret"), ("x-api-key", "nope")
    for headers, status in [
        ([GOOD], 200),
        ([x_good], 200),
        ([GOOD, x_good], 200),
        ([GOOD, x_bad], 401),
        ([BAD, x_good], 401),
        ([x_bad], 401),
    ]:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            assert (await post(world, path, CHAT, *headers)).status == status, (path, headers)
    assert (await post(world, "/v1/chat/completions", CHAT, x_good)).status == 401


# --- WebSockets and lifespan


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
@asynchronous
async def test_websockets_are_refused_in_json_where_the_server_can(path: str) -> None:
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope: dict[str, Any] = {"type": "websocket", "path": path, "headers": []}
    await World().app(scope, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]
    sent.clear()
    await World().app({**scope, "extensions": {"websocket.http.response": {}}}, receive, send)
    assert sent[0]["status"] == 404
    assert "WebSockets are not supported" in orjson.loads(sent[1]["body"])["error"]["message"]


@asynchronous
async def test_lifespan_closes_the_workers() -> None:
    world = World()
    sent: list[str] = []
    messages = iter(["lifespan.startup", "lifespan.shutdown"])

    async def receive() -> dict[str, Any]:
        return {"type": next(messages)}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message["type"])

    await world.app({"type": "lifespan"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    with pytest.raises(RuntimeError):
        await world.service.workers.call(int)


def test_every_error_type_has_a_status() -> None:
    def below(kind: type[ProtocolError]) -> list[type[ProtocolError]]:
        return [kind, *(leaf for child in kind.__subclasses__() for leaf in below(child))]

    assert {kind.status for kind in below(ProtocolError)} == {400, 401, 404, 405, 408, 413, 415, 422, 429, 500, 503}
