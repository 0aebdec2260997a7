"""The CPU's way to sample: few candidates a row, proven to hold every survivor of the filters.

Block maxima bound the candidates, so most of a vocabulary is read once for its maxima and once for its mass. Rows
whose survivors are many (flat distributions, no filter at all) race a superset of them and test the winner.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.execution.noise import exponential_noise, race, winner
from engine.execution.sampling_rows import Part
from engine.execution.selection import at_least, padded, row_sums

FIRST_LOOK = 64
"""Block maxima that bound the first candidates of a top-p row; nearly always enough."""

MOST_BLOCKS = 256
"""Blocks that may hold candidates; rows with more are raced instead."""

FEW_BLOCKS = 16
"""Vocabularies of at most this many blocks are candidates as a whole."""

REACH = 41.0
"""Noise spans 2^-53 … 36.8, so a weight below e^-41 of the greatest can't win."""

DENSE = 0.5
"""From this share of the vocabulary on, racing all of it is cheaper than gathering the survivors."""

LADDER = 3
"""Halvings that tighten the superset of a wide nucleus; each costs one pass, a survivor less saves its noise."""


def by_candidates(part: Part) -> Tensor:
    """Ids [rows] of rows whose logits are finite at the maximum."""
    count = len(part.logits)
    bounds, certain = _bounds(part)
    narrow = (part.maxima >= bounds[:, None]).sum(1) <= MOST_BLOCKS
    rows, ids = at_least(part.logits, part.maxima, torch.where(narrow, bounds, torch.inf))
    unlimited = part.rows.top_k >= part.logits.shape[1]
    narrow &= certain | unlimited  # with a large top-k, candidates would need the mass of all k
    total, known = _total_mass(part, unlimited & (part.rows.top_p < 1))
    weights = (part.peak[rows] - part.logits[rows, ids]).div_(part.rows.temperature[rows]).neg_().exp_().double()
    mass = torch.zeros(count, dtype=torch.float64).index_add_(0, rows, weights)
    # A little more than top_p: the sums are rounded differently, and a spare candidate costs nothing.
    narrow &= certain | (mass >= part.rows.top_p.double() * total * (1 + 1e-6))
    result = torch.zeros(count, dtype=torch.int64)
    if bool(narrow.any()):
        keep = narrow[rows]
        matrix, real = padded(rows[keep], ids[keep], count)
        result = ranked_choice(part, matrix, real, total)
    for row in (~narrow).nonzero()[:, 0].tolist():
        result[row] = _by_race(part, row, known.get(row), float(total[row]))
    return result


def _bounds(part: Part) -> tuple[Tensor, Tensor]:
    """A lower bound [rows] on the logits of candidates, and whether it surely keeps every survivor [rows].

    The k-th greatest block maximum has at least k logits at or above it: certain for top-k. For top-p it is a guess,
    verified by mass. Otherwise min-p, or the noise's reach, bounds from the maximum, less a margin for rounding.
    """
    blocks, width = part.maxima.shape[1], part.logits.shape[1]
    if blocks <= FEW_BLOCKS:
        return torch.full_like(part.peak, -torch.inf), torch.ones_like(part.peak, dtype=torch.bool)
    by_k = part.rows.top_k <= blocks
    need = torch.where(by_k, part.rows.top_k, min(FIRST_LOOK, blocks))
    ranked = part.maxima.topk(int(need.max()), dim=1).values
    guess = ranked.gather(1, need[:, None] - 1)[:, 0]
    no_count = (part.rows.top_p >= 1) & (part.rows.top_k >= width)
    reach = (-part.rows.min_p.log()).clamp(max=REACH) * 1.0001 + 0.0001
    floor = part.peak - reach * part.rows.temperature - part.peak.abs() * 1e-6
    return torch.where(no_count, floor, guess), by_k | no_count


def _total_mass(part: Part, asking: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
    """Sum [rows] of weights exp(-gap) over the vocabulary, one for rows that aren't asking; and by row the weights."""
    total = torch.ones(len(asking), dtype=torch.float64)
    index = asking.nonzero()[:, 0]
    if not len(index):
        return total, {}
    some = part if len(index) == len(asking) else part.only(index)
    weights = some.gaps(some.logits).neg_().exp_()
    total[index] = row_sums(weights)
    return total, dict(zip(index.tolist(), weights, strict=True))


def ranked_choice(part: Part, matrix: Tensor, real: Tensor, total: Tensor) -> Tensor:
    """Applies the filters to candidates `matrix` [rows, widest] and picks by noise among the rest.

    A candidate stays while its rank is within top-k and the mass before it is below top-p of the mass that top-k
    left (`total` where top-k is off), and if its weight reaches min-p of the greatest, which is one.
    """
    gaps = part.gaps(part.logits.gather(1, matrix)).masked_fill_(~real, torch.inf)
    gaps, order = gaps.sort(dim=1, stable=True)  # ids rise within a row, so equals stay in id order
    ids = matrix.gather(1, order)
    weights = gaps.neg().exp_().double()
    within = torch.arange(matrix.shape[1], device=matrix.device) < part.rows.top_k[:, None]
    running = (weights * within).cumsum(1)
    whole = torch.where(part.rows.top_k < part.logits.shape[1], running[:, -1], total)
    stays = running - weights < part.rows.top_p.double()[:, None] * whole[:, None]
    stays |= (part.rows.top_p >= 1)[:, None]
    stays &= within & (weights >= part.rows.min_p[:, None])
    scores = torch.where(stays, weights, 0.0).div_(exponential_noise(part.keys[:, None], ids))
    return ids.gather(1, scores.argmax(1, keepdim=True))[:, 0]


def _by_race(part: Part, row: int, weights: Tensor | None, total: float) -> int:
    """The id of one row with many survivors; `weights` [vocab] exp(-gap) and their sum `total`, if they are known.

    Noise decides first, over a superset of the survivors; then the winner is tested against the filters, which
    takes one pass, and the next best is tried if it fails. The first that passes is the arg-max over survivors.
    """
    gaps = (part.peak[row] - part.logits[row]).div_(part.rows.temperature[row])
    filters = _Filters(part, row, gaps, weights, total)
    values, key = filters.weights.numpy(), int(part.keys[row])
    heavy = values >= np.float32(filters.least())
    ids = np.flatnonzero(heavy) if np.count_nonzero(heavy) < len(heavy) * DENSE else None
    contenders = values if ids is None else values[ids]
    filters.keep(ids)
    best = winner(contenders, key, ids)
    if filters.passes(best if ids is None else int(ids[best])):
        return best if ids is None else int(ids[best])
    scores = race(contenders, key, ids)
    while True:
        scores[best] = -1.0
        best = int(scores.argmax())
        token = best if ids is None else int(ids[best])
        if filters.passes(token):
            return token


class _Filters:
    """The filters of one row, asked about single ids. `gaps`, `weights`: [vocab]."""

    def __init__(self, part: Part, row: int, gaps: Tensor, weights: Tensor | None, total: float) -> None:
        self.gaps = gaps
        self.weights = gaps.neg().exp_() if weights is None else weights
        self._kept: tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64] | None]
        self._kept = (gaps.numpy(), self.weights.numpy(), None)
        self._top_p, self._min_p = float(part.rows.top_p[row]), float(part.rows.min_p[row])
        self._last_gap, self._last_id = math.inf, len(gaps)
        top_k = int(part.rows.top_k[row])
        if top_k < len(gaps):
            self._last_gap = float(np.partition(gaps.numpy(), top_k - 1)[top_k - 1])
            below = int(np.count_nonzero(gaps.numpy() < np.float32(self._last_gap)))
            self._last_id = int(np.flatnonzero(gaps.numpy() == np.float32(self._last_gap))[top_k - below - 1])
            total = self._mass(self._last_gap, self._last_id + 1) if self._top_p < 1 else total
        self._whole = total

    def least(self) -> float:
        """A weight that every survivor reaches.

        Ids lighter than (1 - top_p) / n of the mass weigh less than 1 - top_p together, so the nucleus doesn't need
        them; halving the gap from there on keeps the least weight whose followers still reach top_p.
        """
        # A little slack: weights are rounded, and the border is compared as a float32.
        floor = max(math.exp(-REACH), self._min_p, math.exp(-min(self._last_gap, REACH)) * (1 - 1e-6))
        if self._top_p >= 1:
            return floor
        target = self._top_p * self._whole * (1 + 1e-6)
        far, near = -math.log(max(floor, (1 - self._top_p) * self._whole / len(self.gaps) * (1 - 1e-6))), 0.0
        for _ in range(LADDER):
            middle = (far + near) / 2
            kept = torch.threshold(self.weights, math.exp(-middle), 0.0)
            far, near = (middle, near) if float(row_sums(kept[None])) >= target else (far, middle)
        return math.exp(-far) * (1 - 1e-6)

    def passes(self, token: int) -> bool:
        gap = float(self.gaps[token])
        if gap > self._last_gap or (gap == self._last_gap and token > self._last_id):
            return False
        if float(self.weights[token]) < self._min_p:
            return False
        return self._top_p >= 1 or self._mass(gap, token) < self._top_p * self._whole

    def keep(self, ids: NDArray[np.int64] | None) -> None:
        """Drops all but `ids`, among which are all survivors; None keeps everything. What was dropped lies behind
        every survivor, so it never counts."""
        if ids is not None:
            self._kept = (self.gaps.numpy()[ids], self.weights.numpy()[ids], ids)

    def _mass(self, gap: float, token: int) -> float:
        """Mass of the ids before `token` by (gap, id), `gap` being its gap."""
        gaps, weights, ids = self._kept
        end = token if ids is None else int(np.searchsorted(ids, token))
        before = torch.from_numpy(weights * (gaps < np.float32(gap)))
        equal = np.count_nonzero(gaps[:end] == np.float32(gap))
        return float(row_sums(before[None])) + equal * math.exp(-gap)
