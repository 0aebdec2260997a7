"""What every protocol's encoder is to its ingress.

An encoder owns one response. It is fed semantic events; streaming and buffered delivery use the same accumulated
state, so they can't disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.types.events import SemanticEvent
from engine.types.request import SamplingParams
from protocols.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """What an encoder needs besides the request. `created`: Unix seconds. `token_text(id)` and `token_bytes(id)` come
    from the model's token table. `prompt_tokens`: per prompt, the prepared lengths. `prompt_ids`: the same prompts'
    ids, kept only when the request asked for them. `echo_texts`: per prompt, with `echo`. `images`: image tokens of
    the prompt. `sampling`: what is in force for the first choice, after defaults and clamping."""

    request_id: str
    model: str
    created: int
    token_bytes: Any
    prompt_tokens: tuple[int, ...]
    prompt_ids: tuple[tuple[int, ...], ...] = ()
    echo_texts: tuple[str, ...] = ()
    image_tokens: int = 0
    sampling: SamplingParams | None = None


class Encoder(Protocol):
    def feed(self, choice: int, events: Sequence[SemanticEvent]) -> list[bytes]:
        """Accumulates the events of `choice` (0-based over all choices) and returns the SSE frames they cause."""
        ...

    def finish(self) -> list[bytes]:
        """The last frames of a stream whose every choice has terminated; after a failure, the protocol's terminal error
        and no success terminator."""
        ...

    def fail(self, error: ProtocolError) -> list[bytes]:
        """The terminal frames when the stream can't go on. Nothing may follow."""
        ...

    def result(self) -> dict[str, Any]:
        """The buffered response object. Raises ProtocolError when a choice failed."""
        ...


def sse(data: bytes, event: str | None = None) -> bytes:
    """One server-sent event with a single data line."""
    head = f"event: {event}\n".encode() if event else b""
    return head + b"data: " + data + b"\n\n"
