"""Completions bodies: four prompt shapes, scoring, and every refusal with its field."""

from __future__ import annotations

from typing import Any

import pytest

from engine.types.request import GenerationRequest, OutputOptions, Stops, TextPrompt, TokenPrompt
from protocols.completions.decode import CompletionOptions, decode
from protocols.errors import InvalidRequest
from protocols.fields import DecodeLimits

LIMITS = DecodeLimits(vocab_size=100, prompt_logprobs=True)


def request(**body: Any) -> GenerationRequest:
    return decode({"model": "m", "prompt": "hi", **body}, LIMITS).request


def refusal(limits: DecodeLimits = LIMITS, **body: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        decode({"model": "m", "prompt": "hi", **body}, limits)
    assert caught.value.field and caught.value.message.startswith(f"{caught.value.field}: ")
    return caught.value


def test_a_minimal_body_leaves_everything_open() -> None:
    assert request() == GenerationRequest(api="completions", prompts=(TextPrompt("hi"),))
    assert request().max_tokens is None


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", (TextPrompt("a"),)),
        ("", (TextPrompt(""),)),
        (["a", ""], (TextPrompt("a"), TextPrompt(""))),
        ([0, 99], (TokenPrompt((0, 99)),)),
        ([[1], [2, 3]], (TokenPrompt((1,)), TokenPrompt((2, 3)))),
    ],
)
def test_prompt_shapes(prompt: object, expected: tuple[object, ...]) -> None:
    assert request(prompt=prompt).prompts == expected


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (None, "prompt"),
        (5, "prompt"),
        ({}, "prompt"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        ([[1], []], "prompt[1]"),
        ([True], "prompt[0]"),
        ([1.0], "prompt[0]"),
        ([None], "prompt[0]"),
        ([1, True], "prompt[1]"),
        ([1, "a"], "prompt[1]"),
        (["a", 1], "prompt[1]"),
        ([[1], 2], "prompt[1]"),
        ([[1], "a"], "prompt[1]"),
        ([[1, "a"]], "prompt[0][1]"),
        ([100], "prompt[0]"),
        ([[5], [1, -1]], "prompt[1][1]"),
        ([2**70], "prompt[0]"),
    ],
)
def test_bad_prompts(prompt: object, field: str) -> None:
    assert refusal(prompt=prompt).field == field


def test_the_prompt_is_required() -> None:
    with pytest.raises(InvalidRequest, match=r"^prompt"):
        decode({"model": "m"}, LIMITS)


def test_special_tokens_policy() -> None:
    assert request(add_special_tokens=False).prompts == (TextPrompt("hi", add_special_tokens=False),)


def test_sampling_and_endings() -> None:
    found = request(n=2, best_of=2, temperature=0, seed=5, max_tokens=0, stop_token_ids=[1], ignore_eos=True, echo=True)
    assert (found.n, found.sampling.temperature, found.sampling.seed, found.max_tokens) == (2, 0.0, 5, 0)
    assert found.stops == Stops((), ((1,),)) and found.ignore_eos and found.echo


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, OutputOptions()),
        ({"logprobs": 0}, OutputOptions(logprobs=0)),
        ({"logprobs": 20}, OutputOptions(logprobs=20)),
        ({"prompt_logprobs": 3}, OutputOptions(prompt_logprobs=3)),
        ({"echo": True}, OutputOptions()),
        ({"echo": True, "logprobs": 0}, OutputOptions(logprobs=0, prompt_logprobs=0)),
        ({"echo": True, "logprobs": 5, "prompt_logprobs": 2}, OutputOptions(logprobs=5, prompt_logprobs=5)),
        ({"echo": True, "logprobs": 2, "prompt_logprobs": 5}, OutputOptions(logprobs=2, prompt_logprobs=5)),
        ({"logprobs": 1, "logprob_token_ids": [4, 4, 2]}, OutputOptions(logprobs=1, logprob_token_ids=(4, 2))),
        (
            {"echo": True, "logprobs": 0, "max_tokens": 0, "logprob_token_ids": [4]},
            OutputOptions(logprobs=0, logprob_token_ids=(4,), prompt_logprobs=0),
        ),
    ],
)
def test_observations(body: dict[str, Any], expected: OutputOptions) -> None:
    assert request(**body).output == expected


@pytest.mark.parametrize(
    ("body", "expected", "ids"),
    [
        ({}, CompletionOptions(), False),
        ({"echo": True, "logprobs": 5}, CompletionOptions(echo=True, logprobs=5, prompt_logprobs=5), True),
        (
            {"echo": True, "logprobs": 5, "prompt_logprobs": 2},
            CompletionOptions(echo=True, logprobs=5, prompt_logprobs=2),
            True,
        ),
        ({"echo": True, "logprobs": 5, "stream": True}, CompletionOptions(stream=True, echo=True, logprobs=5), True),
        ({"prompt_logprobs": 2}, CompletionOptions(prompt_logprobs=2), False),
        ({"return_token_ids": True}, CompletionOptions(token_ids=True), True),
        ({"return_tokens_as_token_ids": True}, CompletionOptions(as_token_ids=True), False),
        (
            {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
            CompletionOptions(stream=True, include_usage=True, continuous_usage=True),
            False,
        ),
    ],
)
def test_options(body: dict[str, Any], expected: CompletionOptions, ids: bool) -> None:
    decoded = decode({"prompt": "hi", **body}, LIMITS)
    assert (decoded.options, decoded.prompt_ids) == (expected, ids)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"n": 129}, "n"),
        ({"n": 0}, "n"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"best_of": 2}, "best_of"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"tools": [{"type": "function", "function": {"name": "a"}}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "none"}, "tool_choice"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 5.0}, "max_tokens"),
        ({"echo": 1}, "echo"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 5.0}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"stream": True, "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"stream": True, "echo": True, "logprobs": 1, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"logprobs": 0, "logprob_token_ids": [1] * 129}, "logprob_token_ids"),
        ({"echo": True, "max_tokens": 0, "logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"response_format": {"type": "json_object"}, "stop": "x"}, "stop"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"stop": "a", "stop_token_sequences": [[1]]}, "stop"),
        ({"logit_bias": {"1": 1}}, "logit_bias"),
        ({"prompt_embeds": "x"}, "prompt_embeds"),
        ({"return_token_timestamps": True}, "return_token_timestamps"),
    ],
)
def test_refusals(body: dict[str, Any], field: str) -> None:
    assert refusal(**body).field == field


def test_scoring_needs_the_capability() -> None:
    off = DecodeLimits(100)
    assert refusal(off, prompt_logprobs=0).field == "prompt_logprobs"
    assert refusal(off, echo=True, logprobs=0).field == "logprobs"
    decode({"prompt": "hi", "echo": True}, off)
    decode({"prompt": "hi", "logprobs": 3}, off)
    assert refusal(DecodeLimits(100, max_top_logprobs=5), logprobs=6).field == "logprobs"
    assert refusal(DecodeLimits(100, logprob_token_ids=False), logprobs=0, logprob_token_ids=[1]).message.count(
        "export"
    )


def test_groups_are_bounded() -> None:
    small = DecodeLimits(100, max_group=4)
    assert len(decode({"prompt": ["a", "b"], "n": 2}, small).request.prompts) == 2
    assert "4 choices" in refusal(small, prompt=["a", "b", "c"], n=2).message
