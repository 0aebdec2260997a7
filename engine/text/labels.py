"""Which token a short text is directly after a prompt: what reading an answer from one token's probabilities needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.text.lowering import TokenizerPort, TokensPort


def label_ids(
    tokenizer: TokenizerPort, tokens: TokensPort, segments: Sequence[tuple[str, bool]], labels: Sequence[str]
) -> tuple[int | None, ...]:
    """For each label the token that it is directly after the joined `segments`; None where it isn't exactly one token,
    or changes the tokens before it."""
    if not segments or not labels:
        return (None,) * len(labels)
    text, trusted = segments[-1]
    tail = _tail(tokenizer, tokens, text, trusted)
    before = tokenizer.encode(tail, specials=trusted)
    found: list[int | None] = []
    for label in labels:
        ids = tokenizer.encode(tail + label, specials=trusted)
        single = len(ids) == len(before) + 1 and ids[:-1] == before and not tokens.is_special(ids[-1])
        found.append(ids[-1] if single else None)
    return tuple(found)


def _tail(tokenizer: TokenizerPort, tokens: TokensPort, text: str, trusted: bool) -> str:
    """The end of `text` from its last special token on, which encodes as it does inside the whole; `text` itself
    where there is none. Encoding each label after a long prompt would cost as much as the prompt each time."""
    ids = tokenizer.encode(text, specials=trusted)
    last = next((index for index in range(len(ids) - 1, -1, -1) if tokens.is_special(ids[index])), None)
    if last is None:
        return text
    start = text.rfind(tokens.text(ids[last]))
    tail = text[start:] if start >= 0 else text
    return tail if tokenizer.encode(tail, specials=trusted) == ids[last:] else text
