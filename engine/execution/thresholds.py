"""The accelerator's way to sample: no wait for the host, so no shape that depends on data.

Filters become thresholds found by halving on the bits of a value, on all rows at once. Selects what `candidates`
selects, with the same noise.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.execution.noise import exponential_noise
from engine.execution.sampling_rows import Part


def plain(part: Part) -> Tensor:
    """Ids [rows] of rows without a filter: the whole vocabulary survives."""
    ids = torch.arange(part.logits.shape[1], device=part.logits.device)
    weights = part.gaps(part.logits).neg_().exp_().double()
    return weights.div_(exponential_noise(part.keys[:, None], ids)).argmax(1)


def by_threshold(part: Part) -> Tensor:
    """Ids of filtered rows by halving on the bits of the gap, 31 times for each filter, on all rows at once."""
    gaps = part.gaps(part.logits)
    weights = gaps.neg().exp_()
    bits = gaps.view(torch.int32)  # gaps aren't negative, so their bits order them
    width = gaps.shape[1]
    limit = part.rows.top_k.double()
    alive = _cut(bits, torch.ones_like(weights), limit)
    limited = part.rows.top_k < width
    whole = torch.where(alive | ~limited[:, None], weights, 0.0).sum(1, dtype=torch.float64)
    target = torch.where(part.rows.top_p < 1, part.rows.top_p.double() * whole, math.inf)
    nucleus = _cut(bits, torch.where(alive, weights, 0.0), target)
    stays = alive & nucleus & (weights >= part.rows.min_p[:, None])
    ids = torch.arange(width, device=gaps.device)
    scores = torch.where(stays, weights, 0.0).double().div_(exponential_noise(part.keys[:, None], ids))
    return scores.argmax(1)


def _cut(bits: Tensor, measure: Tensor, target: Tensor) -> Tensor:
    """The first ids [rows, vocab], by (bits, id), whose measure before them is below `target` [rows]."""
    low = torch.zeros(len(bits), dtype=torch.int32, device=bits.device)
    high = torch.full_like(low, 0x7F800000)
    for _ in range(31):  # least value whose measure up to and including it reaches the target
        middle = low + ((high - low) >> 1)
        reached = torch.where(bits <= middle[:, None], measure, 0.0).sum(1, dtype=torch.float64) >= target
        low, high = torch.where(reached, low, middle + 1), torch.where(reached, middle, high)
    before = torch.where(bits < high[:, None], measure, 0.0).sum(1, dtype=torch.float64)
    level = bits == high[:, None]
    single = torch.where(level, measure, 0.0).amax(1).double()
    room = ((target - before) / single).ceil().clamp_min(1)  # how many equals still fit
    return (bits < high[:, None]) | (level & (level.cumsum(1) <= room[:, None]))
