"""Whatever the batch, the chunks, the pool, the cache, cancels and crashes: each request gives what it gives alone,
and every page comes back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.engine import Engine
from engine.types.events import TokenRecord, Update
from engine.types.request import OutputOptions, PreparedPrompt
from tests.support.fake_rank import FakeRank, FakeRanks, alone, fake_model, make_prompt

CONTEXT = 40


@dataclass(frozen=True)
class Arrival:
    prompt: PreparedPrompt
    choices: int
    after: int
    """Rounds of the engine before it comes."""
    cancel_after: int | None


@st.composite
def prompts(draw: st.DrawFn) -> PreparedPrompt:
    """Prompts that share beginnings often."""
    length = draw(st.integers(1, 30))
    branch = draw(st.integers(0, length))
    ids = [*range(1, 1 + branch), *[9] * (length - branch)]
    scored = draw(st.integers(0, 5)) == 0
    return make_prompt(
        [token % 32 for token in ids],
        seed=draw(st.integers(0, 50)),
        max_tokens=draw(st.integers(1, 16)),
        min_tokens=draw(st.sampled_from([0, 0, 3])),
        ignore_eos=draw(st.booleans()),
        stop_sequences=draw(st.sampled_from([(), (), ((4,),), ((5, 6), (7,))])),
        output=OutputOptions(prompt_logprobs=1 if scored else None),
    )


arrivals = st.lists(
    st.builds(
        Arrival, prompts(), st.integers(1, 3), st.integers(0, 6), st.sampled_from([None, None, None, 0, 1, 3, 8])
    ),
    min_size=1,
    max_size=6,
)
configs = st.builds(
    EngineConfig,
    prepared=st.just(Path("unused")),
    page_tokens=st.sampled_from([1, 4, 8]),
    max_requests=st.integers(1, 5),
    queue=st.just(50),
    prefill_chunk=st.sampled_from([1, 3, 16, 64]),
    step_tokens=st.sampled_from([5, 9, 64]),
    prefix_cache=st.booleans(),
)


@settings(max_examples=100, deadline=None)
@given(
    configs,
    arrivals,
    st.integers(0, 12),
    st.lists(st.integers(1, 25), max_size=2),
)
def test_each_is_as_if_alone(config: EngineConfig, coming: list[Arrival], spare: int, crashes: list[int]) -> None:
    """`spare`: pages beyond those of one full context, so that pools run from ample to starving. No request is ever
    alone in the pool and out of pages, so ends are always those of `alone`."""
    pages = -(-CONTEXT // config.page_tokens) + spare
    left = list(crashes)

    def ranks() -> FakeRanks:
        return FakeRanks(FakeRank(pages, config.page_tokens, crash_at=[left.pop()] if left else []))

    engine = Engine(config, fake_model(CONTEXT), ranks, rebuilds=5)
    news: dict[int, list[Update]] = {number: [] for number in range(len(coming))}
    clock: list[tuple[int, int, str]] = []
    at = 0
    for number, arrival in enumerate(coming):
        at += arrival.after
        clock.append((at, number, "submit"))
        if arrival.cancel_after is not None:
            clock.append((at + arrival.cancel_after, number, "cancel"))
    rounds, busy = 0, True
    clock.sort()
    while clock or busy:
        while clock and clock[0][0] <= rounds:
            _, number, what = clock.pop(0)
            if what == "submit":
                arrival = coming[number]
                engine.submit(str(number), children(arrival), news[number].extend)
            else:
                engine.cancel(str(number))
        busy = engine.step()
        engine._scheduler.kv.pool.check()
        rounds += 1
        assert rounds < 3000
    for number, arrival in enumerate(coming):
        check(arrival, news[number])
    check_returned(engine)


def children(arrival: Arrival) -> list[PreparedPrompt]:
    prompt = arrival.prompt
    return [
        replace(prompt, sampling=replace(prompt.sampling, seed=prompt.sampling.seed + child))
        for child in range(arrival.choices)
    ]


def check(arrival: Arrival, news: list[Update]) -> None:
    for child, prompt in enumerate(children(arrival)):
        updates = [update for update in news if update.child == child]
        ids = [record.id for update in updates for record in update.records]
        ends = [update.end for update in updates if update.end is not None]
        assert len(ends) == 1 and updates[-1].end is ends[0]
        assert [update.cached_tokens is not None for update in updates] == [True] + [False] * (len(updates) - 1)
        wanted, cause = alone(prompt, CONTEXT)
        if ends[0].cause == "cancelled" and arrival.cancel_after is not None:
            assert ids == wanted[: len(ids)]
            continue
        assert (ids, ends[0].cause) == (wanted, cause)
        if prompt.output.prompt_logprobs is not None:
            scored = [entry for update in updates if update.scores for entry in update.scores.entries]
            assert len(scored) == len(prompt.token_ids)
            assert updates[0].cached_tokens == 0


def check_returned(engine: Engine) -> None:
    scheduler = engine._scheduler
    assert scheduler.idle
    assert scheduler.kv.pool.available == scheduler.kv.pool.total
    assert not scheduler.kv._promised
    assert sorted(scheduler._slots) == list(range(engine.config.max_requests))
    assert engine._live == 0 and not engine._ids


@settings(max_examples=40, deadline=None)
@given(prompts(), st.integers(0, 16), st.integers(0, 16), configs)
def test_a_resubmission_continues_from_any_token(
    prompt: PreparedPrompt, first: int, second: int, config: EngineConfig
) -> None:
    """Two replicas die after any number of tokens; the third ends it as if nothing had happened."""
    wanted, cause = alone(prompt, CONTEXT)
    for already in sorted({min(first, len(wanted)), min(second, len(wanted))}):
        engine = Engine(config, fake_model(CONTEXT), lambda: FakeRanks(FakeRank(64, config.page_tokens)))
        news: list[Update] = []
        records = tuple(TokenRecord(token) for token in wanted[:already])
        engine.submit("a", [replace(prompt, committed=records, first_cached=2)], news.extend)
        while engine.step():
            pass
        assert [record.id for update in news for record in update.records] == wanted[already:]
        end = news[-1].end
        assert end is not None and end.cause == cause
        assert news[0].cached_tokens == 2
        check_returned(engine)
