"""Completions answers: echo, arrays and offsets, streamed equal to buffered, and as the official SDK reads them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion

from engine.types.events import FirstToken, SemanticEvent, Terminated, TextDelta, Usage
from protocols.completions.decode import decode
from protocols.completions.encode import CompletionEncoder
from protocols.encoder import ResponseContext
from protocols.errors import ExecutionFailed, Unavailable
from tests.support.openai_streams import (
    LIMITS,
    buffered,
    chunks,
    context,
    feeds,
    one,
    raw_outputs,
    records,
    scored,
    sequence,
    stream,
    token_bytes,
)
from tests.support.sdk import openai_client

HEAD = {"id": "cmpl-req-1", "object": "text_completion", "created": 1_700_000_000, "model": "local/model"}
ECHO = context(echo=["prompt "])


def encoder(body: dict[str, Any], where: ResponseContext | None = None) -> CompletionEncoder:
    return CompletionEncoder(where or context(), decode({"prompt": "hi", **body}, LIMITS))


def streamed(
    body: dict[str, Any], events: Sequence[SemanticEvent], where: ResponseContext | None = None
) -> list[dict[str, Any]]:
    return chunks(stream(encoder({"stream": True, **body}, where), one(events)))


def result(
    body: dict[str, Any], events: Sequence[SemanticEvent], where: ResponseContext | None = None
) -> dict[str, Any]:
    return buffered(encoder(body, where), one(events))


def end(cause: Any = "eos", *, count: int = 3, cached: int = 2, **more: Any) -> Terminated:
    return Terminated(cause, Usage(5, cached, count), **more)


ARRAYS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def fold(parts: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The choices that a careful client builds from chunks."""
    choices: list[dict[str, Any]] = [{"index": i, "text": "", "logprobs": None} for i in range(count)]
    for part in parts:
        for choice in part["choices"]:
            found = choices[choice["index"]]
            assert "finish_reason" not in found, "nothing follows the finish chunk"
            found["text"] += choice["text"]
            if choice["logprobs"] is not None:
                arrays = found["logprobs"] or {key: [] for key in ARRAYS}
                found["logprobs"] = {key: arrays[key] + choice["logprobs"][key] for key in ARRAYS}
            for key in ("token_ids", "prompt_token_ids"):
                if key in choice:
                    found[key] = found.get(key, []) + choice[key]
            if choice["finish_reason"] is not None:
                found |= {key: choice[key] for key in ("finish_reason", "stop_reason")}
    return choices


def test_a_plain_stream_frame_for_frame() -> None:
    events = sequence(FirstToken(), records([1]), TextDelta("a"), records([2, 3]), TextDelta("b"), end())
    choice = {"index": 0, "logprobs": None, "finish_reason": None}
    assert streamed({}, events) == [
        {**HEAD, "choices": [{**choice, "text": "a"}]},
        {**HEAD, "choices": [{**choice, "text": "b"}]},
        {**HEAD, "choices": [{**choice, "text": "", "finish_reason": "stop", "stop_reason": None}]},
    ]


def test_a_plain_buffered_answer() -> None:
    assert result({}, sequence(FirstToken(), TextDelta("a"), TextDelta("b"), end("limit"))) == {
        **HEAD,
        "choices": [{"index": 0, "text": "ab", "logprobs": None, "finish_reason": "length", "stop_reason": None}],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 3,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        },
    }


@pytest.mark.parametrize(
    ("cause", "stop", "reason"),
    [("eos", None, "stop"), ("limit", None, "length"), ("string_stop", "END", "stop"), ("token_stop", 7, "stop")],
)
def test_finish_reasons(cause: Any, stop: Any, reason: str) -> None:
    choice = result({}, sequence(FirstToken(), end(cause, stop=stop)))["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == (reason, stop)


def test_arrays_with_no_alternatives_hold_the_chosen_token() -> None:
    answer = result({"logprobs": 0}, sequence(FirstToken(), records([2]), TextDelta(" w2"), end()))
    arrays = answer["choices"][0]["logprobs"]
    assert arrays["tokens"] == [" w2"] and arrays["token_logprobs"] == [-2.25] and arrays["text_offset"] == [0]
    assert arrays["top_logprobs"][0][" w2"] == -2.25


def test_arrays_are_null_when_not_asked_for() -> None:
    assert result({}, sequence(FirstToken(), records([2]), end()))["choices"][0]["logprobs"] is None


def test_entries_are_decoupled_from_text() -> None:
    events = sequence(FirstToken(), records([150]), records([151]), TextDelta("é"), end())
    parts = streamed({"logprobs": 1}, events)
    assert [(p["choices"][0]["text"], len(p["choices"][0]["logprobs"]["tokens"])) for p in parts] == [
        ("", 1),
        ("", 1),
        ("é", 0),
        ("", 0),
    ]


def test_echo_without_logprobs() -> None:
    events = sequence(FirstToken(), TextDelta("a"), end())
    assert result({"echo": True}, events, ECHO)["choices"][0]["text"] == "prompt a"
    assert [p["choices"][0]["text"] for p in streamed({"echo": True}, events, ECHO)] == ["prompt ", "a", ""]


def test_zero_tokens() -> None:
    events = sequence(end("limit", count=0, cached=0))
    answer = result({"echo": True, "max_tokens": 0}, events, ECHO)
    assert answer["choices"][0]["text"] == "prompt " and answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 0,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    }
    parts = streamed({"echo": True, "max_tokens": 0}, events, ECHO)
    assert [p["choices"][0]["text"] for p in parts] == ["prompt ", ""]
    assert [p["choices"][0]["text"] for p in streamed({"max_tokens": 0}, events)] == [""]


SCORED = sequence(scored(0, 2), scored(2, 3), FirstToken(), records([1, 2]), TextDelta(" w1 w2"), end())


def test_echo_with_logprobs_prepends_prompt_entries() -> None:
    choice = result({"echo": True, "logprobs": 1}, SCORED, ECHO)["choices"][0]
    arrays = choice["logprobs"]
    prompt = [token_bytes(id).decode() for id in range(10, 15)]
    assert arrays["tokens"] == [*prompt, " w1", " w2"]
    assert arrays["token_logprobs"] == [None, -2.0, -3.0, -4.0, -5.0, -1.25, -2.25]
    assert arrays["top_logprobs"][:2] == [None, {" w3": -0.5, " w11": -2.0}]
    assert arrays["text_offset"] == [0, 4, 8, 12, 16, 7, 10], "generated offsets start after the echoed text"
    assert [entry and sorted(entry) for entry in choice["prompt_logprobs"][:2]] == [None, ["11", "3"]]


def test_an_explicit_count_changes_only_the_prompt_scores() -> None:
    body = {"echo": True, "logprobs": 3, "prompt_logprobs": 0}
    choice = result(body, SCORED, ECHO)["choices"][0]
    assert choice["prompt_logprobs"][1] == {"11": {"logprob": -2.0, "rank": 2, "decoded_token": " w11"}}
    assert len(choice["logprobs"]["top_logprobs"][1]) == 3


def test_prompt_scores_without_echo() -> None:
    choice = result({"prompt_logprobs": 1, "return_tokens_as_token_ids": True}, SCORED)["choices"][0]
    assert choice["logprobs"] is None and choice["text"] == " w1 w2"
    assert choice["prompt_logprobs"][1]["11"]["decoded_token"] == " w11"


def test_scoring_with_zero_tokens() -> None:
    events = sequence(scored(0, 5), end("limit", count=0, cached=0))
    choice = result({"echo": True, "logprobs": 0, "max_tokens": 0}, events, ECHO)["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == 5 and choice["finish_reason"] == "length"


def test_streaming_echo_has_one_frame_a_prompt_chunk_before_generated_entries() -> None:
    parts = streamed({"echo": True, "logprobs": 1}, SCORED, ECHO)
    shown = [(p["choices"][0]["text"], len(p["choices"][0]["logprobs"]["tokens"])) for p in parts]
    assert shown == [("prompt ", 2), ("", 3), ("", 2), (" w1 w2", 0), ("", 0)]


def test_token_ids_as_strings() -> None:
    body = {"echo": True, "logprobs": 1, "return_tokens_as_token_ids": True}
    choice = result(body, SCORED, ECHO)["choices"][0]
    assert choice["logprobs"]["tokens"] == [*(f"token_id:{id}" for id in range(10, 15)), "token_id:1", "token_id:2"]
    assert choice["logprobs"]["text_offset"][:5] == [0, 4, 8, 12, 16]
    assert set(choice["logprobs"]["top_logprobs"][1]) == {"token_id:3", "token_id:11"}


def test_token_ids_of_choices() -> None:
    events = sequence(FirstToken(), records([1, 2]), TextDelta("a"), end())
    choice = result({"return_token_ids": True}, events)["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([10, 11, 12, 13, 14], [1, 2])
    parts = streamed({"return_token_ids": True}, events)
    assert ["prompt_token_ids" in part["choices"][0] for part in parts] == [True, False, False, False]
    assert fold(parts, 1)[0]["token_ids"] == [1, 2]


def test_indices_and_usage_of_a_batch() -> None:
    where = context((5, 7))
    ends = [Terminated("eos", Usage((5, 7)[i // 2], (4, 0, 3, 1)[i], 10 + i)) for i in range(4)]
    answer = CompletionEncoder(where, decode({"prompt": ["a", "b"], "n": 2}, LIMITS))
    whole = buffered(answer, [(i, sequence(FirstToken(), TextDelta(str(i)), ends[i])) for i in (3, 1, 0, 2)])
    assert [(choice["index"], choice["text"]) for choice in whole["choices"]] == [
        (0, "0"),
        (1, "1"),
        (2, "2"),
        (3, "3"),
    ]
    assert whole["usage"] == {
        "prompt_tokens": 12,
        "completion_tokens": 46,
        "total_tokens": 58,
        "prompt_tokens_details": {"cached_tokens": 7, "cache_write_tokens": 0},
    }


def test_usage_chunks() -> None:
    events = sequence(FirstToken(2), records([1]), TextDelta("a"), records([2, 3]), TextDelta("b"), end())
    plain = streamed({"stream_options": {"include_usage": True}}, events)
    assert plain[-1]["choices"] == [] and all(part["usage"] is None for part in plain[:-1])
    body = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    counts = [part["usage"] for part in streamed(body, events)]
    assert [usage["completion_tokens"] for usage in counts] == [1, 3, 3, 3]
    assert counts[-1] == counts[-2] == plain[-1]["usage"]
    assert "completion_tokens_details" not in counts[0]
    ignored = streamed({"stream_options": {"continuous_usage_stats": True}}, events)
    assert all("usage" not in part for part in ignored)


def test_failures_end_without_a_success() -> None:
    lost = end("failed", failure="unavailable", message="paused")
    frames = stream(encoder({"stream": True, "echo": True}, ECHO), one([lost]))
    assert [json.loads(frame[6:]) for frame in frames] == [
        {"error": {"type": "server_error", "message": "paused", "param": None, "code": None}}
    ]
    with pytest.raises(Unavailable, match="paused"):
        result({}, [lost])
    frames = stream(encoder({"stream": True}), one(sequence(FirstToken(), TextDelta("a"))))
    assert "error" in json.loads(frames[-1][6:])
    with pytest.raises(ExecutionFailed):
        result({}, sequence(FirstToken()))


BODIES: list[dict[str, Any]] = [
    {},
    {"echo": True},
    {"logprobs": 2},
    {"logprobs": 0, "return_token_ids": True},
    {"echo": True, "logprobs": 1},
    {"echo": True, "logprobs": 1, "return_tokens_as_token_ids": True, "return_token_ids": True},
    {"logprobs": 1, "logprob_token_ids": [5]},
    {"stream_options": {"include_usage": True}},
    {"echo": True, "logprobs": 3, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_streams_fold_to_the_buffered_answer(data: st.DataObject) -> None:
    n, lengths = data.draw(st.integers(1, 2)), data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=2))
    body = {**data.draw(st.sampled_from(BODIES)), "n": n, "prompt": ["p"] * len(lengths)}
    scores = bool(body.get("echo")) and "logprobs" in body
    outputs = [data.draw(raw_outputs(prompt=length, scores=scores)) for length in lengths for _ in range(n)]
    parts_in = feeds(data, outputs)
    where = context(lengths, echo=[f"prompt {length}" for length in lengths])
    parts = chunks(stream(encoder({**body, "stream": True}, where), parts_in))
    plain = {key: value for key, value in body.items() if key != "stream_options"}
    whole = buffered(encoder(plain, where), parts_in)
    assert fold(parts, len(outputs)) == [
        {key: value for key, value in choice.items() if key != "prompt_logprobs"} for choice in whole["choices"]
    ]
    if not scores:  # echoed arrays hold nulls, which the strict model doesn't know though OpenAI's own arrays have them
        Completion.model_validate(whole)
    if "stream_options" in body:
        assert parts[-1]["usage"] == whole["usage"]


@pytest.mark.parametrize("body", BODIES)
def test_the_sdk_reads_every_stream(body: dict[str, Any]) -> None:
    frames = stream(encoder({"stream": True, **body}, ECHO), one(SCORED))
    texts, tokens = "", 0
    for part in openai_client(frames).completions.create(model="m", prompt="hi", stream=True):
        for choice in part.choices:
            texts += choice.text
            tokens += len(choice.logprobs.tokens or []) if choice.logprobs else 0
    assert texts == ("prompt " if body.get("echo") else "") + " w1 w2"
    assert tokens == (0 if "logprobs" not in body else 7 if body.get("echo") else 2)
