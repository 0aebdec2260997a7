"""Token ids to text, one token at a time: exact bytes, incremental UTF-8, and where each token begins.

A character whose bytes are spread over tokens is released by the token that completes it; bytes that aren't UTF-8
become U+FFFD, as a decoder of the whole output would make them. Nothing of the prompt is ever looked at.
"""

from __future__ import annotations

import codecs

from engine.text.tokenizer import TokenTable


class Detokenizer:
    """One choice's decoder. `offset`: characters released so far."""

    __slots__ = ("_bytes", "_decoder", "_partial", "_whole", "offset")

    def __init__(self, tokens: TokenTable) -> None:
        self._whole = tokens.whole
        self._bytes = tokens.bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._partial = False
        self.offset = 0

    def feed(self, token: int) -> tuple[str, int, bool]:
        """(text released, characters before the token's first byte, whether the text is the token's own and whole).

        A token that begins inside a character counts the characters before that one.
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
        text = self._decoder.decode(b"", True)
        self._decoder.reset()
        self._partial = False
        self.offset += len(text)
        return text

    def _decode(self, token: int) -> tuple[str, int, bool]:
        data, began = self._bytes(token), self._partial
        # The first byte alone tells whether it continues the character in progress or breaks it off.
        head = self._decoder.decode(data[:1])
        broke = began and bool(data) and (len(head) > 1 or (head == "\ufffd" and self._decoder.getstate()[0] != b""))
        text = head + self._decoder.decode(data[1:])
        offset = self.offset + broke
        self.offset += len(text)
        self._partial = self._decoder.getstate()[0] != b""
        return text, offset, not began and not self._partial
