"""Who waits, in which order, and what cancels of unknown groups do."""

from __future__ import annotations

from engine.scheduler.queue import Tombstones, Waiting
from engine.scheduler.request import Group, Request
from tests.support.fake_rank import make_prompt


def request(arrival: int) -> Request:
    made = Request(Group("g", None), 0, make_prompt([1]), 64)
    made.arrival = arrival
    return made


def test_who_ran_before_goes_first_and_arrivals_stay_in_order() -> None:
    waiting = Waiting()
    fresh = [request(7), request(8)]
    resumed = [request(5), request(3), request(4)]
    for made in fresh:
        waiting.add(made)
    for made in resumed:
        waiting.resume(made)
    assert [made.arrival for made in waiting] == [3, 4, 5, 7, 8]
    assert waiting.fresh == fresh
    waiting.remove(resumed[0])
    waiting.remove(fresh[0])
    assert [made.arrival for made in waiting] == [3, 4, 8]
    assert len(waiting) == 3


def test_tombstones() -> None:
    tombstones = Tombstones(capacity=2)
    tombstones.cancel("a")
    assert tombstones.claim("a") and not tombstones.claim("a")
    tombstones.ended("b")
    tombstones.cancel("b")
    assert not tombstones.claim("b"), "a late cancel means nothing"
    tombstones.cancel("b")
    assert tombstones.claim("b"), "an id that is used again counts anew"
    for name in ("c", "d", "e"):
        tombstones.cancel(name)
    assert [tombstones.claim(name) for name in ("c", "d", "e")] == [False, True, True]
