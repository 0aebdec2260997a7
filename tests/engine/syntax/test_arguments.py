"""Argument text typed by schema: best effort, never a refusal."""

from __future__ import annotations

from typing import Any

import pytest

from engine.syntax.arguments import (
    MAX_ARGUMENT_BYTES,
    Malformed,
    Node,
    Schemas,
    bounded,
    convert,
    json_object,
    json_value,
    loads,
    object_json,
    paired,
)
from engine.types.conversation import ToolDefinition


def node(schema: Any) -> Node:
    return Node(schema, schema)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, " 3 ", 3),
        ({"type": "integer"}, "-0", 0),
        ({"type": "integer"}, "abc", "abc"),
        ({"type": "integer"}, "3.5", "3.5"),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),
        ({"type": "number"}, "1e3", 1000),
        ({"type": "number"}, "2.50", 2.5),
        ({"type": "number"}, "Infinity", "Infinity"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "0", False),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "null"}, "null", None),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, " 3 ", " 3 "),
        ({"type": "object"}, '{"a": [1]}', {"a": [1]}),
        ({"type": "object"}, "[1]", "[1]"),
        ({"type": "object"}, '{"a": NaN}', '{"a": NaN}'),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
        ({"type": ["string", "integer"]}, "3", 3),
        ({"type": ["null", "string"]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
        ({"oneOf": [{"type": "boolean"}, {"type": "array"}]}, "[]", []),
        ({"allOf": [{"type": "integer"}]}, "3", 3),
        ({"enum": [1, "two"]}, "1", 1),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": True}, "true", True),
        ({"properties": {}}, "{}", {}),
        ({"items": {}}, "[]", []),
        ({"type": "string", "nullable": True}, "null", None),
        ({}, "3", "3"),
        (True, "3", "3"),
        ({"type": 5}, "3", "3"),
        ({"type": "wibble"}, "3", "3"),
    ],
)
def test_conversion(schema: Any, text: str, value: Any) -> None:
    found = convert(text, node(schema))
    assert found == value
    assert type(found) is type(value)


def test_references_resolve_and_loops_end() -> None:
    root = {"$defs": {"n": {"type": "integer"}, "a/b": {"type": "boolean"}, "x": {"$ref": "#/$defs/x"}}}
    assert convert("3", Node({"$ref": "#/$defs/n"}, root)) == 3
    assert convert("1", Node({"$ref": "#/$defs/a~1b"}, root)) is True
    assert convert("3", Node({"$ref": "#/$defs/x"}, root)) == "3"
    assert convert("3", Node({"$ref": "#/$defs/none"}, root)) == "3"
    assert convert("3", Node({"$ref": "elsewhere"}, root)) == "3"
    wide: dict[str, Any] = {"anyOf": []}
    wide["anyOf"] = [wide] * 50
    assert convert("3", node(wide)) == "3"


def test_parameters_of_a_tool() -> None:
    schemas = Schemas(
        [
            ToolDefinition(
                "w", "", {"properties": {"n": {"type": "integer"}}, "additionalProperties": {"type": "boolean"}}
            )
        ]
    )
    assert convert("1", schemas.parameter("w", "n")) == 1
    assert convert("1", schemas.parameter("w", "other")) is True
    assert convert("1", schemas.parameter("unknown", "n")) == "1"


def test_objects_only() -> None:
    assert json_object('{"a": 1}', "w") == {"a": 1}
    for text in ("[]", "3", "{", "", '{"a": NaN}', "[" * 100_000):
        with pytest.raises(Malformed, match="'w'"):
            json_object(text, "w")


def test_arguments_are_bounded() -> None:
    assert object_json({"a": "é"}) == '{"a": "é"}'
    assert bounded("x" * MAX_ARGUMENT_BYTES)
    with pytest.raises(Malformed, match="exceed 8388608 bytes"):
        bounded("x" * (MAX_ARGUMENT_BYTES + 1))
    with pytest.raises(Malformed, match="exceed"):
        object_json({"a": "é" * (MAX_ARGUMENT_BYTES // 2)})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r'"a\ud83d b"', "a\ufffd b"),
        (r'"\ude00"', "\ufffd"),
        (r'"\ud83d\ude00"', "😀"),
        (r'"\ud83d\ud83d\ude00"', "\ufffd😀"),
        (r'"\\ud83d"', r"\ud83d"),
        (r'{"\ud83d": ["\n\u0000"]}', {"\ufffd": ["\n\0"]}),
    ],
)
def test_lone_surrogates_are_replaced(text: str, value: Any) -> None:
    """A model may write their escapes, which no reader of UTF-8 takes."""
    assert loads(text) == value
    assert loads(paired(text)) == value


@pytest.mark.parametrize("text", ["NaN", "[-Infinity]", "1e400", '{"a": -1e999}'])
def test_what_is_no_finite_number_is_no_json(text: str) -> None:
    with pytest.raises(Malformed):
        json_value(text, "tool")
    assert loads("1e308") == 1e308
