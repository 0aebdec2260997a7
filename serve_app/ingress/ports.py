"""What an ingress needs from the rest of the graph, as protocols, so that it runs the same over Ray and in tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Literal, Protocol

from engine.types.events import Update
from engine.types.request import GenerationRequest, PreparedRequest
from engine.types.telemetry import Snapshot

Outcome = Literal["completed", "failed", "cancelled"]


class PreprocessorPort(Protocol):
    async def prepare(self, request: GenerationRequest) -> PreparedRequest:
        """Lowers a request. Raises engine.types.request.RequestError for what is a 400."""
        ...

    async def count(self, request: GenerationRequest) -> int:
        """The exact number of prompt tokens that `prepare` would give, without a generation."""
        ...

    async def label_ids(self, request: GenerationRequest, labels: Sequence[str]) -> tuple[int | None, ...]:
        """For each label the token that it is directly after the rendered prompt; None where it isn't one token."""
        ...


class Generation(Protocol):
    """One group being generated. Iterate once; then call `finish` exactly once, whatever happened."""

    def __aiter__(self) -> AsyncIterator[tuple[Update, ...]]:
        """Batches of updates in order, until every child has ended. Raises protocols.errors.ProtocolError when the
        engine is lost and the group can't be resubmitted."""
        ...

    def stop(self, child: int, tokens: int) -> None:
        """The text of `child` ended (string stop, output failure) after `tokens` tokens; the engine need not go on.
        The child's `end` update still comes."""
        ...

    def finish(self, outcomes: tuple[Outcome, ...]) -> None:
        """Delivery is over, per child: frees the HTTP slots, counts completed and failed, cancels what still runs."""
        ...


class EnginePort(Protocol):
    async def generate(self, request_id: str, request: PreparedRequest, after: Generation | None = None) -> Generation:
        """Enqueues a group whole. Returns once the engine has acknowledged it (not yet admitted). `after`: a generation
        that has ended and is still to be finished; its slots pass to the new one.

        Raises SlotsExhausted (429), Unavailable (503: queue full, paused, no runtime) or InvalidRequest (more choices
        than slots exist).
        """
        ...


class ClusterPort(Protocol):
    """What discovery, health and metrics ask of the rest of the graph. None of these takes a generation slot, and each
    answers from memory or within a second."""

    async def health(self) -> str | None:
        """None while the model runtime is healthy, else what is wrong (rebuilding, or broken)."""
        ...

    async def snapshot(self) -> Snapshot:
        """The telemetry hub's sum over all processes. Raises Unavailable when the hub can't be reached."""
        ...
