"""Muse Spark's addressed messages: ` to=RECIPIENT<|message|>…<|eom|>`, the next one after `<|start|>assistant`.

To `self` is reasoning, to `user` and `commentary` visible, to `developer` dropped, to a tool a call in ATEM elements.
A message without a recipient is reasoning.
"""

from __future__ import annotations

import re
from typing import Any, Final

from engine.syntax.arguments import Malformed, Schemas, convert, object_json
from engine.syntax.patterns import Name, Pattern, Space, lit
from engine.syntax.qwen import unwrap
from engine.syntax.states import CallForm, Layout, Rule, Setup, State, awaited, literal

START: Final = "<|start|>assistant"
MESSAGE: Final = "<|message|>"
ENDS: Final = ("<|eom|>", "<|eot|>")
INVOKE: Final = Pattern((lit("<atem:invoke"), Space(), lit('name="'), Name('"', barred="<>\n"), lit(">")))
INVOKE_END: Final = "</atem:invoke>"
_HEADER: Final = re.compile(r'<atem:invoke\s+name="([^"]*)">')
_PARAMETER: Final = re.compile(r'\s*<atem:parameter\s+name="([^"]*)">(.*?)</atem:parameter>\s*', re.DOTALL)
_TARGETS: Final = {"self": "reasoning", "user": "content", "commentary": "content", "developer": "dropped"}


def layout(setup: Setup) -> Layout:
    """Under a constraint, reasoning that was ended can't be addressed again before a call ("over", "next"), and nobody
    who isn't shown the answer, since the output might end there."""

    def route(recipient: str) -> str:
        target = _TARGETS.get(recipient.strip(), "addressed" if setup.tools else "content")
        return "answer" if setup.structured and target == "content" else target

    def ends(between: str, header: str) -> tuple[Rule, ...]:
        return (*(literal(end, between) for end in ENDS), literal(START, header))

    form = CallForm(INVOKE_END, parse_call, after="calls", spell=single)
    invoke = Rule(INVOKE, call=form, region="tool", tool=True)
    recipients = (Pattern((lit(" to=", "to="), Name(MESSAGE, barred="\n\r"))),)
    headers = (
        *(Rule(pattern, route=route, trim=False) for pattern in recipients),
        literal(MESSAGE, "reasoning"),
    )
    plain = "reasoning" if setup.structured else "content"

    def but(*names: str) -> tuple[Pattern, ...]:
        return (Pattern((lit(" to=", "to="), Name(MESSAGE, barred="\n\r\t ", but=names))),)

    over = ends("over", "next") if setup.structured else ends("between", "header")

    def header(openers: tuple[Pattern, ...]) -> State:
        return State("control", headers, otherwise=plain, lead="keep", openers=openers if setup.structured else ())

    def between(rules: tuple[Rule, ...]) -> State:
        openers = (Pattern((lit(START),)),) if setup.structured else ()
        return State("control", (*rules, *headers), otherwise=plain, openers=openers)

    states = {
        "header": header(but("developer")),
        "reasoning": State("reasoning", over, reasoning=True),
        "content": State("text", over),
        "dropped": State("control", over),
        "between": between(ends("between", "header")),
        "over": between(over),
        "next": header(but("developer", "self")),
        "answer": awaited(setup),
        "verbatim": State("text"),
        "addressed": State(
            "tool", (literal("<atem:function_calls>", "calls", region="tool"), invoke), strict=True, tool=True
        ),
        "calls": State(
            "tool", (invoke, literal("</atem:function_calls>", "called", region="tool")), strict=True, tool=True
        ),
        "called": State("control", ends("between", "header"), otherwise="dropped"),
    }
    return Layout(states, "header")


def single(name: str) -> str:
    """A tool's name; a bare name that came back doubled (`w.w`) is collapsed."""
    name = name.strip()
    half = len(name) // 2
    return name[:half] if name[half : half + 1] == "." and name[:half] == name[half + 1 :] else name


def parse_call(text: str, schemas: Schemas) -> tuple[str, str]:
    """A call from `<atem:invoke …>` to its closing tag. Raises Malformed."""
    header = _HEADER.match(text)
    if header is None:
        raise Malformed("a tool call has no function header")
    name = single(header[1])
    end = len(text) - len(INVOKE_END)
    arguments: dict[str, Any] = {}
    at = header.end()
    while text[at:end].strip():
        found = _PARAMETER.match(text, at, end)
        if found is None:
            raise Malformed(f"the call to {name!r} has text outside its parameters")
        key = found[1].strip()
        if not key:
            raise Malformed(f"the call to {name!r} has a parameter without a name")
        arguments[key] = convert(unwrap(found[2]), schemas.parameter(name, key))
        at = found.end()
    return name, object_json(arguments)
