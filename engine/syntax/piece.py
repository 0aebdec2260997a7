"""The seam between the output pipeline and a family's syntax machine.

A machine is fed the generated text token by token and answers with pieces (text assigned to a region) and call
events. It is the same machine in the ingress (events wanted) and in the engine replica (only `reasoning_open` and
`tool_pending` asked, for budgets and grammars).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.syntax.patterns import Pattern
from engine.types.events import Region


@dataclass(frozen=True, slots=True)
class Segment:
    """Text released by one token. `token`: its index in the choice's output. `id`: the token id if `text` is the
    token's whole text, else None (a piece clipped by a stop, or text of a character spread over several tokens)."""

    token: int
    id: int | None
    text: str


@dataclass(frozen=True, slots=True)
class Piece:
    """`text` of token `token` belongs to `region`. Regions "tool" and "control" are markup and never shown."""

    token: int
    region: Region
    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call has begun and its name is known. It may stay unfinished: then no CallCompleted follows."""

    name: str


@dataclass(frozen=True, slots=True)
class CallCompleted:
    """`arguments`: JSON text of an object. Always follows its CallStarted directly or after pieces of region "tool"."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class SyntaxFailure:
    """The output violates the syntax in a way the contract calls an error; ends the choice as failed/output."""

    message: str


@dataclass(frozen=True, slots=True)
class Ending:
    """How reasoning or a call may end where a constrained answer is awaited: with one of `literals`, of which the last
    characters of `held` may be a part already. Behind it stand the answer (`due`) or one of `openers`, perhaps after
    whitespace that is markup (`drops`)."""

    literals: tuple[str, ...]
    held: str
    due: bool
    openers: tuple[Pattern, ...]
    drops: bool


SyntaxEvent = Piece | CallStarted | CallCompleted | SyntaxFailure


class Syntax(Protocol):
    """One choice's machine. Any chunking of the same tokens gives the same events, merged pieces aside."""

    @property
    def reasoning_open(self) -> bool:
        """Reasoning is open after what was fed; unambiguously so unless `tool_pending`."""
        ...

    @property
    def tool_pending(self) -> bool:
        """A tool envelope is open, or a possible delimiter is still undecided."""
        ...

    def feed(self, segment: Segment) -> list[SyntaxEvent]: ...

    def finish(self, *, truncated: bool) -> list[SyntaxEvent]:
        """Ends the output. `truncated`: by the output limit or the caller's stop, so an unfinished call is omitted;
        otherwise (EOS) an incomplete recognised call is a SyntaxFailure."""
        ...
