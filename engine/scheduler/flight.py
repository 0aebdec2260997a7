"""Flight: a step that was planned and not yet answered, with what its rows mean to the scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.scheduler.request import Request
from engine.scheduler.step import Row, SampledRow, ScoredRow, Step, StepResult

CONTEXT_UNIT = 2048
"""Positions of context whose attention costs about as much as the rest of a token's work, for predictions only."""


class StepMismatch(RuntimeError):
    """A result that doesn't answer the step that was sent: the ranks can't be trusted any more."""


@dataclass(slots=True)
class Planned:
    """A row in flight. `slot`: the request's at planning; `start`: position of the first token."""

    request: Request
    slot: int
    start: int
    count: int
    sample: bool
    prefill: bool
    score: bool
    gated: bool


@dataclass(slots=True)
class Flight:
    """`work`: tokens weighted by their context, what the step's time is predicted from; `prefill`: that of the chunks
    alone. `forced`: slot to the token that late inputs forced."""

    step: Step
    rows: list[Planned] = field(default_factory=list)
    forced: dict[int, int] = field(default_factory=dict)
    work: float = 0.0
    prefill: float = 0.0
    gated: bool = False

    def add(self, row: Planned, *, tokens: bytes = b"", alternatives: int | None = None) -> None:
        self.rows.append(row)
        start = row.start if row.prefill else -1
        self.step.rows.append(Row(row.slot, row.count, start, tokens, row.sample, alternatives, row.gated))
        work = row.count * (1.0 + (row.start + 0.5 * row.count) / CONTEXT_UNIT)
        self.work += work
        self.prefill += work if row.prefill else 0.0
        self.gated = self.gated or row.gated

    def answers(self, result: StepResult) -> Iterator[tuple[Planned, SampledRow | None, ScoredRow | None]]:
        """Each row with what the ranks say of it. Raises StepMismatch."""
        if result.number != self.step.number:
            raise StepMismatch(f"step {self.step.number} was answered with the result of step {result.number}")
        sampled = iter(result.sampled)
        scored = {row.slot: row for row in result.scored}
        for row in self.rows:
            answer = None
            if row.sample:
                answer = next(sampled, None)
                if answer is None or answer.slot != row.slot:
                    raise StepMismatch(f"step {result.number} has no sampled token for slot {row.slot}")
                forced = self.forced.get(row.slot)
                if forced is not None and answer.id != forced and not answer.failure:
                    raise StepMismatch(f"step {result.number} ignored the token forced in slot {row.slot}")
            yield row, answer, scored.get(row.slot) if row.score else None
        if next(sampled, None) is not None:
            raise StepMismatch(f"step {result.number} has more sampled tokens than rows")
