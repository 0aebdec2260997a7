"""Rules that only show on a wire: slow, cut and endless uploads, leaving, pausing, crowds."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest

from engine.types.events import EngineEnd, TokenRecord, Update
from serve_app.ingress.service import IngressSettings
from tests.support.ingress import CHAT, FakeGeneration, World, asynchronous
from tests.support.served import served

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
STREAM = {**CHAT, "stream": True}


async def settle(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


def manual(**settings: Any) -> World:
    """A world whose generations the test plays."""
    world = World(settings=IngressSettings(under_serve=False, **settings))
    world.engine.reply = None
    return world


def text_of(body: bytes) -> str:
    """The text of a Completions stream, which must be whole."""
    assert body.endswith(b"data: [DONE]\n\n")
    frames = [json.loads(frame[6:]) for frame in body.split(b"\n\n") if frame.startswith(b"data: {")]
    return "".join(choice["text"] for frame in frames for choice in frame["choices"])


@asynchronous
async def test_headers_and_each_token_arrive_on_their_own() -> None:
    world = manual()
    async with served(world) as site:
        client = await site.connect()
        client.post(CHAT_PATH, STREAM)
        head = await client.head()
        assert head.status == 200
        assert head.values("content-type") == ["text/event-stream; charset=utf-8"]
        assert len(head.values("x-request-id")) == 1
        generation = await world.engine.arrival()
        for letter in "abc":
            generation.text(letter)
            assert f'"content":"{letter}"'.encode() in await client.chunk()
        generation.end()
        assert (await client.rest(head)).body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("leave", ["close", "reset", "half_close"])
@pytest.mark.parametrize("stream", [False, True], ids=["buffered", "streamed"])
@pytest.mark.parametrize("tokens", [0, 2], ids=["waiting", "decoding"])
@asynchronous
async def test_leaving_cancels(leave: str, stream: bool, tokens: int) -> None:
    world = manual()
    async with served(world) as site:
        client = await site.connect()
        client.post(CHAT_PATH, {**CHAT, "stream": stream})
        generation = await world.engine.arrival()
        if stream:
            await client.head()
        if tokens:
            generation.text("ab")
        getattr(client, leave)()
        await asyncio.wait_for(generation.finished.wait(), 10)
        assert generation.outcomes == ("cancelled",)


@asynchronous
async def test_leaving_while_lowering_and_while_uploading() -> None:
    world = manual()
    world.preprocessor.gate.clear()
    async with served(world) as site:
        lowering, uploading = await site.connect(), await site.connect()
        lowering.post(CHAT_PATH, CHAT)
        uploading.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        await settle(lambda: world.service.pool.requests == 2)
        lowering.close()
        uploading.reset()
        await settle(lambda: world.service.pool.requests == 0)
        assert world.engine.generations == []
        assert world.service.pool.held_bytes == 0


@asynchronous
async def test_slow_upload_is_answered_and_a_chunked_one_taken() -> None:
    world = World(settings=IngressSettings(under_serve=False, body_idle_seconds=0.1))
    async with served(world) as site:
        slow = await site.connect()
        slow.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        assert (await slow.answer()).status == 408
        chunked = await site.connect()
        body = json.dumps({"prompt": "ab", "max_tokens": 4}).encode()
        chunked.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        for byte in body:
            chunked.send(b"1\r\n%c\r\n" % byte)
        chunked.send(b"0\r\n\r\n")
        assert (await chunked.answer()).status == 200


@asynchronous
async def test_oversized_uploads_get_their_413_and_the_connection_goes_on() -> None:
    world = World(settings=IngressSettings(under_serve=False, max_body_bytes=200_000))
    async with served(world) as site:
        client = await site.connect()
        client.post(COMPLETIONS, b"x" * 1_000_000)
        assert (await client.answer()).status == 413
        client.post(COMPLETIONS, {"prompt": "ab", "max_tokens": 4})
        assert (await client.answer()).status == 200
        endless = await site.connect()
        endless.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(30):
            endless.send(b"2000\r\n" + b"x" * 0x2000 + b"\r\n")
        assert (await endless.answer()).status == 413


@asynchronous
async def test_expect_continue_is_refused_without_the_body() -> None:
    world = World(settings=IngressSettings(under_serve=False, max_body_bytes=1000))
    async with served(world) as site:
        client = await site.connect()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
        client.send((head % 5000).encode())
        assert (await client.answer()).status == 413
        welcome = await site.connect()
        body = json.dumps({"prompt": "ab", "max_tokens": 4}).encode()
        welcome.send((head % len(body)).encode())
        assert (await welcome.head()).status == 100
        welcome.send(body)
        assert (await welcome.answer()).status == 200


@asynchronous
async def test_paused_reader_gets_everything_and_blocks_nobody() -> None:
    """The reader stops with megabytes to come: generation goes on to its end, another client is served meanwhile, and
    the paused one still gets every token."""
    world = manual()
    async with served(world) as site:
        paused = await site.connect(receive_buffer=4096)
        paused.post(COMPLETIONS, {"prompt": "ab", "stream": True, "max_tokens": 30_000})
        generation = await world.engine.arrival()
        letters = [chr(97 + number % 26) for number in range(30_000)]
        for letter in letters:
            generation.text(letter)
        generation.end()
        await settle(lambda: not generation.queue)
        await asyncio.sleep(0.05)
        assert generation.outcomes is None, "its answer waits for the reader, and holds its slot"
        other = await site.connect()
        other.post(COMPLETIONS, {"prompt": "ab", "max_tokens": 4})
        second = await world.engine.arrival()
        second.text("ok")
        second.end()
        assert (await other.answer()).json["choices"][0]["text"] == "ok"
        answer = await paused.answer()
        assert text_of(answer.body) == "".join(letters)
        await asyncio.wait_for(generation.finished.wait(), 10)
        assert generation.outcomes == ("completed",)


@asynchronous
async def test_large_bodies_do_not_stop_a_stream() -> None:
    """While 20 MiB of short values are parsed, tokens of another client keep arriving."""
    world = manual()
    async with served(world) as site:
        reader = await site.connect()
        reader.post(COMPLETIONS, {"prompt": "ab", "stream": True, "max_tokens": 10_000})
        generation = await world.engine.arrival()
        await reader.head()
        large = await site.connect()
        values = b'{"prompt":"ab","max_tokens":1,"junk":[' + b'{"a":[1,2,3]},' * 300_000 + b"1]}"
        large.post(COMPLETIONS, values)
        arrived = 0
        answer = asyncio.create_task(world.engine.arrival())
        while not answer.done():
            generation.text("a")
            arrived += len(await reader.chunk()) > 0
            await asyncio.sleep(0.002)
        assert arrived > 20
        (await answer).end()
        assert (await large.answer()).status == 200
        generation.end()


@asynchronous
async def test_bombs_do_not_stop_a_stream() -> None:
    """32 bombs at once share two workers; the stream goes on between them and every bomb gets its 413."""
    world = manual()
    bomb = gzip.compress(bytes(40 * 2**20), 1)
    async with served(world) as site:
        reader = await site.connect()
        reader.post(COMPLETIONS, {"prompt": "ab", "stream": True, "max_tokens": 10_000})
        generation = await world.engine.arrival()
        await reader.head()

        async def attack() -> int:
            client = await site.connect()
            client.post(COMPLETIONS, bomb, "Content-Encoding: gzip")
            return (await client.answer()).status

        attacks = asyncio.gather(*(attack() for _ in range(32)))
        arrived = 0
        while not attacks.done():
            generation.text("a")
            arrived += len(await reader.chunk()) > 0
            await asyncio.sleep(0.002)
        assert await attacks == [413] * 32
        assert arrived > 20
        assert (world.service.pool.requests, world.service.pool.held_bytes) == (0, 0)
        generation.end()


@asynchronous
async def test_websocket_upgrades_are_refused() -> None:
    async with served(World()) as site:
        client = await site.connect()
        lines = [
            "GET /v1/responses HTTP/1.1",
            "Host: x",
            "Connection: Upgrade",
            "Upgrade: websocket",
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        ]
        client.send("\r\n".join([*lines, "", ""]).encode())
        answer = await client.answer()
        assert answer.status in (404, 405)
        assert answer.json["error"]["type"] == "invalid_request_error"


@asynchronous
async def test_pipelined_and_slashed_and_encoded_model_names() -> None:
    async with served(World()) as site:
        client = await site.connect()
        for path in ("/v1/models/org/tiny-model", "/v1/models/org%2Ftiny-model"):
            client.get(path)
        for _ in range(2):
            assert (await client.answer()).json["id"] == "org/tiny-model"


def play(generation: FakeGeneration, tokens: int) -> None:
    for number in range(tokens):
        generation.say(Update(0, (TokenRecord(97 + number % 26),)))
    generation.say(Update(0, end=EngineEnd("eos")))


@asynchronous
async def test_a_thousand_idle_connections_and_256_streams() -> None:
    world = manual(request_pool=512)
    async with served(world) as site:
        idle = [await site.connect() for _ in range(1000)]
        for client in idle[:50]:
            client.get("/health")
            assert (await client.answer()).status == 200

        async def stream() -> str:
            client = await site.connect()
            client.post(COMPLETIONS, {"prompt": "ab", "stream": True, "max_tokens": 64})
            answer = await client.answer()
            client.close()
            assert answer.status == 200
            return text_of(answer.body)

        async def feed() -> None:
            for _ in range(256):
                play(await world.engine.arrival(), 64)

        async def look() -> None:
            client = await site.connect()
            for path in ("/health", "/v1/models", "/api/tags", "/metrics") * 5:
                client.get(path)
                assert (await client.answer()).status == 200
            client.close()

        feeding, looking = asyncio.create_task(feed()), asyncio.create_task(look())
        texts = await asyncio.gather(*(stream() for _ in range(256)))
        await feeding
        await looking
        assert set(texts) == {"".join(chr(97 + number % 26) for number in range(64))}
        await settle(lambda: all(generation.outcomes == ("completed",) for generation in world.engine.generations))
