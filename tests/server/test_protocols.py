"""The protocols of a live server through the official SDKs and captured requests.

    FLARE_API_TEST_URL=http://127.0.0.1:8000 .venv/bin/python -m pytest tests/server/test_protocols.py -q

Nothing here depends on what the model says, so any server will do; FLARE_API_TEST_KEY is its key. Without a URL a
server with a scripted model is started.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.support import captures
from tests.support.live import Server

pytestmark = pytest.mark.graph

VERSION = {"anthropic-version": "2023-06-01"}
HELLO: Any = [{"role": "user", "content": "Say hello."}]
TOOL_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {server.any_key}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    """As a user makes it: the SDK sends the version that it knows."""
    with anthropic.Anthropic(base_url=server.url, api_key=server.any_key, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def gpt(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.any_key, max_retries=0) as client:
        yield client


def short(name: str) -> dict[str, Any]:
    """A captured request, with a small output limit so that any model answers it soon."""
    body = captures.body(name)
    for key in ("max_tokens", "max_output_tokens"):
        if key in body:
            body[key] = 16
    if "input" in body:
        body["max_output_tokens"] = 16
    return body


def post(http: httpx.Client, name: str, **changes: Any) -> httpx.Response:
    path = captures.path(name)
    return http.post(path, json={**short(name), **changes}, headers=VERSION if "messages" in path else {})


def replay(http: httpx.Client, name: str, **changes: Any) -> httpx.Response:
    answer = post(http, name, **changes)
    if answer.status_code == 400 and ("prompt is too long" in answer.text or "context_length_exceeded" in answer.text):
        pytest.skip(f"the model's context is too small: {answer.text[:200]}")
    assert answer.status_code == 200, answer.text
    return answer


def reusable(prompt: int) -> int:
    """How much of a first turn's prompt its second turn must reuse: 95 %, or all but one page of a short one."""
    return min(int(0.95 * prompt), prompt - 64)


def sse(answer: httpx.Response) -> list[tuple[str | None, Any]]:
    found: list[tuple[str | None, Any]] = []
    for frame in answer.text.split("\n\n"):
        lines = dict(line.partition(": ")[::2] for line in frame.split("\n") if line and not line.startswith(":"))
        if "data" in lines:
            found.append(
                (lines.get("event"), lines["data"] if lines["data"] == "[DONE]" else json.loads(lines["data"]))
            )
    return found


# Messages


def test_messages_streamed_and_buffered(claude: anthropic.Anthropic, server: Server) -> None:
    whole = claude.messages.create(model="any-model", max_tokens=16, messages=HELLO)
    assert whole.model == server.card["id"] and whole.role == "assistant" and whole.id.startswith("msg_")
    assert whole.stop_reason in ("end_turn", "max_tokens")
    with claude.messages.stream(model="any-model", max_tokens=16, messages=HELLO) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert final.model == whole.model and final.stop_reason in ("end_turn", "max_tokens")
    assert final.usage.output_tokens > 0


def test_counted_tokens_are_the_prompt(claude: anthropic.Anthropic) -> None:
    tools: Any = [{"name": "weather", "description": "d", "input_schema": TOOL_SCHEMA}]
    counted = claude.messages.count_tokens(model="m", messages=HELLO, system="Be brief.", tools=tools).input_tokens
    for _ in range(2):  # cold and warm
        usage = claude.messages.create(model="m", max_tokens=2, messages=HELLO, system="Be brief.", tools=tools).usage
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted
        assert usage.cache_creation_input_tokens == 0


def test_usage_in_a_warm_stream(http: httpx.Client) -> None:
    body = {"model": "m", "max_tokens": 2, "messages": HELLO, "system": "A " * 400, "stream": True}
    for _ in range(2):
        answer = http.post("/v1/messages", json=body, headers=VERSION)
        found = dict(sse(answer))
        start, final = found["message_start"]["message"]["usage"], found["message_delta"]["usage"]
        assert start["cache_read_input_tokens"] == 0
        assert final["input_tokens"] + final["cache_read_input_tokens"] == start["input_tokens"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("version", [None, "2023-01-01", "2026-10-22"])
def test_the_version_header_is_required(http: httpx.Client, path: str, version: str | None) -> None:
    headers = {} if version is None else {"anthropic-version": version}
    answer = http.post(path, json={"model": "m", "max_tokens": 2, "messages": HELLO}, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["type"] == "error" and answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "field", ["logprobs", "top_logprobs", "return_tokens_as_token_ids", "logprob_token_ids", "prompt_logprobs"]
)
def test_fields_that_messages_refuses(http: httpx.Client, field: str) -> None:
    body = {"model": "m", "max_tokens": 2, "messages": HELLO, field: 1}
    answer = http.post("/v1/messages", json=body, headers=VERSION)
    assert answer.status_code == 400 and field in answer.json()["error"]["message"]


def test_a_prompt_beyond_the_context_is_named(http: httpx.Client, server: Server) -> None:
    words = "word " * (server.card["max_model_len"] + 10)
    body = {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": words}]}
    answer = http.post("/v1/messages", json=body, headers=VERSION)
    assert answer.status_code == 400
    assert "prompt is too long: " in answer.json()["error"]["message"]
    assert http.post("/v1/responses", json={"model": "m", "input": words}).json()["error"]["code"] == (
        "context_length_exceeded"
    )


# Responses


def test_responses_streamed_and_buffered(gpt: openai.OpenAI, server: Server) -> None:
    whole = gpt.responses.create(model="any-model", input="Say hello.", max_output_tokens=16)
    assert whole.model == server.card["id"] and whole.id.startswith("resp_")
    assert whole.status in ("completed", "incomplete") and whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    with gpt.responses.stream(model="any-model", input="Say hello.", max_output_tokens=16) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")


def test_responses_events_are_numbered_and_end_once(http: httpx.Client) -> None:
    body = {"model": "m", "input": "Say hello.", "max_output_tokens": 8, "stream": True}
    found = sse(http.post("/v1/responses", json=body))
    assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
    assert all(name == data["type"] for name, data in found)
    assert [name for name, _ in found if name in ("response.completed", "response.incomplete")] == [found[-1][0]]


def test_responses_log_probabilities(gpt: openai.OpenAI, server: Server) -> None:
    if not server.card["flare"]["max_top_logprobs"]:
        pytest.skip("the server has no generation log probabilities")
    found = gpt.responses.create(
        model="m",
        input="Say hello.",
        max_output_tokens=64,
        top_logprobs=2,
        include=["message.output_text.logprobs"],
        reasoning={"effort": "none"},
    )
    parts = [part for item in found.output if item.type == "message" for part in item.content]
    for part in parts:
        assert part.type == "output_text" and part.logprobs
        assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True},
        {"previous_response_id": "resp_1"},
        {"conversation": "conv_1"},
        {"background": True},
        {"truncation": "auto"},
        {"prompt_logprobs": 1},
    ],
)
def test_stateful_responses_are_refused(http: httpx.Client, fields: Mapping[str, Any]) -> None:
    answer = http.post("/v1/responses", json={"model": "m", "input": "Hi", **fields})
    assert answer.status_code == 400
    assert answer.json()["error"].keys() == {"type", "message", "param", "code"}


def test_an_empty_input_is_answered(gpt: openai.OpenAI) -> None:
    assert gpt.responses.create(model="m", input="", max_output_tokens=1).status in ("completed", "incomplete")


# Captured requests


@pytest.mark.parametrize("name", captures.all_names())
def test_captured_requests_are_answered(http: httpx.Client, name: str) -> None:
    answer = replay(http, name)
    if "text/event-stream" in answer.headers["content-type"]:
        ends = [name or data for name, data in sse(answer)]
        assert ends[-1] in ("message_stop", "response.completed", "response.incomplete", "[DONE]")


@pytest.mark.parametrize("mode", ["", "_bare"])
def test_a_second_turn_reuses_the_first(http: httpx.Client, mode: str) -> None:
    first, second = (f"claude-code-2.1.332{mode}_messages_{turn}" for turn in ("turn1", "turn2_tool_result"))
    turn1 = replay(http, first, stream=False).json()["usage"]
    turn2 = replay(http, second, stream=False).json()["usage"]
    prompt = turn1["input_tokens"] + turn1["cache_read_input_tokens"]
    assert turn2["cache_read_input_tokens"] >= reusable(prompt)


def test_a_second_codex_turn_reuses_the_first(http: httpx.Client) -> None:
    turns = ("turn1_catalog_apply_patch", "turn2_custom_tool_call_output")
    usages = [replay(http, f"codex-0.171.0_responses_{turn}", stream=False).json()["usage"] for turn in turns]
    assert usages[1]["input_tokens_details"]["cached_tokens"] >= reusable(usages[0]["input_tokens"])


def test_a_burst_of_counts_is_answered_while_streams_run(http: httpx.Client) -> None:
    probe = "claude-code-2.1.332_count_tokens_probe"
    streamed = {"model": "m", "max_tokens": 64, "messages": HELLO, "stream": True}
    with ThreadPoolExecutor(32) as pool:
        streams = [pool.submit(http.post, "/v1/messages", json=streamed, headers=VERSION) for _ in range(8)]
        counts = [pool.submit(post, http, probe) for _ in range(24)]
        answers = [count.result() for count in counts]
        assert all(stream.result().status_code in (200, 429) for stream in streams)
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["input_tokens"] for answer in answers}) == 1


# Across protocols


def test_protocols_share_one_prompt_and_cache(http: httpx.Client) -> None:
    """The same conversation has the same tokens on every route, so that one route reuses what another computed."""
    text = "Count the words of this sentence. " * 40
    system = {"role": "system", "content": "Be brief."}
    user = {"role": "user", "content": text}
    chat = {"model": "m", "max_tokens": 2, "messages": [system, user]}
    first = http.post("/v1/chat/completions", json=chat).json()["usage"]
    body = {"model": "m", "max_tokens": 2, "messages": [user], "system": "Be brief."}
    second = http.post("/v1/messages", json=body, headers=VERSION).json()["usage"]
    body = {"model": "m", "max_output_tokens": 2, "input": [user], "instructions": "Be brief."}
    third = http.post("/v1/responses", json=body).json()["usage"]
    prompt = first["prompt_tokens"]
    assert second["input_tokens"] + second["cache_read_input_tokens"] == prompt == third["input_tokens"]
    assert second["cache_read_input_tokens"] > 0 and third["input_tokens_details"]["cached_tokens"] > 0


def test_opencode_discovers_the_model_as_from_ollama(http: httpx.Client, server: Server) -> None:
    """The sequence of its Ollama provider: tags, show by name, then chat at the base URL."""
    (entry,) = http.get("/api/tags").json()["models"]
    assert entry["name"] == entry["model"] == server.card["id"]
    assert isinstance(entry["size"], int) and isinstance(entry["digest"], str) and isinstance(entry["modified_at"], str)
    assert {"format", "family", "parameter_size", "quantization_level"} <= entry["details"].keys()
    shown = http.post("/api/show", json={"model": entry["name"]}).json()
    assert "completion" in shown["capabilities"]
    lengths = [value for key, value in shown["model_info"].items() if key.endswith(".context_length")]
    assert lengths == [server.card["max_model_len"]]
    chat = {"model": entry["name"], "messages": HELLO, "max_tokens": 4, "stream": True}
    assert sse(http.post("/v1/chat/completions", json=chat))[-1][1] == "[DONE]"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("change", ["null", "[]", '"x"', "{", '{"model": 5}', '{"model": "m"}'])
def test_malformed_bodies_have_the_error_shape_of_their_route(http: httpx.Client, path: str, change: str) -> None:
    answer = http.post(path, content=change, headers={**VERSION, "content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error" and answer.json()["error"]["message"]
    assert ("type" in answer.json()) == (path == "/v1/messages")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/responses"])
def test_changed_captures_are_answered_or_refused(http: httpx.Client, path: str) -> None:
    """A sample of every single-field change: 200 or a 4xx, never a 5xx or a hang. The output limit stays."""
    name = captures.names(path)[0]
    changes = [body for change, body in captures.mutations(short(name)) if not change.startswith(".max_")]
    for body in random.Random(path).sample(changes, 40):
        answer = http.post(path, json=body, headers=VERSION)
        assert answer.status_code in (200, 400), answer.text
