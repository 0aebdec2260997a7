"""Nested JSON on every route: what is within the bound never fails in us, what is beyond it is 400 with the field and
the bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine.types.nesting import MAX_ARGUMENT_DEPTH, MAX_DEPTH, deeper_than
from tests.support.ingress import Reply
from tests.support.inline_server import Site
from tests.support.scripted import script, token, turn
from tests.support.shown import HEADERS, PATHS, PROTOCOLS, Protocol, ask

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COUNT = "/v1/messages/count_tokens"
SYSTEMONE, DECISIONS, COMPLETIONS = "/v1/systemone", "/v1/decisions", "/v1/completions"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "plain"}], "max_tokens": 2}
RESPOND: dict[str, Any] = {"model": "m", "input": "plain", "max_output_tokens": 2}
NOUL: dict[str, Any] = {"type": "noul", "instructions": "Well?"}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "r"}
TOOL_RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r"}]}

Body = Callable[[Any], dict[str, Any]]
BODIES: dict[tuple[str, str], Body] = {
    (CHAT, "tools"): lambda deep: {
        **ASK,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": deep}}}],
    },
    (CHAT, "chat_template_kwargs"): lambda deep: {**ASK, "chat_template_kwargs": {"x": deep}},
    (CHAT, "metadata"): lambda deep: {**ASK, "metadata": {"x": deep}},
    (CHAT, "messages"): lambda deep: {
        **ASK,
        "messages": [
            *ASK["messages"],
            {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {"x": deep}}}]},
            RESULT,
        ],
    },
    (RESPONSES, "tools"): lambda deep: {
        **RESPOND,
        "tools": [{"type": "function", "name": "f", "parameters": {"x": deep}}],
    },
    (RESPONSES, "metadata"): lambda deep: {**RESPOND, "metadata": {"x": deep}},
    (MESSAGES, "tools"): lambda deep: {**ASK, "tools": [{"name": "f", "input_schema": {"x": deep}}]},
    (MESSAGES, "messages"): lambda deep: {**ASK, "messages": [*ASK["messages"], used(deep), TOOL_RESULT]},
    (COUNT, "messages"): lambda deep: {"model": "m", "messages": [*ASK["messages"], used(deep), TOOL_RESULT]},
    (COMPLETIONS, "logit_processors"): lambda deep: {"prompt": "x", "max_tokens": 1, "logit_processors": [deep]},
    (SYSTEMONE, "state"): lambda deep: {"model": "m", "state": [deep], "questions": {"q": NOUL}},
    (SYSTEMONE, "questions"): lambda deep: {
        "model": "m",
        "state": "s",
        "questions": {"q": {"type": "score", "criteria": [deep]}},
    },
}
"""By route and field: a body with a value that may be nested inside that field."""


def used(deep: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"x": deep}}]}


def nested(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"k": value}
    return value


def at_depth(body: Body, field: str, depth: int) -> dict[str, Any]:
    """The body with exactly `depth` levels inside `field`."""
    around = next(levels for levels in range(40) if not deeper_than(body(nested(20))[field], levels)) - 20
    made = body(nested(depth - around))
    assert deeper_than(made[field], depth - 1) and not deeper_than(made[field], depth)
    return made


def sent(site: Site, path: str, body: dict[str, Any]) -> Reply:
    return site.send("POST", path, body, HEADERS)


@pytest.mark.parametrize(("path", "field"), BODIES)
def test_every_field_may_be_nested_to_the_bound_and_no_deeper(scripted: Site, path: str, field: str) -> None:
    body = BODIES[path, field]
    for stream in (False, True):
        reply = sent(scripted, path, {**at_depth(body, field, MAX_DEPTH), "stream": stream})
        assert reply.status == 200, reply.body[:500]
        for depth in (MAX_DEPTH + 1, 400, 900):
            reply = sent(scripted, path, {**at_depth(body, field, depth), "stream": stream})
            assert reply.status == 400, depth
            assert reply.json["error"]["message"] == f"{field}: is nested deeper than {MAX_DEPTH} levels"
    assert scripted.service.pool.requests == 0


@pytest.mark.parametrize("path", sorted({path for path, _ in BODIES} | {DECISIONS}))
@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 1000 + "1" + "}" * 1000, "[" * 500 + "]" * 500])
def test_a_body_that_is_all_depth(scripted: Site, path: str, text: str) -> None:
    reply = scripted.send("POST", path, text.encode(), HEADERS)
    assert reply.status == 400 and "nested deeper than 256 levels" in reply.json["error"]["message"]


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 900, 100_000])
def test_json_texts_inside_a_request_have_the_same_bound(scripted: Site, depth: int) -> None:
    text = '{"a":' * depth + "1" + "}" * depth
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": text}
    output = {"type": "function_call_output", "call_id": "c", "output": "r"}
    messages = [*ASK["messages"], {"role": "assistant", "tool_calls": [call]}, RESULT]
    for path, body, field in (
        (CHAT, {"messages": messages}, "messages[1].tool_calls[0].function.arguments"),
        (RESPONSES, {"model": "any", "input": [item, output]}, "input[0].arguments"),
        (CHAT, {**ASK, "guided_json": text}, "guided_json"),
        (COMPLETIONS, {"prompt": "x", "guided_json": text}, "guided_json"),
    ):
        assert scripted.refused(path, body) == f"{field}: is nested deeper than {MAX_DEPTH} levels"


def test_schemas_have_the_bound_of_their_compiler(scripted: Site) -> None:
    def schema(levels: int) -> dict[str, Any]:
        return {"enum": [nested(levels - 2)]}

    format = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema(121)}}
    text = {"format": {"type": "json_schema", "name": "s", "schema": schema(121)}}
    output = {"format": {"type": "json_schema", "schema": schema(121)}}
    for path, fields in (
        (CHAT, {"response_format": format}),
        (CHAT, {"guided_json": schema(121)}),
        (RESPONSES, {"text": text}),
        (MESSAGES, {"output_config": output}),
    ):
        reply = sent(scripted, path, {**(RESPOND if path == RESPONSES else ASK), **fields})
        assert reply.status == 400
        assert reply.json["error"]["message"].endswith("the JSON Schema is nested deeper than 120 levels")
    assert sent(scripted, CHAT, {**ASK, "guided_json": schema(120)}).status == 200


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A Hermes model that calls `f`, its JSON nested up to the bound ("within") and beyond it."""
    directory = tmp_path_factory.mktemp("caller")
    turns = []
    for when, levels in (("within", MAX_ARGUMENT_DEPTH), ("beyond", MAX_ARGUMENT_DEPTH + 1), ("far", 1100)):
        deep = "[" * (levels - 2) + "1" + "]" * (levels - 2)
        text = f'{{"name": "f", "arguments": {{"x": {deep}}}}}'
        turns.append(turn(token("<tool_call>"), f"\n{text}\n", token("</tool_call>"), when=when))
    with Site(script(directory, turns, recipe="qwen3"), cache=directory / "cache", engine={"context": 8192}) as site:
        yield site


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_a_model_nests_too_deeply_is_an_invalid_call(caller: Site, protocol: Protocol) -> None:
    """And what it may write comes back in the next request."""
    tools = [("f", {"type": "object"})]
    for when, status in (("within", 200), ("beyond", 500), ("far", 500)):
        reply = caller.send("POST", PATHS[protocol], ask(protocol, when, tools=tools, limit=6000), HEADERS)
        assert reply.status == status, reply.body
        assert (b"nested deeper than 200 levels" in reply.body) == (status == 500)
        if protocol == "messages" and status == 200:
            again = {**ASK, "messages": [*ASK["messages"], {"role": "assistant", "content": reply.json["content"]}]}
            result = {"type": "tool_result", "tool_use_id": reply.json["content"][0]["id"], "content": "r"}
            again["messages"].append({"role": "user", "content": [result]})
            assert caller.send("POST", PATHS[protocol], again, HEADERS).status == 200
