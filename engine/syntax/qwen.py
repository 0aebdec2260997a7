"""Qwen's XML calls: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

Shared by five recipes. A tag starts a call only when a header and a parameter or the closing tag follow; in the answer
the outer tag may be missing. Values lose one wrapping newline on each side; MiMo's stay verbatim.
"""

from __future__ import annotations

import re
from typing import Any, Final

from engine.syntax.arguments import Malformed, Schemas, convert, object_json
from engine.syntax.patterns import Name, Pattern, Space, lit
from engine.syntax.states import CallForm, Layout, Rule, Setup, literal, standard

_HEADER: Final = (lit("<function="), Name(">"), Space(), lit("<parameter=", "</function>"))
OUTER: Final = Pattern((lit("<tool_call>"), Space(), *_HEADER), ahead=1)
BARE: Final = Pattern(_HEADER, ahead=1)
_NAME: Final = re.compile(r"(?:<tool_call>)?\s*<function=([^>]*)>")
_PARAMETER: Final = re.compile(r"\s*<parameter=([^>]*)>")
_BOUNDARY: Final = re.compile(r"</parameter>(?=\s*(?:<parameter=|\Z))|(?=<parameter=)|\Z")
"""Where a value ends; a closing tag that nothing of the call follows is text of the value."""


def layout(setup: Setup) -> Layout:
    verbatim = "verbatim" in setup.options

    def parse(text: str, schemas: Schemas) -> tuple[str, str]:
        return parse_call(text, schemas, verbatim=verbatim)

    form = CallForm("</function>", parse, after="after_call")
    outer = Rule(OUTER, call=form, region="tool", tool=True)
    bare = Rule(BARE, call=form, region="tool", tool=True)
    closing = literal("</tool_call>", "after_call", region="tool")
    return standard(setup, (outer, bare), reasoning_calls=(outer,), after_call=(closing,))


def parse_call(text: str, schemas: Schemas, *, verbatim: bool) -> tuple[str, str]:
    """A call from its opening tag to `</function>`. Raises Malformed."""
    header = _NAME.match(text)
    if header is None:
        raise Malformed("a tool call has no function header")
    name = header[1].strip()
    end = text.rindex("</function>")
    arguments: dict[str, Any] = {}
    at = header.end()
    while text[at:end].strip():
        opened = _PARAMETER.match(text, at, end)
        if opened is None:
            raise Malformed(f"the call to {name!r} has text outside its parameters")
        key = opened[1].strip()
        if not key:
            raise Malformed(f"the call to {name!r} has a parameter without a name")
        closed = _BOUNDARY.search(text, opened.end(), end)
        assert closed is not None
        value = text[opened.end() : closed.start()]
        arguments[key] = convert(value if verbatim else unwrap(value), schemas.parameter(name, key))
        at = closed.end()
    return name, object_json(arguments)


def unwrap(value: str) -> str:
    """`value` without one newline at each end."""
    return value.removeprefix("\n").removesuffix("\n")
