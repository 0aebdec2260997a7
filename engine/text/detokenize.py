"""Token ids to text, one token at a time: exact bytes, incremental UTF-8, and where each token begins.

A character whose bytes are spread over tokens is released by the token that completes it; bytes that aren't UTF-8
become U+FFFD, as a decoder of the whole output would make them. Nothing of the prompt is ever looked at.
"""

from __future__ import annotations

import codecs

from engine.text.tokenizer import TokenTable


class Detokenizer:
    """One choice's decoder. `offset`: characters released so far."""

    __slots__ = ("_bytes", "_partial", "_whole", "offset")

    def __init__(self, tokens: TokenTable) -> None:
        self._whole = tokens.whole
        self._bytes = tokens.bytes
        self._partial = b""
        self.offset = 0

    def feed(self, token: int) -> tuple[str, int, bool]:
        """(text released, characters before the token's first byte, whether the text is the token's own and whole).

        A token that begins inside a character counts the characters before that one. One that breaks a character off
        releases that one's U+FFFD before its own text.
        """
        if not self._partial:
            text = self._whole[token]
            if text is not None:
                offset = self.offset
                self.offset = offset + len(text)
                return text, offset, True
        return self._decode(token)

    def flush(self) -> str:
        """Ends the character in progress, if any: U+FFFD for its bytes."""
        text = "\ufffd" if self._partial else ""
        self._partial = b""
        self.offset += len(text)
        return text

    def _decode(self, token: int) -> tuple[str, int, bool]:
        began, data = self._partial, self._bytes(token)
        broke = bool(began and data) and not _continues(began, data[0])
        text, used = codecs.utf_8_decode(began + data, "replace", False)
        rest = (began + data)[used:]
        if _surrogate(rest):
            text, rest = text + "\ufffd\ufffd", b""
        offset = self.offset + broke
        self.offset += len(text)
        self._partial = rest
        return text, offset, not began and not rest


def _continues(began: bytes, byte: int) -> bool:
    """Whether `byte` belongs to the character that `began`."""
    grown = began + bytes((byte,))
    try:
        codecs.utf_8_decode(grown, "strict", False)
    except UnicodeDecodeError:
        return False
    return not _surrogate(grown)


def _surrogate(began: bytes) -> bool:
    """The start of an encoded surrogate: Python waits for its last byte, but it can only be invalid."""
    return len(began) == 2 and began[0] == 0xED and began[1] >= 0xA0
