"""GLM's calls: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>`.

The tag starts a call only when a name and an `<arg_key>` or the closing tag follow. Strings are raw, other values JSON.
The last value of a call may lack its closing tag.
"""

from __future__ import annotations

import re
from typing import Any, Final

from engine.syntax.arguments import Malformed, Schemas, convert, object_json
from engine.syntax.patterns import Pattern, Space, Word, lit
from engine.syntax.states import CallForm, Layout, Rule, Setup, standard

_LINES: Final = Space(lines=True)
OPENER: Final = Pattern((lit("<tool_call>"), _LINES, Word(), _LINES, lit("<arg_key>", "</tool_call>")), ahead=1)
_NAME: Final = re.compile(r"<tool_call>\s*([^\s<>]+)\s*")
_ARGUMENT: Final = re.compile(
    r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|\Z))\s*", re.DOTALL
)
_UNCLOSED: Final = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>((?:(?!</?arg_).)*)\Z", re.DOTALL)


def layout(setup: Setup) -> Layout:
    form = CallForm(
        "</tool_call>", parse_call, after="after_call", quotes=("<arg_value>", "</arg_value>"), tolerant=True
    )
    return standard(setup, (Rule(OPENER, call=form, region="tool", tool=True),))


def parse_call(text: str, schemas: Schemas) -> tuple[str, str]:
    """A call from its opening to its closing tag. Raises Malformed."""
    header = _NAME.match(text)
    if header is None:
        raise Malformed("a tool call has no function name")
    name = header[1]
    end = len(text) - len("</tool_call>")
    arguments: dict[str, Any] = {}
    at = header.end()
    while at < end:
        found = _ARGUMENT.match(text, at, end) or _UNCLOSED.match(text, at, end)
        if found is None:
            raise Malformed(f"the call to {name!r} has text outside its arguments")
        key = found[1].strip()
        if not key:
            raise Malformed(f"the call to {name!r} has an argument without a name")
        arguments[key] = convert(found[2], schemas.parameter(name, key))
        at = found.end()
    return name, object_json(arguments)
