"""Streams of the OpenAI protocols, read back: frames to chunks, chunks folded to the buffered object, and scripted
tokens with observations."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from hypothesis import strategies as st

from engine.types.events import (
    FirstToken,
    ObservedToken,
    PositionScore,
    PromptScored,
    PromptScores,
    Region,
    SemanticEvent,
    Terminated,
    TextDelta,
    TokenRecord,
    TokensObserved,
    Usage,
)
from protocols.encoder import Encoder, ResponseContext
from protocols.fields import DecodeLimits

VOCABULARY = 200
LIMITS = DecodeLimits(VOCABULARY, prompt_logprobs=True)


def token_bytes(id: int) -> bytes:
    """Ids below 100 are short words, the others single bytes, most of them no UTF-8 of their own."""
    return f" w{id}".encode() if id < 100 else bytes([56 + id])


def context(prompts: Sequence[int] = (5,), *, echo: Sequence[str] = (), images: int = 0) -> ResponseContext:
    return ResponseContext(
        request_id="req-1",
        model="local/model",
        created=1_700_000_000,
        token_bytes=token_bytes,
        prompt_tokens=tuple(prompts),
        prompt_ids=tuple(tuple(range(10, 10 + length)) for length in prompts),
        echo_texts=tuple(echo),
        image_tokens=images,
    )


def chunks(frames: Iterable[bytes]) -> list[dict[str, Any]]:
    """The JSON of a successful stream's frames; asserts that it ends in [DONE], once."""
    frames = list(frames)
    assert all(frame.startswith(b"data: ") and frame.endswith(b"\n\n") and frame.count(b"\n") == 2 for frame in frames)
    assert [frame for frame in frames if b"[DONE]" in frame] == frames[-1:] == [b"data: [DONE]\n\n"]
    return [json.loads(frame[6:]) for frame in frames[:-1]]


def one(events: Sequence[SemanticEvent], size: int = 1) -> list[tuple[int, Sequence[SemanticEvent]]]:
    """The events of the only choice as they come, `size` at a time."""
    return [(0, events[start : start + size]) for start in range(0, len(events), size)]


def sequence(*events: SemanticEvent) -> tuple[SemanticEvent, ...]:
    return events


def stream(encoder: Encoder, feeds: Iterable[tuple[int, Sequence[SemanticEvent]]]) -> list[bytes]:
    frames: list[bytes] = []
    for choice, events in feeds:
        frames += encoder.feed(choice, events)
    return frames + encoder.finish()


def buffered(encoder: Encoder, feeds: Iterable[tuple[int, Sequence[SemanticEvent]]]) -> dict[str, Any]:
    for choice, events in feeds:
        assert encoder.feed(choice, events) == []
    found: dict[str, Any] = json.loads(json.dumps(encoder.result()))
    return found


def records(ids: Sequence[int], region: Region = "text", *, time: float = 0.0) -> TokensObserved:
    """Observed tokens with two alternatives each; offsets as if every token's text came at once."""
    found, offset = [], 0
    for id in ids:
        record = TokenRecord(id, -0.25 - id, ((id, -0.25 - id), (1, -9.5)), time=time)
        found.append(ObservedToken(record, token_bytes(id), offset, region))
        offset += len(token_bytes(id).decode("utf-8", "replace"))
    return TokensObserved(tuple(found))


def scored(start: int, length: int) -> PromptScored:
    """Scores of positions [start, start + length), with three alternatives each; position 0 has none."""
    return PromptScored(
        PromptScores(
            start,
            tuple(
                None
                if p == 0
                else PositionScore(10 + p, -1.0 - p, 2, ((3, -0.5, 1), (10 + p, -1.0 - p, 2), (4, -7.0, 3)))
                for p in range(start, start + length)
            ),
        )
    )


@st.composite
def raw_outputs(draw: st.DrawFn, *, prompt: int = 5, scores: bool = False) -> list[SemanticEvent]:
    """A raw completion: perhaps prompt scores in chunks, then tokens and text, decoupled, and one end."""
    events: list[SemanticEvent] = []
    position = 0
    while scores and position < prompt:
        size = draw(st.integers(1, prompt - position))
        events.append(scored(position, size))
        position += size
    count = 0
    if draw(st.booleans()):
        events.append(FirstToken(2))
        for kind in draw(st.lists(st.sampled_from(("text", "tokens")), max_size=12)):
            if kind == "text":
                events.append(TextDelta(draw(st.text(max_size=6))))
            else:
                ids = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=3))
                events.append(records(ids))
                count += len(ids)
    cause, stop = draw(st.sampled_from((("eos", None), ("limit", None), ("string_stop", "END"), ("token_stop", 7))))
    usage = Usage(prompt=prompt, cached=2, completion=count)
    return [*events, Terminated(cause, usage, stop=stop)]  # type: ignore[arg-type]


def feeds(data: st.DataObject, outputs: Sequence[Sequence[SemanticEvent]]) -> list[tuple[int, list[SemanticEvent]]]:
    """Any interleaving of the choices' events in batches of any size."""
    left = [list(events) for events in outputs]
    found = []
    while waiting := [choice for choice, events in enumerate(left) if events]:
        choice = data.draw(st.sampled_from(waiting))
        size = data.draw(st.integers(1, len(left[choice])))
        found.append((choice, left[choice][:size]))
        del left[choice][:size]
    return found
