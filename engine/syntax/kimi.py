"""Kimi K3's XTML: `<|open|>NAME ATTRIBUTES<|sep|>…<|close|>NAME<|sep|>`.

Reasoning is a `think` element, the answer a `response` element, calls stand in a `tools` element. Every delimiter is
three tokens or more, so all are matched as text.
"""

from __future__ import annotations

import re
from typing import Any, Final

from engine.syntax.arguments import Malformed, Schemas, convert, json_object, json_value, object_json
from engine.syntax.patterns import Name, Pattern, Skip, Space, lit
from engine.syntax.states import CallForm, Layout, Rule, Setup, State, awaited, literal

THINK: Final = "<|open|>think<|sep|>"
THINK_END: Final = "<|close|>think<|sep|>"
RESPONSE: Final = "<|open|>response<|sep|>"
RESPONSE_END: Final = "<|close|>response<|sep|>"
TOOLS: Final = "<|open|>tools<|sep|>"
TOOLS_END: Final = "<|close|>tools<|sep|>"
MESSAGE_END: Final = "<|close|>message<|sep|>"
CALL_END: Final = "<|close|>call<|sep|>"
CALL: Final = Pattern((lit("<|open|>call"), Space(), lit('tool="'), Name('"', barred="<>\n"), Skip("<|sep|>")))
_HEADER: Final = re.compile(r'<\|open\|>call\s+tool="([^"]*)"[^\n]*?<\|sep\|>')
_ARGUMENT: Final = re.compile(
    r"\s*<\|open\|>(argument|json)\b([^\n]*?)<\|sep\|>(.*?)<\|close\|>\1<\|sep\|>(?=\s*(?:<\|open\|>|\Z))\s*", re.DOTALL
)
_ATTRIBUTE: Final = re.compile(r'\s([A-Za-z_]+)="([^"]*)"')


def layout(setup: Setup) -> Layout:
    form = CallForm(CALL_END, parse_call, after="envelope", spell=lambda name: unescape(name).strip())
    tools = (Rule(Pattern((lit(TOOLS),)), "envelope", region="tool", tool=True),) if setup.tools else ()
    into_answer = (literal(RESPONSE, "answer" if setup.structured else "content", trim=False), *tools)
    think = literal(THINK, "reasoning")

    def leave(state: str) -> tuple[Rule, ...]:
        return (*into_answer, *(literal(text, state) for text in (THINK_END, RESPONSE_END, MESSAGE_END)))

    openers = (Pattern((lit(RESPONSE),)), *((Pattern((lit(TOOLS),), free=True),) if setup.tools else ()))
    states = {
        "reasoning": State("reasoning", leave("closed" if setup.structured else "between"), reasoning=True),
        "between": State(
            "control",
            (*leave("between"), think),
            otherwise="answer" if setup.structured else "content",
            openers=(*openers, Pattern((lit(THINK),))) if setup.structured else (),
        ),
        "closed": State("control", (*leave("closed"), think), otherwise="answer", openers=openers),
        "content": State("text", (*leave("between"), think)),
        "answer": awaited(setup),
        "verbatim": State("text"),
        "envelope": State(
            "tool",
            (Rule(CALL, call=form, region="tool", tool=True), literal(TOOLS_END, "between", region="tool")),
            strict=True,
            tool=True,
        ),
    }
    if setup.opening == "reasoning":
        return Layout(states, "reasoning")
    return Layout(states, "between")


def parse_call(text: str, schemas: Schemas) -> tuple[str, str]:
    """A call from its opening to its closing tag. Raises Malformed."""
    header = _HEADER.match(text)
    if header is None:
        raise Malformed("a tool call has no header")
    name = unescape(header[1]).strip()
    end = len(text) - len(CALL_END)
    arguments: dict[str, Any] = {}
    at = header.end()
    while text[at:end].strip():
        found = _ARGUMENT.match(text, at, end)
        if found is None:
            raise Malformed(f"the call to {name!r} has text outside its arguments")
        attributes = {key: unescape(value) for key, value in _ATTRIBUTE.findall(found[2])}
        if found[1] == "json":
            arguments.update(json_object(found[3], name))
        else:
            key = attributes.get("key", "").strip()
            if not key:
                raise Malformed(f"the call to {name!r} has an argument without a name")
            arguments[key] = _value(found[3], attributes.get("type"), name, key, schemas)
        at = found.end()
    return name, object_json(arguments)


def unescape(text: str) -> str:
    """An attribute's value: `&quot;` and `&amp;` undone."""
    return text.replace("&quot;", '"').replace("&amp;", "&")


def escape(text: str) -> str:
    """Text as an attribute's value."""
    return text.replace("&", "&amp;").replace('"', "&quot;")


def _value(text: str, kind: str | None, name: str, key: str, schemas: Schemas) -> Any:
    if kind == "string":
        return text
    if kind is None:
        return convert(text, schemas.parameter(name, key))
    return json_value(text, name)
