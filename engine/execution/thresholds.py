"""The accelerator's way to sample: no wait for the host, so no shape that depends on data.

Filters become thresholds, found in a value's bits by histograms, on all rows at once. Selects what `candidates`
selects, with the same noise.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.execution.candidates import ranked_choice
from engine.execution.noise import exponential_noise
from engine.execution.sampling_rows import Part
from engine.execution.selection import largest

MOST_RANKED = 512
"""The greatest top-k for which ranking candidates is cheaper than finding thresholds."""


def plain(part: Part) -> Tensor:
    """Ids [rows] of rows without a filter: the whole vocabulary survives."""
    ids = torch.arange(part.logits.shape[1], device=part.logits.device)
    weights = part.gaps(part.logits).neg_().exp_().double()
    return weights.div_(exponential_noise(part.keys[:, None], ids)).argmax(1)


def by_filters(part: Part) -> Tensor:
    """Ids [rows] of filtered rows, all at once: from the greatest few where every row's top-k is small."""
    most = part.rows.most_top_k
    return by_rank(part, most) if most is not None and most <= MOST_RANKED else by_threshold(part)


def by_rank(part: Part, most: int) -> Tensor:
    """Ids [rows] of rows whose top-k, or vocabulary, is at most `most`."""
    _, ids = largest(part.logits, most)
    # Only the mass of rows without a limit is asked for, and those have no more ids than these.
    total = part.gaps(part.logits.gather(1, ids)).neg_().exp_().sum(1, dtype=torch.float64)
    return ranked_choice(part, ids, torch.ones_like(ids, dtype=torch.bool), total)


def by_threshold(part: Part) -> Tensor:
    """Ids [rows] of rows with any filters."""
    gaps = part.gaps(part.logits)
    weights = gaps.neg().exp_()
    bits = (gaps + 0.0).view(torch.int32)  # gaps aren't negative (nor zeros, now), so their bits order them
    stays = torch.ones_like(weights, dtype=torch.bool)
    if part.rows.any_top_k:
        stays = _cut(bits, torch.ones_like(weights), part.rows.top_k.double())
    if part.rows.any_top_p:
        left = torch.where(stays, weights, 0.0)  # top-p is of the mass that top-k left
        target = part.rows.top_p.double() * left.sum(1, dtype=torch.float64)
        stays &= _cut(bits, left, torch.where(part.rows.top_p < 1, target, math.inf))
    stays &= weights >= part.rows.min_p[:, None]
    ids = torch.arange(gaps.shape[1], device=gaps.device)
    scores = torch.where(stays, weights, 0.0).double().div_(exponential_noise(part.keys[:, None], ids))
    return scores.argmax(1)


_DIGITS = ((20, 11), (10, 10), (0, 10))
"""(shift, width) of the three digits of a gap's 31 bits."""


def _cut(bits: Tensor, measure: Tensor, target: Tensor) -> Tensor:
    """The first ids [rows, vocab], by (bits, id), whose `measure` before them is below `target` [rows].

    Finds digit by digit the least value whose measure, up to and including it, reaches the target; sums are float64,
    so that the order in which an accelerator adds hardly matters.
    """
    found = torch.zeros_like(target, dtype=torch.int32)
    before = torch.zeros_like(target)
    amounts = measure.double()
    for shift, width in _DIGITS:
        inside = (bits >> (shift + width)) == found[:, None]
        digit = ((bits >> shift) & ((1 << width) - 1)).long()
        mass = torch.zeros(len(bits), 1 << width, dtype=torch.float64, device=bits.device)
        mass.scatter_add_(1, digit, torch.where(inside, amounts, 0.0))
        running = mass.cumsum(1) + before[:, None]
        place = (running < target[:, None]).sum(1, keepdim=True).clamp_max((1 << width) - 1)
        before = (running.gather(1, place) - mass.gather(1, place))[:, 0]
        found = (found << width) | place[:, 0].int()
    level = bits == found[:, None]
    single = torch.where(level, measure, 0.0).amax(1).double()
    room = ((target - before) / single).ceil().clamp_min(1)  # how many equals still fit
    return (bits < found[:, None]) | (level & (level.cumsum(1) <= room[:, None]))
