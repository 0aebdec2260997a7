"""Health, metrics, model cards and Ollama's listing over the application."""

from __future__ import annotations

import asyncio
import gzip
import json
from dataclasses import replace
from typing import Any

import pytest

from protocols.errors import Unavailable
from serve_app.ingress.service import IngressSettings
from tests.support.ingress import FACTS, World, asynchronous, call

ALIASED = replace(FACTS, aliases=("", "house", "org/alias"))


@asynchronous
async def test_health() -> None:
    world = World()
    reply = await call(world.app, "GET", "/health")
    assert (reply.status, reply.body) == (200, b'{"status":"ok"}')
    world.cluster.problem = "the ranks are being rebuilt"
    reply = await call(world.app, "GET", "/health")
    assert reply.status == 503
    assert reply.json["error"] == {
        "type": "server_error",
        "message": "the ranks are being rebuilt",
        "param": None,
        "code": None,
    }


@asynchronous
async def test_metrics_text_and_json() -> None:
    world = World()
    world.cluster.answer["totals"] = {"generated_tokens_total": 12}
    text = await call(world.app, "GET", "/metrics")
    assert text.header("content-type") == "text/plain; version=0.0.4; charset=utf-8"
    assert b"\nflare_generated_tokens_total 12\n" in text.body
    for query, headers in [("format=json", ()), ("", [("accept", "application/json")])]:
        shown = await call(world.app, "GET", "/metrics", b"", headers, query=query)
        assert shown.header("content-type") == "application/json"
        assert shown.json["generated_tokens"] == 12
    chosen = await call(world.app, "GET", "/metrics", b"", [("accept", "application/json")], query="format=prometheus")
    assert chosen.body.startswith(b"# HELP")


@pytest.mark.parametrize("query", ["format=xml", "format=", "format=json&format=xml"])
@asynchronous
async def test_other_metric_formats_are_400(query: str) -> None:
    assert (await call(World().app, "GET", "/metrics", query=query)).status == 400


@asynchronous
async def test_metrics_without_a_hub_are_503() -> None:
    world = World()
    world.cluster.down = Unavailable("no telemetry")
    assert (await call(world.app, "GET", "/metrics")).status == 503


@pytest.mark.parametrize("name", ["org/tiny-model", "house", "org/alias"])
@asynchronous
async def test_one_card_under_every_name(name: str) -> None:
    world = World(facts=ALIASED)
    (card,) = (await call(world.app, "GET", "/v1/models")).json["data"]
    assert card["id"] == "house"
    assert (await call(world.app, "GET", f"/v1/models/{name}")).json == card


@pytest.mark.parametrize("name", ["none/such", "org", "org/tiny-model/x", "House"])
@asynchronous
async def test_unknown_models_are_404(name: str) -> None:
    reply = await call(World(facts=ALIASED).app, "GET", f"/v1/models/{name}")
    assert reply.status == 404
    assert (reply.json["error"]["code"], reply.json["error"]["param"]) == ("model_not_found", None)


@asynchronous
async def test_cards_stay_the_same_and_are_the_servers() -> None:
    first, second = World(), World()
    cards = [(await call(world.app, "GET", "/v1/models")).json for world in (first, first, second)]
    assert cards[0] == cards[1] == cards[2]
    assert cards[0]["data"][0]["created"] == first.cluster.answer["created"]


@asynchronous
async def test_identity_is_asked_at_start_and_kept() -> None:
    world = World()
    world.cluster.down = Unavailable("not yet")
    assert (await call(world.app, "GET", "/v1/models")).status == 503
    world.cluster.down = None
    world.service.open()
    await asyncio.sleep(0.01)
    world.cluster.down = Unavailable("gone")
    assert (await call(world.app, "GET", "/v1/models")).status == 200
    await world.service.close()


@asynchronous
async def test_the_card_tells_what_is_in_force_and_keeps_it() -> None:
    world = World(facts=replace(ALIASED, modes={"attention": "auto", "dtype": "auto", "layout": "compact"}))
    engines = world.cluster.answer["processes"]
    world.cluster.answer["processes"] = []
    for path in ("/v1/models", "/v1/models/house", "/api/tags"):
        assert (await call(world.app, "GET", path)).status == 503, "nobody knows yet what auto came to"
    world.cluster.answer["processes"] = engines
    (card,) = (await call(world.app, "GET", "/v1/models")).json["data"]
    shown = {name: card["flare"][name] for name in ("device", "attention", "numerics", "dtype", "layout")}
    assert shown == {**engines[0]["facts"], "layout": "compact"}
    tags = (await call(world.app, "GET", "/api/tags")).json
    world.cluster.answer["processes"] = []
    assert (await call(world.app, "GET", "/v1/models/house")).json == card
    assert (await call(world.app, "GET", "/api/tags")).json == tags


@asynchronous
async def test_the_listed_release_is_the_servers_day() -> None:
    (entry,) = (await call(World().app, "GET", "/v1/models")).json["models"]
    assert entry["release_date"] == "2023-11-14"


@asynchronous
async def test_generation_objects_name_the_loaded_model_whatever_was_asked() -> None:
    world = World(facts=ALIASED)
    body = {"model": "gpt-9", "messages": [{"role": "user", "content": "x"}]}
    assert (await call(world.app, "POST", "/v1/chat/completions", body)).json["model"] == "house"


@pytest.mark.parametrize("context", ["1000000", "48"])
@asynchronous
async def test_tags_and_show_agree_with_the_card(context: str) -> None:
    world = World(facts=ALIASED)
    world.cluster.answer["processes"][0]["facts"]["context"] = context
    (card,) = (await call(world.app, "GET", "/v1/models")).json["data"]
    assert card["max_model_len"] == min(ALIASED.context, int(context))
    (entry,) = (await call(world.app, "GET", "/api/tags")).json["models"]
    assert entry["name"] == entry["model"] == card["id"]
    info = (await call(world.app, "POST", "/api/show", {"model": "house"})).json["model_info"]
    assert info["flare.context_length"] == card["max_model_len"]
    assert info["flare.vocab_size"] == card["flare"]["vocab_size"]


@pytest.mark.parametrize("name", ["org/tiny-model", "house", "org/alias"])
@asynchronous
async def test_show_by_every_name_and_verbosity(name: str) -> None:
    world = World(facts=ALIASED)
    bodies: list[dict[str, Any]] = [{"model": name}, {"model": name, "verbose": True}, {"name": name}]
    replies = [await call(world.app, "POST", "/api/show", body) for body in bodies]
    assert {reply.status for reply in replies} == {200}
    assert replies[0].json == replies[1].json == replies[2].json


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"model": ""}, 400),
        ({"model": 1}, 400),
        ({"model": None}, 400),
        ({"model": ["org/tiny-model"]}, 400),
        ({"model": "org/tiny-model", "verbose": "yes"}, 400),
        (b"{", 400),
        (b"[]", 400),
        ({"model": "unknown"}, 404),
    ],
)
@asynchronous
async def test_show_refusals_have_ollamas_shape(body: Any, status: int) -> None:
    reply = await call(World().app, "POST", "/api/show", body)
    assert reply.status == status
    assert set(reply.json) == {"error"} and isinstance(reply.json["error"], str)


@asynchronous
async def test_show_takes_plain_json_within_the_bound() -> None:
    world = World(settings=IngressSettings(under_serve=False, max_body_bytes=100))
    packed = gzip.compress(json.dumps({"model": "org/tiny-model"}).encode())
    assert (await call(world.app, "POST", "/api/show", packed, [("content-encoding", "gzip")])).status == 415
    large = await call(world.app, "POST", "/api/show", {"model": "x" * 200})
    assert (large.status, type(large.json["error"])) == (413, str)
