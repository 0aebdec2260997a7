"""Every spelling of an output constraint becomes one, or a refusal."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.types.constraint import Constraint
from engine.types.request import Stops
from protocols.errors import InvalidRequest
from protocols.fields import read
from protocols.structure import StructureFields, check_constraint

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {}}, "required": ["b"]}


def constraint(body: dict[str, Any]) -> Constraint | None:
    return read(StructureFields, body).constraint()


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": None, "guided_json": None, "guided_json_object": False, "grammar": None},
    ],
)
def test_nothing_is_constrained(body: dict[str, Any]) -> None:
    assert constraint(body) is None


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
    ],
)
def test_schemas_keep_their_key_order(body: dict[str, Any]) -> None:
    found = constraint(body)
    assert found is not None and found.kind == "json_schema"
    assert json.dumps(json.loads(found.source)) == json.dumps(SCHEMA)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, Constraint("json_object", "")),
        ({"structured_outputs": {"json_object": True}}, Constraint("json_object", "")),
        ({"guided_json_object": True}, Constraint("json_object", "")),
        ({"response_format": {"type": "json_object", "schema": None}}, Constraint("json_object", "")),
        (
            {"response_format": {"type": "json_object", "schema": {"required": ["a"]}}},
            Constraint("json_schema", '{"type":"object","required":["a"]}'),
        ),
        ({"structured_outputs": {"regex": "a+"}}, Constraint("regex", "a+")),
        ({"guided_regex": "a+"}, Constraint("regex", "a+")),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Constraint("lark", 'start: "a"')),
        ({"guided_grammar": 'start: "a"'}, Constraint("lark", 'start: "a"')),
        ({"grammar": 'start: "a"'}, Constraint("lark", 'start: "a"')),
        ({"structured_outputs": {"choice": ["é", "b"]}}, Constraint("choice", '["é", "b"]')),
        ({"guided_choice": ["é", "b"]}, Constraint("choice", '["é", "b"]')),
    ],
)
def test_spellings(body: dict[str, Any], expected: Constraint) -> None:
    assert constraint(body) == expected


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1]"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"response_format": {"type": "json_object", "schema": "{}"}}, "response_format.schema"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_regex": 1}, "guided_regex"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"grammar": ""}, "grammar"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ],
)
def test_refusals(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        constraint(body)
    assert caught.value.field == field


JSON = Constraint("json_object", "")


@pytest.mark.parametrize(
    ("stops", "ignore_eos", "continuation", "field"),
    [
        (Stops(strings=("x",)), False, False, "stop"),
        (Stops(sequences=((1,),)), False, False, "stop_token_ids"),
        (Stops(), True, False, "ignore_eos"),
        (Stops(), False, True, "continue_final_message"),
    ],
)
def test_what_a_constraint_excludes(stops: Stops, ignore_eos: bool, continuation: bool, field: str) -> None:
    check_constraint(None, stops=stops, ignore_eos=ignore_eos, continuation=continuation)
    check_constraint(JSON, stops=Stops(), ignore_eos=False, continuation=False)
    with pytest.raises(InvalidRequest, match="output constraint") as caught:
        check_constraint(JSON, stops=stops, ignore_eos=ignore_eos, continuation=continuation)
    assert caught.value.field == field
