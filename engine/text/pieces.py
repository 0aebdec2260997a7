"""Encodes a text in pieces between control tokens, and remembers the long ones.

Conversations come back turn after turn, and questions over a common state, with most of their text unchanged; a piece
between two control tokens has the same ids wherever it stands, so it needs encoding once. Exact: where a tokenizer
gives no such promise, texts are encoded whole.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from typing import Any, Final

from tokenizers import Tokenizer as LibraryTokenizer

from engine.text.control import trie_pattern

LONG: Final = 512
"""Characters from which on a piece is remembered; shorter ones cost less than looking for them."""

KEPT: Final = 4 * 2**20
"""Characters of all remembered pieces; the least recently used go first."""


class Pieces:
    """Encodes with `library`, without its frame. `added`: the added tokens of its definition; `borders`: those at which
    texts may be cut. Thread-safe."""

    def __init__(
        self,
        library: LibraryTokenizer,
        added: Sequence[Mapping[str, Any]],
        borders: Container[str] = (),
        *,
        kept: int = KEPT,
    ) -> None:
        self._library = library
        self._pattern = _pattern(added) if borders else None
        self._wanted = borders
        self._borders: dict[str, bool] = {}
        self._room = kept
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, control tokens recognised."""
        if len(text) < LONG:
            return self._whole(text)
        if self._pattern is None:
            return self._remembered(text)
        ids: list[int] = []
        short = start = 0  # text[short:start] is not encoded yet and ends with a border
        for found in self._pattern.finditer(text):
            if not self._is_border(found[0]):
                continue
            if found.start() - start >= LONG:
                ids += self._whole(text[short:start])
                ids += self._remembered(text[start : found.start()])
                short = found.start()
            start = found.end()
        if len(text) - start < LONG:
            return ids + self._whole(text[short:])
        return ids + self._whole(text[short:start]) + self._remembered(text[start:])

    def _whole(self, text: str) -> list[int]:
        return list(self._library.encode(text, add_special_tokens=False).ids) if text else []

    def _remembered(self, piece: str) -> list[int]:
        with self._lock:
            known = self._known.get(piece)
            if known is not None:
                self._known.move_to_end(piece)
                return known.tolist()
        ids = self._whole(piece)
        with self._lock:
            if piece not in self._known and len(piece) <= self._room:
                self._known[piece] = array("i", ids)
                self._size += len(piece)
                while self._size > self._room:
                    self._size -= len(self._known.popitem(last=False)[0])
        return ids

    def _is_border(self, word: str) -> bool:
        """Whether texts before and after `word` are encoded as if they stood alone (a SentencePiece model may treat the
        beginning of a text differently). Tried once."""
        known = self._borders.get(word)
        if known is None:
            parts = ("a b ", word, " c d", word, "e\n")
            apart = [id for part in parts for id in self._whole(part)]
            known = word in self._wanted and len(self._whole(word)) == 1 and self._whole("".join(parts)) == apart
            self._borders[word] = known
        return known


def _pattern(added: Sequence[Mapping[str, Any]]) -> re.Pattern[str] | None:
    """Finds added tokens as the library does: in the raw text, from the left, the longest first. None where a token
    takes text around it along, or looks at it."""
    words = {str(entry["content"]) for entry in added if not entry.get("normalized")}
    if not words or any(entry.get(flag) for entry in added for flag in ("lstrip", "rstrip", "single_word")):
        return None
    return re.compile(trie_pattern(sorted(words)), re.DOTALL)
