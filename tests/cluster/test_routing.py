"""Which replicas a group may go to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cluster.routing import pick


def replicas(*names: str) -> list[Any]:
    return [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in names]


def names(picked: list[Any]) -> set[str]:
    return {replica.replica_id.unique_id for replica in picked}


def test_two_at_random_and_every_one_has_its_turn() -> None:
    found = [names(pick(replicas("a", "b", "c"), ())) for _ in range(200)]
    assert all(len(pair) == 2 for pair in found)
    assert set().union(*found) == {"a", "b", "c"}


def test_refusing_replicas_are_passed_over_while_there_is_another() -> None:
    assert names(pick(replicas("a", "b"), ("a",))) == {"b"}
    assert names(pick(replicas("a"), ("a",))) == {"a"}
    assert pick([], ()) == []


def test_a_request_that_goes_on_stays_where_it_is_while_that_lives() -> None:
    assert names(pick(replicas("a", "b", "c"), (), "b")) == {"b"}
    assert len(pick(replicas("a", "c"), (), "b")) == 2
    assert names(pick(replicas("a", "b"), ("b",), "b")) == {"a"}
