"""When a stream's first words come, and how answers are counted, over whole requests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.inline_server import Site

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
