"""What comes out: committed tokens from the engine, semantic events from the output pipeline.

TokenRecord, PromptScores and Update travel from the engine to an ingress; SemanticEvents never leave the
ingress process. Exactly one Terminated ends each choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EndCause = Literal["eos", "token_stop", "limit", "cancelled", "failed"]
Cause = Literal["eos", "token_stop", "string_stop", "limit", "failed"]
Region = Literal["text", "reasoning", "tool", "control"]
FailureKind = Literal["unavailable", "execution", "output"]


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """One committed token. `logprob` is its raw log probability when asked for; `alternatives` are
    (id, logprob) pairs in the contract's order, the chosen token not necessarily among them. `forced` tokens
    (a budget's close) have no logprob entry. `time`: seconds since the epoch, 0.0 unless asked for."""

    id: int
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()
    forced: bool = False
    time: float = 0.0


@dataclass(frozen=True, slots=True)
class PositionScore:
    """A prompt position: the actual token and its alternatives as (id, logprob, rank)."""

    id: int
    logprob: float
    rank: int
    alternatives: tuple[tuple[int, float, int], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Scores of one completed prompt chunk: entries for positions [start, start + len(entries)). The entry of
    position 0 and of image positions is None."""

    start: int
    entries: tuple[PositionScore | None, ...]


@dataclass(frozen=True, slots=True)
class EngineEnd:
    """The engine's provisional end of one choice; the ingress may know a better cause (a string stop).
    `kind` and `message` are set for "failed". `budget_cut`: the reasoning budget forced a close."""

    cause: EndCause
    kind: FailureKind = "execution"
    message: str = ""
    budget_cut: bool = False


@dataclass(frozen=True, slots=True)
class Update:
    """News of one choice of a request group, in order. `cached_tokens` is set once, in the first update of the
    choice: the prompt tokens reused at its first admission."""

    child: int
    records: tuple[TokenRecord, ...] = ()
    scores: PromptScores | None = None
    cached_tokens: int | None = None
    end: EngineEnd | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Native token counts of one choice. `image` tokens are part of `prompt`; `reasoning` of `completion`."""

    prompt: int
    cached: int
    completion: int
    reasoning: int = 0
    image: int = 0


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """A call whose name is known. `index` counts the calls of the choice from 0; `id` stays the same in every
    event and in the final object."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallCompleted:
    """`arguments` is the JSON text of an object."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ObservedToken:
    """A returned token with what the protocols report of it. `data`: its exact bytes. `text_offset`: Unicode
    characters of the choice's raw text before its first byte. `region`: where its first byte went."""

    record: TokenRecord
    data: bytes
    text_offset: int
    region: Region


@dataclass(frozen=True, slots=True)
class TokensObserved:
    """Returned tokens, in order, decoupled from text deltas: a token is observed once, when its region is
    known. Sent for every returned token, whether or not logprobs were asked for."""

    tokens: tuple[ObservedToken, ...]


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The engine committed its first token, perhaps one hidden by stop matching or text decoding. `cached`: the
    choice's reused prompt tokens, for usage reported while it runs."""

    cached: int = 0


@dataclass(frozen=True, slots=True)
class PromptScored:
    scores: PromptScores


@dataclass(frozen=True, slots=True)
class Terminated:
    """The end of a choice. `cause` is final; `stop` is the matched string of "string_stop", or the last id of
    the matched sequence of "token_stop". For "failed", `failure` and `message` say why, and `usage` is what was
    counted."""

    cause: Cause
    usage: Usage
    stop: str | int | None = None
    tool_calls: int = 0
    failure: FailureKind = "execution"
    message: str = ""


SemanticEvent = (
    FirstToken
    | TextDelta
    | ReasoningDelta
    | ToolCallStarted
    | ToolCallCompleted
    | TokensObserved
    | PromptScored
    | Terminated
)
