"""Chat templates in Jinja: a sandboxed environment with what published templates expect.

Owns compiling, rendering and the errors of both. What goes into a template is prepared by `engine.text.turns`; what
comes out still holds the surrogates of `engine.text.control`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from importlib import resources
from typing import Any, Final, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.text.control import BREAK
from engine.types.request import RequestError

RESERVED: Final = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}
)
"""Template variables that chat_template_kwargs may not set."""

_ESCAPED: Final = re.compile(r"(\\\\)|\\u(dc00|dd[0-9a-f]{2})")


class GenerationBlocks(Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; when serving it is its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own spelling)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template. Raises ValueError when `source` doesn't compile."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """`variables`: special token spellings under the names templates use, such as bos_token."""
        self.source = source
        self._variables = dict(variables)
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise ValueError(f"the chat template does not compile: line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt text. Raises RequestError when the template refuses the conversation."""
        try:
            return self._template.render(
                {
                    **variables,
                    **self._variables,
                    "messages": list(messages),
                    "tools": list(tools) or None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except TemplateError as error:
            raise RequestError(f"the model's chat template refused the conversation: {error}") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise RequestError(
                f"the model's chat template can't render the conversation: {type(error).__name__}: {error}"
            ) from error


def own_template(name: str) -> str:
    """The source of one of our own templates. Raises FileNotFoundError."""
    return (resources.files("engine.recipes") / "templates" / name).read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as published templates expect of `tojson`: no HTML escapes, non-ASCII as it is unless asked for. Surrogates
    of `engine.text.control` stay characters in either case."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if not ensure_ascii:
        return text
    return _ESCAPED.sub(lambda found: found[0] if found[1] else chr(int(found[2], 16)), text)


def _raise(message: object) -> NoReturn:
    raise TemplateError(str(message).replace(BREAK, ""))


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
