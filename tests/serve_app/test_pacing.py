"""What leaves when: nothing is lost or reordered, nothing waits longer than the pause, slow steps never wait at all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.types.events import EngineEnd, PositionScore, PromptScores, TokenRecord, Update
from serve_app.pacing import Pacer, Stream
from serve_app.token_channel import unpack_update

PAUSE = 0.02


def token(*ids: int, child: int = 0, **fields: Any) -> Update:
    return Update(child, tuple(TokenRecord(ident) for ident in ids), **fields)


class Road:
    """A pacer on a clock of the test's. `left`: (when, peer, updates of the frame by stream number)."""

    def __init__(self, pause: float = PAUSE) -> None:
        self.now = 100.0
        self.pacer = Pacer(pause, lambda: self.now)
        self.left: list[tuple[float, Any, dict[int, list[Update]]]] = []

    def step(self, *news: tuple[Stream, Sequence[Update]], seconds: float = 0.006) -> float:
        """One step's news, the next of which come in `seconds`; advances the clock to them, and calls again when the
        pacer wants it. Returns what it answered."""
        for stream, updates in news:
            self.pacer.gather(stream, updates)
        self._leave(seconds)
        answer = wait = self.pacer.wait()
        until = self.now + seconds
        while self.now + wait < until:
            self.now += wait
            self._leave(until - self.now)
            wait = self.pacer.wait()
        self.now = until
        return answer

    def _leave(self, expected: float) -> None:
        for peer, messages in self.pacer.departures(expected):
            self.left.append((self.now, peer, {number: list(map(unpack_update, got)) for number, got in messages}))

    def end(self) -> None:
        self._leave(inf)

    def ids(self, number: int, child: int = 0) -> list[int]:
        return [record.id for update in self.updates(number) if update.child == child for record in update.records]

    def updates(self, number: int) -> list[Update]:
        return [update for _, _, frame in self.left for update in frame.get(number, ())]


def stream(number: int = 1, children: int = 1, peer: Any = "peer") -> Stream:
    return Stream(number, peer, children)


def test_the_first_token_leaves_at_once_and_the_next_ones_in_groups() -> None:
    road, one = Road(), stream()
    for number in range(9):
        road.step((one, [token(number)]))
    road.step((one, [Update(0, (TokenRecord(9),), end=EngineEnd("limit"))]))
    assert [[record.id for update in frame[1] for record in update.records] for _, _, frame in road.left] == [
        [0],
        [1, 2, 3],
        [4, 5, 6],
        [7, 8, 9],
    ]
    assert all(len(frame[1]) == 1 for _, _, frame in road.left), "tokens of a choice leave as one update"
    assert road.updates(1)[-1].end == EngineEnd("limit")


def test_a_group_leaves_from_a_step_and_not_by_the_clock_when_steps_come_as_expected() -> None:
    road, one = Road(), stream()
    times = []
    for number in range(30):
        times.append(road.now)
        road.step((one, [token(number)]))
    assert {when for when, _, _ in road.left} <= set(times)


def test_with_steps_slower_than_the_pause_nothing_waits() -> None:
    road, one = Road(), stream()
    for number in range(5):
        assert road.step((one, [token(number)]), seconds=0.025) == inf
    assert [len(frame[1][0].records) for _, _, frame in road.left] == [1] * 5


def test_without_a_pause_every_token_leaves_by_itself() -> None:
    road, one = Road(0.0), stream()
    for number in range(5):
        assert road.step((one, [token(number)]), seconds=0.001) == inf
    assert [len(frame[1][0].records) for _, _, frame in road.left] == [1] * 5


def test_a_step_that_takes_longer_than_expected_holds_nothing_up() -> None:
    road, one = Road(), stream()
    road.step((one, [token(0)]))
    road.pacer.gather(one, [token(1)])
    assert road.pacer.departures(0.001) == []
    assert abs(road.pacer.wait() - (PAUSE - 0.006)) < 1e-9
    road.now += road.pacer.wait()
    ((_, messages),) = road.pacer.departures(0.001)
    assert messages == [[1, [[0, [1]]]]]
    assert road.pacer.wait() == inf


def test_without_a_step_in_flight_everything_leaves() -> None:
    road, one = Road(), stream()
    road.step((one, [token(0)]))
    road.step((one, [token(1)]))
    assert road.ids(1) == [0]
    road.end()
    assert road.ids(1) == [0, 1]


def test_ends_failures_and_scores_wait_for_nothing_and_take_along_what_waits() -> None:
    scores = PromptScores(0, (None, PositionScore(4, -1.0, 1, ())))
    for last in (
        Update(0, end=EngineEnd("failed", "execution", "broken")),
        Update(0, end=EngineEnd("cancelled")),
        Update(0, scores=scores),
    ):
        road, one = Road(), stream()
        road.step((one, [token(0)]))
        road.step((one, [token(1)]))
        assert road.ids(1) == [0]
        road.step((one, [last]))
        assert road.ids(1) == [0, 1]
        assert (road.updates(1)[-1].end, road.updates(1)[-1].scores) == (last.end, last.scores)


def test_scores_stay_before_the_tokens_that_follow_them() -> None:
    road, one = Road(), stream()
    first, second = PromptScores(0, (None,)), PromptScores(1, (PositionScore(4, -1.0, 1, ()),))
    road.step((one, [Update(0, scores=first, cached_tokens=0), Update(0, scores=second), token(7), token(8)]))
    assert road.updates(1) == [Update(0, scores=first, cached_tokens=0), Update(0, scores=second), token(7, 8)]


def test_the_first_token_of_every_choice_leaves_at_once() -> None:
    road, one = Road(), stream(children=2)
    road.step((one, [token(0, cached_tokens=3)]))
    road.step((one, [token(1)]))
    road.step((one, [token(2), token(50, child=1)]))
    assert [sorted(update.child for update in frame[1]) for _, _, frame in road.left] == [[0], [0, 1]]
    assert (road.ids(1, 0), road.ids(1, 1)) == ([0, 1, 2], [50])


def test_one_departure_takes_the_news_of_all_streams_of_its_peer_and_of_no_other() -> None:
    road, one, two, other = Road(), stream(1), stream(2), stream(3, peer="other")
    road.step((one, [token(0)]), (two, [token(0)]), (other, [token(0)]))
    road.step((one, [token(1)]), (two, [token(1)]), (other, [token(1)]))
    road.step((one, [token(2, end=EngineEnd("eos"))]), (two, [token(2)]), (other, [token(2)]), seconds=0.001)
    assert [(peer, sorted(frame)) for _, peer, frame in road.left] == [
        ("peer", [1, 2]),
        ("other", [3]),
        ("peer", [1, 2]),
    ]
    assert road.ids(2) == [0, 1, 2] and road.ids(3) == [0]


def test_what_is_known_of_each_token_stays_with_it() -> None:
    road, one = Road(), stream()
    records = [TokenRecord(n, -0.5 * n, ((n, -0.5 * n), (n + 1, -9.0)), n == 2, 1000.0 + n) for n in range(6)]
    for record in records:
        road.step((one, [Update(0, (record,))]))
    road.end()
    assert [record for update in road.updates(1) for record in update.records] == records
    assert len(road.left) < len(records)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=4), st.floats(0.0005, 0.05)), max_size=40),
    st.sampled_from([0.0, 0.005, PAUSE]),
)
def test_any_course_of_steps_tells_all_tokens_in_order_and_in_time(
    steps: list[tuple[list[int], float]], pause: float
) -> None:
    """Six choices in three streams of two peers; each step has tokens of some choices and takes its own time. A stream
    is a response: its choices leave together."""
    road = Road(pause)
    streams = [stream(number, 2, f"peer {number % 2}") for number in range(3)]
    told: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for number, (choices, seconds) in enumerate(steps):
        came: dict[Stream, list[Update]] = {}
        for choice in choices:
            one = streams[choice // 2]
            came.setdefault(one, []).append(token(number, child=choice % 2))
            told.setdefault((choice // 2, choice % 2), []).append((number, road.now))
        road.step(*came.items(), seconds=seconds)
    road.end()
    for (number, child), sent in told.items():
        assert road.ids(number, child) == [ident for ident, _ in sent]
        arrived = [
            when
            for when, _, frame in road.left
            for update in frame.get(number, ())
            if update.child == child
            for _ in update.records
        ]
        waits = [at - made for at, (_, made) in zip(arrived, sent, strict=True)]
        assert waits[0] == 0.0
        assert all(-1e-9 <= wait <= pause + 1e-9 for wait in waits)
    for number in range(3):
        news = sorted({made for (one, _), sent in told.items() if one == number for _, made in sent})
        departures = {when for when, _, frame in road.left if number in frame}
        assert {now for before, now in pairwise(news) if now - before >= pause} <= departures
