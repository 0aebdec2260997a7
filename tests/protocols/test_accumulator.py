"""The ordered fold of events, for any chunking."""

from __future__ import annotations

import pytest
from hypothesis import given

from engine.types.events import (
    FirstToken,
    PositionScore,
    PromptScored,
    PromptScores,
    ReasoningDelta,
    SemanticEvent,
    TextDelta,
    TokensObserved,
    ToolCallCompleted,
    ToolCallStarted,
    Usage,
)
from protocols.accumulator import Accumulator, failure
from protocols.errors import ExecutionFailed, OutputInvalid, Unavailable
from tests.support.scenarios import USAGE, call, end, observed, outputs


def fold(events: list[SemanticEvent], *, keep_tokens: bool = False) -> Accumulator:
    state = Accumulator(keep_tokens=keep_tokens)
    for event in events:
        state.add(event)
    return state


def test_blocks_keep_their_order() -> None:
    state = fold(
        [ReasoningDelta("a"), ReasoningDelta("b"), TextDelta("c"), *call(0, "read", {}), TextDelta("d"), end()]
    )
    assert [(block.kind, block.index) for block in state.blocks] == [
        ("reasoning", 0),
        ("text", 1),
        ("tool", 2),
        ("text", 3),
    ]
    assert (state.reasoning, state.text) == ("ab", "cd")


def test_add_returns_the_block_that_changed() -> None:
    state = Accumulator()
    first = state.add(TextDelta("a"))
    assert first is state.add(TextDelta("b")) and first is not None and first.pieces == ["a", "b"]
    opened = state.add(ToolCallStarted(0, "call_0", "read"))
    assert opened is not None and not opened.complete
    assert state.add(ToolCallCompleted(0, "call_0", "read", "{}")) is opened
    assert [block.name for block in state.calls] == ["read"]
    assert state.add(FirstToken()) is None and state.add(end()) is None


def test_a_call_that_never_completes_is_left_out() -> None:
    assert fold([*call(0, "read", {}), ToolCallStarted(1, "call_1", "cut"), end("limit")]).calls[-1].name == "read"


def test_usage_so_far_and_at_the_end() -> None:
    state = fold([FirstToken(24), observed("reasoning", 1, 2), observed("text", 3)])
    assert state.usage(40) == Usage(prompt=40, cached=24, completion=3, reasoning=2)
    state.add(end())
    assert state.usage(40) == USAGE


def test_tokens_are_kept_only_when_asked() -> None:
    events: list[SemanticEvent] = [observed("text", 1, 2)]
    assert fold(events).tokens == [] and len(fold(events, keep_tokens=True).tokens) == 2


def test_scores_of_all_chunks() -> None:
    score = PositionScore(1, -1.0, 1)
    state = fold([PromptScored(PromptScores(0, (None, score))), PromptScored(PromptScores(2, (score,)))])
    assert state.scores == [None, score, score]


@given(outputs())
def test_nothing_is_lost(events: list[SemanticEvent]) -> None:
    state = fold(events, keep_tokens=True)
    assert state.text == "".join(event.text for event in events if isinstance(event, TextDelta))
    assert state.reasoning == "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    completed = [event for event in events if isinstance(event, ToolCallCompleted)]
    assert [(c.call, c.id, c.name, c.text) for c in state.calls] == [
        (c.index, c.id, c.name, c.arguments) for c in completed
    ]
    assert state.observed == sum(len(event.tokens) for event in events if isinstance(event, TokensObserved))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("unavailable", Unavailable), ("execution", ExecutionFailed), ("output", OutputInvalid)],
)
def test_failures_are_typed(kind: str, expected: type[Exception]) -> None:
    error = failure(end("failed", failure=kind, message="why"))  # type: ignore[arg-type]
    assert type(error) is expected and error.message == "why"
    assert failure(end("failed", failure=kind)).message  # type: ignore[arg-type]
