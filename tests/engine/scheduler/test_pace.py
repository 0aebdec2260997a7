"""When a step counts as hung."""

from __future__ import annotations

from engine.scheduler.pace import FLOOR, LEARNING, MULTIPLE, StepPace


def test_the_ceiling_holds_until_steps_were_seen() -> None:
    pace = StepPace(120.0)
    assert pace.predict(100) is None and pace.limit(100) == 120.0
    for _ in range(LEARNING - 1):
        pace.learn(100, 0.01)
    assert pace.limit(100) == 120.0
    pace.learn(100, 0.01)
    assert pace.limit(100) == FLOOR


def test_limits_follow_the_work() -> None:
    pace = StepPace(1000.0)
    for _ in range(LEARNING):
        pace.learn(100, 5.0)
    assert pace.limit(100) == MULTIPLE * 5.0
    assert pace.limit(800) == MULTIPLE * 40.0
    assert pace.limit(1e9) == 1000.0
    assert pace.limit(1) == MULTIPLE * 5.0, "less work is not known to be faster"


def test_a_slow_step_is_forgotten_slowly() -> None:
    pace = StepPace(1000.0)
    pace.learn(100, 10.0)
    pace.learn(100, 0.1)
    assert pace.predict(100) is not None and 9 < (pace.predict(100) or 0) < 10
    for _ in range(500):
        pace.learn(100, 0.1)
    assert (pace.predict(100) or 0) < 0.2


def test_a_short_ceiling_wins_over_the_floor() -> None:
    pace = StepPace(5.0)
    for _ in range(LEARNING):
        pace.learn(1, 0.001)
    assert pace.limit(1) == 5.0


def test_chunks_converge_to_the_time_they_may_take() -> None:
    """Whatever a step costs besides its tokens: here 0.1 s and 1 ms a token, so 150 tokens take 0.25 s."""
    pace = StepPace(120.0)
    assert pace.work_within(0.25) is None
    pace.learn(10, 0.01)
    assert pace.work_within(0.25) is None, "decodes say nothing about prefill"
    work = 500.0
    for _ in range(60):
        pace.learn(work, 0.1 + 0.001 * work, prefill=True)
        work = pace.work_within(0.25) or 0.0
    assert 140 < work < 160
