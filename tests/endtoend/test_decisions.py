"""Decisions over whole requests: probabilities and confidences against transformers, texts, usage, OpenAI's SDK."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.endtoend.test_systemone import children, label_chances, prompts
from tests.support.inline_server import Site

PATH = "/v1/decisions"
QUESTIONS: list[dict[str, Any]] = [
    {"type": "predicate", "name": "refund", "instructions": "Refund requested?"},
    {
        "type": "choice",
        "instructions": "Which team?",
        "choices": [{"value": "billing", "description": "Payments"}, {"value": False}, {"value": "false"}],
    },
    {
        "type": "score",
        "instructions": "Urgency?",
        "levels": [{"label": "Routine"}, {"label": "Soon"}, {"label": "Urgent", "description": "Act today"}],
    },
]
EXAMPLE: dict[str, Any] = {"model": "local", "input": "Charged twice", "questions": QUESTIONS}


def test_probabilities_and_confidences_are_those_of_the_models_labels(demo: Site) -> None:
    answer = demo.post(PATH, EXAMPLE)
    exact = [label_chances(child) for child in children(demo, 3)]
    shares = [[chance / sum(each) for chance in each] for each in exact]
    predicate, choice, score = answer["answers"]
    assert predicate == {"type": "predicate", "name": "refund", "probability": pytest.approx(shares[0][1], abs=1e-5)}
    assert [entry["probability"] for entry in choice["probabilities"]] == pytest.approx(shares[1], abs=1e-5)
    assert [entry["value"] for entry in choice["probabilities"]] == ["billing", False, "false"]
    assert choice["confidence"] == pytest.approx(max(exact[1]), abs=1e-5), "the winner's full-vocabulary probability"
    assert choice["choice"] == ["billing", False, "false"][exact[1].index(max(exact[1]))]
    assert choice["name"] is None
    assert score["score"] == pytest.approx(sum(level * p for level, p in enumerate(shares[2])), abs=1e-5)
    assert score["confidence"] == pytest.approx(max(exact[2]), abs=1e-5)
    assert [(entry["value"], entry["label"]) for entry in score["probabilities"]] == [
        (0, "Routine"),
        (1, "Soon"),
        (2, "Urgent"),
    ]


def test_usage_counts_logical_input_and_what_was_reused(demo: Site) -> None:
    body = {**EXAMPLE, "input": "The parcel has not come and the customer is angry about it. " * 14}
    for _ in range(2):
        usage = demo.post(PATH, body)["usage"]
    lengths = [len(child.token_ids) for child in children(demo, 3)]
    assert usage["input_tokens"] == sum(lengths)
    assert usage["total_tokens"] == sum(lengths) + 3
    assert (usage["output_tokens"], usage["output_tokens_details"]) == (3, {"reasoning_tokens": 0})
    details = usage["input_tokens_details"]
    assert details["cache_write_tokens"] == 0
    assert 3 * 128 <= details["cached_tokens"] < sum(lengths)


def test_parts_join_with_newlines_and_messages_with_blank_lines(demo: Site) -> None:
    parts = [
        {"role": "user", "content": [{"type": "input_text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"type": "message", "role": "user", "content": "three"},
    ]
    usages = [demo.post(PATH, {**EXAMPLE, "input": value})["usage"] for value in (parts, "one\ntwo\n\nthree")]
    assert usages[0]["input_tokens"] == usages[1]["input_tokens"]
    assert prompts(demo, 3) == prompts(demo, 6)[:3]


def test_values_are_spelled_as_json(demo: Site) -> None:
    demo.post(PATH, EXAMPLE)
    first, second, third = prompts(demo, 3)
    assert "A: false\nB: true\n" in first
    assert 'A: "billing" - Payments\nB: false\nC: "false"\n' in second
    assert "0: Routine\n1: Soon\n2: Urgent - Act today\n" in third


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"stream": True}, "stream"),
        ({"joint": False}, "joint"),
        ({"questions": []}, "questions"),
        ({"questions": QUESTIONS[:1] * 65}, "questions"),
        ({"questions": [{"type": "box", "instructions": "?"}]}, "questions[0].type"),
        ({"questions": [{"type": "predicate", "instructions": "?", "name": None}]}, "questions[0].name"),
        ({"questions": [{"type": "predicate"}]}, "questions[0].instructions"),
        ({"safety_identifier": "x" * 129}, "safety_identifier"),
        ({"input": [{"role": "system", "content": "x"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
            "input[0].content[0]",
        ),
        ({"assets": {}}, "assets"),
    ],
)
def test_refusals_have_openais_shape(scripted: Site, change: dict[str, Any], field: str) -> None:
    reply = scripted.send("POST", PATH, {**EXAMPLE, **change})
    assert reply.status == 400
    error = reply.json["error"]
    assert set(error) == {"type", "message", "param", "code"} and field in error["message"]


def test_multipart_is_refused(scripted: Site) -> None:
    headers = [("content-type", "multipart/form-data; boundary=x")]
    reply = scripted.send("POST", PATH, b"--x--\r\n", headers)
    assert reply.status == 400 and "multipart" in reply.json["error"]["message"]


def test_sixty_four_questions_run_one_after_another(scripted: Site) -> None:
    submitted = len(scripted.engine.generations)
    answer = scripted.post(PATH, {**EXAMPLE, "questions": QUESTIONS[:1] * 64})
    assert len(answer["answers"]) == answer["usage"]["output_tokens"] == 64
    assert len(scripted.engine.generations) == submitted + 64
    assert {generation.outcomes for generation in scripted.engine.generations[submitted:]} == {("completed",)}


@pytest.fixture
def client(demo: Site) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_the_sdk_parses_every_answer(client: openai.OpenAI) -> None:
    found = client.decisions.create(
        model="local",
        input=[{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Charged twice"}]}],
        questions=QUESTIONS,  # type: ignore[arg-type]
        safety_identifier="someone",
    )
    predicate, choice, score = found.answers
    assert predicate.type == "predicate" and 0 <= predicate.probability <= 1 and predicate.name == "refund"
    assert choice.type == "choice" and choice.choice in ("billing", False, "false")
    assert [type(entry.value) for entry in choice.probabilities] == [str, bool, str]
    assert score.type == "score" and [entry.value for entry in score.probabilities] == [0, 1, 2]
    assert found.usage is not None and found.usage.input_tokens_details.cache_write_tokens == 0
    with pytest.raises(openai.BadRequestError, match="prompt_cache_key"):
        client.decisions.create(model="m", input="x", questions=QUESTIONS, prompt_cache_key="k")  # type: ignore[arg-type]
