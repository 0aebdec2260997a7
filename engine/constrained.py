"""ConstrainedDecoding: when an output constraint binds, and what may be generated instead of the answer.

The constraint is the answer's alone. Reasoning is free, but the output can't end in it while the answer is due; where
the answer is due, a call, a family's own markup or, unless it has ended, reasoning may begin as well; a call is free
once it has begun; after a complete call the output may end. Between reasoning and a JSON text there may be one token of
whitespace, which belongs to neither. What state the output is in is asked of the syntax machine, so that engine and
ingress can't disagree.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, Protocol

from engine.endings import Endings
from engine.grammar import GrammarMatcher, Grammars
from engine.syntax.patterns import Element, Lit, Name, Pattern, Skip, Space, Token, Word
from engine.syntax.piece import Ending, Piece, Segment, Syntax
from engine.types.constraint import Constraint

_MAX_NAME: Final = 128
"""Characters of a name that is generated under a mask."""
_WHITESPACE: Final = "".join(char for char in map(chr, range(0x3001)) if char.isspace())
"""What the machine takes for whitespace, which is more than a regular expression does."""
_ANYTHING: Final = "/(?s:.*)/"


class StructuredSyntax(Syntax, Protocol):
    """What the constraint asks of a machine opened with `structured`; see engine.syntax.machine.Machine."""

    @property
    def phase(self) -> Literal["free", "start", "answer"]: ...

    @property
    def due(self) -> bool: ...

    @property
    def openers(self) -> tuple[Pattern, ...]: ...

    @property
    def padding(self) -> bool: ...

    @property
    def endings(self) -> tuple[Ending, ...]: ...

    @property
    def attempt(self) -> int: ...

    @property
    def called(self) -> bool: ...

    @property
    def held(self) -> str: ...


class TokensPort(Protocol):
    """What the constraint asks of a token table."""

    @property
    def vocab_size(self) -> int: ...

    def bytes(self, token: int, /) -> bytes: ...

    def text(self, token: int, /) -> str: ...

    def is_special(self, token: int, /) -> bool: ...

    def is_control(self, token: int, /) -> bool: ...


class ConstrainedDecoding:
    """engine.grammar.Matcher over the whole output of one choice: it is advanced with every token that doesn't end the
    output, reasoning included. `mask()` is None while any token will do."""

    def __init__(
        self,
        grammars: Grammars,
        constraint: Constraint,
        syntax: StructuredSyntax | None,
        tokens: TokensPort,
        eos_ids: Sequence[int],
    ) -> None:
        """`syntax`: a machine of this choice, opened with `structured`, that nobody else feeds; None for raw prompts,
        where all output is the answer. `eos_ids`: every id that ends this output.

        Raises RequestError when the constraint can't be compiled.
        """
        self._grammars = grammars
        self._constraint = constraint
        self._syntax = syntax
        self._tokens = tokens
        self._eos = tuple(eos_ids)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._count = 0
        self._attempt = 0
        self._padded = False
        self._called = False
        self._endless = _without(_all(grammars.vocab_size), self._eos)
        self._endings = Endings(tokens, self._may_begin)
        self._sources: dict[tuple[Pattern, ...], str] = {}
        self._opener: GrammarMatcher | None = None
        self._answer: GrammarMatcher | None = grammars.matcher(constraint)
        if syntax is not None:
            self._begin(syntax)
            self._barred(syntax)  # looks through the vocabulary, the first time: not under the first token

    @property
    def finished(self) -> bool:
        """The answer is complete and nothing but the end can follow."""
        return self._answer is not None and self._answer.finished

    def mask(self) -> bytes | None:
        syntax = self._syntax
        if syntax is not None and syntax.phase == "free":
            return self._free(syntax)
        masks: list[bytes] = []
        if self._answer is not None:
            masks.append(self._answer.mask())
            if self._answer.accepting:
                masks.append(self._ends())
        if self._opener is not None:
            barred = self._barred(syntax) if syntax is not None else ()
            masks.append(_without(self._opener.mask(), (*self._grammars.eos_ids, *barred)))
        if syntax is not None and syntax.padding and not self._padded:
            masks.append(_with((), _spaces(self._tokens), self._grammars.vocab_size))
        if syntax is not None and syntax.phase == "start" and syntax.called and not syntax.held.strip():
            masks.append(self._ends())
        return _joined(masks, self._grammars.vocab_size)

    def allows(self, token: int) -> bool:
        mask = self.mask()
        return mask is None or (0 <= token < 8 * len(mask) and bool(mask[token // 8] >> (token % 8) & 1))

    def advance(self, token: int) -> bool:
        """Takes a committed token. False: the constraint doesn't allow it, or no token can follow."""
        syntax = self._syntax
        if syntax is None:
            return self._answer is not None and self._answer.advance(token)
        segment = self._segment(token)
        padding = syntax.padding
        if padding and segment.text.isspace() and self._padded:
            return False
        events = syntax.feed(segment)
        self._called = self._called or syntax.called
        if syntax.phase == "free":
            self._answer = self._opener = None
            return True
        if segment.text and syntax.attempt == self._attempt and syntax.phase == "start" and not syntax.held:
            self._begin(syntax)  # whitespace that belongs to nothing
            self._padded = padding
        elif syntax.attempt == self._attempt:
            self._answer = _advanced(self._answer, token)
            self._opener = _advanced(self._opener, token) if syntax.phase == "start" else None
        else:
            self._begin(syntax)
            text = "".join(event.text for event in events if isinstance(event, Piece) and event.region == "text")
            self._catch_up(text + syntax.held)
        if syntax.phase == "answer":
            self._opener = None
            return self._answer is not None
        return self._answer is not None or self._opener is not None

    def _free(self, syntax: StructuredSyntax) -> bytes | None:
        """The mask where the constraint doesn't govern: anything but what would end the output, or the stretch with
        text in the same token that can't follow it."""
        mask = self._endless if syntax.reasoning_open and not self._called else None
        barred = self._barred(syntax)
        return _without(mask if mask is not None else _all(self._grammars.vocab_size), barred) if barred else mask

    def _barred(self, syntax: StructuredSyntax) -> tuple[int, ...]:
        return tuple(token for ending in syntax.endings for token in self._endings.barred(ending))

    def _may_begin(self, text: str, ending: Ending) -> bool:
        """Whether `text`, behind an ending and in its token, begins what may stand there."""
        text = text.lstrip() if ending.drops else text
        if not text:
            return True
        tokens = self._grammars.encode(text)
        if ending.due and self._grammars.matcher(self._constraint).takes(tokens):
            return True
        return bool(ending.openers) and self._opening(ending.openers).takes(tokens)

    def _begin(self, syntax: StructuredSyntax) -> None:
        """An answer, or what may stand instead of it, may start with the next token."""
        self._attempt = syntax.attempt
        self._padded = False
        self._answer = self._opener = None
        if syntax.phase == "free":
            return
        if syntax.due or syntax.phase == "answer":  # which the delimiter's own token may have begun
            self._answer = self._grammars.matcher(self._constraint)
        if syntax.openers:
            self._opener = self._opening(syntax.openers)

    def _opening(self, openers: tuple[Pattern, ...]) -> GrammarMatcher:
        """A matcher of what begins with one of `openers`."""
        source = self._sources.get(openers)
        if source is None:
            source = self._sources[openers] = _lark(openers, _controls(self._tokens))
        return self._grammars.lark(source)

    def _catch_up(self, text: str) -> None:
        """Text behind the delimiter, in the delimiter's own token, belongs to what begins."""
        if not text:
            return
        tokens = self._grammars.encode(text)
        if self._answer is not None and not self._answer.advance_all(tokens):
            self._answer = None
        if self._opener is not None and not self._opener.advance_all(tokens):
            self._opener = None

    def _segment(self, token: int) -> Segment:
        begun = bool(self._decoder.getstate()[0])
        text = self._decoder.decode(self._tokens.bytes(token))
        whole = not begun and not self._decoder.getstate()[0]
        self._count += 1
        return Segment(self._count - 1, token if whole else None, text)

    def _ends(self) -> bytes:
        """The mask of the ids that end the output."""
        return _with((), self._eos, self._grammars.vocab_size)


def _advanced(matcher: GrammarMatcher | None, token: int) -> GrammarMatcher | None:
    return matcher if matcher is not None and matcher.advance(token) else None


def _joined(masks: Sequence[bytes], vocab_size: int) -> bytes:
    if len(masks) == 1:
        return masks[0]
    joined = 0
    for mask in masks:
        joined |= int.from_bytes(mask, "little")
    return joined.to_bytes(-(-vocab_size // 32) * 4, "little")


def _with(mask: Sequence[int], ids: Sequence[int], vocab_size: int) -> bytes:
    bits = bytearray(mask) or bytearray(-(-vocab_size // 32) * 4)
    for token in ids:
        if token < vocab_size:
            bits[token // 8] |= 1 << (token % 8)
    return bytes(bits)


def _all(vocab_size: int) -> bytes:
    return b"\xff" * (-(-vocab_size // 32) * 4)


def _without(mask: bytes, ids: Sequence[int]) -> bytes:
    bits = bytearray(mask)
    for token in ids:
        if token // 8 < len(bits):
            bits[token // 8] &= ~(1 << (token % 8)) & 0xFF
    return bytes(bits)


@dataclass(frozen=True, slots=True)
class _Control:
    """A control token. A special one can be written by its id only, any other one by its letters too."""

    text: str
    id: int
    special: bool


_Controls = tuple[_Control, ...]
_KNOWN: Final[dict[int, tuple[TokensPort, _Controls]]] = {}
_SPACES: Final[dict[int, tuple[TokensPort, tuple[int, ...]]]] = {}


def _controls(tokens: TokensPort) -> _Controls:
    """The table's control tokens, longest first. Remembered for the last few tables."""
    known = _KNOWN.get(id(tokens))
    if known is None:
        found = [
            _Control(tokens.text(token), token, tokens.is_special(token))
            for token in range(tokens.vocab_size)
            if tokens.is_control(token)
        ]
        known = (tokens, tuple(sorted(found, key=lambda control: -len(control.text))))
        if len(_KNOWN) >= 16:
            _KNOWN.clear()
        _KNOWN[id(tokens)] = known
    return known[1]


def _spaces(tokens: TokensPort) -> tuple[int, ...]:
    """The table's tokens of nothing but blanks, tabs and line breaks. Remembered for the last few tables."""
    known = _SPACES.get(id(tokens))
    if known is None:
        ids = range(tokens.vocab_size)
        blank = [n for n in ids if tokens.text(n) and not tokens.text(n).strip(" \t\r\n")]
        known = (tokens, tuple(n for n in blank if not tokens.is_control(n)))
        if len(_SPACES) >= 16:
            _SPACES.clear()
        _SPACES[id(tokens)] = known
    return known[1]


@lru_cache(maxsize=256)
def _lark(patterns: tuple[Pattern, ...], controls: _Controls) -> str:
    """A Lark grammar of outputs that match one of `patterns`."""
    options = [
        " ".join([*(_terms(element, controls) for element in pattern.elements), *([_ANYTHING] if pattern.free else [])])
        for pattern in patterns
    ]
    return "start: " + "\n     | ".join(options) + "\n"


def _terms(element: Element, controls: _Controls) -> str:
    match element:
        case Token(text):
            return " | ".join(f"<[{control.id}]>" for control in controls if control.text == text)
        case Lit(options):
            return "(" + " | ".join(_literal(option, controls) for option in options) + ")"
        case Space(lines):
            return r"/[\r\n]{0,2}/" if lines else r"/[ \r\n\t]{0,8}/"
        case Word(barred):
            return f"/[^{_class(_WHITESPACE + barred)}]{{1,{_MAX_NAME}}}/"
        case Name(stop, barred, but):
            spaces = _WHITESPACE if but else ""  # around a name they would hide it
            return f"/({_name(_class(spaces + barred + stop[0]), but)})/ {_literal(stop, controls)}"
        case Skip(stop):
            return f"/[^\\n{_class(stop[0])}]{{0,{_MAX_NAME}}}/ {_literal(stop, controls)}"


def _name(barred: str, but: Sequence[str]) -> str:
    """A regular expression for a name, without characters of the class `barred`, that is none of `but`."""
    if not but:
        return f"[^{barred}]{{1,{_MAX_NAME}}}"
    heads = sorted({name[0] for name in but if name})
    options = [f"[^{barred}{_class(''.join(heads))}][^{barred}]{{0,{_MAX_NAME}}}"]
    for head in heads:
        tails = [name[1:] for name in but if name[:1] == head]
        optional = "" if "" in tails else "?"
        options.append(
            f"{head}({_name(barred, tails)}){optional}" if any(tails) else f"{head}[^{barred}]{{1,{_MAX_NAME}}}"
        )
    return "|".join(options)


def _literal(text: str, controls: _Controls) -> str:
    """`text` as Lark terms: special tokens by id, the rest quoted."""
    terms: list[str] = []
    plain = ""
    at = 0
    while at < len(text):
        control = next((each for each in controls if each.special and text.startswith(each.text, at)), None)
        if control is None:
            plain += text[at]
            at += 1
            continue
        if plain:
            terms.append(json.dumps(plain, ensure_ascii=False))
            plain = ""
        terms.append(f"<[{control.id}]>")
        at += len(control.text)
    if plain or not terms:
        terms.append(json.dumps(plain, ensure_ascii=False))
    return " ".join(terms)


def _class(chars: str) -> str:
    """`chars` for the inside of a regular expression's character class."""
    return "".join(f"\\x{{{ord(char):X}}}" for char in dict.fromkeys(chars))
