"""How prefill budgets are shared."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler.chunks import share


@pytest.mark.parametrize(
    ("remaining", "budget", "cap", "chunks"),
    [
        ([], 100, 50, []),
        ([10], 0, 50, [0]),
        ([500], 100, 50, [50]),
        ([500, 500], 100, 80, [80, 20]),
        ([30, 30], 100, 80, [30, 30]),
        ([500, 400, 20], 100, 100, [80, 0, 20]),
        ([500, 26], 100, 100, [100, 0]),
        ([500, 20, 4, 3], 100, 100, [93, 0, 4, 3]),
    ],
)
def test_shares(remaining: list[int], budget: int, cap: int, chunks: list[int]) -> None:
    assert share(remaining, budget, cap) == chunks


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 1000), max_size=12), st.integers(0, 600), st.integers(1, 600))
def test_rules(remaining: list[int], budget: int, cap: int) -> None:
    chunks = share(remaining, budget, cap)
    assert sum(chunks) == min(budget, sum(min(left, cap) for left in remaining)), "the budget is used up"
    assert all(0 <= chunk <= min(left, cap) for chunk, left in zip(chunks, remaining, strict=True))
    if remaining and budget:
        assert chunks[0] >= min(remaining[0], cap, budget - budget // 4), "the oldest keeps three quarters"
        shortest = min(remaining)
        if shortest <= min(budget // 4, cap):
            assert chunks[remaining.index(shortest)] > 0, "a short prompt starts at once"
