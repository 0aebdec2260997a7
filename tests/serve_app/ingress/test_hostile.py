"""Malformed and hostile requests in bulk: no undeclared 5xx, nothing left behind, no growth."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import random
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.ingress.service import IngressSettings
from tests.support.ingress import CHAT, World, asynchronous, call
from tests.support.served import Answer, Site, served

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses")
VERSION = ("anthropic-version", "2023-06-01")
BOMB = gzip.compress(bytes(3 * 2**20))
DECLARED = {200, 400, 401, 404, 405, 408, 413, 415, 429}

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)
)
FIELDS = """model messages prompt input max_tokens n stream stream_options stop stop_token_ids tools tool_choice
temperature top_p top_k seed logprobs top_logprobs response_format reasoning reasoning_effort thinking system echo
best_of suffix max_completion_tokens instructions text include store chat_template_kwargs guided_json structured_outputs
thinking_token_budget continue_final_message add_generation_prompt logprob_token_ids prompt_logprobs metadata"""
bodies = st.dictionaries(st.sampled_from(FIELDS.split()), values, max_size=8)


@settings(max_examples=250, deadline=None)
@given(path=st.sampled_from(PATHS), body=bodies, valid=st.booleans())
def test_random_fields_are_answered_or_refused(path: str, body: dict[str, Any], valid: bool) -> None:
    async def scenario() -> None:
        world = World()
        base = {**CHAT, "prompt": "ab", "input": "hi"} if valid else {}
        reply = await call(world.app, "POST", path, {**base, **body}, [VERSION])
        assert reply.status in DECLARED, reply.body
        assert world.service.pool.requests == 0
        await world.service.close()

    asyncio.run(scenario())


def requests(rng: random.Random) -> Iterator[bytes]:
    """Raw requests that no honest client sends."""
    good = json.dumps(CHAT).encode()
    while True:
        path = rng.choice(PATHS)
        body = good
        headers = ["Host: x", "anthropic-version: 2023-06-01"]
        match rng.randrange(12):
            case 0:
                body = bytes(rng.randrange(256) for _ in range(rng.randrange(200)))
            case 1:
                body = good[: rng.randrange(len(good))]
            case 2:
                body = BOMB
                headers.append("Content-Encoding: gzip")
            case 3:
                body = zlib.compress(good)[: rng.randrange(10, 40)]
                headers.append("Content-Encoding: deflate")
            case 4:
                headers.append(f"Content-Encoding: {rng.choice(['lzma', 'gzip, gzip', '', 'br', '*'])}")
            case 5:
                body = b"[" * rng.randrange(1, 5000)
            case 6:
                headers += [f"X-Flood-{index}: {'y' * rng.randrange(40)}" for index in range(150)]
            case 7:
                headers.append("Authorization: Bearer " + "z" * rng.randrange(2000))
            case 8:
                path = "/" + "".join(rng.choice("abc/%2e..~é\\") for _ in range(rng.randrange(1, 80)))
                path = path.encode("ascii", "ignore").decode()
            case 9:
                body = b'{"messages":' + b'[{"role":"user","content":' * 300 + b"1" + b"}]" * 300 + b"}"
            case 10:
                headers.append("X-Request-Id: " + "\x7f" * rng.randrange(300))
            case _:
                yield f"{rng.choice(['PUT', 'BREW', 'TRACE'])} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
                continue
        headers.append(f"Content-Length: {len(body)}")
        yield "\r\n".join([f"POST {path} HTTP/1.1", *headers, "", ""]).encode("latin-1") + body


async def attack(site: Site, rng: random.Random, count: int, seen: Counter[int]) -> None:
    """`count` requests over connections that are opened anew when the server closes them, some cut in the middle."""
    source = requests(rng)
    client = await site.connect()
    for _ in range(count):
        raw = next(source)
        if rng.random() < 0.1:
            client.send(raw[: rng.randrange(len(raw))])
            client.reset()
            client = await site.connect()
            continue
        client.send(raw)
        try:
            answer: Answer = await client.answer()
        except (asyncio.IncompleteReadError, ConnectionError):
            client.close()
            client = await site.connect()
            continue
        seen[answer.status] += 1
    await site.close_clients()


async def live_objects(world: World) -> int:
    """What the collector counts once every request is over and the test's own notes are forgotten."""
    async with asyncio.timeout(20):
        while world.service.pool.requests or any(g.outcomes is None for g in world.engine.generations):
            await asyncio.sleep(0.01)
    world.engine.forget()
    world.preprocessor.requests.clear()
    await asyncio.sleep(0.05)
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.parametrize("key", ["", "secret"])
@asynchronous
async def test_hostile_requests_leave_nothing(key: str) -> None:
    """2,500 with and as many without a key; what 2,000 of them leave is counted."""
    world = World(settings=IngressSettings(under_serve=False, api_key=key, max_body_bytes=2**20))
    seen: Counter[int] = Counter()
    async with served(world) as site:
        await attack(site, random.Random(1), 500, seen)
        before = await live_objects(world)
        for seed in range(2, 4):
            await attack(site, random.Random(seed), 1000, seen)
        grown = await live_objects(world) - before
    assert set(seen) <= DECLARED, seen
    assert sum(seen.values()) > 2000
    assert len(seen) >= 3
    assert world.service.pool.held_bytes == 0
    assert grown < 500, f"{grown} objects more after 2000 requests"
