"""Observations of raw logits: log probabilities of sampled tokens, their alternatives, and prompt scores.

Values are logit - log-sum-exp over the complete vocabulary, before any sampling transform. Nothing of the size of
the vocabulary is kept: a maximum, a sum, and gathers of what was asked. Each function has a device half, which waits
for nothing, and a host half (`entries`), called when the step is committed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.execution.sampling_rows import Upload, uploader
from engine.execution.selection import count_greater, exponential_sums, largest
from engine.kernels import team

if TYPE_CHECKING:
    from engine.kernels.observing import Seen

NOT_FINITE = -9999.0
"""How a log probability that isn't finite is reported. Replaced here, so that nothing downstream meets -inf or NaN."""

Alternative = tuple[int, float]
RankedAlternative = tuple[int, float, int]


@dataclass(frozen=True, slots=True)
class Asked:
    """What one row wants: `natural` alternatives, or log probabilities of `ids` in that order instead."""

    row: int
    natural: int = 0
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Observations:
    """Device results for the rows in `asked`: `chosen` [n], `top` values and ids [n, most natural], `picked`
    [n, most explicit ids], all float64 but the ids."""

    asked: tuple[Asked, ...]
    chosen: Tensor
    top: Tensor
    top_ids: Tensor
    picked: Tensor

    def entries(self) -> dict[int, tuple[float, list[Alternative]]]:
        """row → (log probability of the chosen token, alternatives in the order asked). Waits for the device."""
        chosen, top, top_ids, picked = (part.tolist() for part in (self.chosen, self.top, self.top_ids, self.picked))
        result: dict[int, tuple[float, list[Alternative]]] = {}
        for index, asked in enumerate(self.asked):
            if asked.ids:
                pairs = zip(asked.ids, picked[index], strict=False)
            else:
                pairs = zip(top_ids[index][: asked.natural], top[index], strict=False)
            result[asked.row] = (_finite(chosen[index]), [(token, _finite(value)) for token, value in pairs])
        return result


@dataclass(frozen=True, slots=True)
class PromptObservations:
    """Device results for consecutive prompt positions: `targets` (the actual ids), `chosen` and `rank` [n], `top`
    values and ids [n, alternatives]."""

    targets: Tensor
    chosen: Tensor
    rank: Tensor
    top: Tensor
    top_ids: Tensor

    def entries(self) -> list[tuple[int, float, int, list[RankedAlternative]]]:
        """Per position (id, log probability, rank, alternatives with their ranks). Waits for the device."""
        parts = (self.targets, self.chosen, self.rank, self.top, self.top_ids)
        rows = zip(*(part.tolist() for part in parts), strict=True)
        return [(target, _finite(chosen), rank, _ranked(values, ids)) for target, chosen, rank, values, ids in rows]


def observe(
    logits: Tensor, chosen: Tensor, asked: Sequence[Asked], upload: Upload | None = None
) -> Observations | None:
    """Scores the `chosen` ids [rows] and what `asked` wants from raw float32 `logits` [rows, vocab]; None if none.
    With an `upload` that doesn't wait, this doesn't."""
    if not asked:
        return None
    upload = upload or uploader(logits.device)
    rows = [entry.row for entry in asked]
    width = max(len(entry.ids) for entry in asked)
    padded = [(entry.row, *entry.ids, *[0] * (width - len(entry.ids))) for entry in asked]
    packed = upload(np.array(padded, dtype=np.int64))
    whole = rows == list(range(len(logits)))
    most = max((entry.natural for entry in asked if not entry.ids), default=0)
    ids = chosen if whole else chosen[packed[:, 0]]
    seen = _compiled(logits, torch.cat((packed[:, :1], ids[:, None], packed[:, 1:]), 1), most)
    if seen is not None:
        return Observations(tuple(asked), seen.picked[:, 0], seen.top, seen.top_ids, seen.picked[:, 1:])
    raw = logits if whole else logits[packed[:, 0]]
    peak, spread = _normalizer(raw)
    top, top_ids = largest(raw, most)
    return Observations(
        tuple(asked),
        _scores(raw.gather(1, ids[:, None]), peak, spread)[:, 0],
        _scores(top, peak, spread),
        top_ids,
        _scores(raw.gather(1, packed[:, 1:]), peak, spread),
    )


def score_prompt(logits: Tensor, targets: Tensor, alternatives: int) -> PromptObservations:
    """Scores prompt tokens `targets` [n] against the raw float32 `logits` [n, vocab] that predict them.

    A rank is one plus the number of strictly greater values. Callers bound memory by the rows they pass at once.
    """
    rows = torch.arange(len(targets), device=targets.device)
    seen = _compiled(logits, torch.stack((rows, targets), 1), alternatives, ranked=True)
    if seen is not None and seen.rank is not None:
        return PromptObservations(targets, seen.picked[:, 0], seen.rank, seen.top, seen.top_ids)
    peak, spread = _normalizer(logits)
    actual = logits.gather(1, targets[:, None])
    top, top_ids = largest(logits, alternatives)
    return PromptObservations(
        targets,
        _scores(actual, peak, spread)[:, 0],
        1 + count_greater(logits, actual),
        _scores(top, peak, spread),
        top_ids,
    )


def _compiled(logits: Tensor, asked: Tensor, natural: int, *, ranked: bool = False) -> Seen | None:
    """The same compiled, see `kernels.observing.observe`; None where that can't run or doesn't serve."""
    if logits.is_cuda or team.missing() or not len(asked):
        return None
    from engine.kernels import observing  # compiles at import, so only where it runs

    return observing.observe(logits, asked, natural, ranked=ranked)


def _normalizer(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(maximum, log of the sum of exponentials below it), each float64 [rows, 1]."""
    peak = logits.amax(1, keepdim=True)
    return peak.double(), exponential_sums(logits, peak).log()[:, None]


def _scores(values: Tensor, peak: Tensor, spread: Tensor) -> Tensor:
    return (values.double() - peak) - spread


def _finite(value: float) -> float:
    return value if math.isfinite(value) else NOT_FINITE


def _ranked(values: Sequence[float], ids: Sequence[int]) -> list[RankedAlternative]:
    """Values that decrease hold every strictly greater one before them, so a rank is the first equal's place."""
    ranked: list[RankedAlternative] = []
    rank = 0
    for place, (value, token) in enumerate(zip(values, ids, strict=True)):
        if place == 0 or value != values[place - 1]:
            rank = place + 1
        ranked.append((token, _finite(value), rank))
    return ranked
