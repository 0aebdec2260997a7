"""Which token a short text is directly after a prompt: what reading an answer from one token's probabilities needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.text.lowering import TokenizerPort, TokensPort


class Labels:
    """Finds label tokens for one model. Thread-safe."""

    def __init__(self, tokenizer: TokenizerPort, tokens: TokensPort) -> None:
        self._tokenizer = tokenizer
        self._is_control = tokens.is_control
        self._controls = {tokens.text(id) for id in range(tokens.vocab_size) if tokens.is_control(id)} - {""}

    def after(self, segments: Sequence[tuple[str, bool]], labels: Sequence[str]) -> tuple[int | None, ...]:
        """For each label the token that it is directly after the joined `segments`; None where it isn't exactly one
        token, or changes the tokens before it."""
        if not segments or not labels:
            return (None,) * len(labels)
        text, trusted = segments[-1]
        tail, before = self._tail(text, trusted)
        return tuple(self._single(tail + label, before, trusted) for label in labels)

    def _single(self, text: str, before: Sequence[int], trusted: bool) -> int | None:
        ids = self._tokenizer.encode(text, specials=trusted)
        single = len(ids) == len(before) + 1 and ids[:-1] == before and not self._is_control(ids[-1])
        return ids[-1] if single else None

    def _tail(self, text: str, trusted: bool) -> tuple[str, list[int]]:
        """The end of `text` from its last control token on, and its ids. What stands before a control token doesn't
        change how the rest is encoded, and encoding a long prompt once a label would be slow."""
        start = max((text.rfind(control) for control in self._controls), default=-1) if trusted else -1
        if start > 0:
            ids = self._tokenizer.encode(text[start:], specials=True)
            if ids and self._is_control(ids[0]):
                return text[start:], ids
        return text, self._tokenizer.encode(text, specials=trusted)
