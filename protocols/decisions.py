"""POST /v1/decisions: vLLM's text protocol over the scorer of System One.

Owns the schema, every field of which is known, and the answers with their own confidence: the winner's probability in
the whole vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ConfigDict, Field

from protocols.fields import DecodeLimits, Fields, read, refuse
from protocols.questions import (
    MAX_LEVELS,
    MAX_OPTIONS,
    MAX_QUESTIONS,
    Content,
    Distribution,
    Question,
    Scored,
    check_capability,
    joined,
)

MAX_IDENTIFIER: Final = 128


class _Known(Fields):
    model_config = ConfigDict(extra="forbid")


class DecisionFields(_Known):
    model: str
    input: Any
    questions: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_QUESTIONS)
    safety_identifier: str | None = Field(None, max_length=MAX_IDENTIFIER)


class MessageFields(_Known):
    role: str
    content: Any
    type: str = "message"


class PartFields(_Known):
    type: str
    text: str


class _Named(_Known):
    type: str
    instructions: str
    name: str = ""

    @property
    def given_name(self) -> str | None:
        return self.name if "name" in self.model_fields_set else None


class PredicateFields(_Named):
    pass


class OptionFields(_Known):
    value: Any
    description: str | None = None


class ChoiceFields(_Named):
    choices: list[OptionFields] = Field(min_length=2, max_length=MAX_OPTIONS)


class LevelFields(_Known):
    label: str
    description: str | None = None


class ScoreFields(_Named):
    levels: list[LevelFields] = Field(min_length=2, max_length=MAX_LEVELS)


@dataclass(frozen=True, slots=True)
class DecisionRequest:
    """A decoded body, ready for the scorer. `fields` answers with the original names, values and labels."""

    state: Content
    questions: tuple[Question, ...]
    fields: tuple[PredicateFields | ChoiceFields | ScoreFields, ...]


def decode(body: Mapping[str, Any], limits: DecodeLimits) -> DecisionRequest:
    """Raises InvalidRequest naming the field."""
    fields = read(DecisionFields, body)
    state = _input(fields.input)
    asked = tuple(_fields(value, f"questions[{index}]") for index, value in enumerate(fields.questions))
    check_capability(limits)
    return DecisionRequest(joined(state), tuple(map(_question, asked)), asked)


def encode(request: DecisionRequest, scored: Scored, model: str) -> dict[str, Any]:
    """The response: answers in question order."""
    return {
        "model": model,
        "answers": [_answer(*pair) for pair in zip(request.fields, scored.answers, strict=True)],
        "usage": {
            "input_tokens": scored.input_tokens,
            "input_tokens_details": {"cached_tokens": scored.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": scored.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": scored.input_tokens + scored.output_tokens,
        },
    }


def confidence(found: Distribution) -> float:
    """The winner's full-vocabulary probability."""
    return found.probabilities[found.top] * found.mass


def _input(value: Any) -> str:
    """Parts are joined with newlines, messages with blank lines."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise refuse("input", "must be a string or a nonempty array of user messages")
    return "\n\n".join(_message(message, f"input[{index}]") for index, message in enumerate(value))


def _message(value: Any, at: str) -> str:
    if not isinstance(value, dict):
        raise refuse(at, "must be an object")
    fields = read(MessageFields, value, at)
    if fields.type != "message":
        raise refuse(f"{at}.type", "must be 'message'")
    if fields.role != "user":
        raise refuse(f"{at}.role", "must be 'user'")
    if isinstance(fields.content, str):
        return fields.content
    if not isinstance(fields.content, list):
        raise refuse(f"{at}.content", "must be a string or an array of text parts")
    return "\n".join(_part(part, f"{at}.content[{index}]") for index, part in enumerate(fields.content))


def _part(value: Any, at: str) -> str:
    if not isinstance(value, dict):
        raise refuse(at, "must be an object")
    kind = value.get("type")
    if isinstance(kind, str) and kind not in ("text", "input_text"):
        raise refuse(f"{at}.type", f"{kind!r} parts are not supported: this route takes text only")
    return read(PartFields, value, at).text


def _fields(value: Mapping[str, Any], at: str) -> PredicateFields | ChoiceFields | ScoreFields:
    match value.get("type"):
        case "predicate":
            return read(PredicateFields, value, at)
        case "choice":
            choice = read(ChoiceFields, value, at)
            _check_values(choice, at)
            return choice
        case "score":
            return read(ScoreFields, value, at)
        case None:
            raise refuse(f"{at}.type", "is required")
    raise refuse(f"{at}.type", "must be one of 'predicate', 'choice' or 'score'")


def _check_values(choice: ChoiceFields, at: str) -> None:
    """A string and a boolean of the same text are different values."""
    seen: set[tuple[type, Any]] = set()
    for index, option in enumerate(choice.choices):
        where = f"{at}.choices[{index}].value"
        if not isinstance(option.value, str | bool):
            raise refuse(where, "must be a string or a boolean")
        key = (type(option.value), option.value)
        if key in seen:
            raise refuse(where, f"{json.dumps(option.value, ensure_ascii=False)} appears twice")
        seen.add(key)


def _question(fields: PredicateFields | ChoiceFields | ScoreFields) -> Question:
    instructions = joined(fields.instructions)
    match fields:
        case ChoiceFields():
            options = tuple(_described(_spelled(c.value), c.description) for c in fields.choices)
            return Question("choice", instructions, options)
        case ScoreFields():
            return Question("score", instructions, tuple(_described(v.label, v.description) for v in fields.levels))
        case _:
            return Question("predicate", instructions, (("false",), ("true",)))


def _spelled(value: str | bool) -> str:
    """The value as JSON, so that "true" and true stay apart."""
    return json.dumps(value, ensure_ascii=False)


def _described(name: str, description: str | None) -> Content:
    return joined(name, f" - {description}" if description else "")


def _answer(fields: PredicateFields | ChoiceFields | ScoreFields, found: Distribution) -> dict[str, Any]:
    named = {"name": fields.given_name}
    match fields:
        case ChoiceFields():
            values = [option.value for option in fields.choices]
            return {
                "type": "choice",
                **named,
                "choice": values[found.top],
                "probabilities": [
                    {"value": value, "probability": p} for value, p in zip(values, found.probabilities, strict=True)
                ],
                "confidence": confidence(found),
            }
        case ScoreFields():
            return {
                "type": "score",
                **named,
                "score": found.expectation,
                "probabilities": [
                    {"value": index, "label": level.label, "probability": p}
                    for index, (level, p) in enumerate(zip(fields.levels, found.probabilities, strict=True))
                ],
                "confidence": confidence(found),
            }
        case _:
            return {"type": "predicate", **named, "probability": found.probabilities[1]}
