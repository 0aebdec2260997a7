"""Reasoning budgets and output constraints through the whole engine, over a deterministic rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from engine.scheduler.guide import Guide, Segments, banned_ids
from engine.syntax.piece import Segment, SyntaxEvent
from engine.types.constraint import Constraint
from engine.types.events import EngineEnd, TokenRecord, Update
from engine.types.request import OutputOptions, PreparedPrompt, RequestError
from tests.support.engine_rig import Rig
from tests.support.fake_rank import EOS, VOCAB, FakeRank, FakeRanks, alone, choose, make_prompt

CLOSE, TOOL, PROSE = 31, 30, 29


class Reasoning:
    """Reasoning until CLOSE; TOOL may open a call, PROSE says that it did not."""

    def __init__(self, opening: str) -> None:
        self.reasoning_open = opening == "reasoning"
        self.tool_pending = False

    def feed(self, segment: Segment) -> list[SyntaxEvent]:
        if segment.id == CLOSE:
            self.reasoning_open = False
        elif segment.id == TOOL:
            self.tool_pending = True
        elif segment.id == PROSE:
            self.tool_pending = False
        return []

    def finish(self, *, truncated: bool) -> list[SyntaxEvent]:
        return []


class Alternating:
    """Even tokens and odd tokens in turn, then EOS after `length` tokens."""

    def __init__(self, length: int = 5) -> None:
        self.taken: list[int] = []
        self.length = length

    def allowed(self) -> Iterable[int]:
        if len(self.taken) == self.length:
            return [EOS]
        return range(2 + len(self.taken) % 2, VOCAB, 2)

    def mask(self) -> bytes | None:
        return sum(1 << token for token in self.allowed()).to_bytes(4, "little")

    def advance(self, token: int) -> bool:
        allowed = token in self.allowed()
        self.taken.append(token)
        return allowed

    def allows(self, token: int) -> bool:
        return token in self.allowed()


class AfterReasoning(Alternating):
    """Binds once CLOSE came."""

    free = True

    def mask(self) -> bytes | None:
        return None if self.free else super().mask()

    def advance(self, token: int) -> bool:
        if self.free:
            self.free = token != CLOSE
            return True
        return super().advance(token)

    def allows(self, token: int) -> bool:
        return self.free or super().allows(token)


def open_guide(prompt: PreparedPrompt) -> Guide:
    matcher = AfterReasoning() if prompt.opening == "reasoning" else Alternating()
    return Guide(
        budget=prompt.reasoning_budget,
        close=CLOSE,
        syntax=Reasoning(prompt.opening) if prompt.opening else None,
        segments=Segments(lambda token: bytes([97 + token % 26])),
        matcher=matcher if prompt.constraint else None,
        banned=banned_ids(prompt),
        min_tokens=prompt.min_tokens,
        vocab_size=VOCAB,
    )


def without(*tokens: int, length: int = 12, **fields: object) -> PreparedPrompt:
    """A prompt whose free answer of `length` tokens has none of `tokens`."""
    for seed in range(10_000):
        prompt = make_prompt([1, 2, 3], seed=seed, max_tokens=length, ignore_eos=True, **fields)
        if not set(tokens) & set(alone(prompt)[0]):
            return prompt
    raise AssertionError("no such seed")


def forced_at(rig: Rig, name: str = "a") -> list[int]:
    records = [record for update in rig.child(name) for record in update.records]
    return [place for place, record in enumerate(records) if record.forced]


PLAIN = Constraint("regex", "fake")


def test_the_close_is_forced_at_the_cap() -> None:
    rig = Rig(open_guide=open_guide)
    prompt = without(
        CLOSE, TOOL, opening="reasoning", reasoning_budget=4, output=OutputOptions(logprobs=1, timestamps=True)
    )
    rig.submit("a", prompt)
    rig.run()
    records = [record for update in rig.child("a") for record in update.records]
    assert [record.id for record in records[:4]] == alone(prompt)[0][:4]
    close = records[4]
    assert (close.id, close.forced, close.logprob, close.alternatives) == (CLOSE, True, None, ())
    assert close.time > 1e9
    assert all(record.logprob is not None and not record.forced for record in records if record is not close)
    assert len(records) == 12, "the close counts in the limit"
    assert rig.end("a") == EngineEnd("limit", budget_cut=True)
    assert rig.engine.stats().reasoning_budget_cuts == 1
    history = [1, 2, 3, *rig.ids("a")[:5]]
    assert rig.ids("a")[5] == choose(prompt.sampling.seed, history, lambda token: True), "the close is read like any"


def test_only_steps_at_the_cap_wait_for_late_inputs() -> None:
    rig = Rig(open_guide=open_guide)
    rig.submit("a", without(CLOSE, TOOL, opening="reasoning", reasoning_budget=4))
    rig.run()
    assert [step.number for step in rig.ranks.steps if any(row.gated for row in step.rows)] == [5, 6]
    events = rig.ranks.events
    for number in (5, 6):
        assert (
            events.index(("receive", number - 1)) < events.index(("late", number)) < events.index(("receive", number))
        )
        assert events.index(("send", number)) < events.index(("receive", number - 1)), "the pipeline stays full"


@pytest.mark.parametrize(
    ("budget", "length", "cut"), [(12, 12, False), (11, 12, True), (1, 12, True), (2**31 - 1, 12, False)]
)
def test_a_cut_needs_room_for_the_close(budget: int, length: int, cut: bool) -> None:
    rig = Rig(open_guide=open_guide)
    rig.submit("a", without(CLOSE, TOOL, length=length, opening="reasoning", reasoning_budget=budget))
    rig.run()
    assert forced_at(rig) == ([budget] if cut else [])
    assert rig.end("a") == EngineEnd("limit", budget_cut=cut)
    assert rig.engine.stats().reasoning_budget_cuts == cut


def test_reasoning_that_closed_in_time_is_not_cut() -> None:
    prompt = next(
        prompt
        for seed in range(10_000)
        for prompt in [make_prompt([1, 2, 3], seed=seed, max_tokens=10, ignore_eos=True, opening="reasoning")]
        if CLOSE in alone(prompt)[0][:4] and TOOL not in alone(prompt)[0]
    )
    rig = Rig(open_guide=open_guide)
    closes = alone(prompt)[0].index(CLOSE)
    for name, budget in {"late": 6, "exact": closes + 1}.items():
        rig.submit(name, replace(prompt, reasoning_budget=budget))
    rig.run()
    for name in ("late", "exact"):
        assert rig.ids(name) == alone(prompt)[0] and forced_at(rig, name) == []
        assert not rig.end(name).budget_cut
    assert rig.engine.stats().reasoning_budget_cuts == 0


def test_an_undecided_tool_opener_holds_the_cut_back() -> None:
    def answer(seed: int) -> list[int]:
        return alone(make_prompt([1, 2, 3], seed=seed, max_tokens=12, ignore_eos=True))[0]

    seed = next(
        seed
        for seed in range(200_000)
        for ids in [answer(seed)]
        if TOOL in ids[:4] and PROSE in ids[5:9] and PROSE not in ids[:5] and CLOSE not in ids and ids.count(TOOL) == 1
    )
    rig = Rig(open_guide=open_guide)
    free = answer(seed)
    prompt = make_prompt([1, 2, 3], seed=seed, max_tokens=12, ignore_eos=True, opening="reasoning", reasoning_budget=4)
    rig.submit("a", prompt)
    rig.run()
    prose = free.index(PROSE)
    assert rig.ids("a")[: prose + 1] == free[: prose + 1], "nothing is injected while the opener is undecided"
    assert forced_at(rig) == [prose + 1], "the cap holds as soon as it turns out to be reasoning"


def test_output_that_starts_in_content_is_not_cut() -> None:
    rig = Rig(open_guide=open_guide)
    prompt = without(CLOSE, opening="content", reasoning_budget=2)
    rig.submit("a", prompt)
    rig.run()
    rig.check("a", prompt)
    assert all(not row.gated for step in rig.ranks.steps for row in step.rows)


def test_a_constraint_binds_from_the_start_of_content() -> None:
    rig = Rig(open_guide=open_guide)
    prompts = [make_prompt([seed], seed=seed, opening="content", constraint=PLAIN) for seed in range(1, 5)]
    rig.submit("a", *prompts)
    rig.run()
    for child in range(4):
        ids = rig.ids("a", child)
        assert [token % 2 for token in ids[:5]] == [0, 1, 0, 1, 0] and ids[5] == EOS
        assert rig.end("a", child).cause == "eos"
    rig.check_returned()


def test_a_constraint_waits_for_the_end_of_reasoning() -> None:
    rig = Rig(open_guide=open_guide)
    prompt = without(CLOSE, TOOL, EOS, length=10, opening="reasoning", reasoning_budget=3)
    rig.submit("a", replace(prompt, constraint=PLAIN, ignore_eos=False))
    rig.run()
    ids = rig.ids("a")
    assert ids[:3] == alone(prompt)[0][:3]
    assert ids[3] == CLOSE and forced_at(rig) == [3]
    assert [token % 2 for token in ids[4:9]] == [0, 1, 0, 1, 0] and ids[9] == EOS
    assert rig.end("a") == EngineEnd("eos", budget_cut=True)


def test_constraints_survive_preemption_and_lost_ranks() -> None:
    def prompts() -> list[PreparedPrompt]:
        return [make_prompt([seed], seed=seed, opening="content", constraint=PLAIN) for seed in range(1, 5)]

    calm = Rig(open_guide=open_guide)
    calm.submit("a", *prompts())
    calm.run()
    crash = [6, 3]
    rough = Rig(
        open_guide=open_guide,
        pages=5,
        ranks=lambda: FakeRanks(FakeRank(5, 4, crash_at=[crash.pop()] if crash else [])),
    )
    rough.submit("a", *prompts())
    rough.run()
    for child in range(4):
        assert rough.ids("a", child) == calm.ids("a", child)
        assert rough.end("a", child).cause == "eos"
    assert len(rough.groups) == 3
    rough.check_returned()


def test_a_resubmitted_constraint_goes_on() -> None:
    rig = Rig(open_guide=open_guide)
    prompt = make_prompt([1], opening="content", constraint=PLAIN)
    rig.submit("a", prompt)
    rig.run()
    rig.submit("b", replace(prompt, committed=tuple(map(TokenRecord, rig.ids("a")[:3]))))
    rig.run()
    assert rig.ids("b") == rig.ids("a")[3:]


def test_min_tokens_give_way_only_to_the_constraint() -> None:
    """EOS is masked while anything else is allowed; a complete answer ends all the same."""
    rig = Rig(open_guide=open_guide)
    rig.submit("a", make_prompt([1], max_tokens=20, opening="content", constraint=PLAIN, min_tokens=9))
    rig.run()
    assert len(rig.ids("a")) == 6 and rig.end("a").cause == "eos"

    class Free(Alternating):
        def allowed(self) -> Iterable[int]:
            return range(VOCAB)

    guide = Guide(matcher=Free(), banned=[EOS, 9], min_tokens=2, vocab_size=VOCAB)
    masks = []
    for token in (5, 6, 7):
        masks.append(guide.mask())
        guide.commit(token)
    banned = (0xFFFFFFFF & ~(1 | 1 << 9)).to_bytes(4, "little")
    assert masks == [banned, banned, b"\xff" * 4]


def test_reasoning_under_a_constraint_keeps_min_tokens() -> None:
    guide = Guide(matcher=AfterReasoning(), banned=[EOS], min_tokens=1, vocab_size=VOCAB)
    assert guide.mask() == (0xFFFFFFFE).to_bytes(4, "little")
    guide.commit(4)
    assert guide.mask() is None, "reasoning is free"


def test_a_constraint_compiles_while_others_run() -> None:
    let_go = threading.Event()

    def slow(prompt: PreparedPrompt) -> Guide:
        assert let_go.wait(20)
        return open_guide(prompt)

    rig = Rig(open_guide=slow)
    over = {name: threading.Event() for name in ("slow", "fast")}

    def sink(name: str) -> Callable[[list[Update]], None]:
        def take(updates: list[Update]) -> None:
            rig.news.setdefault(name, []).extend(updates)
            if updates[-1].end:
                over[name].set()

        return take

    rig.engine.start()
    rig.engine.submit("slow", [make_prompt([1], opening="content", constraint=PLAIN)], sink("slow"))
    fast = make_prompt([1, 2])
    rig.engine.submit("fast", [fast], sink("fast"))
    assert over["fast"].wait(20) and not over["slow"].is_set()
    let_go.set()
    assert over["slow"].wait(20)
    rig.engine.close()
    rig.check("fast", fast)
    assert rig.end("slow").cause == "eos"


def test_a_constraint_that_does_not_compile_fails_its_request_alone() -> None:
    def refuse(prompt: PreparedPrompt) -> Guide:
        raise RequestError("the schema has too many branches")

    rig = Rig(open_guide=refuse)
    fine = make_prompt([1, 2])
    rig.submit("bad", make_prompt([1], constraint=PLAIN))
    rig.submit("fine", fine)
    rig.run()
    end = rig.end("bad")
    assert (end.cause, end.kind) == ("failed", "execution") and "too many branches" in end.message
    rig.check("fine", fine)
    rig.check_returned()


def test_a_token_that_the_constraint_refuses_fails_the_request() -> None:
    class Deaf(Alternating):
        def mask(self) -> bytes | None:
            return b"\xff" * 4

    rig = Rig(open_guide=lambda prompt: Guide(matcher=Deaf(), vocab_size=VOCAB))
    rig.submit("a", make_prompt([1], seed=3, max_tokens=20, ignore_eos=True, constraint=PLAIN))
    rig.run()
    end = rig.end("a")
    assert (end.cause, end.kind) == ("failed", "execution") and "does not allow token" in end.message
    rig.check_returned()


def test_a_close_that_the_constraint_refuses_is_not_forced() -> None:
    guide = Guide(
        budget=1,
        close=CLOSE,
        syntax=Reasoning("reasoning"),
        segments=Segments(lambda token: b"x"),
        matcher=Alternating(),
        vocab_size=VOCAB,
    )
    guide.commit(4)
    assert guide.forced() == CLOSE
    guide.commit(5)
    assert guide.forced() is None, "an even token is due"


def test_characters_spread_over_tokens_are_one_text() -> None:
    data = {1: b"\xc3", 2: b"\xa4", 3: b"a", 4: b"b\xe2"}
    segments = Segments(data.__getitem__)
    assert [segments.next(token) for token in (3, 1, 2, 4, 3)] == [
        Segment(0, 3, "a"),
        Segment(1, None, ""),
        Segment(2, None, "ä"),
        Segment(3, None, "b"),
        Segment(4, None, "\ufffda"),
    ]
