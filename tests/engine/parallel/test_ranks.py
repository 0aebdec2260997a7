"""The inline group: one rank on a thread."""

from __future__ import annotations

import threading

import pytest

from engine.parallel.ranks import InlineRanks, RankGroupFailed, RankLink
from engine.scheduler.step import LateInputs, RankReport, Row, Step, StepResult

REPORT = RankReport(10, 1024, 2048, 100, "cpu", "reference", "invariant", "float32")


def test_messages_pass_in_order_and_close_ends_the_rank() -> None:
    seen: list[object] = []

    def rank(link: RankLink) -> None:
        link.report(REPORT)
        while (message := link.receive()) is not None:
            seen.append(message)
            if isinstance(message, Step):
                link.send(StepResult(message.number))

    others = set(threading.enumerate())
    ranks = InlineRanks(rank)
    assert ranks.report == REPORT
    step, late = Step(1, [Row(0, 1, gated=True)]), LateInputs(1)
    ranks.send(step)
    ranks.send_late(late)
    assert ranks.receive(5.0) == StepResult(1)
    ranks.close()
    assert seen == [step, late]
    assert set(threading.enumerate()) <= others


def test_a_failure_while_loading_is_the_constructors() -> None:
    def rank(link: RankLink) -> None:
        raise ValueError("no such weight file")

    with pytest.raises(RankGroupFailed, match="no such weight file"):
        InlineRanks(rank)


def test_an_ended_rank_is_noticed_while_nothing_runs() -> None:
    def rank(link: RankLink) -> None:
        link.report(REPORT)
        link.receive()

    ranks = InlineRanks(rank)
    ranks.check()
    ranks.close()
    with pytest.raises(RankGroupFailed, match="the rank has ended"):
        ranks.check()


def test_a_failure_in_a_step_reaches_receive() -> None:
    def rank(link: RankLink) -> None:
        link.report(REPORT)
        link.receive()
        raise MemoryError("pool")

    ranks = InlineRanks(rank)
    with pytest.raises(TimeoutError):
        ranks.receive(0.01)
    ranks.send(Step(1))
    with pytest.raises(RankGroupFailed, match="MemoryError: pool"):
        ranks.receive(5.0)
    ranks.close()
