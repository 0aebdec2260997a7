"""Decisions: schema without unknown fields, typed values, and answers as the OpenAI SDK reads them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai.types import Decision

from protocols.decisions import DecisionRequest, decode, encode
from protocols.errors import InvalidRequest
from protocols.fields import DecodeLimits
from protocols.questions import DecisionScorer, Distribution, Scored
from tests.support.scorer import ScriptedScorer

LIMITS = DecodeLimits(100)
PREDICATE: dict[str, Any] = {"type": "predicate", "name": "refund", "instructions": "Refund requested?"}
CHOICE: dict[str, Any] = {
    "type": "choice",
    "instructions": "Which team?",
    "choices": [{"value": "billing", "description": "Payments"}, {"value": False}],
}
SCORE: dict[str, Any] = {
    "type": "score",
    "instructions": "Urgency?",
    "levels": [{"label": "Routine"}, {"label": "Urgent", "description": "Act today"}],
}


def body(*questions: Any, **more: Any) -> dict[str, Any]:
    return {"model": "local", "input": "Charged twice", "questions": list(questions or (PREDICATE,)), **more}


def refusal(value: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        decode(value, LIMITS)
    assert caught.value.field and caught.value.message.startswith(f"{caught.value.field}: ")
    return caught.value


def scored(request: DecisionRequest, *distributions: Distribution) -> list[dict[str, Any]]:
    found = encode(request, Scored(distributions, 10, 4, len(distributions)), "m")
    Decision.model_validate(found)
    answers: list[dict[str, Any]] = json.loads(json.dumps(found))["answers"]
    return answers


def test_the_documented_example() -> None:
    request = decode(body(PREDICATE, CHOICE, SCORE), LIMITS)

    def opinion(turn: str) -> dict[str, float]:
        if "Refund" in turn:
            return {"A": 0.1, "B": 0.3}
        return {"A": 0.2, "B": 0.6} if "team" in turn else {"0": 0.1, "1": 0.4}

    scripted = ScriptedScorer(opinion)
    result = asyncio.run(DecisionScorer(scripted, scripted.read).score("decisions", request.state, request.questions))
    found = json.loads(json.dumps(encode(request, result, "loaded")))
    assert found["model"] == "loaded"
    assert found["answers"] == [
        {"type": "predicate", "name": "refund", "probability": pytest.approx(0.75)},
        {
            "type": "choice",
            "name": None,
            "choice": False,
            "probabilities": [
                {"value": "billing", "probability": pytest.approx(0.25)},
                {"value": False, "probability": pytest.approx(0.75)},
            ],
            "confidence": pytest.approx(0.6),
        },
        {
            "type": "score",
            "name": None,
            "score": pytest.approx(0.8),
            "probabilities": [
                {"value": 0, "label": "Routine", "probability": pytest.approx(0.2)},
                {"value": 1, "label": "Urgent", "probability": pytest.approx(0.8)},
            ],
            "confidence": pytest.approx(0.4),
        },
    ]
    prompt = sum(len("\n".join(turns)) for turns in scripted.prompts)
    assert found["usage"] == {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 30, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + 3,
    }
    assert isinstance(Decision.model_validate(found).answers[1].choice, bool)  # type: ignore[union-attr]
    assert 'A: "billing" - Payments\nB: false\n' in scripted.prompts[1][1]
    assert "0: Routine\n1: Urgent - Act today\n" in scripted.prompts[2][1]


def test_confidence_is_the_winners_share_of_the_vocabulary() -> None:
    request = decode(body({**CHOICE, "choices": [{"value": v} for v in "abc"]}), LIMITS)
    (answer,) = scored(request, Distribution((0.6 / 0.9, 0.2 / 0.9, 0.1 / 0.9), 0.9))
    assert answer["confidence"] == pytest.approx(0.60)


def test_the_first_of_equal_values_is_chosen() -> None:
    request = decode(body({**CHOICE, "choices": [{"value": "z"}, {"value": True}, {"value": "a"}]}), LIMITS)
    assert scored(request, Distribution((0.4, 0.4, 0.2), 0.5))[0]["choice"] == "z"


def test_names() -> None:
    unnamed = {key: value for key, value in PREDICATE.items() if key != "name"}
    request = decode(body(PREDICATE, PREDICATE, unnamed, {**PREDICATE, "name": ""}), LIMITS)
    found = scored(request, *[Distribution((0.5, 0.5), 1.0)] * 4)
    assert [answer["name"] for answer in found] == ["refund", "refund", None, ""]
    assert refusal(body({**PREDICATE, "name": None})).field == "questions[0].name"


def test_booleans_and_strings_are_different_values() -> None:
    values = [True, "true", False, "false"]
    request = decode(body({**CHOICE, "choices": [{"value": value} for value in values]}), LIMITS)
    (answer,) = scored(request, Distribution((0.1, 0.7, 0.1, 0.1), 1.0))
    assert answer["choice"] == "true" and [entry["value"] for entry in answer["probabilities"]] == values


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", "plain"),
        ("", ""),
        ([{"role": "user", "content": "one"}], "one"),
        ([{"type": "message", "role": "user", "content": "a"}, {"role": "user", "content": "b"}], "a\n\nb"),
        (
            [
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]},
                {"role": "user", "content": "c"},
            ],
            "a\nb\n\nc",
        ),
    ],
)
def test_inputs(value: Any, text: str) -> None:
    assert "".join(map(str, decode(body(input=value), LIMITS).state)) == text


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (body(extra=1), "extra"),
        (body(assets={}), "assets"),
        (body(joint=True), "joint"),
        (body(stream=True), "stream"),
        (body(prompt_cache_key="x"), "prompt_cache_key"),
        ({"input": "x", "questions": [PREDICATE]}, "model"),
        (body(model=1), "model"),
        ({"model": "m", "questions": [PREDICATE]}, "input"),
        (body(input=None), "input"),
        (body(input=5), "input"),
        (body(input=[]), "input"),
        (body(input=["x"]), "input[0]"),
        (body(input=[{"role": "system", "content": "x"}]), "input[0].role"),
        (body(input=[{"role": "assistant", "content": "x"}]), "input[0].role"),
        (body(input=[{"role": "user"}]), "input[0].content"),
        (body(input=[{"role": "user", "content": 5}]), "input[0].content"),
        (body(input=[{"role": "user", "content": "x", "id": "1"}]), "input[0].id"),
        (body(input=[{"type": "function_call", "role": "user", "content": "x"}]), "input[0].type"),
        (body(input=[{"role": "user", "content": ["x"]}]), "input[0].content[0]"),
        (
            body(input=[{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
            "input[0].content[0].type",
        ),
        (body(input=[{"role": "user", "content": [{"type": "text"}]}]), "input[0].content[0].text"),
        (
            body(input=[{"role": "user", "content": [{"type": "text", "text": "x", "more": 1}]}]),
            "input[0].content[0].more",
        ),
        ({"model": "m", "input": "x", "questions": []}, "questions"),
        (body(*[PREDICATE] * 65), "questions"),
        (body("x"), "questions[0]"),
        (body({}), "questions[0].type"),
        (body({**PREDICATE, "type": "noul"}), "questions[0].type"),
        (body({"type": "predicate"}), "questions[0].instructions"),
        (body({**PREDICATE, "instructions": None}), "questions[0].instructions"),
        (body({**PREDICATE, "instructions": ["x"]}), "questions[0].instructions"),
        (body({**PREDICATE, "name": 5}), "questions[0].name"),
        (body({**PREDICATE, "extra": 5}), "questions[0].extra"),
        (body({**CHOICE, "choices": [{"value": "a"}]}), "questions[0].choices"),
        (body({**CHOICE, "choices": [{"value": str(i)} for i in range(129)]}), "questions[0].choices"),
        (body({**CHOICE, "choices": [{"value": True}, {"value": True}]}), "questions[0].choices[1].value"),
        (body({**CHOICE, "choices": [{"value": "a"}, {"value": "a"}]}), "questions[0].choices[1].value"),
        (body({**CHOICE, "choices": [{"value": "a"}, {"value": 1}]}), "questions[0].choices[1].value"),
        (body({**CHOICE, "choices": [{"value": "a"}, {"value": None}]}), "questions[0].choices[1].value"),
        (body({**CHOICE, "choices": [{"value": "a"}, {}]}), "questions[0].choices[1].value"),
        (body({**CHOICE, "choices": [{"value": "a", "image": "x"}, {"value": "b"}]}), "questions[0].choices[0].image"),
        (
            body({**CHOICE, "choices": [{"value": "a", "description": 1}, {"value": "b"}]}),
            "questions[0].choices[0].description",
        ),
        (body({**SCORE, "levels": [{"label": "a"}]}), "questions[0].levels"),
        (body({**SCORE, "levels": [{"label": str(i)} for i in range(11)]}), "questions[0].levels"),
        (body({**SCORE, "levels": [{"label": "a"}, {"label": 1}]}), "questions[0].levels[1].label"),
        (body({**SCORE, "levels": [{"label": "a"}, "b"]}), "questions[0].levels[1]"),
        (body(safety_identifier="x" * 129), "safety_identifier"),
        (body(safety_identifier=5), "safety_identifier"),
    ],
)
def test_refusals(value: Any, field: str) -> None:
    assert refusal(value).field == field


def test_the_limits_themselves_pass() -> None:
    decode(body(*[PREDICATE] * 64, safety_identifier="x" * 128), LIMITS)
    decode(body(safety_identifier=None), LIMITS)
    decode(body({**CHOICE, "choices": [{"value": str(i)} for i in range(128)]}), LIMITS)
    decode(body({**SCORE, "levels": [{"label": "same"}] * 10}), LIMITS)


def test_an_unsupported_model_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="re-export"):
        decode(body(), DecodeLimits(10, max_top_logprobs=0))
