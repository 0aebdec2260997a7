"""One choice's output so far, folded from semantic events.

Every encoder builds its stream and its buffered answer from the same Accumulator, so they can't disagree. Owns the
order of blocks and which error a failed choice is; leaves wire shapes to the encoders.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from engine.types.events import (
    FirstToken,
    ObservedToken,
    PositionScore,
    PromptScored,
    ReasoningDelta,
    SemanticEvent,
    Terminated,
    TextDelta,
    TokensObserved,
    ToolCallCompleted,
    ToolCallStarted,
    Usage,
)
from protocols.errors import ExecutionFailed, OutputInvalid, ProtocolError, Unavailable

BlockKind = Literal["text", "reasoning", "tool"]


@dataclass(slots=True)
class Block:
    """A run of text or reasoning, or one call. `index`: its place among the choice's blocks. Of a call, `call` is its
    number, `pieces` holds its arguments, and `complete` turns true when they are there."""

    kind: BlockKind
    index: int
    pieces: list[str] = field(default_factory=list)
    call: int = -1
    id: str = ""
    name: str = ""
    complete: bool = False

    @property
    def text(self) -> str:
        if len(self.pieces) > 1:
            self.pieces[:] = ["".join(self.pieces)]
        return self.pieces[0] if self.pieces else ""


@dataclass(slots=True)
class Accumulator:
    """Folds the events of one choice. `keep_tokens`: remember observed tokens, not only count them."""

    keep_tokens: bool = False
    blocks: list[Block] = field(default_factory=list)
    tokens: list[ObservedToken] = field(default_factory=list)
    scores: list[PositionScore | None] = field(default_factory=list)
    started: bool = False
    cached: int = 0
    observed: int = 0
    observed_reasoning: int = 0
    end: Terminated | None = None

    def add(self, event: SemanticEvent) -> Block | None:
        """The block that `event` extended, opened or completed; None for the other events."""
        match event:
            case TextDelta(text):
                return self._extend("text", text)
            case TokensObserved(tokens):
                self._observe(tokens)
            case ReasoningDelta(text):
                return self._extend("reasoning", text)
            case FirstToken(cached):
                self.started, self.cached = True, cached
            case ToolCallStarted(index, id, name):
                block = Block("tool", len(self.blocks), call=index, id=id, name=name)
                self.blocks.append(block)
                return block
            case ToolCallCompleted():
                return self._complete(event)
            case PromptScored(scores):
                self.scores.extend(scores.entries)
            case Terminated():
                self.end = event
        return None

    def _extend(self, kind: BlockKind, text: str) -> Block:
        if not self.blocks or self.blocks[-1].kind != kind:
            self.blocks.append(Block(kind, len(self.blocks)))
        block = self.blocks[-1]
        block.pieces.append(text)
        return block

    def _observe(self, tokens: tuple[ObservedToken, ...]) -> None:
        self.observed += len(tokens)
        self.observed_reasoning += sum(token.region == "reasoning" for token in tokens)
        if self.keep_tokens:
            self.tokens.extend(tokens)

    def _complete(self, event: ToolCallCompleted) -> Block:
        for block in reversed(self.blocks):
            if block.kind == "tool" and block.call == event.index:
                break
        else:
            block = Block("tool", len(self.blocks), call=event.index)
            self.blocks.append(block)
        block.id, block.name, block.pieces, block.complete = event.id, event.name, [event.arguments], True
        return block

    @property
    def text(self) -> str:
        return "".join(block.text for block in self.blocks if block.kind == "text")

    @property
    def reasoning(self) -> str:
        return "".join(block.text for block in self.blocks if block.kind == "reasoning")

    @property
    def calls(self) -> list[Block]:
        """Completed calls in order. A call cut by the output limit never completes and is left out."""
        return [block for block in self.blocks if block.kind == "tool" and block.complete]

    def usage(self, prompt: int) -> Usage:
        """The final counts, or those so far of a choice that still runs, with `prompt` prompt tokens."""
        if self.end is not None and self.end.cause != "failed":
            return self.end.usage
        return Usage(prompt, self.cached, self.observed, self.observed_reasoning)


def failure(end: Terminated) -> ProtocolError:
    """The error of a choice that ended as "failed"."""
    match end.failure:
        case "unavailable":
            return Unavailable(end.message or "the model runtime is unavailable")
        case "output":
            return OutputInvalid(end.message or "the model's output is invalid")
        case _:
            return ExecutionFailed(end.message or "generation failed")
