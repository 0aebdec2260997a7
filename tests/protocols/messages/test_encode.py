"""Messages events: their order, indexes and usage; the folded stream is the buffered message; the SDK agrees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anthropic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from engine.types.conversation import Conversation
from engine.types.events import FirstToken, SemanticEvent
from engine.types.request import GenerationRequest
from protocols.encoder import ResponseContext
from protocols.errors import ExecutionFailed, OutputInvalid, ProtocolError, SlotsExhausted, Unavailable
from protocols.fields import Decoded
from protocols.messages.encode import MessagesEncoder
from protocols.messages.thinking import marker
from tests.support.agent_folds import fold_message
from tests.support.scenarios import (
    FAILED,
    PROMPT,
    SCENARIOS,
    SUCCEEDED,
    USAGE,
    call,
    chunked,
    end,
    outputs,
    token_bytes,
)
from tests.support.sdk import anthropic_client, events

CONTEXT = ResponseContext("0123abcd", "org/model", 1_764_000_000, token_bytes, (PROMPT,))
DECODED = Decoded(GenerationRequest("messages", (Conversation(()),)), None)
USAGE_JSON = {
    "input_tokens": USAGE.prompt - USAGE.cached,
    "cache_read_input_tokens": USAGE.cached,
    "cache_creation_input_tokens": 0,
    "output_tokens": USAGE.completion,
}


def run(items: Sequence[SemanticEvent], size: int = 1) -> tuple[MessagesEncoder, list[bytes]]:
    encoder = MessagesEncoder(CONTEXT, DECODED)
    frames = [frame for chunk in chunked(items, size) for frame in encoder.feed(0, chunk)]
    return encoder, frames + encoder.finish()


@pytest.mark.parametrize("name", SUCCEEDED)
@pytest.mark.parametrize("size", [1, 100])
def test_the_folded_stream_is_the_buffered_message(name: str, size: int) -> None:
    encoder, frames = run(SCENARIOS[name].events, size)
    assert fold_message(frames) == encoder.result()


@settings(deadline=None)
@given(outputs(), st.integers(1, 20))
def test_any_output_folds_to_the_buffered_message(items: list[SemanticEvent], size: int) -> None:
    encoder, frames = run(items, size)
    assert fold_message(frames) == encoder.result()


@settings(deadline=None)
@given(outputs(), st.integers(1, 20))
def test_chunking_changes_nothing(items: list[SemanticEvent], size: int) -> None:
    assert run(items, size)[1] == run(items, 1)[1]


@pytest.mark.parametrize("name", SUCCEEDED)
def test_the_sdk_accumulates_every_scenario(name: str) -> None:
    encoder, frames = run(SCENARIOS[name].events)
    client = anthropic_client(frames)
    with client.messages.stream(model="m", max_tokens=9, messages=[{"role": "user", "content": "x"}]) as stream:
        final = stream.get_final_message().to_dict()
    expected = encoder.result()
    for key in ("id", "role", "model", "stop_reason", "stop_sequence"):
        assert final[key] == expected[key]
    wanted = [{k: v for k, v in block.items() if v is not None} for block in expected["content"]]
    got = [{k: v for k, v in dict(block).items() if v is not None} for block in final["content"]]  # type: ignore[attr-defined]
    assert got == wanted
    assert expected["usage"].items() >= USAGE_JSON.items()
    assert dict(final["usage"]).items() >= USAGE_JSON.items()  # type: ignore[call-overload]


@pytest.mark.parametrize("name", SUCCEEDED)
def test_every_event_is_of_a_type_that_the_sdk_declares(name: str) -> None:
    """The accumulator forgives missing keys; the declared types don't."""
    declared: TypeAdapter[Any] = TypeAdapter(anthropic.types.RawMessageStreamEvent)
    encoder, frames = run(SCENARIOS[name].events)
    for _, data in events(frames):
        declared.validate_python(data)
    anthropic.types.Message.model_validate(encoder.result())


@pytest.mark.parametrize("name", FAILED)
def test_the_sdk_raises_on_every_failure(name: str) -> None:
    _, frames = run(SCENARIOS[name].events)
    client = anthropic_client(frames)
    with (
        pytest.raises(anthropic.APIStatusError, match=SCENARIOS[name].end.message),
        client.messages.stream(model="m", max_tokens=9, messages=[{"role": "user", "content": "x"}]) as stream,
    ):
        stream.until_done()


@pytest.mark.parametrize("name", FAILED)
def test_a_failure_ends_in_one_error_event_and_no_success(name: str) -> None:
    encoder, frames = run(SCENARIOS[name].events)
    found = events(frames)
    assert found[-1] == (
        "error",
        {"type": "error", "error": {"type": "api_error", "message": SCENARIOS[name].end.message}},
    )
    assert not {"message_stop", "message_delta"} & {event for event, _ in found}
    with pytest.raises(ProtocolError, match=SCENARIOS[name].end.message) as caught:
        encoder.result()
    kinds = {"execution": ExecutionFailed, "output": OutputInvalid, "unavailable": Unavailable}
    assert type(caught.value) is kinds[SCENARIOS[name].end.failure]


@pytest.mark.parametrize(
    ("name", "reason", "sequence"),
    [
        ("text", "end_turn", None),
        ("one call", "tool_use", None),
        ("undeclared call", "tool_use", None),
        ("truncated text", "max_tokens", None),
        ("limit after a call", "max_tokens", None),
        ("truncated call", "max_tokens", None),
        ("string stop", "stop_sequence", "\n\nEND"),
        ("string stop after a call", "stop_sequence", "X"),
        ("token stop", "end_turn", None),
        ("token stop after a call", "end_turn", None),
    ],
)
def test_stop_reasons(name: str, reason: str, sequence: str | None) -> None:
    encoder, frames = run(SCENARIOS[name].events)
    result = encoder.result()
    assert (result["stop_reason"], result["stop_sequence"]) == (reason, sequence)
    delta = next(data["delta"] for event, data in events(frames) if event == "message_delta")
    assert (delta["stop_reason"], delta["stop_sequence"]) == (reason, sequence)


def test_usage_of_a_warm_stream() -> None:
    """The start counts the whole prompt and no reads; the end gives what was reused."""
    found = dict(events(run(SCENARIOS["text"].events)[1]))
    start = found["message_start"]["message"]["usage"]
    assert (start["input_tokens"], start["cache_read_input_tokens"], start["output_tokens"]) == (PROMPT, 0, 0)
    final = found["message_delta"]["usage"]
    assert final.items() >= USAGE_JSON.items()
    assert final["input_tokens"] + final["cache_read_input_tokens"] == PROMPT


def test_a_cut_call_leaves_no_block() -> None:
    encoder, frames = run(SCENARIOS["truncated call"].events)
    assert [block["type"] for block in encoder.result()["content"]] == ["text"]
    assert b'"tool_use"' not in b"".join(frames)


def test_thinking_is_signed_once_and_last() -> None:
    found = events(run(SCENARIOS["reasoning"].events)[1])
    deltas = [data["delta"] for event, data in found if event == "content_block_delta" and data["index"] == 0]
    assert [delta["type"] for delta in deltas] == ["thinking_delta", "thinking_delta", "signature_delta"]
    assert deltas[-1]["signature"] == marker("Two and two.")


def test_keys_that_strict_schemas_require() -> None:
    result = run(SCENARIOS["reasoning, text and parallel calls"].events)[0].result()
    assert result["stop_details"] is None and result["container"] is None
    assert result["usage"]["cache_creation"] == {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0}
    assert {"inference_geo", "service_tier", "server_tool_use", "output_tokens_details"} <= result["usage"].keys()
    kinds = {block["type"]: block for block in result["content"]}
    assert kinds["text"]["citations"] is None
    assert kinds["tool_use"]["caller"] == {"type": "direct"}


def test_the_loaded_model_and_the_request_id_are_named() -> None:
    result = run(SCENARIOS["text"].events)[0].result()
    assert (result["id"], result["model"]) == ("msg_0123abcd", "org/model")


def test_a_lost_engine_before_any_event_is_an_error_event() -> None:
    frames = MessagesEncoder(CONTEXT, DECODED).fail(SlotsExhausted("no slot is free"))
    assert events(frames) == [
        ("error", {"type": "error", "error": {"type": "rate_limit_error", "message": "no slot is free"}})
    ]


def test_an_unfinished_answer_is_no_success() -> None:
    encoder = MessagesEncoder(CONTEXT, DECODED)
    encoder.feed(0, SCENARIOS["text"].events[:-1])
    assert events(encoder.finish())[-1][0] == "error"
    with pytest.raises(ExecutionFailed):
        encoder.result()


def test_long_integers_of_a_call_keep_their_value() -> None:
    encoder, frames = run([FirstToken(), *call(0, "Read", {"id": 2**64 + 1}), end(calls=1)])
    (block,) = encoder.result()["content"]
    assert block["input"] == {"id": 2**64 + 1}
    assert str(2**64 + 1).encode() in b"".join(frames)
