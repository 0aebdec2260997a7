"""Token observations on the wire: log probabilities of Chat, Completions and Responses, and prompt scores.

Owns names of tokens, the order and completeness of alternatives, and offsets. Values come from the engine as they
are; only what JSON can't hold changes (-9999.0 for a non-finite log probability).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from engine.types.events import ObservedToken, PositionScore, TokenRecord

NOT_FINITE: Final = -9999.0

TokenBytes = Callable[[int], bytes]


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else NOT_FINITE


@dataclass(frozen=True, slots=True)
class TokenNames:
    """How a response spells tokens. `as_ids`: as token_id:<id>, whatever their text."""

    token_bytes: TokenBytes
    as_ids: bool = False

    def name(self, id: int) -> str:
        return f"token_id:{id}" if self.as_ids else self.text(id)

    def text(self, id: int) -> str:
        """The decoded token; bytes that are no UTF-8 of their own become replacement characters."""
        return self.token_bytes(id).decode("utf-8", "replace")


def has_entry(token: ObservedToken) -> bool:
    """Forced tokens and tokens without a computed log probability have no entry."""
    return token.record.logprob is not None and not token.record.forced


def chat_entry(record: TokenRecord, names: TokenNames, *, explicit: bool) -> dict[str, Any]:
    """One entry of Chat's and Responses' `logprobs`. `explicit`: the alternatives are the caller's ids, among which
    the chosen token is included last when it isn't there."""
    chosen = finite(record.logprob if record.logprob is not None else NOT_FINITE)
    alternatives = _with_chosen(record, chosen) if explicit else record.alternatives
    entry = _spelled(record.id, chosen, names)
    entry["top_logprobs"] = [_spelled(id, value, names) for id, value in alternatives]
    return entry


def chat_entries(tokens: Iterable[ObservedToken], names: TokenNames, *, explicit: bool) -> list[dict[str, Any]]:
    return [chat_entry(token.record, names, explicit=explicit) for token in tokens if has_entry(token)]


def _spelled(id: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    return {"token": names.name(id), "logprob": finite(logprob), "bytes": list(names.token_bytes(id))}


def _with_chosen(record: TokenRecord, chosen: float) -> Sequence[tuple[int, float]]:
    if any(id == record.id for id, _ in record.alternatives):
        return record.alternatives
    return (*record.alternatives, (record.id, chosen))


@dataclass(slots=True)
class LogprobArrays:
    """Completions' four parallel arrays."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, other: LogprobArrays) -> None:
        self.tokens += other.tokens
        self.token_logprobs += other.token_logprobs
        self.top_logprobs += other.top_logprobs
        self.text_offset += other.text_offset

    def wire(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }


def generated_arrays(tokens: Iterable[ObservedToken], names: TokenNames, start: int) -> LogprobArrays:
    """Entries of generated tokens. `start`: characters of the echoed text before them."""
    arrays = LogprobArrays()
    for token in tokens:
        if not has_entry(token):
            continue
        record = token.record
        chosen = finite(record.logprob if record.logprob is not None else NOT_FINITE)
        arrays.tokens.append(names.name(record.id))
        arrays.token_logprobs.append(chosen)
        arrays.top_logprobs.append(_by_name(_with_chosen(record, chosen), names))
        arrays.text_offset.append(start + token.text_offset)
    return arrays


@dataclass(slots=True)
class PromptArrays:
    """Turns the prompt's scores, chunk by chunk, into array entries. `offset`: characters of the decoded token strings
    so far. `alternatives`: how many natural alternatives the caller wants of those computed."""

    ids: Sequence[int]
    names: TokenNames
    alternatives: int
    offset: int = 0
    position: int = 0

    def entries(self, scores: Iterable[PositionScore | None]) -> LogprobArrays:
        arrays = LogprobArrays()
        for score in scores:
            id = self.ids[self.position]
            arrays.tokens.append(self.names.name(id))
            arrays.text_offset.append(self.offset)
            arrays.token_logprobs.append(None if score is None else finite(score.logprob))
            arrays.top_logprobs.append(None if score is None else self._alternatives(score))
            self.offset += len(self.names.text(id))
            self.position += 1
        return arrays

    def _alternatives(self, score: PositionScore) -> dict[str, float]:
        pairs = [(id, value) for id, value, _ in score.alternatives[: self.alternatives]]
        if all(id != score.id for id, _ in pairs):
            pairs.append((score.id, score.logprob))
        return _by_name(pairs, self.names)


def _by_name(pairs: Iterable[tuple[int, float]], names: TokenNames) -> dict[str, float]:
    """Log probabilities by token string; the first entry stays when several ids have the same string."""
    found: dict[str, float] = {}
    for id, value in pairs:
        found.setdefault(names.name(id), finite(value))
    return found


def prompt_logprobs(
    scores: Iterable[PositionScore | None], names: TokenNames, alternatives: int
) -> list[dict[str, dict[str, Any]] | None]:
    """The `prompt_logprobs` list: for each position null, or the actual token and then `alternatives` others by id."""
    return [None if score is None else _scored(score, names, alternatives) for score in scores]


def _scored(score: PositionScore, names: TokenNames, alternatives: int) -> dict[str, dict[str, Any]]:
    found = {str(score.id): _rank(score.id, score.logprob, score.rank, names)}
    for id, value, rank in score.alternatives[:alternatives]:
        found.setdefault(str(id), _rank(id, value, rank, names))
    return found


def _rank(id: int, logprob: float, rank: int, names: TokenNames) -> dict[str, Any]:
    return {"logprob": finite(logprob), "rank": rank, "decoded_token": names.text(id)}
