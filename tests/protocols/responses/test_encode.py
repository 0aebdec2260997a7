"""Responses events: life cycle, ids, sequence, endings; the folded stream is the buffered object; the SDK agrees."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from engine.types.events import FirstToken, ReasoningDelta, SemanticEvent, TextDelta, ToolCallStarted
from engine.types.request import SamplingParams
from protocols.encoder import ResponseContext
from protocols.errors import OutputInvalid, ProtocolError, SlotsExhausted
from protocols.exact_json import dumps
from protocols.fields import Decoded, DecodeLimits
from protocols.responses.decode import decode
from protocols.responses.encode import ResponsesEncoder
from tests.support.agent_folds import ResponseFold
from tests.support.scenarios import (
    FAILED,
    PROMPT,
    SCENARIOS,
    SUCCEEDED,
    USAGE,
    call,
    chunked,
    end,
    observed,
    outputs,
    token_bytes,
)
from tests.support.sdk import events, openai_client

SAMPLING = SamplingParams(0.7, 0.8, 20, 0.0, 1.0, 1.5, 0.0, 1)
CONTEXT = ResponseContext("0123abcd", "org/model", 1_764_000_000, token_bytes, (PROMPT,), sampling=SAMPLING)
LOGPROBS: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
FUNCTION = {"type": "function", "name": "Read", "parameters": {"type": "object", "properties": {}}}
REQUIRED_KEYS = {
    "id",
    "object",
    "created_at",
    "completed_at",
    "status",
    "incomplete_details",
    "model",
    "previous_response_id",
    "instructions",
    "output",
    "error",
    "tools",
    "tool_choice",
    "truncation",
    "parallel_tool_calls",
    "text",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "top_logprobs",
    "temperature",
    "reasoning",
    "usage",
    "max_output_tokens",
    "max_tool_calls",
    "store",
    "background",
    "service_tier",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
}


def decoded(**fields: Any) -> Decoded:
    return decode({"model": "any", "input": "Hi", **fields}, DecodeLimits(vocab_size=1000))


def run(items: Sequence[SemanticEvent], size: int = 1, **fields: Any) -> tuple[ResponsesEncoder, list[bytes]]:
    encoder = ResponsesEncoder(CONTEXT, decoded(**fields))
    frames = [frame for chunk in chunked(items, size) for frame in encoder.feed(0, chunk)]
    return encoder, frames + encoder.finish()


def check(encoder: ResponsesEncoder, frames: Sequence[bytes]) -> None:
    folded, result = ResponseFold(frames), encoder.result()
    assert folded.final == result
    assert folded.items == result["output"]


@pytest.mark.parametrize("name", SUCCEEDED)
@pytest.mark.parametrize("size", [1, 100])
def test_the_folded_stream_is_the_buffered_response(name: str, size: int) -> None:
    check(*run(SCENARIOS[name].events, size))


@settings(deadline=None)
@given(outputs(), st.integers(1, 20), st.booleans())
def test_any_output_folds_to_the_buffered_response(items: list[SemanticEvent], size: int, logprobs: bool) -> None:
    check(*run(items, size, **LOGPROBS if logprobs else {}))


@settings(deadline=None)
@given(outputs(), st.integers(1, 20))
def test_chunking_changes_nothing(items: list[SemanticEvent], size: int) -> None:
    one, many = (events(run(items, chunk, **LOGPROBS)[1]) for chunk in (1, size))
    for found in (one, many):
        found[-1][1]["response"]["completed_at"] = None
    assert one == many


@pytest.mark.parametrize("name", SUCCEEDED)
def test_the_sdk_accumulates_every_scenario(name: str) -> None:
    encoder, frames = run(SCENARIOS[name].events)
    result = encoder.result()
    with openai_client(frames).responses.stream(model="m", input="x") as stream:
        seen = list(stream)
        if result["status"] == "completed":
            final = stream.get_final_response()
            assert final.id == result["id"] and final.output_text == "".join(
                item["content"][0]["text"] for item in result["output"] if item["type"] == "message"
            )
            assert [item.type for item in final.output] == [item["type"] for item in result["output"]]
            assert final.usage is not None and final.usage.total_tokens == PROMPT + USAGE.completion
    assert seen[-1].type == f"response.{result['status']}"


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_event_is_of_a_type_that_the_sdk_declares(name: str) -> None:
    """The accumulator forgives missing keys; the declared types don't."""
    declared: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for fields in (LOGPROBS, {"tools": [FUNCTION, {"type": "custom", "name": "Now"}]}):
        if name == "no arguments" and "tools" in fields:
            continue  # a call of the custom tool without its input, which fails
        encoder, frames = run(SCENARIOS[name].events, **fields)
        for _, data in events(frames):
            declared.validate_python(data)
        if name in SUCCEEDED:
            Response.model_validate(encoder.result())


@pytest.mark.parametrize("name", FAILED)
def test_a_failure_ends_in_response_failed(name: str) -> None:
    scenario = SCENARIOS[name]
    encoder, frames = run(scenario.events)
    final = ResponseFold(frames[:-1]).final or events(frames)[-1][1]["response"]
    assert events(frames)[-1][0] == "response.failed"
    assert final["status"] == "failed"
    assert final["error"] == {"code": "server_error", "message": scenario.end.message}
    with openai_client(frames).responses.stream(model="m", input="x") as stream:
        assert list(stream)[-1].type == "response.failed"
    with pytest.raises(ProtocolError, match=scenario.end.message):
        encoder.result()


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("text", "completed"),
        ("one call", "completed"),
        ("string stop", "completed"),
        ("token stop", "completed"),
        ("truncated text", "incomplete"),
        ("truncated call", "incomplete"),
        ("limit after a call", "incomplete"),
    ],
)
def test_endings(name: str, status: str) -> None:
    encoder, frames = run(SCENARIOS[name].events)
    result = encoder.result()
    assert result["status"] == status and events(frames)[-1][0] == f"response.{status}"
    reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
    assert result["incomplete_details"] == reason
    assert (result["completed_at"] is None) == (status == "incomplete")


def test_what_the_limit_cut_is_incomplete() -> None:
    assert [item["status"] for item in run(SCENARIOS["truncated text"].events)[0].result()["output"]] == ["incomplete"]
    assert [item["status"] for item in run(SCENARIOS["limit after a call"].events)[0].result()["output"]] == [
        "completed"
    ]


@pytest.mark.parametrize(
    ("cut", "status"),
    [
        ((TextDelta("x"), observed("text", 1)), "incomplete"),
        ((TextDelta("x"), observed("text", 1), observed("tool", 2)), "completed"),
        ((TextDelta("x"), observed("text", 1, 2), ToolCallStarted(0, "call_0", "Read")), "completed"),
        ((ReasoningDelta("x"), observed("reasoning", 1)), "incomplete"),
        ((ReasoningDelta("x"), observed("reasoning", 1), observed("control", 2)), "completed"),
    ],
)
def test_an_item_that_ended_before_the_limit_is_complete(cut: Sequence[SemanticEvent], status: str) -> None:
    encoder, _ = run((FirstToken(), *cut, end("limit")))
    result = encoder.result()
    assert (result["status"], [item["status"] for item in result["output"]]) == ("incomplete", [status])


def test_long_integers_are_repeated_as_they_came() -> None:
    tool = {**FUNCTION, "parameters": {"type": "object", "properties": {"id": {"maximum": 2**64}}}}
    encoder, frames = run(SCENARIOS["text"].events, tools=[tool], max_output_tokens=10**30)
    shown = encoder.result()
    assert json.loads(dumps(shown))["max_output_tokens"] == 10**30
    assert events(frames)[-1][1]["response"]["tools"][0]["parameters"]["properties"]["id"] == {"maximum": 2**64}


def test_a_cut_call_leaves_no_item() -> None:
    encoder, frames = run(SCENARIOS["truncated call"].events)
    assert [item["type"] for item in encoder.result()["output"]] == ["message"]
    assert b"function_call" not in b"".join(frames)


def test_every_key_of_the_response_object() -> None:
    for name in ("text", "truncated text"):
        _, frames = run(SCENARIOS[name].events, tools=[FUNCTION])
        for _, data in events(frames):
            if "response" in data:
                assert data["response"].keys() >= REQUIRED_KEYS
                assert {"description", "parameters", "strict"} <= data["response"]["tools"][0].keys()


def test_the_request_is_repeated() -> None:
    asked: dict[str, Any] = {
        "instructions": "Be brief.",
        "tools": [FUNCTION],
        "tool_choice": {"type": "function", "name": "Read"},
        "parallel_tool_calls": False,
        "max_output_tokens": 99,
        "metadata": {"a": "b"},
        "prompt_cache_key": "k",
        "safety_identifier": "s",
    }
    result = run(SCENARIOS["one call"].events, **asked, reasoning={"effort": "low", "summary": "auto"})[0].result()
    for key in asked.keys() - {"tools"}:
        assert result[key] == asked[key]
    assert result["reasoning"] == {"effort": "low", "summary": "auto"}
    assert result["tools"] == [{**FUNCTION, "description": None, "strict": False}]
    assert (result["temperature"], result["top_p"], result["presence_penalty"]) == (0.7, 0.8, 1.5)
    assert (result["id"], result["model"], result["created_at"]) == ("resp_0123abcd", "org/model", 1_764_000_000)
    assert result["store"] is False and result["background"] is False and result["truncation"] == "disabled"


def test_usage() -> None:
    assert run(SCENARIOS["text"].events)[0].result()["usage"] == {
        "input_tokens": PROMPT,
        "input_tokens_details": {"cached_tokens": USAGE.cached, "cache_write_tokens": 0},
        "output_tokens": USAGE.completion,
        "output_tokens_details": {"reasoning_tokens": USAGE.reasoning},
        "total_tokens": PROMPT + USAGE.completion,
    }


def test_reasoning_is_readable_and_nothing_is_invented() -> None:
    item = run(SCENARIOS["reasoning"].events)[0].result()["output"][0]
    assert item["summary"] == []
    assert item["content"] == [{"type": "reasoning_text", "text": "Two and two."}]
    assert "encrypted_content" not in item


# Tools


def test_custom_calls_are_restored() -> None:
    patch = "*** Begin Patch\n*** End Patch\n"
    tools = [{"type": "custom", "name": "apply_patch"}]
    encoder, frames = run([FirstToken(), *call(0, "apply_patch", {"input": patch}), end(calls=1)], tools=tools)
    check(encoder, frames)
    (item,) = encoder.result()["output"]
    assert item == {
        "id": "ctc_0123abcd_0",
        "type": "custom_tool_call",
        "status": "completed",
        "call_id": "call_0",
        "name": "apply_patch",
        "input": patch,
    }
    assert [name for name, _ in events(frames)[3:5]] == [
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
    ]
    with openai_client(frames).responses.stream(model="m", input="x") as stream:
        assert stream.get_final_response().output[0].type == "custom_tool_call"


def test_namespaces_are_restored() -> None:
    space = {"type": "namespace", "name": "agents", "description": "", "tools": [{**FUNCTION, "name": "wait"}]}
    items = [FirstToken(), *call(0, "agents__wait", {"a": 1}), *call(1, "agents__other", {}), end(calls=2)]
    encoder, frames = run(items, tools=[space])
    check(encoder, frames)
    declared, undeclared = encoder.result()["output"]
    assert (declared["namespace"], declared["name"]) == ("agents", "wait")
    assert "namespace" not in undeclared and undeclared["name"] == "agents__other"
    assert json.loads(declared["arguments"]) == {"a": 1}


def test_a_custom_call_without_its_input_fails() -> None:
    tools = [{"type": "custom", "name": "apply_patch"}]
    encoder = ResponsesEncoder(CONTEXT, decoded(tools=tools))
    frames = encoder.feed(0, [FirstToken(), TextDelta("Now.")])
    with pytest.raises(OutputInvalid, match="apply_patch") as caught:
        encoder.feed(0, call(0, "apply_patch", {"patch": "x"}))
    found = events([*frames, *encoder.fail(caught.value)])
    assert found[-1][0] == "response.failed"
    assert [item["type"] for item in found[-1][1]["response"]["output"]] == ["message"]


# Observations


def entries(response: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        entry
        for item in response["output"]
        if item["type"] == "message"
        for part in item["content"]
        for entry in part["logprobs"]
    ]


def test_only_output_text_has_entries() -> None:
    items = [
        FirstToken(),
        observed("reasoning", 0),
        ReasoningDelta("a"),
        observed("control", 1),
        observed("text", 2),
        TextDelta("c"),
        TextDelta("d"),
        observed("text", 3),
        observed("tool", 4),
        *call(0, "Read", {}),
        end(calls=1),
    ]
    encoder, frames = run(items, **LOGPROBS)
    check(encoder, frames)
    assert [entry["token"] for entry in entries(encoder.result())] == ["c", "d"]
    assert entries(encoder.result())[0] == {
        "token": "c",
        "bytes": [99],
        "logprob": -0.25,
        "top_logprobs": [
            {"token": "c", "bytes": [99], "logprob": -0.25},
            {"token": "d", "bytes": [100], "logprob": -2.0},
        ],
    }
    assert entries(run(items)[0].result()) == []


def test_tokens_can_be_named_by_id() -> None:
    items: list[SemanticEvent] = [FirstToken(), observed("text", 2), TextDelta("c"), end()]
    encoder, _ = run(items, **LOGPROBS, return_tokens_as_token_ids=True)
    (entry,) = entries(encoder.result())
    assert entry["token"] == "token_id:2" and entry["bytes"] == [99]
    assert [other["token"] for other in entry["top_logprobs"]] == ["token_id:2", "token_id:3"]


def test_entries_of_text_that_a_stop_took_away_are_kept() -> None:
    encoder, frames = run([FirstToken(), observed("text", 2), end("string_stop", stop="c")], **LOGPROBS)
    check(encoder, frames)
    assert [entry["token"] for entry in entries(encoder.result())] == ["c"]
    assert encoder.result()["output"][0]["content"][0]["text"] == ""


def test_a_refused_admission_is_a_failed_response() -> None:
    encoder = ResponsesEncoder(CONTEXT, decoded())
    found = events(encoder.fail(SlotsExhausted("no slot is free")))
    assert [name for name, _ in found] == ["response.created", "response.in_progress", "response.failed"]
    assert found[-1][1]["response"]["error"] == {"code": "rate_limit_exceeded", "message": "no slot is free"}
