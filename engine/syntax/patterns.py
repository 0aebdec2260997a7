"""Patterns over text that may not be complete yet.

A pattern is a sequence of elements; `probe` says whether text at a position matches it, can't match it, or could still
match once more text is there. Families describe the openers of their calls with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

OPEN_TOKEN: Final = "\ud901"
CLOSE_TOKEN: Final = "\ud902"
"""Private characters (lone surrogates, which no decoded text holds) that stand for single-token delimiters. No name
holds one."""
DELIMITERS: Final = OPEN_TOKEN + CLOSE_TOKEN

MAX_NAME: Final = 8_192
MAX_SPACE: Final = 256
"""Characters that a name and whitespace in a header may have; beyond them the text is no header."""


@dataclass(frozen=True, slots=True)
class Lit:
    """One of several literals, none of which begins another."""

    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Space:
    """Whitespace, none included; line breaks only with `lines`."""

    lines: bool = False


@dataclass(frozen=True, slots=True)
class Name:
    """A captured name: everything before `stop`, which is consumed. Characters of `barred` can't be part of it. `but`:
    names that may not be generated."""

    stop: str
    barred: str = "<>\n\r\t "
    but: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Word:
    """A captured run of characters, at least one, none of them whitespace or `barred`."""

    barred: str = "<>"


@dataclass(frozen=True, slots=True)
class Skip:
    """Anything up to and including `stop`, on one line."""

    stop: str


@dataclass(frozen=True, slots=True)
class Token:
    """The token spelled so, not its letters. Only in patterns that describe what may be generated."""

    text: str


Element = Lit | Space | Name | Word | Skip | Token


@dataclass(frozen=True, slots=True)
class Pattern:
    """The last `ahead` elements must match but are not consumed. `free`: anything may follow, so that a generated token
    may run over the end."""

    elements: tuple[Element, ...]
    ahead: int = 0
    free: bool = False

    @property
    def first(self) -> tuple[str, ...]:
        """The literals with which a match begins."""
        head = self.elements[0]
        if not isinstance(head, Lit):
            raise TypeError("a pattern must begin with a literal")
        return head.options


class Verdict(Enum):
    """What `probe` found. OPENED: undecided, with the first literal complete; PREFIX: undecided inside it."""

    MATCH = 1
    OPENED = 2
    PREFIX = 3
    NO = 4


@dataclass(frozen=True, slots=True)
class Probe:
    """`end`: where the consumed part of a match ends. `name`: what Name or Word captured."""

    verdict: Verdict
    end: int = 0
    name: str | None = None


_NO: Final = Probe(Verdict.NO)
_OPENED: Final = Probe(Verdict.OPENED)
_PREFIX: Final = Probe(Verdict.PREFIX)


def lit(*options: str) -> Lit:
    return Lit(options)


def probe(pattern: Pattern, text: str, at: int) -> Probe:
    """How `pattern` fares at `text[at:]`."""
    undecided = _PREFIX
    name: str | None = None
    end = at
    kept = len(pattern.elements) - pattern.ahead
    for index, element in enumerate(pattern.elements):
        step = _step(element, text, at)
        if step is None:
            return undecided
        if step < 0:
            return _NO
        if isinstance(element, Name):
            name = text[at : step - len(element.stop)]
        elif isinstance(element, Word):
            name = text[at:step]
        at = step
        undecided = _OPENED
        if index < kept:
            end = at
    return Probe(Verdict.MATCH, end, name)


def _step(element: Element, text: str, at: int) -> int | None:
    """Where `element`, matched at `at`, ends; None while undecided, -1 when it can't match."""
    if isinstance(element, Lit):
        for option in element.options:
            if text.startswith(option, at):
                return at + len(option)
        rest = text[at:] if len(text) - at < max(map(len, element.options)) else None
        return None if rest is not None and any(option.startswith(rest) for option in element.options) else -1
    if isinstance(element, Space):
        start = at
        while at < len(text) and (text[at] in "\r\n" if element.lines else text[at].isspace()):
            at += 1
        if at - start > MAX_SPACE:
            return -1
        return at if at < len(text) else None
    if isinstance(element, Token):
        return -1
    if isinstance(element, Skip):
        return _name(Name(element.stop, "\n"), text, at)
    if isinstance(element, Name):
        return _name(element, text, at)
    start = at
    while at < len(text) and not text[at].isspace() and text[at] not in element.barred and text[at] not in DELIMITERS:
        at += 1
    if at == len(text):
        return None if at - start <= MAX_NAME else -1
    return at if at > start else -1


def _name(element: Name, text: str, at: int) -> int | None:
    end = text.find(element.stop, at)
    name = text[at : len(text) if end < 0 else end]
    if len(name) > MAX_NAME or any(char in name for char in element.barred + DELIMITERS if char not in element.stop):
        return -1
    return None if end < 0 else end + len(element.stop)
