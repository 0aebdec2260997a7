"""MiniMax M3's calls: elements whose tags all carry the namespace `]<]minimax[>[`.

Envelope, `<invoke name="NAME">`, then one element an argument: objects nest, arrays repeat `<item>`, the schema decides
the types of scalars. The namespaced opener always starts a call.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Final

from engine.syntax.arguments import Malformed, Node, Schemas, convert, object_json
from engine.syntax.patterns import Name, Pattern, Space, lit
from engine.syntax.states import CallForm, Layout, Rule, Setup, State, literal, standard
from engine.types.nesting import MAX_ARGUMENT_DEPTH

NAMESPACE: Final = "]<]minimax[>["
OPEN: Final = f"{NAMESPACE}<tool_call>"
CLOSE: Final = f"{NAMESPACE}</tool_call>"
INVOKE: Final = Pattern((lit(f"{NAMESPACE}<invoke"), Space(), lit('name="'), Name('"', barred="<>\n"), lit(">")))
INVOKE_END: Final = f"{NAMESPACE}</invoke>"
_HEADER: Final = re.compile(rf'{re.escape(NAMESPACE)}<invoke\s+name="([^"]*)">')
_TAG: Final = re.compile(rf"{re.escape(NAMESPACE)}<(/?)([^<>]*)>")


def layout(setup: Setup) -> Layout:
    form = CallForm(INVOKE_END, parse_call, after="envelope")
    envelope = State(
        "tool",
        (Rule(INVOKE, call=form, region="tool", tool=True), literal(CLOSE, "after_call", region="tool")),
        strict=True,
        tool=True,
    )
    opener = Rule(Pattern((lit(OPEN),)), "envelope", region="tool", tool=True)
    return standard(setup, (opener,), extra={"envelope": envelope})


@dataclass(slots=True)
class _Element:
    name: str
    text: list[str] = field(default_factory=list)
    children: list[_Element] = field(default_factory=list)


def parse_call(text: str, schemas: Schemas) -> tuple[str, str]:
    """A call from `<invoke …>` to `</invoke>`. Raises Malformed."""
    header = _HEADER.match(text)
    if header is None:
        raise Malformed("a tool call has no function header")
    name = header[1].strip()
    root = _tree(text[header.end() : -len(INVOKE_END)], name)
    if "".join(root.text).strip():
        raise Malformed(f"the call to {name!r} has text outside its arguments")
    return name, object_json(_object(root, schemas.root(name)))


def _tree(text: str, name: str) -> _Element:
    root = _Element("")
    stack = [root]
    at = 0
    for found in _TAG.finditer(text):
        stack[-1].text.append(text[at : found.start()])
        at = found.end()
        if not found[1]:
            if not found[2].strip() or len(stack) > MAX_ARGUMENT_DEPTH:
                raise Malformed(f"the call to {name!r} has an argument without a name or nested too deeply")
            child = _Element(found[2].strip())
            stack[-1].children.append(child)
            stack.append(child)
        elif stack[-1].name == found[2].strip():
            stack.pop()
        else:
            raise Malformed(f"the call to {name!r} closes <{found[2]}> inside <{stack[-1].name}>")
    if len(stack) > 1:
        raise Malformed(f"the call to {name!r} does not close <{stack[-1].name}>")
    root.text.append(text[at:])
    return root


def _object(element: _Element, node: Node) -> dict[str, Any]:
    return {child.name: _value(child, node.child(child.name)) for child in element.children}


def _value(element: _Element, node: Node) -> Any:
    types = node.types()
    if element.children:
        items = all(child.name == "item" for child in element.children)
        if items and ("array" in types or "object" not in types):
            return [_value(child, node.items()) for child in element.children]
        return _object(element, node)
    text = "".join(element.text)
    if not text.strip() and "string" not in types:
        if "array" in types:
            return []
        if "object" in types:
            return {}
    return convert(text, node)
