"""Dead, hung and lying ranks: no token is lost or repeated, and what can't go on says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from math import inf

import pytest

import engine.engine
from engine.engine import Engine, QueueFull
from engine.parallel.ranks import RankGroupFailed
from engine.scheduler.step import LateInputs, SampledRow, Step, StepResult
from engine.types.events import EngineEnd, Update
from engine.types.request import OutputOptions
from tests.support.engine_rig import SMALL, Rig
from tests.support.fake_rank import FakeRank, FakeRanks, fake_model, make_prompt

PROMPTS = [make_prompt(range(1, 4 + 6 * seed), seed=seed, max_tokens=10, ignore_eos=True) for seed in range(5)]


def dying(*plans: dict[str, int]) -> Callable[[], FakeRanks]:
    """Groups that crash or hang at a step, one plan a group; the last group is sound."""
    left = list(plans)

    def ranks() -> FakeRanks:
        plan = left.pop(0) if left else {}
        rank = FakeRank(64, 4, crash_at=[plan["crash"]] if "crash" in plan else [])
        return FakeRanks(rank, hang_at=plan.get("hang", -1))

    return ranks


@pytest.mark.parametrize("how", ["crash", "hang"])
@pytest.mark.parametrize("step", range(1, 9))
def test_every_stream_goes_on_after_the_ranks_are_lost(how: str, step: int) -> None:
    rig = Rig(replace(SMALL, step_timeout=0.05), ranks=dying({how: step}))
    rig.submit("a", *PROMPTS)
    rig.run()
    rig.check("a", *PROMPTS)
    assert len(rig.groups) == 2 and rig.groups[0].closed and not rig.groups[1].closed
    assert rig.engine.stats().rebuilds == 1
    assert rig.engine.health().state == "running"
    assert all(rig.cached("a", child) == 0 for child in range(1)), "recomputation is no reuse"
    rig.check_returned()


def test_news_that_are_held_back_leave_when_the_ranks_are_lost() -> None:
    """New ranks take seconds to load; what is told already must not wait for them."""
    held, most = 0, 0
    at_rebuild: list[int] = []

    def on_step(news: list[tuple[str, list[Update]]], expected: float) -> float:
        nonlocal held, most
        held = held + len(news) if expected < inf else 0
        most = max(most, held)
        return 60.0 if held else inf

    def ranks() -> FakeRanks:
        at_rebuild.append(held)
        return FakeRanks(FakeRank(64, 4, crash_at=[3] if len(at_rebuild) == 1 else []))

    rig = Rig(on_step=on_step, ranks=ranks)
    rig.submit("a", PROMPTS[0])
    rig.run()
    rig.check("a", PROMPTS[0])
    assert most and at_rebuild == [0, 0] and held == 0


def test_a_rank_that_dies_while_nothing_runs_is_replaced_before_the_next_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine.engine, "IDLE_SECONDS", 0.01)
    rig = Rig()
    rig.engine.start()
    try:
        rig.ranks.gone.set()
        while rig.engine.stats().rebuilds == 0:
            time.sleep(0.005)
        assert rig.groups[0].closed
        while rig.engine.health().state != "running":
            time.sleep(0.005)
        rig.submit("a", PROMPTS[0])
        while not rig.news["a"] or rig.ended("a") is None:
            time.sleep(0.005)
        rig.check("a", PROMPTS[0])
    finally:
        rig.engine.close()
    assert rig.engine.stats().rebuilds == 1


def test_scores_are_not_repeated_after_a_loss() -> None:
    scored = make_prompt(range(1, 22), max_tokens=3, output=OutputOptions(prompt_logprobs=1))
    rig = Rig(ranks=dying({"crash": 3}))
    rig.submit("a", scored)
    rig.run()
    starts = [(update.scores.start, len(update.scores.entries)) for update in rig.child("a") if update.scores]
    assert sum(count for _, count in starts) == 21
    assert [start for start, _ in starts] == [sum(count for _, count in starts[:place]) for place in range(len(starts))]
    rig.check("a", scored)


def test_too_many_losses_fail_everything_as_unavailable() -> None:
    rig = Rig(ranks=dying(*[{"crash": step} for step in (2, 5, 8, 11)]), rebuilds=2)
    rig.submit("a", *PROMPTS)
    rig.run()
    for child in range(5):
        end = rig.end("a", child)
        assert (end.cause, end.kind) == ("failed", "unavailable")
        assert "crash at step" in end.message and "3 failures" in end.message
    health = rig.engine.health()
    assert health.state == "down" and not health.serving(1e9) and "crash" in health.message
    with pytest.raises(QueueFull, match="unavailable") as raised:
        rig.submit("b", PROMPTS[0])
    assert raised.value.reason == "down"
    rig.check_returned()


def test_a_group_that_was_on_its_way_when_the_engine_went_down_fails() -> None:
    rig = Rig(ranks=dying({"crash": 1}), rebuilds=0)
    rig.submit("a", PROMPTS[0])
    rig.engine._take_inbox()
    rig.submit("b", PROMPTS[0])
    rig.run()
    assert rig.end("a").kind == rig.end("b").kind == "unavailable"
    rig.check_returned()


def test_a_factory_that_fails_is_tried_again() -> None:
    calls = 0

    def ranks() -> FakeRanks:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError("no such device")
        return FakeRanks(FakeRank(64, 4, crash_at=[2] if calls == 1 else []))

    rig = Rig(ranks=ranks)
    rig.submit("a", *PROMPTS)
    rig.run()
    rig.check("a", *PROMPTS)
    assert calls == 3
    rig.check_returned()


def test_a_failing_start_is_the_constructors() -> None:
    def ranks() -> FakeRanks:
        raise RankGroupFailed("no weights")

    with pytest.raises(RankGroupFailed, match="no weights"):
        Rig(ranks=ranks)


def test_a_smaller_pool_after_a_rebuild() -> None:
    """What fits goes on; an answer that no longer fits ends with its limit."""
    sizes = [64, 5]
    rig = Rig(ranks=lambda: FakeRanks(FakeRank(sizes.pop(0), 4, crash_at=[6] if len(sizes) else [])))
    rig.submit("a", *PROMPTS)
    rig.run()
    fits = [len(prompt.token_ids) + 10 <= 21 for prompt in PROMPTS]
    for child, (prompt, whole) in enumerate(zip(PROMPTS, fits, strict=True)):
        assert rig.end("a", child).cause == "limit"
        assert not whole or len(rig.ids("a", child)) == prompt.max_tokens
    rig.check_returned()


class Lying(FakeRanks):
    """Answers the second step with something else."""

    def __init__(self, lie: Callable[[StepResult], StepResult]) -> None:
        super().__init__(FakeRank(64, 4))
        self.lie = lie

    def receive(self, timeout: float) -> StepResult:
        result = super().receive(timeout)
        return self.lie(result) if result.number == 2 else result


def _renumbered(result: StepResult) -> StepResult:
    return StepResult(9, result.sampled)


def _short(result: StepResult) -> StepResult:
    return StepResult(result.number, result.sampled[:-1])


def _long(result: StepResult) -> StepResult:
    return StepResult(result.number, [*result.sampled, SampledRow(0, 1)])


def _failed(result: StepResult) -> StepResult:
    return StepResult(result.number, failure="out of memory")


@pytest.mark.parametrize("lie", [_renumbered, _short, _long, _failed])
def test_ranks_that_answer_something_else_are_replaced(lie: Callable[[StepResult], StepResult]) -> None:
    groups: list[Callable[[], FakeRanks]] = [lambda: Lying(lie)]
    rig = Rig(ranks=lambda: groups.pop()() if groups else FakeRanks(FakeRank(64, 4)))
    rig.submit("a", *PROMPTS)
    rig.run()
    assert len(rig.groups) == 2
    rig.check("a", *PROMPTS)
    rig.check_returned()


def test_requests_are_taken_and_cancelled_while_ranks_are_rebuilt() -> None:
    let_go, rebuilding = threading.Event(), threading.Event()
    calls = 0

    def ranks() -> FakeRanks:
        nonlocal calls
        calls += 1
        if calls == 2:
            rebuilding.set()
            assert let_go.wait(20)
        return FakeRanks(FakeRank(64, 4, crash_at=[4] if calls == 1 else []))

    rig = Rig(ranks=ranks)
    over = {name: threading.Event() for name in ("running", "cancelled", "new")}

    def sink(name: str) -> Callable[[list[Update]], None]:
        def take(updates: list[Update]) -> None:
            rig.news.setdefault(name, []).extend(updates)
            if updates[-1].end:
                over[name].set()

        return take

    rig.engine.start()
    rig.engine.submit("running", PROMPTS[:1], sink("running"))
    rig.engine.submit("cancelled", PROMPTS[1:2], sink("cancelled"))
    assert rebuilding.wait(20)
    rig.engine.submit("new", PROMPTS[2:3], sink("new"))
    rig.engine.cancel("cancelled")
    assert over["cancelled"].wait(20), "a cancel doesn't wait for the new ranks"
    assert rig.end("cancelled") == EngineEnd("cancelled")
    health = rig.engine.health()
    assert health.state == "rebuilding" and "crash at step 4" in health.message
    assert not over["running"].is_set() and not over["new"].is_set()
    let_go.set()
    assert over["running"].wait(20) and over["new"].wait(20)
    rig.engine.close()
    rig.check("running", PROMPTS[0])
    rig.check("new", PROMPTS[2])


def test_cancels_are_heard_while_a_step_hangs_and_closing_does_not_wait_for_it() -> None:
    rig = Rig(ranks=dying({"hang": 3}))
    begun, over = threading.Event(), threading.Event()

    def sink(updates: list[Update]) -> None:
        rig.news.setdefault("a", []).extend(updates)
        begun.set()
        if updates[-1].end:
            over.set()

    rig.engine.submit("a", PROMPTS[:1], sink)
    rig.submit("b", PROMPTS[1])
    rig.engine.start()
    assert begun.wait(20)
    rig.engine.cancel("a")
    assert over.wait(20)
    assert rig.end("a") == EngineEnd("cancelled")
    assert rig.engine.health().state == "running"
    rig.engine.close()
    assert rig.end("b").kind == "unavailable"
    assert rig.engine._live == 0 and rig.ranks.closed


def test_closing_while_ranks_are_rebuilt() -> None:
    let_go, rebuilding = threading.Event(), threading.Event()
    made: list[FakeRanks] = []

    def ranks() -> FakeRanks:
        if made:
            rebuilding.set()
            assert let_go.wait(20)
        made.append(FakeRanks(FakeRank(64, 4, crash_at=[1])))
        return made[-1]

    engine = Engine(SMALL, fake_model(), ranks)
    news: list[Update] = []
    engine.submit("a", PROMPTS[:1], news.extend)
    engine.start()
    assert rebuilding.wait(20)
    engine.close()
    assert news[-1].end is not None and news[-1].end.kind == "unavailable"
    let_go.set()
    for thread in threading.enumerate():
        if thread.name == "rebuild":
            thread.join(20)
    assert len(made) == 2 and made[1].closed, "ranks that come too late are not left behind"


def test_a_bug_in_the_scheduler_fails_requests_instead_of_hanging(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeRanks):
        def send_late(self, late: LateInputs) -> None: ...

        def send(self, step: Step) -> None:
            if step.number == 3:
                raise ZeroDivisionError("a bug")
            super().send(step)

    rig = Rig(ranks=lambda: Broken(FakeRank(64, 4)))
    over = threading.Event()

    def sink(updates: list[Update]) -> None:
        rig.news.setdefault("a", []).extend(updates)
        if updates[-1].end:
            over.set()

    rig.engine.submit("a", PROMPTS[:1], sink)
    rig.engine.start()
    assert over.wait(20)
    assert rig.end("a").kind == "unavailable" and "a bug" in rig.end("a").message
    assert rig.engine.health().state == "down"
    assert "the scheduler failed" in caplog.text
    rig.engine.close()
