"""The engine over a deterministic rank: every request gives what it gives alone, whatever happens around it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

import pytest

from engine.cache.keys import cache_seed, page_keys
from engine.engine import QueueFull
from engine.scheduler.request import Group
from engine.scheduler.step import StepResult
from engine.types.events import EngineEnd, PromptScores, TokenRecord, Update
from engine.types.request import OutputOptions, PreparedPrompt, RequestError
from tests.support.engine_rig import SMALL, Rig
from tests.support.fake_rank import EOS, FakeRank, FakeRanks, alone, fake_model, make_prompt, score_entry


def find(condition: Callable[[PreparedPrompt], bool], **fields: object) -> PreparedPrompt:
    """The first seed whose answer is as wanted."""
    prompts = (make_prompt([3, 1, 4, 1, 5], seed=seed, **fields) for seed in range(5000))  # type: ignore[arg-type]
    return next(prompt for prompt in prompts if condition(prompt))


def ends_with_eos(length: int) -> Callable[[PreparedPrompt], bool]:
    return lambda prompt: (lambda got: got[1] == "eos" and len(got[0]) == length)(alone(prompt))


def test_one_request() -> None:
    rig = Rig()
    prompt = make_prompt(range(1, 20), max_tokens=6, ignore_eos=True)
    rig.submit("a", prompt)
    rig.run()
    rig.check("a", prompt)
    rig.check_returned()
    assert rig.cached("a") == 0
    stats = rig.engine.stats()
    assert (stats.prefill_tokens, stats.generated_tokens, stats.verification_rounds) == (19, 6, 5)
    assert (stats.active, stats.pending, stats.total_pages, stats.page_tokens) == (0, 0, 64, 4)
    assert stats.free_pages + stats.cached_pages == 64
    assert stats.decode_weight_bytes == 1000


def test_the_next_step_is_sent_before_the_tokens_of_the_last_are_read() -> None:
    rig = Rig()
    rig.submit("a", make_prompt([1, 2, 3], max_tokens=5, ignore_eos=True))
    rig.run()
    events = rig.ranks.events
    for number in range(1, 5):
        assert events.index(("send", number + 1)) < events.index(("receive", number))
    assert [len(step.rows) for step in rig.ranks.steps] == [1] * 5, "no row is planned past the limit"


def test_a_batch_gives_each_what_it_gives_alone() -> None:
    rig = Rig()
    prompts = [make_prompt(range(1, 3 + 5 * place), seed=place, max_tokens=4 + place) for place in range(8)]
    for place, prompt in enumerate(prompts):
        rig.submit(str(place), prompt)
    rig.run()
    for place, prompt in enumerate(prompts):
        rig.check(str(place), prompt)
    rig.check_returned()


def test_eos_is_committed_counted_and_sent() -> None:
    rig = Rig()
    prompt = find(ends_with_eos(3), max_tokens=8)
    rig.submit("a", prompt)
    rig.run()
    rig.check("a", prompt)
    assert rig.ids("a")[-1] == EOS
    assert rig.engine.stats().generated_tokens == 3
    assert rig.engine.stats().dropped_rows == 1, "the row that was planned past the EOS is dropped"
    rig.check_returned()


def test_eos_on_the_last_allowed_token_wins_over_the_limit() -> None:
    rig = Rig()
    prompt = find(ends_with_eos(4), max_tokens=4)
    rig.submit("a", prompt)
    rig.submit("ignored", replace(prompt, ignore_eos=True))
    rig.run()
    assert rig.end("a").cause == "eos"
    assert rig.ids("ignored") == rig.ids("a")
    assert rig.end("ignored").cause == "limit"


def test_token_stops() -> None:
    rig = Rig()
    free = find(lambda prompt: alone(prompt)[1] == "limit" and len(set(alone(prompt)[0])) == 8)
    ids, _ = alone(free)
    one = replace(free, stop_sequences=((ids[2],),))
    two = replace(free, stop_sequences=((ids[1], ids[0]), (ids[3], ids[4])))
    last = replace(free, stop_sequences=((ids[6], ids[7]),))
    never = replace(free, stop_sequences=((*free.token_ids.tolist()[-2:], ids[0]),))
    for name, prompt in {"one": one, "two": two, "last": last, "never": never}.items():
        rig.submit(name, prompt)
    rig.run()
    ended = {name: (len(rig.ids(name)), rig.end(name).cause) for name in rig.news}
    assert ended == {
        "one": (3, "token_stop"),
        "two": (5, "token_stop"),
        "last": (8, "token_stop"),
        "never": (8, "limit"),
    }, "a stop on the last token wins over the limit, and prompt tokens never count"


def test_min_tokens_keep_eos_and_stops_away() -> None:
    rig = Rig()
    short = find(ends_with_eos(2))
    stop = (alone(short)[0][0],)
    prompts = [replace(short, min_tokens=5), replace(short, min_tokens=5, stop_sequences=(stop,))]
    rig.submit("a", *prompts)
    rig.run()
    rig.check("a", *prompts)
    assert all(len(rig.ids("a", child)) >= 5 for child in (0, 1))
    assert EOS not in rig.ids("a")[:5]
    assert stop[0] not in rig.ids("a", 1)[:4]


def test_engines_that_compute_alike_name_pages_alike() -> None:
    """The keys that come with a prompt are the settings' own; an engine's name its KV."""

    def named(tensor_parallel: int = 1, **changes: str) -> bytes:
        rank = FakeRank(8, SMALL.page_tokens)
        rank.report = replace(rank.report, **changes)  # type: ignore[arg-type]
        rig = Rig(replace(SMALL, tensor_parallel=tensor_parallel), ranks=lambda: FakeRanks(rank))
        prompt = make_prompt(range(1, 9), max_tokens=1)
        seed = cache_seed(fake_model(64).manifest, dtype="auto", numerics="invariant", page_tokens=4)
        given = page_keys(prompt.token_ids, 4, seed)
        (request,) = rig.engine._scheduler.prepare(Group("a", None), [replace(prompt, page_keys=given)])
        assert len(request.keys) == 2 and request.keys[0] != given[0]
        return request.keys[0]

    others = [
        named(kernels="vnni-int8"),
        named(device="cuda"),
        named(attention="flash"),
        named(numerics="fast"),
        named(2),
    ]
    assert named() == named() and len({named(), *others}) == 6


def test_the_context_ends_an_answer() -> None:
    rig = Rig(context=16)
    prompt = make_prompt(range(1, 13), max_tokens=100, ignore_eos=True)
    rig.submit("a", prompt)
    rig.submit("full", make_prompt(range(1, 17), max_tokens=0))
    rig.run()
    rig.check("a", prompt)
    assert len(rig.ids("a")) == 4
    assert rig.ids("full") == [] and rig.end("full") == EngineEnd("limit")
    for prompt, limit in ((make_prompt(range(1, 17), max_tokens=1), 15), (make_prompt(range(17), max_tokens=0), 16)):
        message = rf"^prompt is too long: {len(prompt.token_ids)} tokens > {limit} maximum$"
        with pytest.raises(RequestError, match=message) as raised:
            rig.submit("long", prompt)
        assert raised.value.code == "context_length_exceeded"
    rig.check_returned()


def test_a_pool_smaller_than_the_context_is_the_context(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(pages=3)
    assert rig.engine.context == 12
    assert "the context is cut from 64 tokens to the 12 that the KV pool holds (engine.kv_bytes)" in caplog.text
    prompt = make_prompt(range(1, 9), max_tokens=100, ignore_eos=True)
    rig.submit("a", prompt)
    rig.run()
    assert (rig.ids("a"), rig.end("a")) == (alone(prompt)[0][:4], EngineEnd("limit"))
    rig.check_returned()
    assert Rig(context=16).engine.context == 16


def test_a_prompt_beyond_the_pool_is_refused() -> None:
    rig = Rig(pages=3)
    with pytest.raises(RequestError, match="tokens > 11 maximum"):
        rig.submit("a", make_prompt(range(13)))
    with pytest.raises(RequestError, match="empty"):
        rig.submit("b", make_prompt([]))
    rig.check_returned()


def test_logprobs_and_times_are_passed_on() -> None:
    rig = Rig()
    rig.submit("a", make_prompt([1, 2], max_tokens=3, output=OutputOptions(logprobs=2, timestamps=True)))
    rig.submit("b", make_prompt([1, 2], max_tokens=3))
    rig.run()
    records = [record for update in rig.child("a") for record in update.records]
    assert all(record.logprob is not None and len(record.alternatives) == 2 and record.time > 1e9 for record in records)
    plain = [record for update in rig.child("b") for record in update.records]
    assert plain == [TokenRecord(token) for token in rig.ids("a")]


# ---- prefix reuse ----


def test_a_repeated_prompt_is_restored_but_for_one_token() -> None:
    rig = Rig()
    prompt = make_prompt(range(1, 17), max_tokens=4)
    for name in ("cold", "warm"):
        rig.submit(name, prompt)
        rig.run()
        rig.check(name, prompt)
    assert (rig.cached("cold"), rig.cached("warm")) == (0, 15), "one of 16 tokens must be computed"
    stats = rig.engine.stats()
    assert (stats.reused_tokens, stats.prefill_tokens) == (15, 17)
    rig.check_returned()


def test_an_answer_is_restored_in_the_next_turn() -> None:
    rig = Rig()
    first = make_prompt(range(1, 7), max_tokens=8, ignore_eos=True)
    rig.submit("a", first)
    rig.run()
    turn = make_prompt([*range(1, 7), *rig.ids("a"), 9, 9], max_tokens=4)
    rig.submit("b", turn)
    rig.run()
    rig.check("b", turn)
    assert rig.cached("b") == 13, "of the 14 earlier tokens the last was never fed"


def test_prompts_that_part_within_a_page_share_what_is_before() -> None:
    rig = Rig(replace(SMALL, page_tokens=8, prefill_chunk=16, step_tokens=24))
    common = [*range(1, 14)]
    prompts = {
        "first": make_prompt([*common, 20, 21, 22, 23], max_tokens=1),
        "second": make_prompt([*common, 24, 25, 26], max_tokens=1),
        "short": make_prompt([*common[:10]], max_tokens=1),
        "longer": make_prompt([*common, 24, 25, 26, 27, 28], max_tokens=1),
        "other": make_prompt([*common[:8], 29, 30], max_tokens=1),
    }
    for name, prompt in prompts.items():
        rig.submit(name, prompt)
        rig.run()
        rig.check(name, prompt)
    assert [rig.cached(name) for name in prompts] == [0, 13, 9, 16, 8]
    assert sum(len(step.copies) for step in rig.ranks.steps) == 2, "the last page of a whole match isn't copied"
    rig.check_returned()


def test_a_beginning_is_given_up_where_pages_are_scarce() -> None:
    """Two pages: the second prompt needs both, so the one it could copy from must go."""
    rig = Rig(replace(SMALL, page_tokens=8, prefill_chunk=16, step_tokens=24), pages=2)
    for name, last in (("first", 20), ("second", 21)):
        prompt = make_prompt([*range(1, 8), last, 1, 2], max_tokens=1)
        rig.submit(name, prompt)
        rig.run()
        rig.check(name, prompt)
        assert rig.cached(name) == 0
    rig.check_returned()


def test_choices_of_one_prompt_share_its_prefill() -> None:
    rig = Rig()
    prompts = [make_prompt(range(1, 18), seed=seed, max_tokens=5) for seed in range(4)]
    rig.submit("a", *prompts)
    rig.run()
    rig.check("a", *prompts)
    assert [rig.cached("a", child) for child in range(4)] == [0, 16, 16, 16]
    assert rig.engine.stats().prefill_tokens == 17 + 3
    rig.check_returned()


def test_without_a_prefix_cache_nothing_is_shared() -> None:
    rig = Rig(replace(SMALL, prefix_cache=False))
    prompt = make_prompt(range(1, 17), max_tokens=4)
    rig.submit("a", prompt, prompt)
    rig.run()
    rig.check("a", prompt, prompt)
    stats = rig.engine.stats()
    assert (rig.cached("a"), rig.cached("a", 1), stats.reused_tokens, stats.cached_pages) == (0, 0, 0, 0)
    assert stats.free_pages == 64


def test_keys_of_another_seed_are_replaced() -> None:
    rig = Rig()
    prompt = make_prompt(range(1, 17), max_tokens=2)
    for name, keys in {"a": (), "b": (b"k1", b"k2", b"k3", b"k4"), "c": (b"k1",)}.items():
        rig.submit(name, replace(prompt, page_keys=keys))
        rig.run()
    assert (rig.cached("b"), rig.cached("c")) == (15, 15)


def test_pages_of_a_failed_computation_are_not_shared() -> None:
    rig = Rig(ranks=lambda: FakeRanks(FakeRank(64, 4, poison=31)))
    bad = make_prompt([*range(1, 10), 31, 1, 2], max_tokens=2)
    good = make_prompt([*range(1, 10), 8, 1, 2], max_tokens=2)
    for name, prompt in {"bad": bad, "again": bad, "good": good}.items():
        rig.submit(name, prompt)
        rig.run()
    for name in ("bad", "again"):
        end = rig.end(name)
        assert (end.cause, end.kind) == ("failed", "execution")
        assert "not finite" in end.message
        assert rig.cached(name) == 0
    rig.check("good", good)
    assert rig.cached("good") == 0
    rig.check_returned()


# ---- pages run out ----


def test_the_youngest_gives_way_and_nobody_notices() -> None:
    rig = Rig(pages=8)
    prompts = [make_prompt([9, seed, 3], seed=seed, max_tokens=20, ignore_eos=True) for seed in range(3)]
    for seed, prompt in enumerate(prompts):
        rig.submit(str(seed), prompt)
    rig.run()
    for seed, prompt in enumerate(prompts):
        rig.check(str(seed), prompt)
        assert rig.cached(str(seed)) == 0, "what is restored after a preemption was never cached before"
    assert rig.engine.stats().preemptions > 0
    rig.check_returned()


# ---- prompt scores ----


def scores_of(updates: Sequence[Update]) -> list[object]:
    found: list[object] = []
    for update in updates:
        if isinstance(update.scores, PromptScores):
            assert update.scores.start == len(found), "chunks come in order, without holes"
            found += update.scores.entries
    return found


def expected_scores(prompt: PreparedPrompt, alternatives: int) -> list[object]:
    ids = prompt.token_ids.tolist()
    entries = [score_entry(ids[: position + 1], alternatives) for position in range(1, len(ids))]
    return [None, *entries]


def flat(scores: Sequence[object]) -> list[object]:
    return [
        None if entry is None else (entry.id, entry.logprob, entry.rank, list(entry.alternatives))  # type: ignore[attr-defined]
        for entry in scores
    ]


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("length", [1, 8, 21])
def test_prompt_scores_start_uncached_and_come_before_tokens(max_tokens: int, length: int) -> None:
    rig = Rig()
    warm = make_prompt(range(1, length + 1), max_tokens=2)
    scored = replace(warm, max_tokens=max_tokens, output=OutputOptions(prompt_logprobs=2))
    for name, prompt in {"warm": warm, "scored": scored, "next": warm}.items():
        rig.submit(name, prompt)
        rig.run()
    assert flat(scores_of(rig.child("scored"))) == expected_scores(scored, 2)
    assert rig.cached("scored") == 0
    assert rig.cached("next") == length - 1
    rig.check("scored", scored)
    kinds = [
        "scores" if update.scores else "token" for update in rig.child("scored") if update.scores or update.records
    ]
    assert kinds == sorted(kinds)
    rig.check_returned()


def test_scores_survive_preemption_and_publish() -> None:
    rig = Rig(pages=7)
    scored = make_prompt(range(1, 10), seed=3, max_tokens=6, ignore_eos=True, output=OutputOptions(prompt_logprobs=0))
    rig.submit("old", make_prompt([7, 7], max_tokens=22, ignore_eos=True))
    rig.run(3)
    rig.submit("scored", scored)
    rig.run()
    assert flat(scores_of(rig.child("scored"))) == expected_scores(scored, 0)
    rig.check("scored", scored)
    assert rig.engine.stats().preemptions > 0
    rig.check_returned()


# ---- resubmission ----


@pytest.mark.parametrize("already", [1, 4, 7])
def test_a_resubmission_goes_on_where_it_was(already: int) -> None:
    rig = Rig()
    prompt = make_prompt(range(1, 11), max_tokens=8, ignore_eos=True)
    ids, _ = alone(prompt)
    again = replace(prompt, committed=tuple(TokenRecord(token) for token in ids[:already]), first_cached=4)
    rig.submit("a", prompt)
    rig.run()
    rig.submit("b", again)
    rig.run()
    assert rig.ids("b") == ids[already:], "committed tokens are never sent again and count in the limit"
    assert rig.cached("b") == 4
    assert rig.end("b").cause == "limit"
    rig.check_returned()


def test_a_resubmission_that_had_ended_ends_at_once() -> None:
    rig = Rig()
    prompt = find(ends_with_eos(3))
    ids, _ = alone(prompt)
    rig.submit("eos", replace(prompt, committed=tuple(map(TokenRecord, ids))))
    rig.submit("limit", replace(prompt, max_tokens=2, committed=tuple(map(TokenRecord, ids[:2])), first_cached=3))
    rig.run()
    assert (rig.end("eos"), rig.end("limit")) == (EngineEnd("eos"), EngineEnd("limit"))
    assert rig.cached("limit") == 3
    assert not rig.ranks.steps


# ---- groups, cancel, stop ----


def test_groups_are_taken_whole_or_not_at_all() -> None:
    rig = Rig()
    prompt = make_prompt([1, 2], max_tokens=2)
    rig.submit("ten", *[prompt] * 10)
    with pytest.raises(QueueFull, match="10 of 12") as raised:
        rig.submit("three", *[prompt] * 3)
    assert raised.value.reason == "full"
    with pytest.raises(RequestError, match="13 choices"):
        rig.submit("thirteen", *[prompt] * 13)
    with pytest.raises(RequestError, match="too long"):
        rig.submit("mixed", prompt, make_prompt(range(100)))
    rig.submit("two", prompt, prompt)
    with pytest.raises(QueueFull):
        rig.submit("late", prompt)
    rig.run()
    assert rig.news["three"] == rig.news["mixed"] == []
    rig.submit("late", prompt)
    rig.run()
    rig.check("late", prompt)
    rig.check_returned()


def test_an_id_in_use_is_an_error() -> None:
    rig = Rig()
    rig.submit("a", make_prompt([1]))
    with pytest.raises(ValueError, match="already running"):
        rig.submit("a", make_prompt([1]))
    rig.run()
    rig.submit("a", make_prompt([1]))
    rig.run()


@pytest.mark.parametrize("steps", range(8))
def test_cancel_at_every_point_returns_everything(steps: int) -> None:
    rig = Rig(replace(SMALL, max_requests=2))
    prompt = make_prompt(range(1, 20), max_tokens=10, ignore_eos=True)
    others = [make_prompt([5, seed], seed=seed) for seed in range(3)]
    rig.submit("a", prompt, prompt, prompt)
    rig.submit("b", *others)
    rig.run(steps)
    rig.engine.cancel("a")
    rig.run()
    for child in range(3):
        assert rig.end("a", child) == EngineEnd("cancelled")
        assert rig.ids("a", child) == alone(prompt)[0][: len(rig.ids("a", child))]
    rig.check("b", *others)
    rig.check_returned()


def test_a_cancel_that_overtakes_its_submit_works_once() -> None:
    rig = Rig()
    prompt = make_prompt([1, 2])
    rig.engine.cancel("a")
    rig.run()
    rig.submit("a", prompt)
    rig.run()
    assert rig.end("a") == EngineEnd("cancelled") and rig.ids("a") == []
    assert rig.cached("a") == 0
    rig.news.clear()
    rig.submit("a", prompt)
    rig.run()
    rig.check("a", prompt)


def test_a_cancel_of_a_finished_group_buries_nothing() -> None:
    rig = Rig()
    prompt = make_prompt([1, 2])
    rig.submit("a", prompt)
    rig.run()
    rig.engine.cancel("a")
    rig.run()
    rig.news.clear()
    rig.submit("a", prompt)
    rig.run()
    rig.check("a", prompt)


def test_stop_ends_one_child() -> None:
    rig = Rig()
    prompts = [make_prompt([1, 2], seed=seed, max_tokens=12, ignore_eos=True) for seed in (1, 2)]
    rig.submit("a", *prompts)
    rig.run(4)
    rig.engine.stop("a", 0, 2)
    rig.engine.stop("a", 5, 2)
    rig.engine.stop("nobody", 0, 2)
    rig.run()
    assert rig.end("a", 0) == EngineEnd("cancelled")
    assert 0 < len(rig.ids("a", 0)) < 12
    ids, cause = alone(prompts[1])
    assert rig.ids("a", 1) == ids and rig.end("a", 1).cause == cause
    rig.check_returned()


def test_a_failing_sink_ends_its_group_alone() -> None:
    rig = Rig()
    prompt = make_prompt([1, 2], max_tokens=12, ignore_eos=True)

    def broken(updates: list[Update]) -> None:
        raise ConnectionError("peer is gone")

    rig.engine.submit("broken", [prompt], broken)
    rig.submit("fine", prompt)
    rig.run()
    rig.check("fine", prompt)
    rig.check_returned()


def test_all_news_of_a_step_can_be_had_at_once() -> None:
    """So that they leave in one frame."""
    calls: list[list[tuple[str, list[Update]]]] = []

    def on_step(news: list[tuple[str, list[Update]]], expected: float) -> float:
        calls.append(news)
        return inf

    rig = Rig(on_step=on_step)
    names = ["a", "b", "c"]
    for name in names:
        rig.engine.submit(name, [make_prompt([1, 2], max_tokens=3, ignore_eos=True)])
    rig.run()
    assert [[group for group, _ in call] for call in calls] == [names] * 3
    assert [
        record.id for call in calls for group, updates in call if group == "b" for record in updates[0].records
    ] == (alone(make_prompt([1, 2], max_tokens=3, ignore_eos=True))[0])


def test_news_that_are_held_back_are_asked_for_in_time_and_before_the_engine_rests() -> None:
    """`on_step` wants to be called again at once: so it is, without news while a step runs, and when none does."""
    calls: list[tuple[int, float]] = []

    def on_step(news: list[tuple[str, list[Update]]], expected: float) -> float:
        calls.append((len(news), expected))
        return 0.0 if news else inf

    class Slow(FakeRanks):
        """The first question for a result comes too early."""

        asked = 0

        def receive(self, timeout: float) -> StepResult:
            self.asked += 1
            if self.asked % 2:
                raise TimeoutError("no step result")
            return super().receive(timeout)

    rig = Rig(on_step=on_step, ranks=lambda: Slow(FakeRank(64, 4)))
    rig.engine.submit("a", [make_prompt([1, 2], max_tokens=3, ignore_eos=True)])
    rig.run()
    assert [count for count, _ in calls] == [1, 0, 1, 0, 1, 0]
    assert all(0 <= expected < inf for _, expected in calls[:4]), "steps are in flight"
    assert calls[-1] == (0, inf)
    rig.check_returned()


# ---- pause, drain ----


def test_pause_refuses_and_lets_the_rest_finish() -> None:
    rig = Rig()
    prompt = make_prompt([1, 2])
    rig.submit("a", *[prompt] * 6)
    rig.run(1)
    rig.engine.pause()
    with pytest.raises(QueueFull, match="paused") as raised:
        rig.submit("b", prompt)
    assert raised.value.reason == "paused"
    rig.engine.submit("c", [prompt], rig.news.setdefault("c", []).extend, admitted=True)
    rig.run()
    rig.check("a", *[prompt] * 6)
    rig.check("c", prompt)
    rig.engine.resume()
    rig.submit("b", prompt)
    rig.run()
    rig.check("b", prompt)


def test_pause_may_fail_who_waits() -> None:
    rig = Rig(replace(SMALL, max_requests=2))
    prompt = make_prompt([1, 2], max_tokens=9)
    rig.submit("a", *[prompt] * 4)
    rig.run(1)
    rig.engine.pause(fail_waiting=True)
    rig.run()
    rig.check("a", prompt, prompt)
    for child in (2, 3):
        end = rig.end("a", child)
        assert (end.cause, end.kind) == ("failed", "unavailable")


# ---- the thread ----


def test_on_a_thread_from_many_threads() -> None:
    rig = Rig()
    rig.engine.start()
    done: dict[int, list[Update]] = {}

    def client(number: int) -> None:
        over = threading.Event()
        updates: list[Update] = []

        def sink(news: list[Update]) -> None:
            updates.extend(news)
            if any(update.end for update in news):
                over.set()

        while True:
            try:
                rig.engine.submit(str(number), [make_prompt([1, number % 5], seed=number)], sink)
                break
            except QueueFull:
                over.wait(0.002)
        assert over.wait(20)
        done[number] = updates

    threads = [threading.Thread(target=client, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert rig.engine.drain(10)
    rig.engine.close()
    for number in range(40):
        ids = [record.id for update in done[number] for record in update.records]
        assert ids == alone(make_prompt([1, number % 5], seed=number))[0]
    assert rig.ranks.closed
    with pytest.raises(QueueFull) as raised:
        rig.submit("late", make_prompt([1]))
    assert raised.value.reason == "down"


def test_closing_ends_what_runs() -> None:
    rig = Rig()
    rig.engine.pause()
    rig.engine.resume()
    rig.submit("a", make_prompt([1, 2], max_tokens=30, ignore_eos=True))
    rig.run(3)
    rig.engine.close()
    end = rig.end("a")
    assert (end.cause, end.kind) == ("failed", "unavailable")
