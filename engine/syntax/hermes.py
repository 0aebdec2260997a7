"""Hermes calls, the generic default: `<tool_call>{"name": NAME, "arguments": {…}}</tool_call>`."""

from __future__ import annotations

from typing import Final

from engine.syntax.arguments import Malformed, Schemas, json_object, object_json
from engine.syntax.patterns import Pattern, Space, lit
from engine.syntax.states import CallForm, Layout, Rule, Setup, standard

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
OPENER: Final = Pattern((lit(OPEN), Space(), lit("{")), ahead=1)


def layout(setup: Setup) -> Layout:
    form = CallForm(CLOSE, parse_call, after="after_call", quotes=('"', '"'), escapes=True)
    return standard(setup, (Rule(OPENER, call=form, region="tool", tool=True),))


def parse_call(text: str, _schemas: Schemas) -> tuple[str, str]:
    """A call from its opening to its closing tag. Raises Malformed."""
    body = json_object(text.removeprefix(OPEN).removesuffix(CLOSE), "a tool")
    name = body.get("name")
    if not isinstance(name, str) or not name.strip():
        raise Malformed("a tool call has an empty name")
    arguments = body.get("arguments", body.get("parameters", {}))
    if not isinstance(arguments, dict):
        raise Malformed(f"the arguments of the call to {name!r} are not a JSON object")
    return name.strip(), object_json(arguments)
