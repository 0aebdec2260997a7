"""Random requests over the whole stack: what streams is what is buffered, in every field, and usage agrees."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.support.inline_server import Site, Stream

WORDS = ("plain", "emoji", "faces", "call", "reason", "ends", "again", "broken", "delimiters", "stops later")
STOPS = (" the", "wor", "is", "🙂", "b ", "</think>", "x", "answer is", "<function", "Paris")
TOOL = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}
COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens", "completion_tokens_details")


def common(rng: random.Random, site: Site) -> dict[str, Any]:
    """Fields of both endpoints."""
    body: dict[str, Any] = {"n": rng.choice((1, 1, 2, 3)), "seed": rng.randrange(99)}
    body["max_tokens"] = rng.choice((1, 2, 3, 5, 8, 20, 60, 90))
    for flag in ("return_token_ids", "return_tokens_as_token_ids", "ignore_eos", "include_stop_str_in_output"):
        if rng.random() < 0.3:
            body[flag] = True
    kind = rng.random()
    if kind < 0.3:
        body["stop"] = rng.sample(STOPS, rng.choice((1, 2, 3)))
    elif kind < 0.5:
        body["stop_token_ids"] = [rng.randrange(600), *site.model.tokenizer.encode(" is", specials=False)]
    return body


def completion(rng: random.Random, site: Site) -> dict[str, Any]:
    body = {"prompt": rng.sample(WORDS, rng.choice((1, 1, 2))), **common(rng, site)}
    if rng.random() < 0.2:
        body["max_tokens"] = 0
    if rng.random() < 0.5:
        body["logprobs"] = rng.choice((0, 1, 3, 20))
        if rng.random() < 0.3:
            body["logprob_token_ids"] = [rng.randrange(600) for _ in range(5)]
    body["echo"] = rng.random() < 0.4
    return body


def chat(rng: random.Random, site: Site) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": rng.choice(WORDS)}], **common(rng, site)}
    if rng.random() < 0.5:
        body |= {"logprobs": True, "top_logprobs": rng.choice((0, 1, 3, 20))}
    if rng.random() < 0.5:
        body["tools"] = [TOOL]
        body["tool_choice"] = rng.choice(("auto", "none", "required", TOOL | {"function": {"name": "lookup"}}))
    if rng.random() < 0.3:
        body["chat_template_kwargs"] = {"enable_thinking": False}
    if rng.random() < 0.3:
        body["thinking_token_budget"] = rng.choice((1, 2, 3, 5))
    body["return_token_timestamps"] = rng.random() < 0.3
    return body


def folded(stream: Stream, index: int) -> dict[str, Any]:
    """One choice of a stream, put together as a client does."""
    found: dict[str, Any] = {"text": "", "reasoning": "", "calls": {}, "ids": [], "times": 0, "logprobs": {}}
    for chunk in stream.choices(index):
        delta = chunk.get("delta", {})
        found["text"] += chunk.get("text", "") + (delta.get("content") or "")
        found["reasoning"] += delta.get("reasoning") or ""
        for part in delta.get("tool_calls", ()):
            call = found["calls"].setdefault(part["index"], ["", ""])
            call[0] += part["function"].get("name", "")
            call[1] += part["function"].get("arguments", "")
        for name, values in (chunk["logprobs"] or {}).items():
            found["logprobs"].setdefault(name, []).extend(values or ())
        found["ids"] += chunk.get("token_ids") or []
        found["times"] += len(chunk.get("token_timestamps") or ())
        if chunk["finish_reason"]:
            found["end"] = (chunk["finish_reason"], chunk["stop_reason"])
    found["calls"] = [call for _, call in sorted(found["calls"].items())]
    found["logprobs"] = {name: values for name, values in found["logprobs"].items() if values}
    return found


def buffered(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice.get("message", {})
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    return {
        "text": choice.get("text", "") + (message.get("content") or ""),
        "reasoning": message.get("reasoning", ""),
        "calls": calls,
        "ids": choice.get("token_ids") or [],
        "times": len(choice.get("token_timestamps") or ()),
        "logprobs": {name: values for name, values in (choice["logprobs"] or {}).items() if values},
        "end": (choice["finish_reason"], choice["stop_reason"]),
    }


@pytest.mark.parametrize(("path", "draw"), [("/v1/completions", completion), ("/v1/chat/completions", chat)])
def test_streams_fold_to_what_is_buffered(scripted: Site, path: str, draw: Any) -> None:
    rng = random.Random(path)
    served = 0
    for _ in range(60):
        body = draw(rng, scripted)
        reply = scripted.send("POST", path, body)
        stream = scripted.stream(path, {**body, "stream_options": {"include_usage": True}})
        whole = reply.json
        if reply.status != 200:  # a call that was required and didn't come, or was cut off by EOS
            assert reply.status == 500 and not stream.done, body
            assert stream.frames[-1]["error"] == whole["error"], body
            continue
        served += 1
        for choice in whole["choices"]:
            assert folded(stream, choice["index"]) == buffered(choice), body
        usage = stream.frames[-1]["usage"]
        assert {name: usage.get(name) for name in COUNTS} == {name: whole["usage"].get(name) for name in COUNTS}, body
    assert served > 30
