"""Scores of a chunk, from what the ranks computed."""

from __future__ import annotations

import pytest

from engine.scheduler.flight import StepMismatch
from engine.scheduler.scores import chunk_scores
from engine.scheduler.step import ScoredRow
from engine.types.events import PositionScore, PromptScores
from engine.types.request import ImageSpan


def row(start: int, end: int) -> ScoredRow:
    return ScoredRow(0, start, [(position, -1.0, 1, [(5, -2.0, 2)]) for position in range(start, end)])


def entry(position: int) -> PositionScore:
    return PositionScore(position, -1.0, 1, ((5, -2.0, 2),))


def test_the_first_position_has_no_score() -> None:
    assert chunk_scores(0, 3, row(1, 3), (), delivered=0) == PromptScores(0, (None, entry(1), entry(2)))
    assert chunk_scores(3, 5, row(3, 5), (), delivered=3) == PromptScores(3, (entry(3), entry(4)))
    assert chunk_scores(0, 1, None, (), delivered=0) == PromptScores(0, (None,))


def test_what_was_delivered_is_not_sent_again() -> None:
    assert chunk_scores(0, 3, row(1, 3), (), delivered=3) is None
    assert chunk_scores(0, 4, row(1, 4), (), delivered=3) == PromptScores(3, (entry(3),))


def test_image_positions_have_no_scores() -> None:
    spans = (ImageSpan(2, 2, b""), ImageSpan(6, 4, b""))
    scores = chunk_scores(1, 7, row(1, 7), spans, delivered=0)
    assert scores == PromptScores(1, (entry(1), None, None, entry(4), entry(5), None))


def test_missing_scores_are_an_error() -> None:
    with pytest.raises(StepMismatch, match="2 scores came"):
        chunk_scores(0, 5, row(1, 3), (), delivered=0)
    with pytest.raises(StepMismatch):
        chunk_scores(3, 5, None, (), delivered=0)
