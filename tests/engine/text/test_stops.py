"""Stops against brute force: the earliest end, the longest of equals, and nothing held back needlessly."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.stops import StopMatcher

STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """(end, stop) by looking at every prefix."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


def could_begin(text: str, stops: list[str]) -> int:
    return max(
        (size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size]) and size <= len(text)),
        default=0,
    )


@settings(deadline=None)
@given(st.text("abc", max_size=30), STOPS, st.lists(st.integers(0, 30), max_size=8))
def test_any_chunking_finds_the_earliest_end(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    wanted = first_stop(text, stops)
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for start, end in pairwise(bounds):
        found = matcher.feed(text[start:end])
        if found is not None:
            assert wanted == (start + found.end, stops[found.index])
            return
        assert matcher.held == could_begin(text[:end], stops)
    assert wanted is None


@settings(deadline=None)
@given(st.text("ab", max_size=20), STOPS, st.integers(0, 20))
def test_unarmed_stops_are_passed_over(text: str, stops: list[str], armed_from: int) -> None:
    matcher = StopMatcher(stops)
    for at, letter in enumerate(text):
        found = matcher.feed(letter, armed=at >= armed_from)
        ending = [stop for stop in stops if text[: at + 1].endswith(stop)]
        if at >= armed_from and ending:
            assert found is not None and stops[found.index] == max(ending, key=len)
            return
        assert found is None
        assert matcher.held == could_begin(text[: at + 1], stops)


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["abc", "b"], "xabc", (3, "b")),  # b ends first although abc begins first
        (["b", "ab"], "xab", (3, "ab")),
        (["aab"], "aaab", (4, "aab")),
        (["é", "日本"], "x日本", (3, "日本")),
        (["."], "a.b", (2, ".")),
    ],
)
def test_which_stop_wins(stops: list[str], text: str, expected: tuple[int, str]) -> None:
    found = StopMatcher(stops).feed(text)
    assert found is not None and (found.end, stops[found.index]) == expected


def test_sequences_of_ids() -> None:
    matcher = StopMatcher([(1, 2, 3), (2, 9)])
    assert [matcher.feed((token,)) for token in (1, 1, 2)] == [None, None, None]
    assert matcher.held == 2
    found = matcher.feed((9,))
    assert found is not None and found.index == 1


def test_long_stops_take_linear_time() -> None:
    matcher = StopMatcher(["a" * 2000 + "b"])
    for step in range(1, 51):
        matcher.feed("a" * 1000)
        assert matcher.held == min(step * 1000, 2000)
    assert matcher.feed("b") is not None
