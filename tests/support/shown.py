"""What a client is shown of an answer, read back from each protocol's own form, buffered and streamed: one question in
three spellings, one value to compare."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from tests.support.ingress import Reply
from tests.support.inline_server import Stream

Protocol = Literal["chat", "messages", "responses"]
PROTOCOLS: Final[tuple[Protocol, ...]] = ("chat", "messages", "responses")
PATHS: Final[Mapping[Protocol, str]] = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
HEADERS: Final = (("anthropic-version", "2023-06-01"),)
_ENDS: Final = {
    **{"stop": "done", "tool_calls": "calls", "length": "limit"},
    **{"end_turn": "done", "stop_sequence": "done", "tool_use": "calls", "max_tokens": "limit"},
    "max_output_tokens": "limit",
}


@dataclass(frozen=True)
class Shown:
    """`calls`: name and arguments in order. `end`: "done", "calls" or "limit", empty after an error."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    end: str = ""
    error: str = ""


def ask(
    protocol: Protocol,
    text: str,
    *,
    tools: Sequence[tuple[str, Mapping[str, Any]]] = (),
    schema: Mapping[str, Any] | None = None,
    limit: int = 1000,
    **fields: Any,
) -> dict[str, Any]:
    """The body of a question. `tools`: names and schemas. `schema`: of the answer."""
    if protocol == "chat":
        named: Any = [{"name": name, "description": "Look", "parameters": schema} for name, schema in tools]
        body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": limit}
        body["tools"] = [{"type": "function", "function": function} for function in named]
    elif protocol == "messages":
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": limit}
        body["tools"] = [{"name": name, "description": "Look", "input_schema": schema} for name, schema in tools]
    else:
        body = {"input": text, "max_output_tokens": limit}
        body["tools"] = [
            {"type": "function", "name": name, "description": "Look", "parameters": schema} for name, schema in tools
        ]
    if not body["tools"]:
        del body["tools"]
    if schema is not None:
        form = {"type": "json_schema", "schema": schema}
        formats: Mapping[Protocol, dict[str, Any]] = {
            "chat": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
            "messages": {"output_config": {"format": form}},
            "responses": {"text": {"format": {**form, "name": "x"}}},
        }
        body |= formats[protocol]
    return {"model": "any", **body, **fields}


def whole(protocol: Protocol, reply: Reply) -> Shown:
    """A buffered answer."""
    if reply.status != 200:
        assert reply.status == 500, reply.body
        return Shown(error=reply.json["error"]["message"])
    return _WHOLE[protocol](reply.json)


def streamed(protocol: Protocol, reply: Reply) -> Shown:
    """A stream, put together. Holds it to the rules of its end as well."""
    assert reply.status == 200, reply.body
    return _STREAMED[protocol](Stream(reply))


def _chat(body: Any) -> Shown:
    (choice,) = body["choices"]
    message = choice["message"]
    assert message.get("reasoning") == message.get("reasoning_content")
    calls = tuple(
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    )
    return Shown(message["content"] or "", message.get("reasoning") or "", calls, _ENDS[choice["finish_reason"]])


def _chat_stream(stream: Stream) -> Shown:
    text, reasoning, again, end = "", "", "", ""
    calls: dict[int, list[str]] = {}
    for choice in stream.choices():
        delta = choice["delta"]
        text += delta.get("content") or ""
        reasoning += delta.get("reasoning") or ""
        again += delta.get("reasoning_content") or ""
        for part in delta.get("tool_calls", ()):
            call = calls.setdefault(part["index"], ["", ""])
            call[0] += part["function"].get("name", "")
            call[1] += part["function"].get("arguments", "")
        end = choice["finish_reason"] or end
    assert reasoning == again
    error = _error(stream)
    assert stream.done == (not error) == bool(end)
    if error:
        return Shown(error=error)
    return Shown(text, reasoning, tuple((name, json.loads(value)) for name, value in calls.values()), _ENDS[end])


def _messages(body: Any) -> Shown:
    shown = Shown(end=_ENDS[body["stop_reason"]])
    for block in body["content"]:
        match block["type"]:
            case "text":
                shown = replace(shown, text=shown.text + block["text"])
            case "thinking":
                shown = replace(shown, reasoning=shown.reasoning + block["thinking"])
            case "tool_use":
                shown = replace(shown, calls=(*shown.calls, (block["name"], block["input"])))
    return shown


def _messages_stream(stream: Stream) -> Shown:
    error = _error(stream)
    last = stream.frames[-1]["type"]
    assert last == ("error" if error else "message_stop")
    if error:
        return Shown(error=error)
    blocks: list[Any] = []
    body: dict[str, Any] = {"content": blocks}
    for frame in stream.frames:
        match frame["type"]:
            case "content_block_start":
                assert frame["index"] == len(blocks)
                blocks.append({**frame["content_block"], "json": ""})
            case "content_block_delta":
                _extend(blocks[frame["index"]], frame["delta"])
            case "message_delta":
                body["stop_reason"] = frame["delta"]["stop_reason"]
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["json"])
    return _messages(body)


def _extend(block: dict[str, Any], delta: Mapping[str, Any]) -> None:
    match delta["type"]:
        case "text_delta":
            block["text"] += delta["text"]
        case "thinking_delta":
            block["thinking"] += delta["thinking"]
        case "input_json_delta":
            block["json"] += delta["partial_json"]


def _responses(body: Any) -> Shown:
    text = reasoning = ""
    calls: list[tuple[str, Any]] = []
    for item in body["output"]:
        match item["type"]:
            case "message":
                text += "".join(part["text"] for part in item["content"])
            case "reasoning":
                reasoning += "".join(part["text"] for part in item["content"])
            case "function_call":
                calls.append((item["name"], json.loads(item["arguments"])))
    if body["status"] == "incomplete":
        return Shown(text, reasoning, tuple(calls), _ENDS[body["incomplete_details"]["reason"]])
    assert body["status"] == "completed"
    return Shown(text, reasoning, tuple(calls), "calls" if calls else "done")


def _responses_stream(stream: Stream) -> Shown:
    last = stream.frames[-1]
    assert [frame["sequence_number"] for frame in stream.frames] == list(range(len(stream.frames)))
    if last["type"] == "response.failed":
        return Shown(error=last["response"]["error"]["message"])
    assert last["type"] == f"response.{last['response']['status']}"
    deltas = {
        kind: "".join(frame["delta"] for frame in stream.frames if frame["type"] == f"response.{kind}.delta")
        for kind in ("output_text", "reasoning_text")
    }
    shown = _responses(last["response"])
    assert (deltas["output_text"], deltas["reasoning_text"]) == (shown.text, shown.reasoning)
    items = [frame["item"] for frame in stream.frames if frame["type"] == "response.output_item.done"]
    assert items == last["response"]["output"]
    return shown


def _error(stream: Stream) -> str:
    """The message of a terminal error event, and nothing may follow it; empty without one."""
    places = [index for index, frame in enumerate(stream.frames) if "error" in frame]
    assert places in ([], [len(stream.frames) - 1])
    return str(stream.frames[-1]["error"]["message"]) if places else ""


_WHOLE: Final[Mapping[Protocol, Callable[[Any], Shown]]] = {
    "chat": _chat,
    "messages": _messages,
    "responses": _responses,
}
_STREAMED: Final[Mapping[Protocol, Callable[[Stream], Shown]]] = {
    "chat": _chat_stream,
    "messages": _messages_stream,
    "responses": _responses_stream,
}
