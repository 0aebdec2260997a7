"""Random requests to Messages and Responses over the whole stack: what streams is what is buffered, in every field."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.support.agent_folds import ResponseFold, fold_message
from tests.support.ingress import Reply
from tests.support.inline_server import Site
from tests.support.sdk import events

WORDS = ("plain", "emoji", "faces", "call", "reason", "ends", "again", "broken", "delimiters", "stops later")
STOPS = (" the", "wor", "is", "🙂", "b ", "</think>", "x", "answer is", "<function", "Paris")
VERSION = [("anthropic-version", "2023-06-01")]


def common(rng: random.Random, site: Site, limit: str, stops: str) -> dict[str, Any]:
    """Fields of both protocols. `limit` and `stops`: their names for the output limit and for string stops."""
    body: dict[str, Any] = {"model": "m", "seed": rng.randrange(99), limit: rng.choice((1, 2, 3, 5, 8, 20, 60, 90))}
    for flag in ("ignore_eos", "include_stop_str_in_output"):
        if rng.random() < 0.3:
            body[flag] = True
    kind = rng.random()
    if kind < 0.3:
        body[stops] = rng.sample(STOPS, rng.choice((1, 2, 3)))
    elif kind < 0.5:
        body["stop_token_ids"] = [rng.randrange(600), *site.model.tokenizer.encode(" is", specials=False)]
    if rng.random() < 0.3:
        body["thinking_token_budget"] = rng.choice((1, 2, 3, 5))
    return body


def messages(rng: random.Random, site: Site) -> dict[str, Any]:
    body = common(rng, site, "max_tokens", "stop_sequences")
    body["messages"] = [{"role": "user", "content": rng.choice(WORDS)}]
    if rng.random() < 0.6:
        body["tools"] = [{"name": "lookup", "input_schema": {"type": "object"}}]
        choice = rng.choice(({"type": "auto"}, {"type": "none"}, {"type": "any"}, {"type": "tool", "name": "lookup"}))
        body["tool_choice"] = {**choice, "disable_parallel_tool_use": rng.random() < 0.5}
    if rng.random() < 0.3:
        body["thinking"] = {"type": "disabled"}
    return body


def responses(rng: random.Random, site: Site) -> dict[str, Any]:
    body = common(rng, site, "max_output_tokens", "stop")
    body["input"] = rng.choice(WORDS)
    if rng.random() < 0.6:
        freeform = rng.random() < 0.3
        body["tools"] = [{"type": "custom" if freeform else "function", "name": "lookup"}]
        named = {"type": body["tools"][0]["type"], "name": "lookup"}
        body["tool_choice"] = rng.choice(("auto", "none", "required", named))
        body["parallel_tool_calls"] = rng.random() < 0.5
    if rng.random() < 0.3:
        body["reasoning"] = {"effort": "none"}
    if rng.random() < 0.6:
        body |= {"include": ["message.output_text.logprobs"], "top_logprobs": rng.choice((0, 1, 3, 20))}
        if rng.random() < 0.3:
            body["logprob_token_ids"] = [rng.randrange(600) for _ in range(5)]
        body["return_tokens_as_token_ids"] = rng.random() < 0.3
    return body


def alike(found: dict[str, Any]) -> dict[str, Any]:
    """An answer without what differs between two of the same request: ids, times, and how much was reused."""
    usage = found["usage"]
    if "cache_read_input_tokens" in usage:
        usage["input_tokens"] += usage.pop("cache_read_input_tokens")
    else:
        usage["input_tokens_details"]["cached_tokens"] = 0
    text = json.dumps({**found, "usage": usage, "created_at": 0, "completed_at": found.get("completed_at") is None})
    text = text.replace(str(found["id"]).partition("_")[2], "ID")
    for item in (*found.get("content", ()), *found.get("output", ())):
        name = "id" if item["type"] == "tool_use" else "call_id"
        if name in item:
            text = text.replace(item[name], "CALL")
    alike: dict[str, Any] = json.loads(text)
    return alike


def folded(path: str, reply: Reply) -> dict[str, Any]:
    if path == "/v1/messages":
        return fold_message([reply.body])
    fold = ResponseFold([reply.body])
    assert fold.items == fold.final["output"]
    return fold.final


def failure(path: str, reply: Reply) -> str:
    """The message in which a stream failed."""
    name, data = events([reply.body])[-1]
    assert name == ("error" if path == "/v1/messages" else "response.failed")
    error = data["error"] if path == "/v1/messages" else data["response"]["error"]
    return str(error["message"])


@pytest.mark.parametrize(("path", "draw"), [("/v1/messages", messages), ("/v1/responses", responses)])
def test_streams_fold_to_what_is_buffered(scripted: Site, path: str, draw: Any) -> None:
    rng = random.Random(path)
    served = 0
    for _ in range(80):
        body = draw(rng, scripted)
        whole = scripted.send("POST", path, body, VERSION)
        stream = scripted.send("POST", path, {**body, "stream": True}, VERSION)
        assert stream.status == 200, (body, stream.body)
        if whole.status != 200:  # a call that was required and didn't come, or that can't be returned
            assert whole.status == 500, (body, whole.body)
            assert failure(path, stream) == whole.json["error"]["message"], body
            continue
        served += 1
        assert alike(folded(path, stream)) == alike(whole.json), body
    assert served > 40
