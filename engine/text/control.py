"""Keeps control tokens that are spelled out in conversation text from becoming control tokens.

A template sees the text almost unchanged: wherever a control token is spelled, one lone surrogate (which no valid
text holds) is put inside it, so trimming, searching and JSON-quoting still work. In the rendered prompt every control
token without a surrogate came from the template itself. `split` then separates what may be encoded with control tokens
from what may not, and drops the surrogates.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

BREAK: Final = "\udc00"
_FIRST_MARK: Final = 0xDD00
_SURROGATES: Final = re.compile("[\ud800-\udfff]")
_MARKS: Final = re.compile("[\udd00-\uddff]")
_OURS: Final = re.compile("[\udc00\udd00-\uddff]")
_PUNCTUATION: Final = "<>|/[]{}｜"
_SHORT: Final = 64
_KEPT: Final = 4096
"""Texts of at most _SHORT characters, mostly names of a tool schema that come with every request, are looked at once;
_KEPT of them are remembered."""

Segment = tuple[str, bool]
"""Text, and whether control tokens in it are to be recognised."""


def mark(index: int) -> str:
    """A position marker that survives rendering; up to 256 of them."""
    return chr(_FIRST_MARK + index)


def take_marks(text: str) -> tuple[str, list[int]]:
    """`text` without position markers, and where they stood in what remains."""
    places = [found.start() - index for index, found in enumerate(_MARKS.finditer(text))]
    return _MARKS.sub("", text), places


def clean(text: str) -> str:
    """`text` with lone surrogates, which no tokenizer can encode, replaced by U+FFFD."""
    return _SURROGATES.sub("\ufffd", text)


def strip_breaks(text: str) -> str:
    """`text` as it will be encoded: without surrogates of ours."""
    return _OURS.sub("", text)


class ControlTokens:
    """The control tokens of one tokenizer, by their spelling (two characters or more)."""

    def __init__(self, spellings: Iterable[str]) -> None:
        words = sorted({word for word in spellings if len(word) > 1 and not word.isspace()})
        self._pattern = re.compile(trie_pattern(words), re.DOTALL) if words else None
        self._inside = re.compile(f"(?={trie_pattern(words)})(.)", re.DOTALL) if words else None
        self._heads = frozenset(word[:n] for word in words for n in range(1, len(word)))
        self._tails = frozenset(word[-n:] for word in words for n in range(1, len(word)))
        self._longest = max((len(word) for word in words), default=0)
        self._cores = frozenset(word.strip(_PUNCTUATION) for word in words)
        self._firsts = frozenset(word[0] for word in words)
        self._known: dict[str, str] = {}

    def protect(self, text: str) -> str:
        """Conversation text, safe to render: no part of it, alone or with what a template puts around it, forms a
        control token."""
        if len(text) > _SHORT:
            return self._protected(text)
        known = self._known.get(text)
        if known is None:
            known = self._protected(text)
            if len(self._known) >= _KEPT:
                self._known.clear()
            self._known[text] = known
        return known

    def _protected(self, text: str) -> str:
        text = clean(text)
        if not text or self._inside is None:
            return text
        if not self._firsts.isdisjoint(text):
            text = self._inside.sub(lambda found: found[1] + BREAK, text)
        if text.strip(_PUNCTUATION) in self._cores or self._ends_like_a_head(text):
            text += BREAK
        if self._starts_like_a_tail(text):
            text = BREAK + text
        return text

    def protect_tree(self, value: Any) -> Any:
        """`protect` for every string, keys included, of a JSON value. Tuples become lists."""
        if isinstance(value, str):
            return self.protect(value)
        if isinstance(value, Mapping):
            return {self.protect_tree(key): self.protect_tree(item) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self.protect_tree(item) for item in value]
        return value

    def split(self, rendered: str) -> tuple[Segment, ...]:
        """The rendered prompt as segments. Control tokens are recognised except in stretches, between two of the
        template's own control tokens, where conversation text spells one."""
        if BREAK not in rendered:
            return ((rendered, True),) if rendered else ()
        segments: list[Segment] = []
        trusted: list[str] = []
        start = 0
        ends = [(found.start(), found.end()) for found in self._pattern.finditer(rendered)] if self._pattern else []
        for found_start, found_end in [*ends, (len(rendered), len(rendered))]:
            plain = rendered[start:found_start]
            if BREAK in plain:
                if trusted:
                    segments.append(("".join(trusted), True))
                    trusted = []
                if text := plain.replace(BREAK, ""):
                    segments.append((text, False))
            else:
                trusted.append(plain)
            trusted.append(rendered[found_start:found_end])
            start = found_end
        if last := "".join(trusted):
            segments.append((last, True))
        return tuple(segments)

    def _ends_like_a_head(self, text: str) -> bool:
        return any(text[-n:] in self._heads for n in range(1, min(len(text), self._longest) + 1))

    def _starts_like_a_tail(self, text: str) -> bool:
        return any(text[:n] in self._tails for n in range(1, min(len(text), self._longest) + 1))


def trie_pattern(words: Sequence[str]) -> str:
    """A regular expression matching the longest of `words`, shared prefixes factored."""
    trie: dict[str, Any] = {}
    for word in words:
        node = trie
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}
    return _node_pattern(trie)


def _node_pattern(node: Mapping[str, Any]) -> str:
    branches: list[str] = []
    for char, child in node.items():
        if not char:
            continue
        text = re.escape(char)
        while len(child) == 1 and "" not in child:  # a straight run needs no group
            ((char, child),) = child.items()
            text += re.escape(char)
        branches.append(text + (_node_pattern(child) if any(child) else ""))
    body = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
    return f"(?:{body})?" if "" in node else body
