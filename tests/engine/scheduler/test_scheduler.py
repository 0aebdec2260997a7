"""The scheduler's decisions, step by step: order, fairness, room, and who gives way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.parallel.ranks import RankGroupFailed
from engine.scheduler.request import Group, Request
from engine.scheduler.scheduler import LOOKAHEAD, PREFILLING, STRIKES, Scheduler
from engine.scheduler.step import SampledRow, Step, StepResult
from engine.types.events import EngineEnd, Update
from engine.types.request import PreparedPrompt
from tests.support.engine_rig import SMALL, Rig
from tests.support.fake_rank import FakeRank, FakeRanks, make_prompt

WIDE = EngineConfig(Path("unused"), page_tokens=4, max_requests=40, queue=9000, prefill_chunk=64, step_tokens=128)


class Bench:
    """A scheduler without ranks: results are made up, token 5 for every row."""

    def __init__(self, config: EngineConfig = SMALL, *, pages: int = 200) -> None:
        self.scheduler = Scheduler(config, pages=pages, context=2000, cache_seed=b"seed")
        self.sent: list[Step] = []
        self.requests: list[Request] = []

    def add(self, length: int, *, start: int = 1, **fields: object) -> Request:
        """A request whose prompt starts with `start`, so that equal starts share their beginnings."""
        options: dict[str, object] = {"max_tokens": 50, "ignore_eos": True, **fields}
        prompt = make_prompt([start, *range(1, length)], **options)  # type: ignore[arg-type]
        group = Group(str(len(self.requests)), None)
        requests = self.scheduler.prepare(group, [prompt])
        self.scheduler.add(group, requests)
        self.requests += requests
        return requests[0]

    def plan(self) -> dict[int, int]:
        """Rows of the next step: request number to tokens; decodes count as 1."""
        step = self.scheduler.plan()
        if step is None:
            return {}
        self.sent.append(step)
        flight = self.scheduler.flights[-1]
        return {self.requests.index(row.request): row.count for row in flight.rows}

    def commit(self) -> None:
        step = self.sent.pop(0)
        self.scheduler.commit(StepResult(step.number, [SampledRow(row.slot, 5) for row in step.rows if row.sample]))

    def step(self) -> dict[int, int]:
        rows = self.plan()
        if self.sent:
            self.commit()
        return rows


def test_decodes_come_first_and_go_on_beside_a_long_prompt() -> None:
    bench = Bench()
    for start in (1, 2):
        bench.add(3, start=start)
    bench.step()
    bench.add(500, start=3)
    for _ in range(30):
        rows = bench.step()
        assert rows == {0: 1, 1: 1, 2: 8}, "one chunk of the cap beside a token for everyone"
        assert [row.start for row in bench.scheduler.flights[0].step.rows[:2]] == [-1, -1] if bench.sent else True


def test_a_short_prompt_does_not_wait_for_long_ones() -> None:
    config = replace(WIDE, max_requests=20)
    bench = Bench(config, pages=2000)
    for start in range(PREFILLING + 3):
        bench.add(600, start=10 + start)
    for _ in range(2):
        bench.step()
    assert len(bench.scheduler.active) == PREFILLING, "no more long prompts than can be worked on"
    short = bench.add(20, start=1)
    rows = bench.step()
    assert rows[PREFILLING + 3] == 20 and short.decoding
    assert rows[0] == 64, "the oldest keeps its chunk"


def test_the_oldest_long_prompt_gets_most_of_a_crowded_step() -> None:
    bench = Bench(WIDE, pages=2000)
    for start in range(30):
        bench.add(300 if start == 0 else 31, start=start)
    rows = bench.step()
    assert rows[0] == 64 and sum(rows.values()) == 128


def test_chunks_shrink_while_answers_run() -> None:
    bench = Bench(replace(SMALL, step_tokens=100, prefill_chunk=100))
    bench.scheduler.allowance = 10.0
    bench.add(150, start=1)
    assert bench.step() == {0: 100}, "nobody is held up"
    bench.step()
    bench.add(90, start=2)
    assert bench.step() == {0: 1, 1: 10}
    bench.scheduler.allowance = 0.5
    assert bench.step() == {0: 1, 1: 4}, "never less than a page"


def test_pages_of_a_whole_prompt_are_reserved_at_admission() -> None:
    bench = Bench(pages=10)
    bench.add(30, start=1)
    bench.step()
    assert len(bench.requests[0].pages) == 8
    assert bench.scheduler.kv.pool.available == 2


def test_room_is_left_for_those_who_run_so_that_nobody_is_admitted_to_be_preempted() -> None:
    bench = Bench(pages=10)
    bench.add(30, start=1, max_tokens=8)
    bench.step()
    bench.add(8, start=2)
    assert 1 not in bench.step(), "2 pages are left, but the one who runs may need another"
    while bench.scheduler.active:
        bench.step()
        assert bench.scheduler.counters.preemptions == 0
        if bench.requests[1].slot >= 0:
            break
    assert bench.requests[0].ended


def test_who_lacks_pages_is_not_overtaken() -> None:
    bench = Bench(pages=10)
    bench.add(30, start=1)
    bench.step()
    bench.add(30, start=2)
    bench.add(2, start=3)
    for _ in range(3):
        assert set(bench.step()) == {0}


def test_a_preempted_request_comes_back_before_those_that_never_ran() -> None:
    config = replace(SMALL, max_requests=2)
    bench = Bench(config, pages=6)
    bench.add(4, start=1, max_tokens=12)
    bench.add(4, start=2, max_tokens=12)
    bench.add(4, start=3, max_tokens=2)
    while not bench.scheduler.counters.preemptions:
        bench.step()
    assert list(bench.scheduler.waiting) == [bench.requests[1], bench.requests[2]]
    while bench.requests[1].slot < 0:
        assert bench.requests[2].slot < 0
        bench.step()


def test_nobody_else_gives_way_while_pages_drain() -> None:
    """Two steps are in flight when the pool runs dry: one request is enough."""
    bench = Bench(replace(SMALL, prefix_cache=False), pages=9)
    for start in range(3):
        bench.add(3, start=start, max_tokens=20)
    preempted = []
    for _ in range(60):
        bench.plan()
        before = bench.scheduler.counters.preemptions
        if len(bench.sent) == 2:
            bench.commit()
        preempted.append(before)
        if bench.scheduler.counters.preemptions:
            break
    for _ in range(2):
        bench.plan()
        assert bench.scheduler.counters.preemptions == 1
        while len(bench.sent) > 1:
            bench.commit()


def test_thousands_that_wait_cost_a_plan_nothing() -> None:
    """A plan looks at a bounded number of them, and at none without a free slot."""
    bench = Bench(WIDE, pages=1000)
    for _ in range(40):
        bench.add(4, start=1)
    while len(bench.scheduler.active) < 40:
        bench.step()

    looked = 0

    class Watched(Request):
        @property
        def ended(self) -> bool:
            nonlocal looked
            looked += 1
            return False

        @ended.setter
        def ended(self, value: bool) -> None: ...

    group = Group("crowd", None)
    prompt = make_prompt([1, 2, 3])
    requests = [Watched(group, child, prompt, 2000) for child in range(3000)]
    for request in requests:
        request.inflight = 1
        bench.scheduler.waiting.add(request)
    looked = 0
    bench.step()
    assert looked == 0
    bench.scheduler.end(bench.requests[0], EngineEnd("cancelled"))
    for request in requests:
        request.inflight = 0
        request.awaits = b"never"
    bench.scheduler.kv.promise([b"never"])
    bench.step()
    assert 0 < looked <= LOOKAHEAD


def test_choices_with_one_prefix_wait_for_it_and_no_longer() -> None:
    bench = Bench(replace(SMALL, max_requests=4))
    for _ in range(3):
        bench.add(17, start=1)
    other = bench.add(4, start=9)
    assert set(bench.step()) == {0, 3}, "another prompt passes by"
    assert other.decoding
    assert set(bench.step()) == {0, 3}
    rows = bench.step()
    assert set(rows) == {0, 1, 2, 3}
    assert bench.requests[1].cached_tokens == 16


def test_who_promised_a_prefix_and_ends_frees_those_who_waited() -> None:
    bench = Bench()
    first = bench.add(30, start=1)
    bench.add(30, start=1)
    bench.step()
    bench.scheduler.end(first, EngineEnd("cancelled"))
    assert set(bench.step()) == {1}
    assert bench.requests[1].cached_tokens == 8, "what was computed before stays"


def test_a_plan_publishes_for_later_steps_only() -> None:
    bench = Bench(replace(SMALL, prefill_chunk=40, step_tokens=100))
    bench.add(20, start=1)
    bench.add(20, start=1)
    assert bench.plan() == {0: 20}
    assert bench.plan() == {0: 1, 1: 1}, "the second is restored from a step that is still in flight"
    assert bench.requests[1].cached_tokens == 19


def test_a_request_that_kills_ranks_is_given_up_and_others_go_on() -> None:
    class Touchy(FakeRank):
        """Dies when it computes token 31."""

        def run(self, step: Step, late: object) -> StepResult:
            if any(31 in np.frombuffer(row.tokens, "<i4") for row in step.rows):
                raise RankGroupFailed("hung")
            return super().run(step, late)  # type: ignore[arg-type]

    rig = Rig(ranks=lambda: FakeRanks(Touchy(64, 4)))
    rig.submit("poison", make_prompt([1, 31, 2]))
    rig.run(STRIKES)
    fine = make_prompt([1, 2, 3])
    rig.submit("fine", fine)
    rig.run()
    end = rig.end("poison")
    assert (end.cause, end.kind) == ("failed", "execution") and "3 times: hung" in end.message
    rig.check("fine", fine)
    assert rig.engine.health().state == "running"
    rig.check_returned()


def test_one_step_must_hold_every_running_request() -> None:
    with pytest.raises(ValueError, match="step_tokens 3 is below max_requests 4"):
        Scheduler(replace(SMALL, step_tokens=3), pages=10, context=10, cache_seed=b"")


def test_updates_are_told_once_and_in_order() -> None:
    bench = Bench()
    bench.add(3, max_tokens=1)
    bench.step()
    ((group, updates),) = bench.scheduler.take_news()
    assert group.id == "0" and len(updates) == 1
    update: Update = updates[0]
    assert ([record.id for record in update.records], update.cached_tokens) == ([5], 0)
    assert update.end == EngineEnd("limit")
    assert bench.scheduler.take_news() == []


def prompt_with_images() -> PreparedPrompt:
    from engine.types.request import ImageSpan

    return make_prompt(range(1, 17), images=(ImageSpan(2, 4, b"i" * 32),))


def test_prompts_with_other_images_share_nothing_from_there_on() -> None:
    rig = Rig()
    one = prompt_with_images()
    other = replace(one, images=tuple(replace(span, digest=b"o" * 32) for span in one.images))
    late = replace(one, images=tuple(replace(span, start=9) for span in one.images))
    for name, prompt in {
        "one": one,
        "same": one,
        "other": other,
        "late": late,
        "plain": replace(one, images=()),
    }.items():
        rig.submit(name, prompt)
        rig.run()
    assert [rig.cached(name) for name in ("one", "same", "other", "late", "plain")] == [0, 15, 0, 0, 8]
