"""When a stream's first words come, and how answers are counted, over whole requests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.inline_server import Site
from tests.support.shown import HEADERS

CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}


def asking(text: str, **fields: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": text}],
        "chat_template_kwargs": {"enable_thinking": False},
        **fields,
    }


@pytest.mark.parametrize(
    "body",
    [
        asking("faces", max_tokens=1),
        asking("faces", stop=["🙂"]),
        asking("plain", stop=["hello"]),
        asking("plain", stop_token_ids=[0xF0], max_tokens=1),
    ],
    ids=["a part of a character", "a character that is a stop", "a text that is a stop", "plain"],
)
def test_the_role_comes_with_the_first_token_even_a_hidden_one(scripted: Site, body: dict[str, Any]) -> None:
    stream = scripted.stream(CHAT, body)
    first = stream.choices()[0]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert sum("role" in choice["delta"] for choice in stream.choices()) == 1
    assert stream.done


@pytest.mark.parametrize(
    ("text", "fields", "outcome"),
    [
        ("plain", {}, "completed"),
        ("plain", {"max_tokens": 2}, "completed"),
        ("plain", {"stop": ["wor"]}, "completed"),
        ("call", {"tools": [TOOL], "tool_choice": "required"}, "completed"),
        ("emoji", {"tools": [TOOL], "tool_choice": "required"}, "failed"),
        ("call", {"tools": [TOOL], "tool_choice": "required", "max_tokens": 8}, "failed"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_counts_as_completed_and_what_as_failed(
    scripted: Site, text: str, fields: dict[str, Any], outcome: str, stream: bool
) -> None:
    reply = scripted.send("POST", CHAT, asking(text, stream=stream, **fields))
    assert reply.status == (500 if outcome == "failed" and not stream else 200), reply.body
    assert ('"error"' in reply.body.decode()) == (outcome == "failed")
    assert scripted.engine.generations[-1].outcomes == (outcome,)


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize("depth", [900, 100_000])
def test_json_texts_nested_too_deeply_are_refused(scripted: Site, depth: int) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": nested(depth)}}
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": nested(depth)}
    output = {"type": "function_call_output", "call_id": "c", "output": "r"}
    messages = [*asking("plain")["messages"], {"role": "assistant", "tool_calls": [call]}]
    result = {"role": "tool", "tool_call_id": "c", "content": "r"}
    for stream in (False, True):
        scripted.refused(CHAT, {"messages": [*messages, result], "stream": stream})
        scripted.refused("/v1/responses", {"model": "any", "input": [item, output], "stream": stream})
    scripted.refused(CHAT, asking("plain", guided_json=nested(depth)))
    assert scripted.service.pool.requests == 0


def test_bodies_nested_too_deeply_are_refused(scripted: Site) -> None:
    deep = json.loads(nested(900))
    function = {"name": "lookup", "parameters": deep}
    scripted.refused(CHAT, asking("plain", tools=[{"type": "function", "function": function}]))
    tools = [{"type": "function", **function}]
    scripted.refused("/v1/responses", {"model": "any", "input": "x", "tools": tools})
    used = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": deep}]}
    answered = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "r"}]}
    body = {"model": "any", "max_tokens": 4, "messages": [*asking("plain")["messages"], used, answered]}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        reply = scripted.send("POST", path, body, HEADERS)
        assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")
    assert scripted.service.pool.requests == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_never_breaks_off_for_what_it_repeats_of_the_request(scripted: Site, stream: bool) -> None:
    body = {"model": "any", "input": "plain", "max_output_tokens": 2, "stream": stream}
    deep = json.loads(nested(700))
    tools = [{"type": "function", "name": "f", "parameters": deep}]
    for name, fields in (("metadata", {"metadata": deep}), ("tools", {"tools": tools, "tool_choice": "none"})):
        assert scripted.refused("/v1/responses", {**body, **fields}).startswith(f"{name}: is nested deeper")
    reply = scripted.send("POST", "/v1/responses", {**body, "metadata": json.loads(nested(500))})
    assert reply.status == 200 and b'"incomplete_details":{"reason"' in reply.body
