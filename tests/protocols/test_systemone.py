"""System One: schema and its 422 details, formulas with worked numbers, answers as the official SDK reads them."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping
from typing import Any

import pytest
from typesafe_sdk._schemas import models as sdk

from engine.types.conversation import Image
from protocols.errors import BodyTooLarge, InvalidRequest, SchemaInvalid
from protocols.errors import body as error_body
from protocols.fields import DecodeLimits
from protocols.questions import DecisionScorer, Distribution, Scored
from protocols.systemone import SystemOneRequest, choice_confidence, decode, encode, score_confidence
from tests.support.scorer import Opinion, ScriptedScorer

LIMITS = DecodeLimits(100, vision=True)
PNG = b"\x89PNG\r\n\x1a\n" + bytes(8)
EXAMPLE: dict[str, Any] = {
    "model": "local",
    "state": {"message": "Charged twice"},
    "questions": {
        "refund": {"type": "noul", "instructions": "Is a refund requested?"},
        "team": {"type": "choice", "criteria": {"billing": None, "support": "Other help"}},
        "urgency": {"type": "score", "criteria": ["Routine", "Urgent"]},
    },
}


def decoded(body: Any, *, limits: DecodeLimits = LIMITS, max_bytes: int = 10**6, **more: Any) -> SystemOneRequest:
    return decode(body, limits, max_bytes=max_bytes, **more)


def with_question(question: Any, name: str = "team") -> dict[str, Any]:
    return {"model": "m", "state": "s", "questions": {name: question}}


def detail(body: Any) -> list[dict[str, Any]]:
    with pytest.raises(SchemaInvalid) as caught:
        decoded(body)
    shown: list[dict[str, Any]] = json.loads(json.dumps(error_body(caught.value, "systemone")))["detail"]
    for entry in shown:
        sdk.ValidationError.model_validate(entry)
        assert entry["loc"][0] == "body"
    return shown


def answered(body: Any, opinion: Opinion, **more: Any) -> tuple[dict[str, Any], ScriptedScorer]:
    request = decoded(body, **more)
    scripted = ScriptedScorer(opinion)
    scored = asyncio.run(DecisionScorer(scripted, scripted.read).score("systemone", request.state, request.questions))
    return json.loads(json.dumps(encode(request, scored, "loaded"))), scripted


def opinion(turn: str) -> Mapping[str, float]:
    if "refund" in turn:
        return {"A": 0.1, "B": 0.3}
    return {"A": 0.6, "B": 0.2} if "billing" in turn else {"0": 0.15, "1": 0.35}


def test_the_documented_example() -> None:
    found, scripted = answered(EXAMPLE, opinion)
    assert found["model"] == "loaded" and found["usage"] == {
        "input_tokens": sum(len("\n".join(prompt)) for prompt in scripted.prompts),
        "output_tokens": 3,
    }
    assert list(found["answers"]) == ["refund", "team", "urgency"]
    assert found["answers"]["refund"] == {"type": "noul", "noul": pytest.approx(0.75)}
    assert found["answers"]["team"] == {
        "type": "choice",
        "choice": "billing",
        "probabilities": {"billing": pytest.approx(0.75), "support": pytest.approx(0.25)},
        "confidence": pytest.approx(0.5),
    }
    assert found["answers"]["urgency"] == {
        "type": "score",
        "score": pytest.approx(0.7),
        "legend": {"0": "Routine", "1": "Urgent"},
        "probabilities": {"0": pytest.approx(0.3), "1": pytest.approx(0.7)},
        "confidence": pytest.approx(0.4),
    }
    sdk.NoulAnswer.model_validate(found["answers"]["refund"])
    sdk.ChoiceAnswer.model_validate(found["answers"]["team"])
    sdk.ScoreAnswer.model_validate(found["answers"]["urgency"])
    sdk.Usage.model_validate(found["usage"])


@pytest.mark.parametrize(
    ("p", "confidence"),
    [
        ((0.8, 0.1, 0.1), 0.7),
        ((0.9, 0.1), 0.8),
        ((0.4, 0.4, 0.2), 0.1),
        ((0.5, 0.5), 0.0),
        ((0.25,) * 4, 0.0),
        ((1.0,), 1.0),
        ((1.0, 0.0), 1.0),
    ],
)
def test_choice_confidence(p: tuple[float, ...], confidence: float) -> None:
    assert choice_confidence(p) == pytest.approx(confidence, abs=1e-12)


@pytest.mark.parametrize(
    ("p", "score", "confidence"),
    [
        ((0.1, 0.1, 0.8), 1.7, 0.55),
        ((0.0, 0.95, 0.05), 1.05, 0.925),
        ((0.5, 0.0, 0.5), 1.0, 0.0),
        ((0.3, 0.7), 0.7, 0.4),
        ((0.1, 0.2, 0.4, 0.2, 0.1), 2.0, 1 / 3),
        ((0.05, 0.05, 0.9), 1.85, 0.775),
        ((1.0,), 0.0, 1.0),
    ],
)
def test_score_and_its_confidence(p: tuple[float, ...], score: float, confidence: float) -> None:
    assert score_confidence(p) == pytest.approx(confidence, abs=1e-12)
    assert Distribution(p, 1.0).expectation == pytest.approx(score, abs=1e-12)


@pytest.mark.parametrize(("n", "spread"), [(2, 0.5), (3, 2 / 3), (4, 1.0), (5, 1.2), (6, 1.5), (10, 2.5)])
def test_the_uniform_spread_that_scores_are_measured_against(n: int, spread: float) -> None:
    mode_first = (0.6, 0.4, *([0.0] * (n - 2)))
    assert score_confidence(mode_first) == pytest.approx(1 - 0.4 / spread, abs=1e-12)


def test_the_first_of_equal_options_is_chosen() -> None:
    request = decoded(with_question({"type": "choice", "criteria": {"z": None, "a": None, "b": None}}))
    found = encode(request, Scored((Distribution((0.4, 0.4, 0.2), 1.0),), 1, 0, 1), "m")["answers"]["team"]
    assert found["choice"] == "z" and found["confidence"] == pytest.approx(0.1)
    assert list(found["probabilities"]) == ["z", "a", "b"]


def test_structured_json_reaches_the_prompt_and_the_legend() -> None:
    level = {"meaning": ["é", {"deep": None}]}
    question = {"type": "score", "instructions": {"task": "rate", "by": [1, True]}, "criteria": [level, "plain", ["x"]]}
    found, scripted = answered(with_question(question), lambda _: {"0": 0.5})
    turn = scripted.prompts[0][1]
    assert json.dumps(question["instructions"]) in turn and f"0: {json.dumps(level, ensure_ascii=False)}\n" in turn
    assert found["answers"]["team"]["legend"] == {"0": level, "1": "plain", "2": ["x"]}


@pytest.mark.parametrize("state", ["text", "", {"a": [1]}, {}, [], ["é", None]])
def test_states(state: Any) -> None:
    _, scripted = answered({**EXAMPLE, "state": state}, opinion)
    assert scripted.prompts[0][0] == (state if isinstance(state, str) else json.dumps(state, ensure_ascii=False))


def test_noul_criteria() -> None:
    for criteria, shown in (
        (None, ["A: no\n", "B: yes\n"]),
        ({"true": "asks"}, ["A: no\n", "B: yes - asks\n"]),
        ({"false": ["x"]}, ['A: no - ["x"]\n', "B: yes\n"]),
        ({"true": None, "false": {"a": 1}}, ['A: no - {"a": 1}\n', "B: yes\n"]),
    ):
        _, scripted = answered(with_question({"type": "noul", "criteria": criteria}), lambda _: {"A": 0.5})
        assert all(line in scripted.prompts[0][1] for line in shown)


def test_question_names_never_reach_the_prompt() -> None:
    prompts = [
        answered(with_question({"type": "noul", "instructions": "Is it?"}, name), lambda _: {"A": 1.0})[1].prompts
        for name in ("q", "totally different é")
    ]
    assert prompts[0] == prompts[1]


def test_unknown_fields_are_ignored() -> None:
    assert decoded({**EXAMPLE, "stream": True, "whatever": 1}).questions == decoded(EXAMPLE).questions


def many(count: int) -> dict[str, Any]:
    return {"model": "m", "state": "s", "questions": {str(i): {"type": "noul"} for i in range(count)}}


def choice(count: int) -> dict[str, Any]:
    return with_question({"type": "choice", "criteria": {str(i): None for i in range(count)}})


def score(count: int) -> dict[str, Any]:
    return with_question({"type": "score", "criteria": [str(i) for i in range(count)]})


@pytest.mark.parametrize("body", [many(1), many(64), choice(1), choice(128), score(1), score(10)])
def test_the_limits_themselves_pass(body: dict[str, Any]) -> None:
    decoded(body)


@pytest.mark.parametrize(
    ("body", "loc", "code"),
    [
        ({}, ["body", "model"], "missing"),
        ([], ["body"], "model_type"),
        (None, ["body"], "model_type"),
        ({**EXAMPLE, "model": 1}, ["body", "model"], "string_type"),
        ({**EXAMPLE, "model": None}, ["body", "model"], "string_type"),
        ({**EXAMPLE, "state": None}, ["body", "state", "str"], "string_type"),
        ({**EXAMPLE, "state": 5}, ["body", "state", "str"], "string_type"),
        ({"model": "m", "questions": EXAMPLE["questions"]}, ["body", "state"], "missing"),
        ({**EXAMPLE, "questions": []}, ["body", "questions"], "dict_type"),
        (many(0), ["body", "questions"], "too_short"),
        (many(65), ["body", "questions"], "too_long"),
        (choice(0), ["body", "questions", "team", "choice", "criteria"], "too_short"),
        (choice(129), ["body", "questions", "team", "choice", "criteria"], "too_long"),
        (score(0), ["body", "questions", "team", "score", "criteria"], "too_short"),
        (score(11), ["body", "questions", "team", "score", "criteria"], "too_long"),
        (with_question({"type": "choice"}), ["body", "questions", "team", "choice", "criteria"], "missing"),
        (
            with_question({"type": "score", "criteria": {"0": "a"}}),
            ["body", "questions", "team", "score", "criteria"],
            "list_type",
        ),
        (
            with_question({"type": "choice", "criteria": ["a"]}),
            ["body", "questions", "team", "choice", "criteria"],
            "dict_type",
        ),
        (
            with_question({"type": "score", "criteria": ["a", None]}),
            ["body", "questions", "team", "score", "criteria", 1, "str"],
            "string_type",
        ),
        (
            with_question({"type": "choice", "criteria": {"a": 5}}),
            ["body", "questions", "team", "choice", "criteria", "a", "str"],
            "string_type",
        ),
        (
            with_question({"type": "noul", "criteria": []}),
            ["body", "questions", "team", "noul", "criteria"],
            "model_type",
        ),
        (
            with_question({"type": "noul", "instructions": 1}),
            ["body", "questions", "team", "noul", "instructions", "str"],
            "string_type",
        ),
        (with_question({"type": "box"}), ["body", "questions", "team"], "union_tag_invalid"),
        (with_question({"type": "custom"}), ["body", "questions", "team"], "union_tag_invalid"),
        (with_question({}), ["body", "questions", "team"], "union_tag_not_found"),
        (with_question("x"), ["body", "questions", "team"], "model_attributes_type"),
        ({**EXAMPLE, "assets": {}}, ["body", "assets"], "too_short"),
        ({**EXAMPLE, "assets": {"<a>": {"type": "audio"}}}, ["body", "assets", "<a>", "type"], "literal_error"),
        ({**EXAMPLE, "assets": {"<a>": {"part": 1}}}, ["body", "assets", "<a>", "part"], "string_type"),
    ],
)
def test_schema_failures(body: Any, loc: list[str | int], code: str) -> None:
    assert (loc, code) in [(entry["loc"], entry["type"]) for entry in detail(body)]


def test_details_tell_what_was_sent_and_the_limit() -> None:
    (entry,) = detail(many(65))
    assert entry["ctx"]["max_length"] == 64 and entry["input"] == many(65)["questions"]
    (entry,) = detail({**EXAMPLE, "model": 1})
    assert entry["input"] == 1 and "ctx" not in entry


def test_details_stay_small() -> None:
    questions = {str(i): {"type": "score", "criteria": [None] * 10} for i in range(64)}
    found = detail({"model": "x" * 10**5, "state": "s", "questions": questions, "assets": 5})
    assert len(found) == 100 and len(json.dumps(found)) < 10**5
    assert "input" not in detail({"model": ["x" * 10**5], "state": "s", "questions": questions})[0]


def test_an_unsupported_model_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="re-export"):
        decoded(EXAMPLE, limits=DecodeLimits(10, logprob_token_ids=False))


ASSETS = {"<image:0>": {"type": "image", "format": "png", "data_base64": base64.b64encode(PNG).decode()}}


def test_images_replace_values_but_neither_keys_nor_legends() -> None:
    body = {
        "model": "m",
        "state": {"<image:0>": "see <image:0>"},
        "questions": {
            "a": {
                "type": "choice",
                "instructions": "<image:0>",
                "criteria": {"<image:0>": "<image:0>!", "other": None},
            },
            "b": {"type": "score", "criteria": ["like <image:0>", "unlike"]},
        },
        "assets": ASSETS,
    }
    request = decoded(body, images_allowed=True)
    image = Image(PNG, "image/png")
    assert request.state == ('{"<image:0>": "see ', image, '"}')
    assert request.questions[0].instructions == (image,)
    assert request.questions[0].options[0] == ("<image:0> - ", image, "!")
    answers = encode(request, Scored((Distribution((1.0, 0.0), 1.0),) * 2, 1, 0, 2), "m")["answers"]
    assert answers["a"]["choice"] == "<image:0>" and answers["b"]["legend"]["0"] == "like <image:0>"


def test_multipart_images() -> None:
    body = {**EXAMPLE, "state": "<image:0>", "assets": {"<image:0>": {"type": "image", "part": "asset-0"}}}
    request = decoded(body, images_allowed=True, parts={"asset-0": PNG})
    assert request.state == (Image(PNG, "image/png"),)
    with pytest.raises(InvalidRequest, match="belongs to no asset"):
        decoded(EXAMPLE, parts={"asset-0": PNG})


def test_images_need_their_header() -> None:
    with pytest.raises(InvalidRequest, match="TypeSafe-Danger-Zone-Images"):
        decoded({**EXAMPLE, "state": "<image:0>", "assets": ASSETS})


def test_expanded_prompts_keep_the_body_limit() -> None:
    body = {**EXAMPLE, "state": "<image:0>" * 1000, "assets": ASSETS}
    decoded(body, images_allowed=True, max_bytes=17_000)
    with pytest.raises(BodyTooLarge, match="max_body_bytes"):
        decoded(body, images_allowed=True, max_bytes=16_000)
