"""What compiled passes know of a row of logits: its ranks, its weights, and the keys of its best ids.

A rank is an int32 an id: the lower, the better, and among equals the lower id. Sampling ranks by gaps: a gap is the
distance below the row's greatest logit in units of temperature, and the bits of floats >= 0 compare as they do.
Observing ranks by the logits themselves, of which gaps can make equals. Import only where `team.missing()` is empty.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from engine.kernels import team
from engine.kernels.memory import ROUND, address, float_of, pointer, take

BLOCK = 128
"""Ids whose least rank is kept, and whose weights are added up in float32."""
MOST_FOUND = 1024
"""The most keys that a room holds."""
LAST = np.int32(0x7FFFFFFF)
"""No rank is greater."""
FINITE = np.int32(0x7F7FFFFF)
"""The rank of the greatest finite gap."""
_MINUS_INFINITY = np.int32(-0x7F800001)
"""-inf as `_ordered` has it. Below are only NaN."""

_BEGUN, _THREADS, ROWS, WIDTH, LOGITS, STEP, _ROOM, _ROOM_SIZE = range(8)
"""First arguments of a pass over rows, all int64: rows and threads begun (zero at first), rows to do, their width, the
logits' address and the bytes from one row to the next, the address of the first thread's room and the size of one."""
OWN = 8
"""Where a pass's own arguments begin."""


def deal(function: int, threads: int, count: int, logits: Tensor, own: list[int]) -> None:
    """Has the compiled function at address `function` do `count` rows of float32 `logits` [rows, vocab], whose own rows
    have no gaps, on up to `threads` threads. `own`: its own arguments."""
    width, threads = logits.shape[1], max(1, min(threads, count))
    blocks = -(-width // BLOCK)
    size = -(-(8 * MOST_FOUND + 8 * BLOCK * blocks + 4 * blocks) // 64) * 64
    rooms = torch.empty(threads * size, dtype=torch.uint8)
    numbers = 0, 0, count, width, logits.data_ptr(), 4 * logits.stride(0), rooms.data_ptr(), size, *own
    team.run(function, threads, (ctypes.c_int64 * len(numbers))(*numbers))


def dense(logits: Tensor) -> Tensor:
    """`logits`, copied if there are gaps in a row. Raises TypeError if they aren't float32."""
    if logits.dtype is not torch.float32:
        raise TypeError(f"compiled passes take float32 logits, not {logits.dtype}")
    return logits if logits.stride(1) == 1 else logits.contiguous()


@njit(inline="always")  # type: ignore[untyped-decorator]
def room_of(raw: Any, a: Any) -> Any:
    """The address of a room that no other thread has; `raw` are the arguments `a`."""
    return a[_ROOM] + take(address(raw) + 8 * _THREADS, 1) * a[_ROOM_SIZE]


# A row is a tuple: its width and the addresses of its logits (float32), ranks or gaps, weights (float32), the least
# rank of every block, and keys. A key is rank << 32 | id.


@njit(inline="always")  # type: ignore[untyped-decorator]
def row_of(width: Any, logits: Any, room: Any) -> Any:
    """The row of `width` logits at address `logits`, in a thread's room."""
    padded = -(-width // BLOCK) * BLOCK
    ranks = room + 8 * MOST_FOUND
    return width, logits, ranks, ranks + 4 * padded, ranks + 8 * padded, room


@njit(inline="always")  # type: ignore[untyped-decorator]
def _ordered(bits: Any) -> Any:
    """The bits of a float32 so that as an int32 they compare as it does, NaN beyond the infinities; its own inverse."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & LAST))


@njit  # type: ignore[untyped-decorator]
def peak_of(logits: Any, width: Any) -> Any:
    """The greatest of the `width` float32 at address `logits`, NaN if one is NaN."""
    bits = carray(pointer(logits), (width,), np.int32)
    most, least = _MINUS_INFINITY, LAST
    for index in range(width):
        ordered = _ordered(bits[index])
        most, least = max(most, ordered), min(least, ordered)
    return np.float32(np.nan) if least < _MINUS_INFINITY else float_of(_ordered(most))


@njit(inline="always")  # type: ignore[untyped-decorator]
def weight_of(gap: Any) -> Any:
    """e to the power of -`gap`, right to 2e-7; 0 from 87 on. Vector code, unlike the library's: 2 ** n * e ** r with
    |r| <= ln 2 / 2, the latter by its Taylor series."""
    x = -min(gap, np.float32(87.0))
    n = (x * np.float32(1.4426950408889634) + ROUND) - ROUND
    r = (x - n * np.float32(0.693359375)) + n * np.float32(2.12194440e-4)
    series = np.float32(1 / 5040)
    series = series * r + np.float32(1 / 720)
    series = series * r + np.float32(1 / 120)
    series = series * r + np.float32(1 / 24)
    series = series * r + np.float32(1 / 6)
    series = series * r + np.float32(1 / 2)
    series = series * r + np.float32(1)
    series = series * r + np.float32(1)
    power = float_of((np.int32(n) + np.int32(127)) << np.int32(23))
    return series * power if gap < np.float32(87.0) else np.float32(0)


@njit(fastmath={"reassoc"})  # type: ignore[untyped-decorator]
def _added(values: Any) -> Any:
    total = np.float32(0)
    for index in range(len(values)):
        total += values[index]
    return total


@njit  # type: ignore[untyped-decorator]
def _lowest(ranks: Any) -> Any:
    least = LAST
    for index in range(len(ranks)):
        least = min(least, ranks[index])
    return least


@njit(error_model="numpy", fastmath={"contract"})  # type: ignore[untyped-decorator]
def weigh(row: Any, peak: Any, temperature: Any) -> Any:
    """Writes every id's gap and weight, and every block's least gap. The sum of the weights."""
    width, logits, gaps, weights, blocks, _ = row
    least = carray(pointer(blocks), (-(-width // BLOCK),), np.int32)
    total = 0.0
    for start in range(0, width, BLOCK):
        count = min(BLOCK, width - start)
        x = carray(pointer(logits + 4 * start), (count,), np.float32)
        gap = carray(pointer(gaps + 4 * start), (count,), np.float32)
        weight = carray(pointer(weights + 4 * start), (count,), np.float32)
        for index in range(count):
            distance = (peak - x[index]) / temperature
            gap[index] = distance
            weight[index] = weight_of(distance)
        least[start // BLOCK] = _lowest(carray(pointer(gaps + 4 * start), (count,), np.int32))
        total += np.float64(_added(weight))
    return total


@njit(fastmath={"contract"})  # type: ignore[untyped-decorator]
def weigh_and_rank(row: Any, peak: Any) -> Any:
    """Writes every id's rank by its logit and its weight at a temperature of one, and every block's least rank. The sum
    of the weights."""
    width, logits, ranks, weights, blocks, _ = row
    least = carray(pointer(blocks), (-(-width // BLOCK),), np.int32)
    total = 0.0
    for start in range(0, width, BLOCK):
        count = min(BLOCK, width - start)
        x = carray(pointer(logits + 4 * start), (count,), np.float32)
        bits = carray(pointer(logits + 4 * start), (count,), np.int32)
        rank = carray(pointer(ranks + 4 * start), (count,), np.int32)
        weight = carray(pointer(weights + 4 * start), (count,), np.float32)
        for index in range(count):
            ordered = _ordered(bits[index])
            rank[index] = ~ordered if ordered != np.int32(-1) else np.int32(-1)  # -0 ranks as 0 does
            weight[index] = weight_of(peak - x[index])
        least[start // BLOCK] = _lowest(rank)
        total += np.float64(_added(weight))
    return total


@njit  # type: ignore[untyped-decorator]
def up_to(ranks: Any, count: Any, limit: Any) -> Any:
    """How many of the `count` ranks at address `ranks` are at most `limit`."""
    found = carray(pointer(ranks), (count,), np.int32)
    total = np.int32(0)
    for index in range(count):
        total = np.int32(total + (found[index] <= limit))
    return np.int64(total)


@njit  # type: ignore[untyped-decorator]
def nth(ranks: Any, count: Any, number: Any) -> Any:
    """The `number`-th lowest of the `count` ranks at address `ranks`."""
    low, high = -(1 << 31), (1 << 31) - 1
    while low < high:
        middle = (low + high) >> 1
        if up_to(ranks, count, np.int32(middle)) >= number:
            high = middle
        else:
            low = middle + 1
    return np.int32(low)


@njit  # type: ignore[untyped-decorator]
def look(row: Any, limit: Any) -> Any:
    """Writes the keys of the ids of ranks up to `limit`, by id; how many there are, or more than MOST_FOUND where there
    is no room for all."""
    width, _, ranks, _, blocks, keys_at = row
    number, count = -(-width // BLOCK), 0
    least = carray(pointer(blocks), (number,), np.int32)
    keys = carray(pointer(keys_at), (MOST_FOUND,), np.int64)
    for block in range(number):
        if least[block] > limit:
            continue
        start = block * BLOCK
        size = min(BLOCK, width - start)
        found = carray(pointer(ranks + 4 * start), (size,), np.int32)
        for index in range(size):
            if found[index] <= limit:
                if count == MOST_FOUND:
                    return MOST_FOUND + 1
                keys[count] = (np.int64(found[index]) << 32) | (start + index)
                count += 1
    return count


@njit  # type: ignore[untyped-decorator]
def sort(row: Any, count: Any) -> None:
    """Sorts the row's `count` keys (Shell's way)."""
    keys = carray(pointer(row[5]), (count,), np.int64)
    step = 1
    while 3 * step < count:
        step = 3 * step + 1
    while step > 0:
        for index in range(step, count):
            key, place = keys[index], index
            while place >= step and keys[place - step] > key:
                keys[place] = keys[place - step]
                place -= step
            keys[place] = key
        step //= 3
