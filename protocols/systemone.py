"""POST /v1/systemone: TypeSafe's schema in, named answers with Jev's confidences out.

Owns the schema with its 422 details and the confidence formulas. The prompts and the scoring are in `questions`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import Field, ValidationError

from protocols.assets import AssetFields, Assets, bind_assets
from protocols.errors import BodyTooLarge, SchemaInvalid
from protocols.fields import DecodeLimits, Fields
from protocols.questions import (
    MAX_LEVELS,
    MAX_OPTIONS,
    MAX_QUESTIONS,
    Content,
    Distribution,
    Question,
    Scored,
    check_capability,
    final_turn,
    joined,
    label_pool,
)

Structured = str | dict[str, Any] | list[Any]
MAX_DETAILS: Final = 100
MAX_INPUT_CHARACTERS: Final = 2000


class NoulCriteria(Fields):
    true: Structured | None = None
    false: Structured | None = None


class NoulFields(Fields):
    type: Literal["noul"]
    instructions: Structured | None = None
    criteria: NoulCriteria | None = None


class ChoiceFields(Fields):
    type: Literal["choice"]
    instructions: Structured | None = None
    criteria: dict[str, Structured | None] = Field(min_length=1, max_length=MAX_OPTIONS)


class ScoreFields(Fields):
    type: Literal["score"]
    instructions: Structured | None = None
    criteria: list[Structured] = Field(min_length=1, max_length=MAX_LEVELS)


QuestionFields = Annotated[NoulFields | ChoiceFields | ScoreFields, Field(discriminator="type")]


class SystemOneFields(Fields):
    model: str
    state: Structured
    questions: dict[str, QuestionFields] = Field(min_length=1, max_length=MAX_QUESTIONS)
    assets: dict[str, AssetFields] | None = Field(None, min_length=1)


@dataclass(frozen=True, slots=True)
class SystemOneRequest:
    """A decoded body, ready for the scorer. `fields` answers with the original names and levels."""

    state: Content
    questions: tuple[Question, ...]
    fields: SystemOneFields


def decode(
    body: Any,
    limits: DecodeLimits,
    *,
    max_bytes: int,
    images_allowed: bool = False,
    parts: Mapping[str, bytes] | None = None,
) -> SystemOneRequest:
    """`max_bytes`: the server's body limit, which each expanded prompt must keep too. `images_allowed`: the images
    header is there. `parts`: image parts of a multipart body.

    Raises SchemaInvalid for the schema, InvalidRequest for capabilities and images, BodyTooLarge.
    """
    fields = _validated(body)
    check_capability(limits)
    assets = bind_assets(fields.assets, parts, limits, allowed=images_allowed)
    state = assets.content(fields.state)
    questions = tuple(_question(question, assets) for question in fields.questions.values())
    assets.check_used()
    _check_size(state, questions, max_bytes)
    return SystemOneRequest(state, questions, fields)


def encode(request: SystemOneRequest, scored: Scored, model: str) -> dict[str, Any]:
    """The response: one answer for each question under its name, in request order."""
    answers = {
        name: _answer(question, answer)
        for (name, question), answer in zip(request.fields.questions.items(), scored.answers, strict=True)
    }
    usage = {"input_tokens": scored.input_tokens, "output_tokens": scored.output_tokens}
    return {"model": model, "answers": answers, "usage": usage}


def choice_confidence(probabilities: Sequence[float]) -> float:
    """(max p - 1/n) / (1 - 1/n); one for a single option."""
    n = len(probabilities)
    return 1.0 if n == 1 else min(1.0, max(0.0, (max(probabilities) - 1 / n) / (1 - 1 / n)))


def score_confidence(probabilities: Sequence[float]) -> float:
    """max(0, 1 - S/U): the spread S around the mode against the spread U of a uniform distribution around the middle;
    one for a single level."""
    n = len(probabilities)
    if n == 1:
        return 1.0
    mode = max(range(n), key=probabilities.__getitem__)
    spread = math.fsum(p * abs(index - mode) for index, p in enumerate(probabilities))
    uniform = sum(abs(index - (n - 1) / 2) for index in range(n)) / n
    return max(0.0, 1.0 - spread / uniform)


def _validated(body: Any) -> SystemOneFields:
    try:
        return SystemOneFields.model_validate(body)
    except ValidationError as error:
        raise SchemaInvalid(details(error)) from None


def details(error: ValidationError) -> list[dict[str, Any]]:
    """One entry for each failure: the location from "body" on, pydantic's message and code, and the input unless it
    is large."""
    found = []
    for entry in error.errors(include_url=False)[:MAX_DETAILS]:
        detail: dict[str, Any] = {"type": entry["type"], "loc": ["body", *entry["loc"]], "msg": entry["msg"]}
        value = entry["input"]
        if _is_small(value):
            detail["input"] = value
        if "ctx" in entry:
            detail["ctx"] = {key: value for key, value in entry["ctx"].items() if isinstance(value, str | int | float)}
        found.append(detail)
    return found


def _is_small(value: Any) -> bool:
    try:
        return len(json.dumps(value)) <= MAX_INPUT_CHARACTERS
    except (TypeError, ValueError):
        return False


def _question(fields: NoulFields | ChoiceFields | ScoreFields, assets: Assets) -> Question:
    instructions = () if fields.instructions is None else assets.content(fields.instructions)
    match fields:
        case NoulFields():
            criteria = fields.criteria or NoulCriteria()
            options = (_described("no", criteria.false, assets), _described("yes", criteria.true, assets))
            return Question("predicate", instructions, options)
        case ChoiceFields():
            named = tuple(_described(name, about, assets) for name, about in fields.criteria.items())
            return Question("choice", instructions, named)
        case _:
            return Question("score", instructions, tuple(assets.content(level) for level in fields.criteria))


def _described(name: str, about: Structured | None, assets: Assets) -> Content:
    return joined(name) if about is None else joined(name, " - ", assets.content(about))


def _check_size(state: Content, questions: Sequence[Question], max_bytes: int) -> None:
    shared = _size(state)
    for question in questions:
        labels = label_pool(question.kind, len(question.options))[: len(question.options)]
        size = shared + _size(final_turn(question, labels))
        if size > max_bytes:
            raise BodyTooLarge(
                f"a question with its state has {size} bytes, more than max_body_bytes ({max_bytes} bytes)"
            )


def _size(content: Content) -> int:
    return sum(len(piece.encode()) if isinstance(piece, str) else len(piece.data) for piece in content)


def _answer(question: NoulFields | ChoiceFields | ScoreFields, found: Distribution) -> dict[str, Any]:
    match question:
        case NoulFields():
            return {"type": "noul", "noul": found.probabilities[1]}
        case ChoiceFields():
            names = list(question.criteria)
            return {
                "type": "choice",
                "choice": names[found.top],
                "probabilities": dict(zip(names, found.probabilities, strict=True)),
                "confidence": choice_confidence(found.probabilities),
            }
        case _:
            return {
                "type": "score",
                "score": found.expectation,
                "legend": {str(index): level for index, level in enumerate(question.criteria)},
                "probabilities": {str(index): p for index, p in enumerate(found.probabilities)},
                "confidence": score_confidence(found.probabilities),
            }
