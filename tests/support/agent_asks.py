"""One question in the words of each protocol that agents speak, and one answer read back from each SDK's objects.

An Ask is put to Messages, Responses and Chat through the official clients; whatever they accumulate from a stream, or
parse from a buffered answer, becomes the same Answer, so that protocols and deliveries can be compared.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import anthropic
import openai
import PIL.Image
from openai.lib.streaming.chat import ChatCompletionStreamState

SCHEMA: Final = {"type": "object", "properties": {"city": {"type": "string"}}}
End = Literal["done", "calls", "limit", "stop"]


def png(side: int = 32) -> str:
    """A picture as base64 text."""
    file = io.BytesIO()
    PIL.Image.new("RGB", (side, side), "teal").save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


@dataclass(frozen=True, slots=True)
class Ask:
    """`picture`: a tool's result with an image stands before `text`. `single`: at most one call is allowed."""

    text: str
    limit: int = 400
    stop: str | None = None
    thinking: bool = True
    picture: bool = False
    single: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """`calls`: name and arguments in order. `prompt`: all prompt tokens, reused or not."""

    reasoning: str
    text: str
    calls: tuple[tuple[str, dict[str, Any]], ...]
    end: End
    prompt: int
    generated: int


# Messages


def messages_body(ask: Ask) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": ask.text}]
    if ask.picture:
        source = {"type": "base64", "media_type": "image/png", "data": png()}
        content = [{"type": "text", "text": "here"}, {"type": "image", "source": source}]
        messages = [
            {"role": "user", "content": "Show me."},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "lookup", "input": {}}]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": content},
                    {"type": "text", "text": ask.text},
                ],
            },
        ]
    body: dict[str, Any] = {"model": "any", "max_tokens": ask.limit, "messages": messages}
    body["tools"] = [{"name": "lookup", "description": "Looks", "input_schema": SCHEMA}]
    if ask.single:
        body["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": True}
    if ask.stop is not None:
        body["stop_sequences"] = [ask.stop]
    if not ask.thinking:
        body["thinking"] = {"type": "disabled"}
    return body


def of_message(message: anthropic.types.Message) -> Answer:
    reasons: dict[str, End] = {
        "end_turn": "done",
        "tool_use": "calls",
        "max_tokens": "limit",
        "stop_sequence": "stop",
    }
    found = message.to_dict()
    blocks: Any = found["content"]
    usage: Any = found["usage"]
    assert usage["cache_creation_input_tokens"] == 0
    assert all(block["id"].startswith("toolu_") for block in blocks if block["type"] == "tool_use")
    return Answer(
        "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        "".join(block["text"] for block in blocks if block["type"] == "text"),
        tuple((block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"),
        reasons[str(found["stop_reason"])],
        usage["input_tokens"] + usage["cache_read_input_tokens"],
        usage["output_tokens"],
    )


def ask_messages(client: anthropic.Anthropic, ask: Ask, *, stream: bool) -> Answer:
    if not stream:
        return of_message(client.messages.create(**messages_body(ask)))
    with client.messages.stream(**messages_body(ask)) as events:
        return of_message(events.get_final_message())


# Responses


def responses_body(ask: Ask) -> dict[str, Any]:
    items: list[dict[str, Any]] = [{"role": "user", "content": ask.text}]
    if ask.picture:
        output = [
            {"type": "input_text", "text": "here"},
            {"type": "input_image", "image_url": f"data:image/png;base64,{png()}", "detail": "original"},
        ]
        items = [
            {"role": "user", "content": "Show me."},
            {"type": "function_call", "call_id": "call_1", "name": "lookup", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": output},
            *items,
        ]
    tool = {"type": "function", "name": "lookup", "description": "Looks", "parameters": SCHEMA, "strict": False}
    body: dict[str, Any] = {"model": "any", "input": items, "tools": [tool], "max_output_tokens": ask.limit}
    if ask.single:
        body["parallel_tool_calls"] = False
    if ask.stop is not None:
        body["extra_body"] = {"stop": [ask.stop]}
    if not ask.thinking:
        body["reasoning"] = {"effort": "none"}
    return body


def of_response(response: Any) -> Answer:
    items = response.output
    calls = tuple((item.name, json.loads(item.arguments)) for item in items if item.type == "function_call")
    assert response.status in ("completed", "incomplete")
    end: End = "calls" if calls else "done"
    if response.status == "incomplete":
        assert response.incomplete_details.reason == "max_output_tokens"
        end = "limit"
    return Answer(
        "".join(part.text for item in items if item.type == "reasoning" for part in item.content),
        "".join(part.text for item in items if item.type == "message" for part in item.content),
        calls,
        end,
        response.usage.input_tokens,
        response.usage.output_tokens,
    )


def ask_responses(client: openai.OpenAI, ask: Ask, *, stream: bool) -> Answer:
    if not stream:
        return of_response(client.responses.create(**responses_body(ask)))
    with client.responses.stream(**responses_body(ask)) as events:
        seen: Sequence[Any] = list(events)
        last = seen[-1]
        if last.type == "response.completed":
            assert events.get_final_response().id == last.response.id
    assert last.type in ("response.completed", "response.incomplete")
    return of_response(last.response)


# Chat


def chat_body(ask: Ask) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": ask.text}]
    if ask.picture:
        call = {"id": "call_1", "type": "function", "function": {"name": "lookup", "arguments": "{}"}}
        parts = [
            {"type": "text", "text": "here"},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png()}"}},
        ]
        messages = [
            {"role": "user", "content": "Show me."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": parts},
            *messages,
        ]
    tool = {"type": "function", "function": {"name": "lookup", "description": "Looks", "parameters": SCHEMA}}
    body: dict[str, Any] = {"model": "any", "messages": messages, "tools": [tool], "max_tokens": ask.limit}
    if ask.single:
        body["parallel_tool_calls"] = False
    if ask.stop is not None:
        body["stop"] = [ask.stop]
    if not ask.thinking:
        body["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}
    return body


def of_completion(completion: Any) -> Answer:
    (choice,) = completion.choices
    message = choice.message
    extra = message.model_extra or {}
    reasoning = extra.get("reasoning") or ""
    assert reasoning == (extra.get("reasoning_content") or "")
    ends: dict[str, End] = {"stop": "done", "tool_calls": "calls", "length": "limit"}
    calls = tuple((call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ())
    return Answer(
        reasoning,
        message.content or "",
        calls,
        ends[choice.finish_reason],
        completion.usage.prompt_tokens,
        completion.usage.completion_tokens,
    )


def ask_chat(client: openai.OpenAI, ask: Ask, *, stream: bool) -> Answer:
    if not stream:
        return of_completion(client.chat.completions.create(**chat_body(ask)))
    state: Any = ChatCompletionStreamState()
    options: Any = {"include_usage": True}
    for chunk in client.chat.completions.create(**chat_body(ask), stream=True, stream_options=options):
        state.handle_chunk(chunk)
    try:
        return of_completion(state.get_final_completion())
    except openai.LengthFinishReasonError as cut:  # the client's word for an answer that the limit cut
        return of_completion(cut.completion)
