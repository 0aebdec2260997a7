"""A deterministic rank without torch that behaves like a real one towards the scheduler.

Its KV memory holds token ids in pages, and what it samples is a hash of (seed, position, everything it reads back
through the slot's page table). So a page reused too early, shared wrongly, restored from the wrong place or lost in a
preemption changes the tokens. `alone` says what a request must give whatever happens around it.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np

from engine.config import Manifest
from engine.parallel.ranks import RankGroupFailed, RankLink
from engine.scheduler.step import LateInputs, RankReport, Row, SampledRow, ScoredRow, SlotSetup, Step, StepResult
from engine.types.request import OutputOptions, PreparedPrompt, SamplingParams

if TYPE_CHECKING:
    from engine.prepared import PreparedModel

VOCAB = 32
EOS = 0
NOTHING = -1


def hashed(*parts: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=6).digest(), "little")


def choose(seed: int, history: Sequence[int], allowed: Callable[[int], bool]) -> int:
    """The allowed token with the largest hash of (seed, position, history, token)."""
    context = hashed(seed, len(history), *history)
    return max((token for token in range(VOCAB) if allowed(token)), key=lambda token: hashed(context, token))


def score(history: Sequence[int], token: int) -> float:
    return -(hashed(*history, token) % 1000) / 100


@dataclass
class _Slot:
    setup: SlotSetup
    length: int
    last: int = NOTHING
    table: list[int] = field(default_factory=list)
    scored: bool = False


class FakeRank:
    """`poison`: a row that reads this token fails. `crash_at`: steps that kill the rank."""

    def __init__(self, pages: int, page_tokens: int, *, poison: int = -1, crash_at: Sequence[int] = ()) -> None:
        self.page_tokens = page_tokens
        self.memory = [[NOTHING] * page_tokens for _ in range(pages)]
        self.slots: dict[int, _Slot] = {}
        self.poison = poison
        self.crash_at = set(crash_at)
        self.report = RankReport(pages, 64, 1000, VOCAB, "cpu", "reference", "invariant", "float32")

    def run(self, step: Step, late: Callable[[], LateInputs]) -> StepResult:
        if step.number in self.crash_at:
            raise RankGroupFailed(f"crash at step {step.number}")
        for slot in step.release:
            del self.slots[slot]
        for setup in step.setups:
            assert setup.slot not in self.slots, "a slot was bound twice"
            self.slots[setup.slot] = _Slot(setup, setup.length)
        for slot, first, pages in step.tables:
            table = self.slots[slot].table
            assert first == len(table), "page tables grow at their end"
            table += pages
        for source, target in step.copies:
            self.memory[target] = list(self.memory[source])
        assert len({row.slot for row in step.rows}) == len(step.rows), "one row a slot and step"
        result = StepResult(step.number)
        histories = [self._forward(row, result) for row in step.rows]
        inputs = late() if any(row.gated for row in step.rows) else LateInputs(step.number)
        assert inputs.number == step.number
        for row, history in zip(step.rows, histories, strict=True):
            if row.sample:
                result.sampled.append(self._sample(row, history, inputs))
        return result

    def _forward(self, row: Row, result: StepResult) -> list[int]:
        slot = self.slots[row.slot]
        if row.start < 0:
            assert row.count == 1 and not row.tokens and slot.last != NOTHING
            start, tokens = slot.length, [slot.last]
        else:
            start, tokens = row.start, np.frombuffer(row.tokens, "<i4").tolist()
        assert start == slot.length, "positions are computed once, in order"
        assert len(tokens) == row.count > 0
        for position, token in enumerate(tokens, start):
            self.memory[slot.table[position // self.page_tokens]][position % self.page_tokens] = token
        slot.length = start + row.count
        history = [
            self.memory[slot.table[position // self.page_tokens]][position % self.page_tokens]
            for position in range(slot.length)
        ]
        assert NOTHING not in history, "a position was read before it was written"
        if row.score is not None:
            assert slot.scored or start == 0, "scores need the logits of the position before"
            slot.scored = True
            first = max(start, 1)
            entries = [score_entry(history[: position + 1], row.score) for position in range(first, slot.length)]
            result.scored.append(ScoredRow(row.slot, first, entries))
        return history

    def _sample(self, row: Row, history: list[int], late: LateInputs) -> SampledRow:
        slot = self.slots[row.slot]
        if self.poison in history:
            slot.last = 0
            return SampledRow(row.slot, 0, failure="logits are not finite")
        setup = slot.setup
        position = len(history)
        mask = late.masks.get(row.slot)

        def allowed(token: int) -> bool:
            if position < setup.banned_until and token in setup.banned_ids:
                return False
            return mask is None or bool(mask[token // 8] >> (token % 8) & 1)

        token = late.forced.get(row.slot, NOTHING)
        if token == NOTHING:
            token = choose(setup.sampling.seed, history, allowed)
        slot.last = token
        if setup.logprobs is None:
            return SampledRow(row.slot, token)
        others = [(other, score(history, other)) for other in range(setup.logprobs)]
        return SampledRow(row.slot, token, score(history, token), others)


def score_entry(history: Sequence[int], alternatives: int) -> tuple[int, float, int, list[tuple[int, float, int]]]:
    before, token = history[:-1], history[-1]
    return token, score(before, token), 1, [(other, score(before, other), 2) for other in range(alternatives)]


class FakeRanks:
    """A RankGroup that runs a FakeRank when a result is asked for, so that the scheduler's order shows in `events`:
    ("send", n), ("late", n), ("receive", n)."""

    def __init__(self, rank: FakeRank, *, hang_at: int = -1) -> None:
        self.rank = rank
        self.report = rank.report
        self.events: list[tuple[str, int]] = []
        self.steps: list[Step] = []
        self.closed = False
        self.gone = threading.Event()
        self._hang_at = hang_at
        self._waiting: list[Step] = []
        self._late: dict[int, LateInputs] = {}

    def send(self, step: Step) -> None:
        assert not self.closed
        assert len(self._waiting) < 2, "at most two steps are in flight"
        assert not self.steps or self.steps[-1].number < step.number
        self.events.append(("send", step.number))
        self.steps.append(step)
        self._waiting.append(step)

    def send_late(self, late: LateInputs) -> None:
        assert late.number == self._waiting[0].number, "late inputs are those of the oldest step in flight"
        assert late.number not in self._late
        self.events.append(("late", late.number))
        self._late[late.number] = late

    def receive(self, timeout: float) -> StepResult:
        if self._waiting[0].number == self._hang_at:
            time.sleep(timeout)
            raise TimeoutError("no step result")
        step = self._waiting.pop(0)
        result = self.rank.run(step, lambda: self._late[step.number])
        self.events.append(("receive", step.number))
        return result

    def check(self) -> None:
        assert not self._waiting, "nothing is in flight"
        if self.gone.is_set():
            raise RankGroupFailed("rank 0 is gone")

    def close(self) -> None:
        self.closed = True


def fake_rank_loop(rank: FakeRank) -> Callable[[RankLink], None]:
    """The same rank behind a link, for the inline group and for sockets."""

    def run(link: RankLink) -> None:
        link.report(rank.report)
        while (step := link.receive()) is not None:
            assert isinstance(step, Step)
            link.send(rank.run(step, lambda: cast(LateInputs, link.receive())))

    return run


def fake_model(context: int = 64) -> PreparedModel:
    """As much of a prepared model as an engine without grammars needs."""

    class Fake:
        manifest = Manifest("fake", "llama", "safetensors", {}, [], context, VOCAB, None, [EOS], {}, "fake")

    return cast("PreparedModel", Fake())


def make_prompt(
    ids: Sequence[int],
    *,
    seed: int = 7,
    max_tokens: int = 8,
    **fields: object,
) -> PreparedPrompt:
    sampling = SamplingParams(1.0, 1.0, -1, 0.0, 1.0, 0.0, 0.0, seed)
    options: dict[str, object] = {"eos_ids": (EOS,), "output": OutputOptions(), **fields}
    return PreparedPrompt(np.array(ids, dtype=np.int32), sampling, max_tokens, **options)  # type: ignore[arg-type]


def alone(prompt: PreparedPrompt, context: int = 64) -> tuple[list[int], str]:
    """The tokens and the end's cause of `prompt`, by the definition."""
    history = prompt.token_ids.tolist()
    length = len(history)
    limit = min(prompt.max_tokens, context - length)
    singles = {sequence[0] for sequence in prompt.stop_sequences if len(sequence) == 1}
    banned = singles | (set() if prompt.ignore_eos else set(prompt.eos_ids))
    generated: list[int] = []
    while len(generated) < limit:
        early = len(generated) < prompt.min_tokens
        token = choose(prompt.sampling.seed, history, lambda token, early=early: not (early and token in banned))  # type: ignore[misc]
        history.append(token)
        generated.append(token)
        if token in prompt.eos_ids and not prompt.ignore_eos:
            return generated, "eos"
        if len(generated) >= prompt.min_tokens and any(
            tuple(generated[-len(stop) :]) == stop for stop in prompt.stop_sequences
        ):
            return generated, "token_stop"
    return generated, "limit"
