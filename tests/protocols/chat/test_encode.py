"""Chat answers: frame for frame, streamed equal to buffered, and as the official SDK reads them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from engine.types.events import (
    FirstToken,
    ReasoningDelta,
    SemanticEvent,
    Terminated,
    TextDelta,
    ToolCallCompleted,
    ToolCallStarted,
    Usage,
)
from protocols.chat.decode import decode
from protocols.chat.encode import ChatEncoder, finish_reason
from protocols.encoder import ResponseContext
from protocols.errors import ExecutionFailed, OutputInvalid, Unavailable
from tests.support.openai_streams import (
    LIMITS,
    buffered,
    chunks,
    context,
    feeds,
    one,
    records,
    scored,
    sequence,
    stream,
)
from tests.support.scenarios import FAILED, SCENARIOS, SUCCEEDED, call, end, outputs

HEAD = {"id": "chatcmpl-req-1", "created": 1_700_000_000, "model": "local/model"}


def encoder(body: dict[str, Any], where: ResponseContext | None = None) -> ChatEncoder:
    return ChatEncoder(where or context(), decode({"messages": [{"role": "user", "content": "hi"}], **body}, LIMITS))


def streamed(body: dict[str, Any], events: Sequence[SemanticEvent], size: int = 1) -> list[dict[str, Any]]:
    return chunks(stream(encoder({"stream": True, **body}), one(events, size)))


def result(body: dict[str, Any], events: Sequence[SemanticEvent]) -> dict[str, Any]:
    return buffered(encoder(body), one(events))


def fold(parts: Sequence[dict[str, Any]], n: int = 1) -> list[dict[str, Any]]:
    """The choices that a careful client builds from chunks."""
    choices: list[dict[str, Any]] = [{"index": i, "content": "", "calls": {}, "logprobs": []} for i in range(n)]
    for part in parts:
        for choice in part["choices"]:
            found, delta = choices[choice["index"]], choice["delta"]
            for key in ("content", "reasoning", "reasoning_content"):
                if key in delta:
                    found[key] = found.get(key, "") + delta[key]
            for item in delta.get("tool_calls", ()):
                slot = found["calls"].setdefault(item["index"], {"arguments": ""})
                function = item["function"]
                slot.update({key: item[key] for key in ("id", "type") if key in item})
                slot.update({"name": function["name"]} if "name" in function else {})
                slot["arguments"] += function.get("arguments", "")
            found["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
            for key in ("token_ids", "token_timestamps"):
                if key in choice:
                    found[key] = found.get(key, []) + choice[key]
            if choice["finish_reason"] is not None:
                assert "finish_reason" not in found
                found |= {key: choice[key] for key in ("finish_reason", "stop_reason")}
            else:
                assert "finish_reason" not in found, "nothing follows the finish chunk"
    return choices


def flat(choice: dict[str, Any]) -> dict[str, Any]:
    """A buffered choice in the form of `fold`."""
    message = choice["message"]
    calls = message.get("tool_calls", [])
    found: dict[str, Any] = {
        "index": choice["index"],
        "content": message["content"] or "",
        "calls": {i: {"id": c["id"], "type": c["type"], **c["function"]} for i, c in enumerate(calls)},
        "logprobs": (choice["logprobs"] or {"content": []})["content"],
        "finish_reason": choice["finish_reason"],
        "stop_reason": choice["stop_reason"],
    }
    found |= {key: message[key] for key in ("reasoning", "reasoning_content") if key in message}
    return found | {key: choice[key] for key in ("token_ids", "token_timestamps") if key in choice}


def test_a_plain_stream_frame_for_frame() -> None:
    events: list[SemanticEvent] = [
        FirstToken(),
        records([1]),
        TextDelta("It is"),
        records([2]),
        TextDelta(' "4"\n'),
        end(),
    ]
    choice = {"index": 0, "logprobs": None, "finish_reason": None}
    head = {**HEAD, "object": "chat.completion.chunk"}
    assert streamed({}, events) == [
        {**head, "choices": [{**choice, "delta": {"role": "assistant", "content": ""}}]},
        {**head, "choices": [{**choice, "delta": {"content": "It is"}}]},
        {**head, "choices": [{**choice, "delta": {"content": ' "4"\n'}}]},
        {**head, "choices": [{**choice, "delta": {}, "finish_reason": "stop", "stop_reason": None}]},
    ]


def test_a_plain_buffered_answer() -> None:
    assert result({}, sequence(FirstToken(), TextDelta("It is"), TextDelta(" 4."), end())) == {
        **HEAD,
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "It is 4.", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 12,
            "total_tokens": 17,
            "prompt_tokens_details": {"cached_tokens": 24, "cache_write_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 3},
        },
    }


def test_the_role_waits_for_the_first_token_even_a_hidden_one() -> None:
    answer = encoder({"stream": True})
    assert answer.feed(0, []) == []
    frames = answer.feed(0, [FirstToken()])
    assert [json.loads(frame[6:])["choices"][0]["delta"] for frame in frames] == [{"role": "assistant", "content": ""}]
    assert answer.feed(0, [records([150])]) == [], "a token without text makes no chunk"


def test_reasoning_has_both_names() -> None:
    events: list[SemanticEvent] = [FirstToken(), ReasoningDelta("Two"), ReasoningDelta("."), TextDelta("4"), end()]
    deltas = [part["choices"][0]["delta"] for part in streamed({}, events)]
    assert deltas[1] == {"reasoning": "Two", "reasoning_content": "Two"}
    message = result({}, events)["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "Two."


def test_reasoning_can_be_left_out_but_is_counted() -> None:
    events: list[SemanticEvent] = [FirstToken(), ReasoningDelta("Two"), TextDelta("4"), end()]
    body = {"include_reasoning": False}
    assert all("reasoning" not in part["choices"][0]["delta"] for part in streamed(body, events))
    answer = result(body, events)
    assert "reasoning" not in answer["choices"][0]["message"]
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


def test_calls_open_with_a_name_and_then_get_their_arguments() -> None:
    events: list[SemanticEvent] = [FirstToken(), *call(0, "read", {"path": "a"}), *call(1, "now", {}), end(calls=2)]
    deltas = [part["choices"][0]["delta"] for part in streamed({}, events)]
    assert deltas[1]["tool_calls"] == [
        {"index": 0, "id": "call_0", "type": "function", "function": {"name": "read", "arguments": ""}}
    ]
    assert deltas[2]["tool_calls"] == [{"index": 0, "function": {"arguments": '{"path": "a"}'}}]
    assert [item["index"] for delta in deltas[1:5] for item in delta["tool_calls"]] == [0, 0, 1, 1]
    message = result({}, events)["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"][1] == {
        "id": "call_1",
        "type": "function",
        "function": {"name": "now", "arguments": "{}"},
    }


def test_an_unfinished_call_leaves_no_trace() -> None:
    events: list[SemanticEvent] = [FirstToken(), TextDelta("a"), ToolCallStarted(0, "call_0", "read"), end("limit")]
    assert all("tool_calls" not in part["choices"][0]["delta"] for part in streamed({}, events))
    choice = result({}, events)["choices"][0]
    assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("cause", "calls", "reason"),
    [
        ("limit", 0, "length"),
        ("limit", 1, "length"),
        ("eos", 0, "stop"),
        ("eos", 2, "tool_calls"),
        ("string_stop", 0, "stop"),
        ("string_stop", 1, "stop"),
        ("token_stop", 0, "stop"),
        ("token_stop", 1, "stop"),
    ],
)
def test_finish_reasons(cause: Any, calls: int, reason: str) -> None:
    assert finish_reason(end(cause), calls) == reason


@pytest.mark.parametrize(("cause", "stop"), [("string_stop", "END"), ("token_stop", 7), ("eos", None)])
def test_the_matched_stop_is_reported(cause: Any, stop: str | int | None) -> None:
    events: list[SemanticEvent] = [FirstToken(), TextDelta("a"), end(cause, stop=stop)]
    assert result({}, events)["choices"][0]["stop_reason"] == stop
    assert streamed({}, events)[-1]["choices"][0]["stop_reason"] == stop


LOGPROBS = {"logprobs": True, "top_logprobs": 2}


def test_entries_are_decoupled_from_text() -> None:
    events: list[SemanticEvent] = [FirstToken(), records([150]), records([151]), TextDelta("é"), TextDelta("x"), end()]
    parts = streamed(LOGPROBS, events)
    assert [(p["choices"][0]["delta"], p["choices"][0]["logprobs"]) for p in parts[:2]] == [
        ({"role": "assistant", "content": ""}, None),
        (
            {"content": ""},
            {
                "content": [
                    {
                        "token": "\ufffd",
                        "logprob": -150.25,
                        "bytes": [206],
                        "top_logprobs": [
                            {"token": "\ufffd", "logprob": -150.25, "bytes": [206]},
                            {"token": " w1", "logprob": -9.5, "bytes": [32, 119, 49]},
                        ],
                    }
                ],
                "refusal": None,
            },
        ),
    ]
    assert [len(p["choices"][0]["logprobs"]["content"]) for p in parts[2:]] == [1, 0, 0, 0]


def test_entries_ride_on_the_delta_of_the_same_batch() -> None:
    parts = streamed(LOGPROBS, sequence(FirstToken(), TextDelta("a"), records([1, 2]), end()), size=4)
    assert [len((p["choices"][0]["logprobs"] or {"content": []})["content"]) for p in parts] == [0, 2, 0]


def test_token_ids_and_timestamps() -> None:
    body = {"return_token_ids": True, "return_token_timestamps": True}
    events: list[SemanticEvent] = [
        FirstToken(),
        records([1], time=7.5),
        TextDelta("a"),
        records([2, 3], "control", time=8.5),
        end(),
    ]
    answer = result(body, events)
    assert answer["prompt_token_ids"] == [10, 11, 12, 13, 14]
    assert answer["choices"][0]["token_ids"] == [1, 2, 3]
    assert answer["choices"][0]["token_timestamps"] == [7.5, 8.5, 8.5]
    parts = streamed(body, events)
    assert parts[0]["prompt_token_ids"] == [10, 11, 12, 13, 14]
    assert all("prompt_token_ids" not in part for part in parts[1:])
    assert fold(parts)[0]["token_ids"] == [1, 2, 3]


def test_usage_rides_on_the_terminal_chunk_with_token_ids() -> None:
    events: list[SemanticEvent] = [FirstToken(), records([1]), TextDelta("a"), end()]
    parts = streamed({"return_token_ids": True}, events)
    assert [("usage" in part) for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1]["choices"][0]["finish_reason"] == "stop"
    assert parts[-1]["usage"] == result({}, events)["usage"]
    separate = streamed({"return_token_ids": True, "stream_options": {"include_usage": True}}, events)
    assert separate[-2]["usage"] is None and separate[-1]["choices"] == []
    timestamps = streamed({"return_token_timestamps": True}, events)
    assert all("usage" not in part for part in timestamps)


def test_the_usage_chunk_is_last() -> None:
    events: list[SemanticEvent] = [FirstToken(), TextDelta("a"), end()]
    parts = streamed({"stream_options": {"include_usage": True}}, events)
    assert parts[-1]["choices"] == [] and parts[-1]["usage"] == result({}, events)["usage"]
    assert all(part["usage"] is None for part in parts[:-1])


def test_continuous_usage_counts_tokens_and_ends_at_the_total() -> None:
    events: list[SemanticEvent] = [
        FirstToken(24),
        records([1, 2], "reasoning"),
        ReasoningDelta("r"),
        records([150]),
        records([151]),
        TextDelta("é"),
        Terminated("eos", Usage(prompt=5, cached=24, completion=5, reasoning=2)),
    ]
    body = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    counts = [part["usage"] for part in streamed(body, events)]
    assert [usage["completion_tokens"] for usage in counts] == [0, 2, 4, 5, 5]
    assert all(usage["prompt_tokens_details"]["cached_tokens"] == 24 for usage in counts)
    assert counts[1]["completion_tokens_details"] == {"reasoning_tokens": 2}
    assert counts[-2] == counts[-1] == result({}, events)["usage"]


def test_continuous_usage_is_ignored_without_usage() -> None:
    body = {"stream_options": {"continuous_usage_stats": True}}
    assert all("usage" not in part for part in streamed(body, sequence(FirstToken(), TextDelta("a"), end())))


def test_image_tokens_are_reported_only_when_there_are_some() -> None:
    events: list[SemanticEvent] = [FirstToken(), TextDelta("a"), end()]
    assert "multimodal_tokens" not in result({}, events)["usage"]["prompt_tokens_details"]
    with_images = buffered(encoder({}, context(images=3)), one(events))
    assert with_images["usage"]["prompt_tokens_details"]["multimodal_tokens"] == {"image": 3}


def test_prompt_scores_stand_at_the_top() -> None:
    events: list[SemanticEvent] = [scored(0, 2), scored(2, 3), FirstToken(), TextDelta("a"), end()]
    answer = result({"prompt_logprobs": 1, "return_tokens_as_token_ids": True}, events)
    assert len(answer["prompt_logprobs"]) == 5 and answer["prompt_logprobs"][0] is None
    assert answer["prompt_logprobs"][1] == {
        "11": {"logprob": -2.0, "rank": 2, "decoded_token": " w11"},
        "3": {"logprob": -0.5, "rank": 1, "decoded_token": " w3"},
    }
    assert "prompt_logprobs" not in result({}, events)


def test_choices_share_the_prompt_count() -> None:
    answers: list[list[SemanticEvent]] = [
        [FirstToken(), TextDelta(str(i)), Terminated("eos", Usage(5, 2 - i, 10 + i, i))] for i in range(3)
    ]
    answer = buffered(encoder({"n": 3}), [(i, answers[i]) for i in (2, 0, 1)])
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["0", "1", "2"]
    assert answer["usage"]["prompt_tokens"] == 5 and answer["usage"]["completion_tokens"] == 33
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3


@pytest.mark.parametrize("name", FAILED)
def test_failures_end_without_a_success(name: str) -> None:
    scenario = SCENARIOS[name]
    frames = stream(encoder({"stream": True, **LOGPROBS}), one(scenario.events))
    assert b"[DONE]" not in b"".join(frames) and b'"finish_reason":"' not in b"".join(frames)
    error = json.loads(frames[-1][6:])
    assert error["error"]["type"] == "server_error" and error["error"]["message"] == scenario.end.message
    assert set(error["error"]) == {"type", "message", "param", "code"}
    if not isinstance(scenario.events[0], FirstToken):
        assert len(frames) == 1, "no role chunk before the first token"
    with pytest.raises((ExecutionFailed, OutputInvalid, Unavailable), match=scenario.end.message):
        result({}, scenario.events)


def test_one_failed_choice_fails_the_response() -> None:
    ok: list[SemanticEvent] = [FirstToken(), TextDelta("a"), end()]
    frames = stream(
        encoder({"stream": True, "n": 2}), [(0, ok), (1, sequence(FirstToken(), end("failed", message="lost")))]
    )
    assert b"[DONE]" not in b"".join(frames) and json.loads(frames[-1][6:])["error"]["message"] == "lost"


def test_a_stream_that_ends_early_is_an_error() -> None:
    frames = stream(encoder({"stream": True}), one(sequence(FirstToken(), TextDelta("a"))))
    assert "error" in json.loads(frames[-1][6:])
    with pytest.raises(ExecutionFailed):
        result({}, sequence(FirstToken(), TextDelta("a")))


def test_fail_is_one_error_frame() -> None:
    (frame,) = encoder({"stream": True}).fail(Unavailable("paused"))
    assert json.loads(frame[6:]) == {
        "error": {"type": "server_error", "message": "paused", "param": None, "code": None}
    }


BODIES: list[dict[str, Any]] = [
    {},
    LOGPROBS,
    {"logprobs": True, "logprob_token_ids": [3]},
    {"logprobs": True, "return_tokens_as_token_ids": True, "return_token_ids": True},
    {"return_token_timestamps": True, "include_reasoning": False},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "return_token_ids": True},
]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_streams_fold_to_the_buffered_answer(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 3))
    body = {**data.draw(st.sampled_from(BODIES)), "n": n}
    parts_in = feeds(data, [data.draw(outputs()) for _ in range(n)])
    parts = chunks(stream(encoder({**body, "stream": True}), parts_in))
    whole = buffered(encoder({key: value for key, value in body.items() if key != "stream_options"}), parts_in)
    assert fold(parts, n) == [flat(choice) for choice in whole["choices"]]
    ChatCompletion.model_validate(whole)
    for part in parts:
        ChatCompletionChunk.model_validate(part)
    if "stream_options" in body:
        assert parts[-1]["usage"] == whole["usage"]
        if body["stream_options"].get("continuous_usage_stats"):
            assert parts[-2]["usage"] == whole["usage"]


@pytest.mark.parametrize("name", SUCCEEDED)
@pytest.mark.parametrize("size", [1, 100])
@pytest.mark.parametrize("body", BODIES)
def test_the_sdk_reads_every_shape(name: str, size: int, body: dict[str, Any]) -> None:
    events = SCENARIOS[name].events
    state = ChatCompletionStreamState()
    for part in streamed(body, events, size):
        state.handle_chunk(ChatCompletionChunk.model_validate(part))
    got = state.current_completion_snapshot.choices[0]
    if got.finish_reason != "length":  # the SDK raises for a cut answer
        assert state.get_final_completion().choices[0].message.content == got.message.content
    plain = {key: value for key, value in body.items() if key != "stream_options"}
    want = ChatCompletion.model_validate(result(plain, events)).choices[0]
    assert (got.message.content or "") == (want.message.content or "")
    assert got.finish_reason == want.finish_reason
    assert [(c.id, c.type, c.function.name, c.function.arguments) for c in got.message.tool_calls or []] == [
        (c.id, c.type, c.function.name, c.function.arguments)
        for c in want.message.tool_calls or []
        if c.type == "function"
    ]
    completed = [event for event in events if isinstance(event, ToolCallCompleted)]
    assert len(want.message.tool_calls or []) == len(completed)
