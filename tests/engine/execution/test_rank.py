"""A rank's loop over a link: results in order, late inputs after earlier results, failures told."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest

from engine.config import Manifest
from engine.execution.rank import _Answers, _Inbox, _loop, rank_main
from engine.parallel.ranks import InlineRanks
from engine.scheduler.step import LateInputs, RankReport, Row, SlotSetup, Step, StepResult
from tests.support.tiny_models import GREEDY, checkpoint, engine_config, tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return checkpoint("llama", tmp_path_factory.mktemp("rank"))


def prefill(number: int, slot: int, pages: list[int]) -> Step:
    ids = tokens(20)
    row = Row(slot, 20, 0, np.array(ids, dtype="<i4").tobytes())
    return Step(number, [row], setups=[SlotSetup(slot, GREEDY, 0, 20)], tables=[(slot, 0, pages)])


def test_a_real_rank_on_a_thread(model: Manifest) -> None:
    ranks = InlineRanks(lambda link: rank_main(engine_config(), model, 0, 1, link, None))
    try:
        assert ranks.report.vocab_size == 320
        ranks.send(prefill(1, 0, [0, 1, 2]))
        ranks.send(Step(2, [Row(0, 1, gated=True)]))
        ranks.send_late(LateInputs(2, forced={0: 99}))
        ranks.send(Step(3, [Row(0, 1)]))
        results = [ranks.receive(30) for _ in range(3)]
    finally:
        ranks.close()
    assert [result.number for result in results] == [1, 2, 3]
    assert results[1].sampled[0].id == 99
    assert all(result.seconds > 0 for result in results)


class Log:
    """A link that hands out given messages and records what the rank says."""

    def __init__(self, *messages: Step | LateInputs) -> None:
        self.down: deque[Any] = deque(messages)
        self.said: list[Any] = []

    def report(self, report: RankReport) -> None:
        self.said.append(report)

    def receive(self) -> Step | LateInputs | None:
        return self.down.popleft() if self.down else None

    def send(self, result: StepResult) -> None:
        self.said.append(result.number)

    def fail(self, message: str) -> None:
        self.said.append(message)


class Slow:
    """A step that is done only when asked for."""

    def __init__(self, number: int) -> None:
        self.number = number

    def ready(self) -> bool:
        return False

    def __call__(self) -> StepResult:
        return StepResult(self.number)


class SlowRunner:
    """Records what was said when a step's late inputs came."""

    asynchronous = True

    def __init__(self, link: Log) -> None:
        self._link = link
        self.before: list[Any] = []

    def launch(self, step: Step, late: Any) -> Any:
        if step.rows and step.rows[0].gated:
            assert late().number == step.number
            self.before = list(self._link.said)
        return Slow(step.number)


def test_earlier_results_are_sent_before_late_inputs_are_awaited() -> None:
    link = Log(Step(1), Step(2, [Row(0, 1, gated=True)]), LateInputs(2))
    runner: Any = SlowRunner(link)
    _loop(runner, _Inbox(link, ahead=True), _Answers(link, answers=True))
    assert runner.before == [1]


def test_only_rank_0_answers() -> None:
    link = Log(Step(1), Step(2))
    runner: Any = SlowRunner(link)
    _loop(runner, _Inbox(link, ahead=False), _Answers(link, answers=False))
    assert link.said == []


def test_messages_out_of_order_are_refused() -> None:
    link = Log(LateInputs(1))
    runner: Any = SlowRunner(link)
    with pytest.raises(ValueError, match="without a step"):
        _loop(runner, _Inbox(link, ahead=False), _Answers(link, answers=True))
    link = Log(Step(1, [Row(0, 1, gated=True)]), Step(2))
    runner = SlowRunner(link)
    with pytest.raises(ValueError, match="late inputs were due"):
        _loop(runner, _Inbox(link, ahead=False), _Answers(link, answers=True))
    link = Log(Step(1, [Row(0, 1, gated=True)]))
    runner = SlowRunner(link)
    with pytest.raises(ConnectionError, match="hung up"):
        _loop(runner, _Inbox(link, ahead=False), _Answers(link, answers=True))


def test_what_goes_wrong_is_told(model: Manifest) -> None:
    link = Log()
    with pytest.raises(Exception, match="attention 'flash' can't serve"):
        rank_main(engine_config(attention="flash"), model, 0, 1, link, None)
    assert link.said[0].startswith(
        "AttentionUnavailable: attention 'flash' can't serve this model; missing: device cpu"
    )
    link = Log()
    with pytest.raises(ValueError, match="rendezvous"):
        rank_main(engine_config(), model, 0, 2, link, None)
