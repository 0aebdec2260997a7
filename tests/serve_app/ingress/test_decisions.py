"""System One and Decisions over the application: bodies, errors, slots, cancellation."""

from __future__ import annotations

import asyncio
import base64
import gzip
import io
import json
import zlib
from collections.abc import Callable
from typing import Any

import brotli
import pytest
import zstandard
from PIL import Image

from engine.types.events import Update
from protocols.errors import ExecutionFailed, SlotsExhausted, Unavailable
from protocols.fields import DecodeLimits
from serve_app.ingress.service import IngressSettings
from tests.support.ingress import Call, FakeGeneration, Reply, World, asynchronous, call, scores

SYSTEM_ONE: dict[str, Any] = {
    "model": "jev-latest",
    "state": {"message": "Charged twice"},
    "questions": {
        "refund": {"type": "noul", "instructions": "Is a refund requested?"},
        "team": {"type": "choice", "criteria": {"billing": None, "support": "Other help"}},
        "urgency": {"type": "score", "criteria": ["Routine", "Urgent"]},
    },
}
DECISIONS: dict[str, Any] = {
    "model": "local",
    "input": "Charged twice",
    "questions": [
        {"type": "predicate", "name": "refund", "instructions": "Refund requested?"},
        {"type": "choice", "instructions": "Which team?", "choices": [{"value": "billing"}, {"value": False}]},
    ],
}
routes = pytest.mark.parametrize(("path", "body"), [("/v1/systemone", SYSTEM_ONE), ("/v1/decisions", DECISIONS)])


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 4)).save(file, "PNG")
    return file.getvalue()


def in_parts(body: dict[str, Any], **images: bytes) -> bytes:
    parts = [b'name="request"\r\nContent-Type: application/json\r\n\r\n' + json.dumps(body).encode()]
    parts += [f'name="{name}"; filename="{name}"\r\n\r\n'.encode() + data for name, data in images.items()]
    return b"".join(b"--xyz\r\nContent-Disposition: form-data; " + part + b"\r\n" for part in parts) + b"--xyz--\r\n"


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": brotli.compress,
    "zstd": zstandard.compress,
}
MULTIPART = ("content-type", "multipart/form-data; boundary=xyz")
IMAGES = ("typesafe-danger-zone-images", "true")


@asynchronous
async def test_system_one_answers_every_question() -> None:
    world = World()
    reply = await call(world.app, "POST", "/v1/systemone", SYSTEM_ONE)
    assert reply.status == 200
    answers = reply.json["answers"]
    assert list(answers) == ["refund", "team", "urgency"]
    assert answers["refund"]["noul"] == pytest.approx(1 / 3)
    assert answers["team"]["probabilities"] == pytest.approx({"billing": 2 / 3, "support": 1 / 3})
    assert reply.json["model"] == "org/tiny-model"
    assert reply.json["usage"]["output_tokens"] == 3
    assert reply.header("x-typesafe-request-id") == reply.header("x-request-id")
    assert [generation.outcomes for generation in world.engine.generations] == [("completed",)] * 3
    assert len({generation.request_id for generation in world.engine.generations}) == 3


@asynchronous
async def test_decisions_answer_in_order() -> None:
    world = World()
    reply = await call(world.app, "POST", "/v1/decisions", DECISIONS)
    assert reply.status == 200
    first, second = reply.json["answers"]
    assert (first["name"], second["name"]) == ("refund", None)
    assert [entry["value"] for entry in second["probabilities"]] == ["billing", False]
    assert reply.json["usage"]["input_tokens_details"]["cached_tokens"] == 2


@routes
@pytest.mark.parametrize("encoding", PACKED)
@asynchronous
async def test_compressed_json(path: str, body: dict[str, Any], encoding: str) -> None:
    packed = PACKED[encoding](json.dumps(body).encode())
    assert (await call(World().app, "POST", path, packed, [("content-encoding", encoding)])).status == 200


@routes
@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b'{"a":NaN}'])
@asynchronous
async def test_malformed_json_is_400(path: str, body: dict[str, Any], text: bytes) -> None:
    reply = await call(World().app, "POST", path, text)
    assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("value", [{}, [], 1, None, {**SYSTEM_ONE, "questions": {}}])
@asynchronous
async def test_schema_failures_are_422_on_system_one_alone(value: Any) -> None:
    text = json.dumps(value).encode()
    reply = await call(World().app, "POST", "/v1/systemone", text)
    assert reply.status == 422
    assert all(entry["loc"][0] == "body" for entry in reply.json["detail"])
    assert (await call(World().app, "POST", "/v1/decisions", text)).status == 400


@routes
@asynchronous
async def test_authentication_and_load_have_openais_shape(path: str, body: dict[str, Any]) -> None:
    locked = World(settings=IngressSettings(api_key="secret", under_serve=False))
    reply = await call(locked.app, "POST", path, body)
    assert (reply.status, reply.json["error"]["type"]) == (401, "authentication_error")
    for error, status in [(SlotsExhausted("full"), 429), (Unavailable("paused"), 503), (ExecutionFailed("x"), 500)]:
        world = World()
        world.engine.refuse = error
        reply = await call(world.app, "POST", path, body)
        assert (reply.status, set(reply.json["error"])) == (status, {"type", "message", "param", "code"})
        assert world.service.recorder.totals.get("requests_failed_total", 0) == (status != 500)
        assert world.service.pool.requests == 0


@routes
@asynchronous
async def test_a_model_without_explicit_ids_is_400(path: str, body: dict[str, Any]) -> None:
    world = World(limits=DecodeLimits(vocab_size=256, logprob_token_ids=False))
    reply = await call(world.app, "POST", path, body)
    assert reply.status == 400
    assert "re-export" in reply.json["error"]["message"]


# --- multipart


def with_image(**asset: str) -> dict[str, Any]:
    return {**SYSTEM_ONE, "state": ["see", "<image:1>"], "assets": {"<image:1>": {"type": "image", **asset}}}


@asynchronous
async def test_images_inline_and_in_parts() -> None:
    inline = with_image(data_base64=base64.b64encode(png()).decode())
    parted = in_parts(with_image(part="asset-0"), **{"asset-0": png()})
    replies = [
        await call(World().app, "POST", "/v1/systemone", inline, [IMAGES]),
        await call(World().app, "POST", "/v1/systemone", parted, [IMAGES, MULTIPART]),
    ]
    assert [reply.status for reply in replies] == [200, 200]


@asynchronous
async def test_images_need_their_header() -> None:
    parted = in_parts(with_image(part="asset-0"), **{"asset-0": png()})
    reply = await call(World().app, "POST", "/v1/systemone", parted, [MULTIPART])
    assert reply.status == 400
    assert "TypeSafe-Danger-Zone-Images" in reply.json["error"]["message"]


@asynchronous
async def test_multipart_without_images_and_with_stray_ones() -> None:
    world = World()
    assert (await call(world.app, "POST", "/v1/systemone", in_parts(SYSTEM_ONE), [MULTIPART])).status == 200
    stray = await call(world.app, "POST", "/v1/systemone", in_parts(SYSTEM_ONE, extra=png()), [IMAGES, MULTIPART])
    assert stray.status == 400


@pytest.mark.parametrize("encoding", [*PACKED, "identity"])
@asynchronous
async def test_multipart_must_not_be_compressed(encoding: str) -> None:
    plain = in_parts(SYSTEM_ONE)
    packed = PACKED[encoding](plain) if encoding in PACKED else plain
    reply = await call(World().app, "POST", "/v1/systemone", packed, [MULTIPART, ("content-encoding", encoding)])
    assert reply.status == (415 if encoding in PACKED else 200)
    if encoding in PACKED:
        assert set(reply.json["error"]) == {"type", "message", "param", "code"}


@asynchronous
async def test_large_bodies_are_413_in_the_chat_format() -> None:
    world = World(settings=IngressSettings(under_serve=False, max_body_bytes=2000))
    large = in_parts(SYSTEM_ONE, image=bytes(3000))
    for path, body, headers in (
        ("/v1/systemone", large, [MULTIPART]),
        ("/v1/systemone", json.dumps({**SYSTEM_ONE, "state": "x" * 2000}).encode(), []),
        ("/v1/decisions", json.dumps({**DECISIONS, "input": "x" * 2000}).encode(), []),
    ):
        reply = await call(world.app, "POST", path, body, headers)
        assert (reply.status, reply.json["error"]["type"]) == (413, "request_too_large")


@asynchronous
async def test_decisions_take_no_multipart() -> None:
    reply = await call(World().app, "POST", "/v1/decisions", in_parts(DECISIONS), [MULTIPART])
    assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")


# --- slots and leaving


async def answer(generation: FakeGeneration) -> None:
    ids = generation.request.children[0].output.logprob_token_ids
    generation.say(Update(0, (scores(ids),), cached_tokens=0))
    generation.end("limit")


@routes
@asynchronous
async def test_questions_run_one_after_another(path: str, body: dict[str, Any]) -> None:
    world = World()
    world.engine.reply = None
    request = Call(world.app, "POST", path, body)
    for number in range(len(body["questions"])):
        generation = await world.engine.arrival()
        assert all(other.outcomes for other in world.engine.generations[:number])
        assert len(world.engine.generations) == number + 1
        await answer(generation)
    assert (await request.done()).status == 200


@routes
@asynchronous
async def test_each_question_takes_over_the_slot_of_the_one_before(path: str, body: dict[str, Any]) -> None:
    world = World()
    world.engine.reply = None
    request = Call(world.app, "POST", path, body)
    before: FakeGeneration | None = None
    for _ in body["questions"]:
        world.engine.gate.clear()
        if before is not None:
            await answer(before)
            await asyncio.sleep(0.01)
            assert before.outcomes is None, "the slot was let go between two questions"
        world.engine.gate.set()
        generation = await world.engine.arrival()
        assert generation.after is before
        before = generation
    assert before is not None
    await answer(before)
    assert (await request.done()).status == 200
    assert [generation.outcomes for generation in world.engine.generations] == [("completed",)] * len(body["questions"])


@asynchronous
async def test_leaving_between_two_questions_frees_the_slot() -> None:
    world = World()
    world.engine.reply = None
    request = Call(world.app, "POST", "/v1/decisions", DECISIONS)
    first = await world.engine.arrival()
    world.engine.gate.clear()
    await answer(first)
    await asyncio.sleep(0.01)
    request.leave()
    await request.done()
    await asyncio.wait_for(first.finished.wait(), 10)
    assert first.outcomes == ("completed",)
    assert world.engine.cancelled == 1


@asynchronous
async def test_a_refusal_between_two_questions_frees_the_slot() -> None:
    world = World()
    world.engine.reply = None
    request = Call(world.app, "POST", "/v1/decisions", DECISIONS)
    first = await world.engine.arrival()
    world.engine.refuse = Unavailable("the model is gone")
    await answer(first)
    assert (await request.done()).status == 503
    assert first.outcomes == ("completed",)


@routes
@asynchronous
async def test_leaving_cancels_the_child_that_runs(path: str, body: dict[str, Any]) -> None:
    world = World()
    world.engine.reply = None
    request = Call(world.app, "POST", path, body)
    await answer(await world.engine.arrival())
    second = await world.engine.arrival()
    request.leave()
    reply: Reply = await request.done()
    assert reply.messages == []
    await asyncio.wait_for(second.finished.wait(), 10)
    assert second.outcomes == ("cancelled",)
    assert len(world.engine.generations) == 2
    assert world.service.pool.requests == 0


@pytest.mark.parametrize(("kind", "status"), [("unavailable", 503), ("execution", 500)])
@asynchronous
async def test_a_failed_child_fails_the_request(kind: str, status: int) -> None:
    world = World()
    world.engine.reply = None
    request = Call(world.app, "POST", "/v1/systemone", SYSTEM_ONE)
    generation = await world.engine.arrival()
    generation.end("failed", kind=kind, message="why")
    reply = await request.done()
    assert (reply.status, reply.json["error"]["message"]) == (status, "why")
    assert generation.outcomes == ("failed",)
