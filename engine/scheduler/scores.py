"""Prompt scores of a completed chunk, from what the ranks computed."""

from __future__ import annotations

from collections.abc import Sequence

from engine.scheduler.flight import StepMismatch
from engine.scheduler.step import ScoredRow
from engine.types.events import PositionScore, PromptScores
from engine.types.request import ImageSpan


def chunk_scores(
    start: int, end: int, scored: ScoredRow | None, images: Sequence[ImageSpan], *, delivered: int
) -> PromptScores | None:
    """Scores of positions [start, end), without the first ones when `delivered` positions were sent before; None when
    all were. Position 0 and image positions have none. Raises StepMismatch when the ranks scored other positions."""
    entries = scored.entries if scored is not None else []
    expected = end - max(start, 1)
    if len(entries) != expected:
        raise StepMismatch(f"positions {max(start, 1)} to {end} were asked for, {len(entries)} scores came")
    if end <= delivered:
        return None
    scores: list[PositionScore | None] = [None] * (end - start - expected)
    scores += [PositionScore(token, logprob, rank, tuple(others)) for token, logprob, rank, others in entries]
    for span in images:
        for position in range(max(span.start, start), min(span.start + span.length, end)):
            scores[position - start] = None
    first = max(start, delivered)
    return PromptScores(first, tuple(scores[first - start :]))
