"""Tokens that hold the end of a free stretch of output and then something more.

Where reasoning or a call is closed by text, a token may hold the last characters of the closing text and the first of
what follows, which an output constraint may not allow. Owns which tokens of a table these are; what may follow is
asked of the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from engine.syntax.piece import Ending

_REMEMBERED: Final = 64


class TokensPort(Protocol):
    @property
    def vocab_size(self) -> int: ...

    def bytes(self, token: int, /) -> bytes: ...

    def is_control(self, token: int, /) -> bool: ...


@dataclass(frozen=True, slots=True)
class _Overrun:
    """`rest`: the text behind the closing text; None when it isn't whole characters."""

    token: int
    rest: str | None


_Overruns = tuple[tuple[_Overrun, ...], ...]
_KNOWN: Final[dict[tuple[int, str], tuple[TokensPort, _Overruns]]] = {}


class Endings:
    """Finds, for one output, the tokens that would end a free stretch with text that can't follow it. `may_begin`:
    whether a text can follow an ending."""

    def __init__(self, tokens: TokensPort, may_begin: Callable[[str, Ending], bool]) -> None:
        self._tokens = tokens
        self._may_begin = may_begin
        self._found: dict[tuple[str, int], tuple[int, ...]] = {}

    def barred(self, ending: Ending) -> tuple[int, ...]:
        """Ids that must not come next."""
        found: list[int] = []
        for literal in ending.literals:
            for begun in range(len(literal)):
                if ending.held.endswith(literal[:begun]):
                    found += self._barred(ending, literal, begun)
        return tuple(found)

    def _barred(self, ending: Ending, literal: str, begun: int) -> tuple[int, ...]:
        known = self._found.get((literal, begun))
        if known is None:
            overruns = _overruns(self._tokens, literal)[begun]
            bad = {
                rest for rest in {each.rest for each in overruns} if rest is None or not self._may_begin(rest, ending)
            }
            known = self._found[literal, begun] = tuple(each.token for each in overruns if each.rest in bad)
        return known


def _overruns(tokens: TokensPort, literal: str) -> _Overruns:
    """The tokens that go on behind `literal`, by how many of its characters stand before them. Remembered for the last
    few tables."""
    key = (id(tokens), literal)
    known = _KNOWN.get(key)
    if known is None:
        if len(_KNOWN) >= _REMEMBERED:
            _KNOWN.clear()
        known = _KNOWN[key] = (tokens, _searched(tokens, literal))
    return known[1]


def _searched(tokens: TokensPort, literal: str) -> _Overruns:
    found: list[list[_Overrun]] = [[] for _ in literal]
    tails = [literal[begun:].encode() for begun in range(len(literal))]
    for token in range(tokens.vocab_size):
        data = tokens.bytes(token)
        if tails[-1] not in data or tokens.is_control(token):
            continue
        for begun, tail in enumerate(tails):
            at = data.find(tail) if not begun else 0 if data.startswith(tail) else -1
            rest = data[at + len(tail) :]
            if at >= 0 and rest:
                found[begun].append(_Overrun(token, _text(rest)))
    return tuple(map(tuple, found))


def _text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
