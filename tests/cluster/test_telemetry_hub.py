"""The hub's arithmetic: totals survive processes and the hub, and are never counted twice."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.telemetry_hub import BEAT_SECONDS, RETIRED_KEPT, SILENT_SECONDS, Ledger, Turns
from engine.types.telemetry import Report


def report(process: str, tokens: int, **gauges: int) -> Report:
    return {
        "process": process,
        "kind": "engine",
        "totals": {"generated_tokens_total": tokens},
        "gauges": gauges,
        "samples": [(1.0, 0.5)],
        "truncated": False,
        "facts": {"device": "cpu"},
    }


def tokens(ledger: Ledger) -> int:
    return ledger.snapshot()["totals"].get("generated_tokens_total", 0)


def test_totals_add_and_gauges_stay_with_their_process() -> None:
    ledger = Ledger("i", 1)
    ledger.report(report("a", 5, active_requests=1), 0)
    ledger.report(report("b", 7, active_requests=2), 0)
    ledger.report(report("a", 6, active_requests=0), 1)
    snapshot = ledger.snapshot()
    assert snapshot["totals"] == {"generated_tokens_total": 13}
    assert [row["gauges"] for row in snapshot["processes"]] == [{"active_requests": 0}, {"active_requests": 2}]
    assert (snapshot["instance"], snapshot["created"]) == ("i", 1)


def test_a_dead_process_keeps_its_totals_and_loses_its_gauges() -> None:
    ledger = Ledger("i", 1)
    ledger.report(report("a", 5, active_requests=3), 0)
    ledger.expire(SILENT_SECONDS + 1)
    assert ledger.snapshot()["processes"] == []
    ledger.report(report("a2", 2), 40)
    assert tokens(ledger) == 7


def test_a_silent_process_that_speaks_again_is_not_counted_twice() -> None:
    ledger = Ledger("i", 1)
    ledger.report(report("a", 5), 0)
    ledger.expire(100)
    ledger.report(report("a", 9), 101)
    assert tokens(ledger) == 9
    ledger.leave("a")
    ledger.leave("a")
    assert tokens(ledger) == 9


def test_a_new_hub_goes_on_where_the_old_one_stopped() -> None:
    ledger = Ledger("i", 17)
    ledger.report(report("a", 5), 0)
    ledger.report(report("b", 6), 0)
    ledger.leave("b")
    again = Ledger.restore(ledger.dump(), 50)
    assert again.snapshot()["totals"] == ledger.snapshot()["totals"]
    assert [row["gauges"] for row in again.snapshot()["processes"]] == [{}]
    again.report(report("a", 8), 51)
    again.report(report("b", 7), 51)
    assert tokens(again) == 15
    assert (again.instance, again.created) == ("i", 17)


def test_the_memory_of_dead_processes_is_bounded() -> None:
    ledger = Ledger("i", 1)
    for number in range(RETIRED_KEPT + 50):
        ledger.report(report(f"p{number}", 1), 0)
        ledger.leave(f"p{number}")
    assert tokens(ledger) == RETIRED_KEPT + 50
    assert len(ledger._retired) == RETIRED_KEPT


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["count", "leave", "restore"])), max_size=40))
def test_the_sum_is_what_was_counted_whatever_happens(script: list[tuple[str, str]]) -> None:
    ledger, counted = Ledger("i", 1), dict.fromkeys("abc", 0)
    for process, action in script:
        if action == "count":
            counted[process] += 3
            ledger.report(report(process, counted[process]), 0)
        elif action == "leave":
            ledger.leave(process)
        else:
            ledger = Ledger.restore(ledger.dump(), 0)
        assert tokens(ledger) == sum(counted.values())


def test_counts_are_told_at_once_and_when_they_rest_but_seldom_while_they_grow() -> None:
    turns = Turns()
    looks = [0.25 * number for number in range(40)]
    counts = [0, 0, 0, 0, 0, 0, *range(1, 12), *[12] * 23]
    told = [at for at, count in zip(looks, counts, strict=True) if turns.due(report("a", count), at)]
    assert told[0] == 0.0, "a new process makes itself known"
    first, last = looks[counts.index(1)], looks[counts.index(12)]
    assert told[1] == first, "after a rest, a change is told when it is seen"
    assert [at for at in told if first < at < last] == [first + 1.0, first + 2.0]
    assert last + 0.25 in told, "the last count doesn't wait for its turn"
    after = [at for at in told if at > last + 0.25]
    assert after and after[0] - (last + 0.25) > BEAT_SECONDS - 0.25, "nothing more until the beat"
