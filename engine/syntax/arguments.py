"""Arguments of calls: text typed by JSON Schema as well as it goes, and the JSON object that goes out.

A schema guides, it never rejects: what doesn't convert stays a string.
"""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from engine.types.conversation import ToolDefinition
from engine.types.nesting import MAX_ARGUMENT_DEPTH, deeper_than

MAX_ARGUMENT_BYTES: Final = 8 * 1024 * 1024
ORDER: Final = ("null", "integer", "number", "boolean", "object", "array", "string")
"""The order in which the types of a schema are tried."""

_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,4000}\Z")
_NUMBER: Final = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?\Z")
_MAX_ALTERNATIVES: Final = 256
_ESCAPE: Final = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
"""An escape of JSON: a pair of surrogates, a lone one (the group), or any other."""
_REPLACED: Final = r"\ufffd"


class Malformed(ValueError):
    """A recognised call whose text breaks the syntax; the message is for the client."""


class Schemas:
    """The parameter schemas of the declared tools, by name. Unknown tools and parameters have the empty schema."""

    def __init__(self, tools: Sequence[ToolDefinition]) -> None:
        self._tools = {tool.name: tool.parameters for tool in tools}

    def __contains__(self, name: str) -> bool:
        return name in self._tools

    def parameter(self, tool: str, key: str) -> Node:
        """The schema of parameter `key` of `tool`."""
        root = self._tools.get(tool, {})
        return Node(root, root).child(key)

    def root(self, tool: str) -> Node:
        """The schema of the whole argument object of `tool`."""
        root = self._tools.get(tool, {})
        return Node(root, root)


class Node:
    """A place in a schema, with the root in which its references resolve."""

    def __init__(self, schema: Any, root: Any) -> None:
        self.schema = schema
        self.root = root

    def types(self) -> frozenset[str]:
        """The JSON types the schema allows, as far as it says; empty when it doesn't."""
        found: set[str] = set()
        for schema in self._alternatives():
            named = schema.get("type")
            if isinstance(named, str):
                found.add(named)
            elif isinstance(named, list):
                found.update(name for name in named if isinstance(name, str))
            elif "properties" in schema:
                found.add("object")
            elif "items" in schema:
                found.add("array")
            if schema.get("nullable") is True:
                found.add("null")
            if named is None:
                values = schema.get("enum") if isinstance(schema.get("enum"), list) else []
                values = [*(values or []), *([schema["const"]] if "const" in schema else [])]
                found.update(_type_of(value) for value in values)
        return frozenset(found)

    def child(self, key: str) -> Node:
        """The schema of property `key`."""
        for schema in self._alternatives():
            properties = schema.get("properties")
            if isinstance(properties, Mapping) and key in properties:
                return Node(properties[key], self.root)
        for schema in self._alternatives():
            extra = schema.get("additionalProperties")
            if isinstance(extra, Mapping):
                return Node(extra, self.root)
        return Node({}, self.root)

    def items(self) -> Node:
        """The schema of an array's elements."""
        for schema in self._alternatives():
            if isinstance(schema.get("items"), Mapping):
                return Node(schema["items"], self.root)
        return Node({}, self.root)

    def _alternatives(self) -> Iterator[Mapping[str, Any]]:
        """This schema and what it refers to or combines."""
        pending: deque[Any] = deque([self.schema])
        seen: set[int] = set()
        while pending and len(seen) < _MAX_ALTERNATIVES:
            schema = pending.popleft()
            if not isinstance(schema, Mapping) or id(schema) in seen:
                continue
            seen.add(id(schema))
            yield schema
            if isinstance(schema.get("$ref"), str):
                pending.append(_resolve(self.root, schema["$ref"]))
            for word in ("anyOf", "oneOf", "allOf"):
                if isinstance(schema.get(word), list):
                    pending.extend(schema[word][:_MAX_ALTERNATIVES])


def convert(text: str, node: Node) -> Any:
    """`text` as the first type of ORDER that the schema allows and the text fits; else the text itself."""
    types = node.types()
    for kind in ORDER:
        if kind in types:
            found, value = _as(kind, text)
            if found:
                return value
    return text


def object_json(arguments: Mapping[str, Any]) -> str:
    """The JSON text of an argument object. Raises Malformed when it is over the bound."""
    return bounded(json.dumps(arguments, ensure_ascii=False))


def bounded(text: str) -> str:
    """`text`, unless it is over the bound for arguments: then Malformed."""
    if len(text) * 4 > MAX_ARGUMENT_BYTES and len(text.encode()) > MAX_ARGUMENT_BYTES:
        raise Malformed(f"the arguments of a tool call exceed {MAX_ARGUMENT_BYTES} bytes")
    return text


def json_object(text: str, name: str) -> dict[str, Any]:
    """The object that `text` is in JSON. Raises Malformed otherwise."""
    value = json_value(text, name)
    if not isinstance(value, dict):
        raise Malformed(f"the arguments of the call to {name!r} are not a JSON object")
    return value


def json_value(text: str, name: str) -> Any:
    """The value that `text` is in JSON. Raises Malformed otherwise."""
    try:
        return loads(text)
    except ValueError as error:
        raise Malformed(f"the arguments of the call to {name!r} are not valid JSON: {error}") from error


def loads(text: str, **options: Any) -> Any:
    """json.loads of what every reader of the arguments can read: no NaN and no infinity, not even as a number beyond
    all doubles. Raises ValueError, also for what is nested too deeply."""
    text = paired(text)
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_no_constant, **options)
        if text.count("[") + text.count("{") <= MAX_ARGUMENT_DEPTH:
            return value
        if not deeper_than(json.loads(text) if options else value, MAX_ARGUMENT_DEPTH):
            return value
    except RecursionError:
        pass
    raise ValueError(f"nested deeper than {MAX_ARGUMENT_DEPTH} levels")


def paired(text: str) -> str:
    """A JSON text with its escapes of lone surrogates, which no UTF-8 has, as U+FFFD."""
    return _ESCAPE.sub(lambda found: _REPLACED if found[1] else found[0], text) if "\\u" in text else text


def _finite(word: str) -> float:
    value = float(word)
    if math.isinf(value):
        raise ValueError(f"{word:.40} is beyond all numbers")
    return value


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def _as(kind: str, text: str) -> tuple[bool, Any]:
    word = text.strip()
    if kind == "null":
        return word.lower() == "null", None
    if kind == "integer":
        return (True, int(word)) if _INTEGER.match(word) else (False, None)
    if kind == "number":
        if not _NUMBER.match(word):
            return False, None
        value = float(word)
        if not math.isfinite(value):
            return False, None
        return True, int(value) if value.is_integer() else value
    if kind == "boolean":
        lowered = word.lower()
        return lowered in ("true", "false", "1", "0"), lowered in ("true", "1")
    if kind == "string":
        return True, text
    try:
        loaded = loads(word)
    except ValueError:
        return False, None
    return isinstance(loaded, dict if kind == "object" else list), loaded


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _resolve(root: Any, reference: str) -> Any:
    if not reference.startswith("#"):
        return {}
    value = root
    for step in reference[1:].split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        else:
            return {}
    return value
