"""The CPU's way to sample: few candidates a row, proven to hold every survivor of the filters.

In torch's passes; `kernels.sampling` does the same in fewer, where compiled kernels run. Block maxima bound the
candidates, so most of a vocabulary is read once for its maxima and once for its mass. Rows whose survivors are many
(flat distributions, no filter at all) race a superset of them and test the winner.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.execution.noise import exponential_noise, leaders
from engine.execution.sampling_rows import Part
from engine.execution.selection import at_least, padded, row_sums

FIRST_LOOK = 64
"""Block maxima that bound the first candidates of a top-p row; nearly always enough."""

MOST_OF_A_LOOK = 4
"""Candidates a block of the first look, hardly ever more: a nucleus of a greater mass needs no look."""

MOST_BLOCKS = 256
"""Blocks that may hold candidates; rows with more are raced instead."""

FEW_BLOCKS = 16
"""Vocabularies of at most this many blocks are candidates as a whole."""

REACH = 41.0
"""Noise spans 2^-53 … 36.8, so a weight below e^-41 of the greatest can't win."""

UNDERFLOW = 105.0
"""exp of minus this is zero in float32."""

EXPECTED = 8
"""How many ids of a race are looked at, on average, before it is widened: the best score is hardly ever lower than the
eighth part of the mass."""


def by_candidates(part: Part) -> Tensor:
    """Ids [rows] of rows whose logits are finite at the maximum."""
    unlimited = part.rows.top_k >= part.logits.shape[1]
    total, known = _total_mass(part, unlimited & (part.rows.top_p < 1))
    wide = part.rows.top_p.double() * total > FIRST_LOOK * MOST_OF_A_LOOK
    result = torch.zeros(len(part.logits), dtype=torch.int64)
    if not bool(wide.all()):
        wide |= ~_ranked(part, unlimited, total, result)
    for row in wide.nonzero()[:, 0].tolist():
        one = part.only(slice(row, row + 1))
        weights = known[row] if row in known else _weights(one)[0]
        result[row] = _by_race(one, weights, float(total[row]) if row in known else float(row_sums(weights[None])))
    return result


def _ranked(part: Part, unlimited: Tensor, total: Tensor, result: Tensor) -> Tensor:
    """Writes into `result` [rows] the ids of those rows whose survivors are certainly among a few candidates, and says
    which rows those are."""
    bounds, certain = _bounds(part)
    narrow = (part.maxima >= bounds[:, None]).sum(1) <= MOST_BLOCKS
    narrow &= certain | unlimited  # with a large top-k, candidates would need the mass of all k
    rows, ids = at_least(part.logits, part.maxima, torch.where(narrow, bounds, torch.inf))
    weights = (part.peak[rows] - part.logits[rows, ids]).div_(part.rows.temperature[rows]).neg_().exp_().double()
    mass = torch.zeros(len(result), dtype=torch.float64).index_add_(0, rows, weights)
    # A little more than top_p: the sums are rounded differently, and a spare candidate costs nothing.
    narrow &= certain | (mass >= part.rows.top_p.double() * total * (1 + 1e-6))
    if bool(narrow.any()):
        keep = narrow[rows]
        matrix, real = padded(rows[keep], ids[keep], len(result))
        result.copy_(ranked_choice(part, matrix, real, total))
    return narrow


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
    # Under a mask there may be fewer finite maxima: then all ids whose float32 weight isn't zero.
    weightless = part.peak - UNDERFLOW * part.rows.temperature - part.peak.abs() * 1e-6
    guess = torch.where(torch.isneginf(guess), weightless, guess)
    no_count = (part.rows.top_p >= 1) & (part.rows.top_k >= width)
    reach = (-part.rows.min_p.log()).clamp(max=REACH) * 1.0001 + 0.0001
    floor = part.peak - reach * part.rows.temperature - part.peak.abs() * 1e-6
    return torch.where(no_count, floor, guess), by_k | no_count


def _total_mass(part: Part, asking: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
    """Sum [rows] of weights over the vocabulary, one for rows that aren't asking; and the others' weights by row."""
    total = torch.ones(len(asking), dtype=torch.float64)
    index = asking.nonzero()[:, 0]
    if not len(index):
        return total, {}
    weights = _weights(part if len(index) == len(asking) else part.only(index))
    total[index] = row_sums(weights)
    return total, dict(zip(index.tolist(), weights, strict=True))


def _weights(part: Part) -> Tensor:
    """exp(-gap) [rows, vocab]; a gap's negative is a difference as well, which saves a pass."""
    return (part.logits - part.peak[:, None]).div_(part.rows.temperature[:, None]).exp_()


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


def _by_race(part: Part, weights: Tensor, mass: float) -> int:
    """The id of a lone row with many survivors; `weights` [vocab] exp(-gap) and their sum.

    Noise decides first: the leaders among all ids are tested against the filters, each in one pass, and the first that
    passes is the arg-max over survivors. What fails top-p bounds the survivors, and the race is run again among what
    lies before it.
    """
    filters, key = _Filters(part, weights, mass), int(part.keys)
    least = filters.mass / EXPECTED
    while True:
        border = filters.border
        for token in leaders(filters.weights, key, least)[0].tolist():
            if filters.passes(token):
                return int(token)
        if filters.border < border:
            filters.narrow()
            least = filters.mass / EXPECTED
        else:
            least /= EXPECTED


class _Filters:
    """The filters of a lone row, asked about single ids. `weights` [vocab]: zero where top-k, min-p or, once narrowed,
    top-p leave nothing; `mass`: their sum. `border`: (gap, id) of an id that top-p excludes, with all that follow."""

    def __init__(self, part: Part, weights: Tensor, mass: float) -> None:
        self._logits, self._weights = part.logits[0].numpy(), weights
        self._peak, self._temperature = part.peak.numpy()[0], part.rows.temperature.numpy()[0]
        self.mass = mass
        self.border = (math.inf, 0)
        top_p, min_p, top_k = float(part.rows.top_p), float(part.rows.min_p), int(part.rows.top_k)
        if top_k < len(weights):
            self._keep_before(*self._end(top_k))
        self._target = math.inf if top_p >= 1 else top_p * self.mass
        if min_p > 0:
            self._keep(self._weights >= min_p)

    @property
    def weights(self) -> NDArray[np.float32]:
        return self._weights.numpy()

    def passes(self, token: int) -> bool:
        gap = float(self._gaps(token))
        if (gap, token) >= self.border:
            return False
        if self._target < math.inf and self._mass_before(gap, token) >= self._target:
            self.border = (gap, token)
            return False
        return True

    def narrow(self) -> None:
        """Leaves only what lies before the border."""
        self._keep_before(*self.border)

    def _gaps(self, ids: Any) -> Any:
        return (self._peak - self._logits[ids]) / self._temperature

    def _end(self, top_k: int) -> tuple[float, int]:
        """The (gap, id) before which `top_k` ids lie."""
        gaps = self._gaps(slice(None))
        last = np.partition(gaps, top_k - 1)[top_k - 1]
        below = int(np.count_nonzero(gaps < last))
        return float(last), int(np.flatnonzero(gaps == last)[top_k - below - 1]) + 1

    def _keep_before(self, gap: float, token: int) -> None:
        gaps = self._gaps(slice(None))
        kept = gaps < np.float32(gap)
        kept[:token] |= gaps[:token] == np.float32(gap)
        self._keep(torch.from_numpy(kept))

    def _keep(self, kept: Tensor) -> None:
        self._weights = torch.where(kept, self._weights, 0.0)
        self.mass = float(row_sums(self._weights[None]))

    def _mass_before(self, gap: float, token: int) -> float:
        """Mass of the ids before `token` by (gap, id), `gap` being its gap. Ids without a weight lie behind it."""
        weight = self.weights[token]
        heavier = float(row_sums(torch.threshold(self._weights, float(weight), 0.0)[None]))
        equal = np.flatnonzero(self.weights == weight)
        gaps = self._gaps(equal)
        before = (gaps < np.float32(gap)) | ((gaps == np.float32(gap)) & (equal < token))
        return heavier + float(weight) * int(np.count_nonzero(before))
