"""Gemma 4's calls: `<|tool_call>call:NAME{key:<|"|>text<|"|>,n:3,o:{a:[1,true]}}<tool_call|>`.

The opener always starts a call. Keys are bare, strings stand between `<|"|>` without escapes, the rest are literals.
"""

from __future__ import annotations

from typing import Any, Final

from engine.syntax.arguments import Malformed, Node, Schemas, convert, loads, object_json
from engine.syntax.patterns import Name, Pattern, Space, lit
from engine.syntax.states import CallForm, Layout, Rule, Setup, standard
from engine.types.nesting import MAX_ARGUMENT_DEPTH

OPEN: Final = "<|tool_call>"
CLOSE: Final = "<tool_call|>"
QUOTE: Final = '<|"|>'
HEADER: Final = Pattern((Space(), lit("call:"), Name("{", barred="<>}\n\r\t ")))


def layout(setup: Setup) -> Layout:
    form = CallForm(CLOSE, parse_call, after="after_call", header=HEADER, quotes=(QUOTE, QUOTE))
    return standard(setup, (Rule(Pattern((lit(OPEN),)), call=form, region="tool", tool=True),))


def parse_call(text: str, schemas: Schemas) -> tuple[str, str]:
    """A call from its opening to its closing token. Raises Malformed."""
    body = text.removeprefix(OPEN).removesuffix(CLOSE).strip()
    at = body.index("{")
    name = body[:at].removeprefix("call:").strip()
    reader = _Reader(body, at, name)
    value = reader.value(schemas.root(name), 0)
    reader.end()
    return name, object_json(value)


class _Reader:
    """Reads one value of the literal syntax."""

    def __init__(self, text: str, at: int, name: str) -> None:
        self._text = text
        self._at = at
        self._name = name

    def value(self, node: Node, depth: int) -> Any:
        if depth > MAX_ARGUMENT_DEPTH:
            raise self._malformed("is nested too deeply")
        self._space()
        if self._take(QUOTE):
            return self._string()
        if self._take("{"):
            return self._object(node, depth)
        if self._take("["):
            return self._array(node, depth)
        return self._literal(node)

    def end(self) -> None:
        self._space()
        if self._at < len(self._text):
            raise self._malformed("has text after its arguments")

    def _object(self, node: Node, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        while not self._closed("}", bool(result)):
            self._space()
            key = self._string() if self._take(QUOTE) else self._bare(":").strip()
            if not key:
                raise self._malformed("has an argument without a name")
            self._space()
            if not self._take(":"):
                raise self._malformed(f"has no value for {key!r}")
            result[key] = self.value(node.child(key), depth + 1)
        return result

    def _array(self, node: Node, depth: int) -> list[Any]:
        result: list[Any] = []
        while not self._closed("]", bool(result)):
            result.append(self.value(node.items(), depth + 1))
        return result

    def _closed(self, bracket: str, begun: bool) -> bool:
        """Whether `bracket` comes next; otherwise, once begun, a comma must."""
        self._space()
        if self._take(bracket):
            return True
        if begun and not self._take(","):
            raise self._malformed(f"lacks a comma or {bracket!r}")
        if self._at >= len(self._text):
            raise self._malformed(f"lacks {bracket!r}")
        self._space()
        return begun and self._take(bracket)

    def _string(self) -> str:
        end = self._text.find(QUOTE, self._at)
        if end < 0:
            raise self._malformed("has an unclosed string")
        text = self._text[self._at : end]
        self._at = end + len(QUOTE)
        return text

    def _literal(self, node: Node) -> Any:
        word = self._bare(",}]").strip()
        if not word:
            raise self._malformed("has an empty value")
        try:
            return loads(word)
        except ValueError:
            return convert(word, node)

    def _bare(self, stops: str) -> str:
        start = self._at
        while self._at < len(self._text) and self._text[self._at] not in stops:
            self._at += 1
        return self._text[start : self._at]

    def _space(self) -> None:
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1

    def _take(self, word: str) -> bool:
        if not self._text.startswith(word, self._at):
            return False
        self._at += len(word)
        return True

    def _malformed(self, problem: str) -> Malformed:
        return Malformed(f"the call to {self._name!r} {problem}")
