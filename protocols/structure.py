"""Output constraints on the wire: every accepted spelling becomes one Constraint, or a 400.

Owns `response_format`, `structured_outputs`, `guided_*` and `grammar` (a Lark grammar), and what may not be combined
with a constraint. Whether a schema or grammar compiles is found before admission by `engine.grammar`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import Field

from engine.types.constraint import Constraint
from engine.types.request import Stops
from protocols.fields import Fields, json_object, read, refuse


class _SchemaFormat(Fields):
    """`strict` here belongs to the output format, which is enforced either way."""

    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    name: str | None = None
    description: str | None = None


class _StructuredOutputs(Fields):
    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class StructureFields(Fields):
    """The fields of Chat and Completions that constrain the answer."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    grammar: str | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None

    def constraint(self) -> Constraint | None:
        """The one constraint asked for. Raises InvalidRequest when there are two, or one can't be honoured."""
        if self.guided_whitespace_pattern is not None:
            raise refuse("guided_whitespace_pattern", "is not supported")
        found: dict[str, Constraint] = {}
        if (wanted := response_format(self.response_format)) is not None:
            found["response_format"] = wanted
        if (wanted := _structured_outputs(self.structured_outputs)) is not None:
            found["structured_outputs"] = wanted
        if self.grammar is not None:
            found["grammar"] = _source("lark", self.grammar, "grammar")
        found |= _spelled(
            {
                "guided_json": self.guided_json,
                "guided_regex": self.guided_regex,
                "guided_choice": self.guided_choice,
                "guided_grammar": self.guided_grammar,
                "guided_json_object": self.guided_json_object,
            }
        )
        if len(found) > 1:
            raise refuse(list(found)[1], f"can't be combined with {next(iter(found))}: give one output constraint")
        return next(iter(found.values()), None)


def json_schema(schema: Mapping[str, Any]) -> Constraint:
    """A JSON Schema constraint; key order is kept."""
    return Constraint("json_schema", json.dumps(schema, ensure_ascii=False, separators=(",", ":")))


def any_object(value: Mapping[str, Any], field: str) -> Constraint:
    """The format `json_object` at `field`; other servers let it have a schema of the object."""
    schema = value.get("schema")
    if schema is None:
        return Constraint("json_object", "")
    if not isinstance(schema, dict):
        raise refuse(f"{field}.schema", "must be a JSON Schema object")
    return json_schema({"type": "object", **schema})


def response_format(value: Mapping[str, Any] | None, field: str = "response_format") -> Constraint | None:
    """Chat's response format. `text` and null constrain nothing."""
    if value is None:
        return None
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return any_object(value, field)
        case "json_schema":
            inner = value.get("json_schema")
            if not isinstance(inner, dict):
                raise refuse(f"{field}.json_schema", "must be an object with a schema")
            return json_schema(read(_SchemaFormat, inner, f"{field}.json_schema").schema_)
        case None:
            raise refuse(f"{field}.type", "is required")
        case _:
            raise refuse(f"{field}.type", "must be one of 'text', 'json_object' or 'json_schema'")


def _structured_outputs(value: Mapping[str, Any] | None) -> Constraint | None:
    if value is None:
        return None
    at = "structured_outputs"
    asked = read(_StructuredOutputs, value, at)
    for option in ("structural_tag", "whitespace_pattern", "disable_any_whitespace", "disable_additional_properties"):
        if getattr(asked, option) not in (None, False):
            raise refuse(f"{at}.{option}", "is not supported")
    found = _spelled(
        {
            f"{at}.json": asked.json_,
            f"{at}.regex": asked.regex,
            f"{at}.choice": asked.choice,
            f"{at}.grammar": asked.grammar,
            f"{at}.json_object": asked.json_object,
        }
    )
    if len(found) != 1:
        raise refuse(at, "must have exactly one of json, regex, choice, grammar and json_object")
    return next(iter(found.values()))


def _spelled(values: Mapping[str, Any]) -> dict[str, Constraint]:
    """The constraints among `values`, whose names end in what they hold."""
    found: dict[str, Constraint] = {}
    for field, value in values.items():
        if value is None or value is False:
            continue
        if field.endswith("json_object"):
            found[field] = Constraint("json_object", "")
        elif field.endswith("json"):
            found[field] = json_schema(_schema(value, field))
        elif field.endswith("choice"):
            found[field] = _choice(value, field)
        else:
            found[field] = _source("regex" if field.endswith("regex") else "lark", value, field)
    return found


def _schema(value: dict[str, Any] | str, field: str) -> Mapping[str, Any]:
    if isinstance(value, str):
        return json_object(value, field, "must be a JSON Schema object")
    return value


def _choice(value: list[str], field: str) -> Constraint:
    if not value or any(not option for option in value):
        raise refuse(field, "must be a nonempty array of nonempty strings")
    return Constraint("choice", json.dumps(value, ensure_ascii=False))


def _source(kind: Literal["lark", "regex"], text: str, field: str) -> Constraint:
    if not text:
        raise refuse(field, "must not be empty")
    return Constraint(kind, text)


def check_constraint(
    constraint: Constraint | None, *, stops: Stops, ignore_eos: bool, continuation: bool, stop_field: str = "stop"
) -> None:
    """Raises InvalidRequest for what an output constraint can't be combined with."""
    if constraint is None:
        return
    if stops.strings:
        raise refuse(stop_field, _COMBINED)
    if stops.sequences:
        raise refuse("stop_token_ids", f"and stop_token_sequences {_COMBINED}")
    if ignore_eos:
        raise refuse("ignore_eos", _COMBINED)
    if continuation:
        raise refuse("continue_final_message", _COMBINED)


_COMBINED: Final = "can't be combined with an output constraint"
