"""Exact selection in rows of logits without sorting a vocabulary.

Owns the largest-k rule (ties by increasing id), block maxima as a cheap lower bound of it, and sums whose rounding
doesn't depend on how many rows or threads there are. Leaves what to select, and why, to `sampler` and `logprobs`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

BLOCK = 128
"""Ids under one block maximum. Real vocabularies are mostly multiples of it, so the tail block is rare."""

_CACHED_ROWS = 16


def block_maxima(values: Tensor) -> Tensor:
    """Maxima [rows, blocks] over runs of BLOCK neighbouring ids of `values` [rows, vocab]; the last may be short."""
    width = values.shape[1]
    whole = width // BLOCK * BLOCK
    parts = [values[:, :whole].reshape(len(values), -1, BLOCK).amax(-1)] if whole else []
    if whole < width:
        parts.append(values[:, whole:].amax(-1, keepdim=True))
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


def row_sums(values: Tensor) -> Tensor:
    """Float64 sums [rows] of float32 `values` [rows, vocab].

    torch splits a lone row's reduction among threads, but never one with several outputs; summing fixed blocks
    first makes every row's result the same alone, in a batch and at any thread count.
    """
    width = values.shape[1]
    whole = width // BLOCK * BLOCK
    total = values.new_zeros(values.shape[0], dtype=torch.float64)
    if whole:
        total = total + values[:, :whole].reshape(len(values), -1, BLOCK).sum(-1).double().sum(-1)
    if whole < width:
        total = total + values[:, whole:].sum(-1).double()
    return total


def exponential_sums(values: Tensor, peaks: Tensor) -> Tensor:
    """Float64 sums [rows] of exp(value - peak) over `values` [rows, vocab], `peaks` [rows, 1]; a few rows at a time on
    the CPU, whose caches a whole batch would leave."""
    if values.is_cuda or len(values) <= _CACHED_ROWS:
        return row_sums((values - peaks).exp_())
    starts = range(0, len(values), _CACHED_ROWS)
    slices = [slice(start, start + _CACHED_ROWS) for start in starts]
    return torch.cat([row_sums((values[part] - peaks[part]).exp_()) for part in slices])


def count_greater(values: Tensor, than: Tensor) -> Tensor:
    """How many of `values` [rows, vocab] are greater than their row's `than` [rows, 1], int64 [rows]."""
    if values.is_cuda:
        return (values > than).sum(1)
    rows = zip(values.numpy(), than[:, 0].numpy(), strict=True)
    return torch.tensor([int(np.count_nonzero(row > value)) for row, value in rows], dtype=torch.int64)


def at_least(values: Tensor, maxima: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """(row, id) of every element of `values` [rows, vocab] >= its row's bound [rows], by row, then id.

    `maxima` are the row's block maxima: only blocks that can hold such an element are read. Waits for the device.
    """
    width = values.shape[1]
    blocks = width // BLOCK
    row, block = (maxima[:, :blocks] >= bounds[:, None]).nonzero(as_tuple=True)
    picked = (
        values[:, : blocks * BLOCK].reshape(len(values), blocks, BLOCK)[row, block] if blocks else values[:0, :BLOCK]
    )
    hit, inside = (picked >= bounds[row, None]).nonzero(as_tuple=True)
    rows, ids = row[hit], block[hit] * BLOCK + inside
    if blocks * BLOCK == width:
        return rows, ids
    tail_rows, tail_ids = (values[:, blocks * BLOCK :] >= bounds[:, None]).nonzero(as_tuple=True)
    flat = torch.cat((rows * width + ids, tail_rows * width + tail_ids + blocks * BLOCK)).sort().values
    return flat // width, flat % width


def padded(rows: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Spreads (row, id) pairs, sorted by row, over a matrix: ids [count, widest] and which entries are real."""
    lengths = torch.bincount(rows, minlength=count)
    widest = int(lengths.max())
    column = torch.arange(len(rows), device=rows.device) - (lengths.cumsum(0) - lengths)[rows]
    matrix = torch.zeros(count, widest, dtype=torch.int64, device=rows.device)
    matrix[rows, column] = ids
    return matrix, torch.arange(widest, device=rows.device) < lengths[:, None]


def order_keys(values: Tensor) -> Tensor:
    """Int64 keys [rows, vocab] that order float32 `values` increasingly and equal values by decreasing id."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0 makes a negative zero positive
    monotone = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    ids = torch.arange(values.shape[1], device=values.device)
    return (monotone << 32) | (0xFFFFFFFF - ids)


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row of float32 `values` [rows, vocab]: (values, ids), each [rows, count], by
    decreasing value and increasing id, exact also where equal values straddle the border."""
    if count == 0:
        empty = values[:, :0]
        return empty, empty.long()
    width = values.shape[1]
    if values.is_cuda or count * BLOCK > width // 2:
        return _largest_by_key(values, count)
    maxima = block_maxima(values)
    bounds = maxima.topk(count).values[:, -1]
    rows, ids = at_least(values, maxima, bounds)
    if len(rows) > max(count, 32) * 8 * len(values):  # many equal values: the bound selects too much
        return _largest_by_key(values, count)
    matrix, real = padded(rows, ids, len(values))
    if bool((real.sum(1) < count).any()):  # NaN compares with nothing
        return _largest_by_key(values, count)
    found = values.gather(1, matrix).masked_fill(~real, -torch.inf)
    # Stable, and ids rise within a row: equal values stay in id order. Padding stays behind a real -inf.
    ranked, order = found.sort(dim=1, descending=True, stable=True)
    return ranked[:, :count], matrix.gather(1, order)[:, :count]


def _largest_by_key(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    keys = order_keys(values).topk(count, dim=1).values
    ids = 0xFFFFFFFF - (keys & 0xFFFFFFFF)
    return values.gather(1, ids), ids
