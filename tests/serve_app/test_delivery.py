"""Delivery: first token at once, bursts in one write, keepalive, paused readers, and one `finish` on every path."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from engine.types.events import TokenRecord, Update
from engine.types.request import GenerationRequest, PreparedPrompt, PreparedRequest, Stops, TextPrompt
from protocols.completions.decode import CompletionOptions
from protocols.completions.encode import CompletionEncoder
from protocols.encoder import ResponseContext
from protocols.errors import ExecutionFailed, OutputInvalid, ProtocolError, Unavailable
from protocols.fields import Decoded
from serve_app import delivery
from serve_app.delivery import Choice, Response
from tests.support.ingress import SAMPLING, FakeGeneration, Letters, asynchronous, token_bytes

_IDS = np.zeros(2, np.int32)


class Wire:
    """An ASGI send. While `open` is cleared, body writes wait, as for a reader that doesn't read."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.open = asyncio.Event()
        self.open.set()
        self.wrote = asyncio.Event()

    async def __call__(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.wrote.set()
        if message["type"] == "http.response.body":
            await self.open.wait()

    async def write(self) -> bytes:
        """The next write's bytes."""
        await asyncio.wait_for(self.wrote.wait(), 10)
        self.wrote.clear()
        body: bytes = self.messages[-1].get("body", b"")
        return body

    @property
    def writes(self) -> list[bytes]:
        return [message["body"] for message in self.messages if message["type"] == "http.response.body"]

    @property
    def body(self) -> bytes:
        return b"".join(self.writes)


def started(
    *, choices: int = 1, stream: bool = True, stops: tuple[str, ...] = (), usage: bool = False
) -> tuple[FakeGeneration, Response, list[float]]:
    """A generation and its response, and when its first text was offered."""
    request = GenerationRequest(
        "completions", (TextPrompt("ab"),), n=choices, stops=Stops(stops), stream=stream, max_tokens=1000
    )
    prompt = PreparedPrompt(token_ids=_IDS, sampling=SAMPLING, max_tokens=1000, eos_ids=(0,))
    generation = FakeGeneration("g", PreparedRequest((prompt,) * choices))
    context = ResponseContext("id", "m", 1, token_bytes, (2,))
    encoder = CompletionEncoder(context, Decoded(request, CompletionOptions(stream=stream, include_usage=usage)))
    told: list[float] = []
    parts = [Choice(Letters(prompt, request, lambda: "c"), None) for _ in range(choices)]
    return generation, Response(generation, parts, encoder, lambda: told.append(1.0)), told


def texts(body: bytes) -> str:
    found = ""
    for frame in body.decode().split("\n\n"):
        if frame.startswith("data: {"):
            for choice in json.loads(frame[6:]).get("choices", ()):
                found += choice["text"]
    return found


@asynchronous
async def test_headers_come_before_any_token() -> None:
    generation, response, _ = started()
    wire = Wire()
    task = asyncio.create_task(delivery.stream(response, wire, [(b"x-request-id", b"r")], 60))
    await wire.write()
    head = wire.messages[0]
    assert (head["type"], head["status"]) == ("http.response.start", 200)
    headers = dict(head["headers"])
    assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert headers[b"cache-control"] == b"no-cache"
    assert headers[b"x-request-id"] == b"r"
    assert len(wire.messages) == 1
    generation.end()
    await task


@asynchronous
async def test_first_token_goes_out_alone_and_a_burst_in_one_write() -> None:
    generation, response, told = started()
    wire = Wire()
    task = asyncio.create_task(delivery.stream(response, wire, [], 60))
    await wire.write()
    generation.text("a")
    assert texts(await wire.write()) == "a"
    assert told == [1.0]
    wire.open.clear()
    generation.text("b")
    assert texts(await wire.write()) == "b"
    for letter in "cdefg":
        generation.text(letter)
    await asyncio.sleep(0.01)
    wire.open.set()
    assert texts(await wire.write()) == "cdefg"
    generation.end()
    await task
    assert told == [1.0]
    assert wire.body.endswith(b"data: [DONE]\n\n")
    assert generation.outcomes == ("completed",)


@asynchronous
async def test_paused_reader_loses_nothing_and_stops_are_noticed_meanwhile() -> None:
    generation, response, _ = started(stops=("xyz",))
    wire = Wire()
    task = asyncio.create_task(delivery.stream(response, wire, [], 60))
    wire.open.clear()
    generation.text("a")
    while not wire.writes:
        await wire.write()
    for number in range(500):
        generation.text(chr(97 + number % 20))
    generation.text("xyz")
    while not generation.stops:
        await asyncio.sleep(0)
    assert generation.stops == [(0, 504)]
    assert generation.outcomes is None, "the answer still waits for its reader"
    wire.open.set()
    await task
    assert texts(wire.body) == "a" + "".join(chr(97 + number % 20) for number in range(500)) + "xyz"
    assert generation.outcomes == ("completed",)


@asynchronous
async def test_keepalive_from_the_first_wait_on_and_only_in_silence() -> None:
    generation, response, _ = started()
    wire = Wire()
    task = asyncio.create_task(delivery.stream(response, wire, [], 0.03))
    await wire.write()
    assert await wire.write() == b": keep-alive\n\n"
    assert await wire.write() == b": keep-alive\n\n"
    generation.text("a")
    assert texts(await wire.write()) == "a"
    assert await wire.write() == b": keep-alive\n\n"
    generation.end()
    await task
    assert wire.body.count(b": keep-alive") >= 3
    assert b": keep-alive" not in wire.writes[-1]


@asynchronous
async def test_no_keepalive_piles_up_for_a_paused_reader() -> None:
    generation, response, _ = started()
    wire = Wire()
    task = asyncio.create_task(delivery.stream(response, wire, [], 0.01))
    wire.open.clear()
    generation.text("a")
    while not wire.writes:
        await wire.write()
    await asyncio.sleep(0.1)
    assert len(response.frames) == 0
    generation.end()
    wire.open.set()
    await task


@pytest.mark.parametrize(
    ("kind", "error"), [("unavailable", Unavailable), ("execution", ExecutionFailed), ("output", OutputInvalid)]
)
@asynchronous
async def test_engine_failures_end_streams_and_buffers_alike(kind: str, error: type[ProtocolError]) -> None:
    generation, response, _ = started()
    wire = Wire()
    generation.text("a")
    generation.end("failed", kind=kind, message="why")
    await delivery.stream(response, wire, [], 60)
    assert b"[DONE]" not in wire.body
    assert b'"why"' in wire.writes[-1]
    assert generation.outcomes == ("failed",)
    generation, response, _ = started(stream=False)
    generation.text("a")
    generation.end("failed", kind=kind, message="why")
    with pytest.raises(error, match="why"), delivery.finishing(response):
        await delivery.buffer(response)
    assert generation.outcomes == ("failed",)


@asynchronous
async def test_one_failed_choice_takes_the_response_down() -> None:
    generation, response, _ = started(choices=3)
    wire = Wire()
    generation.text("a", 0)
    generation.end("eos", 0)
    generation.end("failed", 1, message="broken")
    await delivery.stream(response, wire, [], 60)
    assert wire.body.count(b'"error"') == 1
    assert b"[DONE]" not in wire.body
    assert generation.outcomes == ("completed", "failed", "failed")


@asynchronous
async def test_a_lost_engine_is_the_protocols_error() -> None:
    generation, response, _ = started()
    wire = Wire()
    generation.lose(Unavailable("the engine is gone"))
    await delivery.stream(response, wire, [], 60)
    assert b"the engine is gone" in wire.body
    assert generation.outcomes == ("failed",)


@asynchronous
async def test_a_bug_is_an_internal_error_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    generation, response, _ = started()
    wire = Wire()
    generation.lose(KeyError("private detail"))
    await delivery.stream(response, wire, [], 60)
    assert b"private detail" not in wire.body
    assert b"internal error" in wire.body
    assert generation.outcomes == ("failed",)
    assert "delivery failed" in caplog.text


@asynchronous
async def test_generation_that_just_ends_is_an_error() -> None:
    generation, response, _ = started()
    wire = Wire()
    generation._open.clear()
    await delivery.stream(response, wire, [], 60)
    assert b"without a result" in wire.body


@pytest.mark.parametrize("when", ["before the first token", "between tokens", "in a write"])
@asynchronous
async def test_cancelled_streams_finish_once(when: str) -> None:
    generation, response, _ = started(choices=2)
    wire = Wire()
    task = asyncio.create_task(delivery.stream(response, wire, [], 60))
    await wire.write()
    if when != "before the first token":
        if when == "in a write":
            wire.open.clear()
        generation.text("a", 1)
        await wire.write()
        generation.end("eos", 1)
        while response.choices[1].end is None:
            await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    expected = "cancelled" if when == "before the first token" else "completed"
    assert generation.outcomes == ("cancelled", expected)


@asynchronous
async def test_a_broken_socket_finishes_too() -> None:
    generation, response, _ = started()

    async def broken(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            raise OSError("reset")

    generation.text("a")
    with pytest.raises(OSError, match="reset"):
        await delivery.stream(response, broken, [], 60)
    assert generation.outcomes == ("cancelled",)


@asynchronous
async def test_buffered_text_counts_as_offered_and_updates_after_the_end_are_ignored() -> None:
    generation, response, told = started(stream=False, stops=("b",))
    generation.text("ab")
    generation.say(Update(0, (TokenRecord(99),)))
    with delivery.finishing(response):
        await delivery.buffer(response)
        result = json.loads(response.whole())
    assert result["choices"][0]["text"] == "ab"
    assert result["usage"]["completion_tokens"] == 2
    assert told == [1.0]
    assert generation.stops == [(0, 2)]
    assert generation.outcomes == ("completed",)


@asynchronous
async def test_interleaved_choices_keep_their_order() -> None:
    generation, response, _ = started(choices=3, stream=False)
    for letter in "abcdefghij":
        generation.say(*(Update(child, (TokenRecord(ord(letter) + child),)) for child in range(3)))
    for child in (2, 0, 1):
        generation.end("eos", child)
    with delivery.finishing(response):
        await delivery.buffer(response)
        result = json.loads(response.whole())
    assert [choice["text"] for choice in result["choices"]] == ["abcdefghij", "bcdefghijk", "cdefghijkl"]
