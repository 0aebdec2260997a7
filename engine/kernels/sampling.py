"""Rows of logits to sampled ids, and to log probabilities, in a few compiled passes where torch takes many.

One thread takes a row from its first pass to its result, in a fixed order, so that a row depends on nothing but itself.
`execution` says what is chosen and why, and does the same with torch on other machines. Import only where
`team.missing()` is empty: compiles at import (seconds once, then from a cache).
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, njit, types
from torch import Tensor

from engine.kernels import team
from engine.kernels.memory import CACHED, ROUND, address, float_of, pointer, take

_BLOCK = 128
"""Ids whose least rank is kept and whose weights are added up in float32."""
MOST_FOUND = 1024
"""The most candidates that are sorted; where more survive the filters, a race is cheaper."""
_LOOK = 64
"""Candidates are the ids at least as good as the best of so many blocks; nearly always enough for top-p."""
_MOST_OF_A_LOOK = 256.0
"""Hardly ever are there more candidates: a nucleus of a greater mass needs no look."""
_MOST_BLOCKS = 256
"""For a top-k of up to so many there are as many blocks looked at as ids are asked for."""
_REACH = 41.0
"""Noise spans 2^-53 … 36.8, so an id with a greater gap can't win."""
_EXPECTED = 8.0
"""How many ids reach the score that a race asks for, on average: the best is hardly ever below an eighth of the mass."""
_LUCKY = 256.0
"""How many ids, on average, have so little noise that a race looks at them whatever their weight."""
_STRIDE = 16
"""Ids whose hashes are asked at once whether one is worth a closer look."""

_GOLDEN, _MIX1, _MIX2 = (np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""SplitMix64, see `execution.noise`."""

# ---- ranks ----
#
# An int32 an id: the lower, the better, and among equals the lower id. Sampling ranks by gaps: a gap is the distance
# below the row's greatest logit in units of temperature, and the bits of floats >= 0 compare as they do. Observing
# ranks by the logits themselves, of which gaps can make equals.

_LAST = np.int32(0x7FFFFFFF)
_FINITE = np.int32(0x7F7FFFFF)
"""The rank of the greatest finite gap."""
_MINUS_INFINITY = np.int32(-0x7F800001)
"""-inf as `_ordered` has it. Below are only NaN."""


@njit(inline="always")  # type: ignore[untyped-decorator]
def _ordered(bits: Any) -> Any:
    """The bits of a float32 so that as an int32 they compare as it does, NaN beyond the infinities; its own inverse."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & _LAST))


@njit  # type: ignore[untyped-decorator]
def _peak(logits: Any, width: Any) -> Any:
    """The greatest of the float32 at `logits`, NaN if one is NaN."""
    bits = carray(pointer(logits), (width,), np.int32)
    most, least = _MINUS_INFINITY, _LAST
    for index in range(width):
        ordered = _ordered(bits[index])
        most, least = max(most, ordered), min(least, ordered)
    return np.float32(np.nan) if least < _MINUS_INFINITY else float_of(_ordered(most))


@njit  # type: ignore[untyped-decorator]
def _lowest(ranks: Any) -> Any:
    least = _LAST
    for index in range(len(ranks)):
        least = min(least, ranks[index])
    return least


@njit  # type: ignore[untyped-decorator]
def _up_to(ranks: Any, count: Any, limit: Any) -> Any:
    """How many of the `count` ranks at address `ranks` are at most `limit`."""
    rank = carray(pointer(ranks), (count,), np.int32)
    total = np.int32(0)
    for index in range(count):
        total = np.int32(total + (rank[index] <= limit))
    return np.int64(total)


@njit  # type: ignore[untyped-decorator]
def _nth(ranks: Any, count: Any, number: Any) -> Any:
    """The `number`-th lowest of the `count` ranks at address `ranks`."""
    low, high = -(1 << 31), (1 << 31) - 1
    while low < high:
        middle = (low + high) >> 1
        if _up_to(ranks, count, np.int32(middle)) >= number:
            high = middle
        else:
            low = middle + 1
    return np.int32(low)


# ---- a row: its width and the addresses of what is known of it ----
#
# (width, float32 logits, ranks or gaps, float32 weights, each block's least rank, keys of candidates). A key is
# rank << 32 | id.


@njit(inline="always")  # type: ignore[untyped-decorator]
def _weight(gap: Any) -> Any:
    """e to the power of -`gap`, right to 2e-7; 0 beyond a gap of 87. Vector code, unlike the library's: 2 ** n * e ** r
    with |r| <= ln 2 / 2, the latter by its Taylor series."""
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


@njit(error_model="numpy", fastmath={"contract"})  # type: ignore[untyped-decorator]
def _weigh(row: Any, peak: Any, temperature: Any) -> Any:
    """Writes every id's gap and weight, and every block's least gap. The sum of the weights."""
    width, logits, gaps, weights, blocks, _ = row
    least = carray(pointer(blocks), (-(-width // _BLOCK),), np.int32)
    total = 0.0
    for start in range(0, width, _BLOCK):
        count = min(_BLOCK, width - start)
        x = carray(pointer(logits + 4 * start), (count,), np.float32)
        gap = carray(pointer(gaps + 4 * start), (count,), np.float32)
        weight = carray(pointer(weights + 4 * start), (count,), np.float32)
        for index in range(count):
            distance = (peak - x[index]) / temperature
            gap[index] = distance
            weight[index] = _weight(distance)
        least[start // _BLOCK] = _lowest(carray(pointer(gaps + 4 * start), (count,), np.int32))
        total += np.float64(_added(weight))
    return total


@njit  # type: ignore[untyped-decorator]
def _rank(row: Any) -> None:
    """Writes every id's rank by its logit, and every block's least."""
    width, logits, ranks, _, blocks, _ = row
    least = carray(pointer(blocks), (-(-width // _BLOCK),), np.int32)
    for start in range(0, width, _BLOCK):
        count = min(_BLOCK, width - start)
        bits = carray(pointer(logits + 4 * start), (count,), np.int32)
        rank = carray(pointer(ranks + 4 * start), (count,), np.int32)
        for index in range(count):
            ordered = _ordered(bits[index])
            rank[index] = ~ordered if ordered != np.int32(-1) else np.int32(-1)  # -0 ranks as 0 does
        least[start // _BLOCK] = _lowest(rank)


# ---- candidates ----


@njit  # type: ignore[untyped-decorator]
def _look(row: Any, limit: Any) -> Any:
    """Writes the keys of the ids of ranks up to `limit`; how many there are, more than MOST_FOUND where that is all
    that there is room for."""
    width, _, ranks, _, blocks, found = row
    number, count = -(-width // _BLOCK), 0
    least = carray(pointer(blocks), (number,), np.int32)
    keys = carray(pointer(found), (MOST_FOUND,), np.int64)
    for block in range(number):
        if least[block] > limit:
            continue
        start = block * _BLOCK
        size = min(_BLOCK, width - start)
        rank = carray(pointer(ranks + 4 * start), (size,), np.int32)
        for index in range(size):
            if rank[index] <= limit:
                if count == MOST_FOUND:
                    return MOST_FOUND + 1
                keys[count] = (np.int64(rank[index]) << 32) | (start + index)
                count += 1
    return count


@njit  # type: ignore[untyped-decorator]
def _sort(found: Any, count: Any) -> None:
    """Sorts `count` keys (Shell's way)."""
    keys = carray(pointer(found), (count,), np.int64)
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


@njit(inline="always")  # type: ignore[untyped-decorator]
def _hash(key: Any, token: Any) -> Any:
    """SplitMix64's number `token` + 1 from `key` without its last round, which doesn't change the upper 31 bits."""
    bits = key + (np.uint64(token) + np.uint64(1)) * _GOLDEN
    bits = (bits ^ (bits >> np.uint64(30))) * _MIX1
    return (bits ^ (bits >> np.uint64(27))) * _MIX2


@njit  # type: ignore[untyped-decorator]
def _mixed(key: Any, token: Any) -> Any:
    bits = _hash(key, token)
    return bits ^ (bits >> np.uint64(31))


@njit  # type: ignore[untyped-decorator]
def _noise(key: Any, token: Any) -> Any:
    """A unit exponential, see `execution.noise.exponential_noise`."""
    return -math.log((np.float64(_mixed(key, token) >> np.uint64(12)) + 0.5) * 2.0**-52)


@njit  # type: ignore[untyped-decorator]
def _mass(found: Any, count: Any) -> Any:
    """The weights of `count` candidates, added up in their order."""
    keys = carray(pointer(found), (count,), np.int64)
    total = 0.0
    for index in range(count):
        total += np.float64(_weight(float_of(np.int32(keys[index] >> 32))))
    return total


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _choice(found: Any, count: Any, target: Any, min_p: Any, key: Any) -> Any:
    """Among `count` sorted candidates, the id of the greatest weight / noise while the mass before is below `target`."""
    keys = carray(pointer(found), (count,), np.int64)
    chosen, best, before = keys[0] & 0xFFFFFFFF, 0.0, 0.0
    for index in range(count):
        if before >= target:
            break
        token = keys[index] & 0xFFFFFFFF
        weight = np.float64(_weight(float_of(np.int32(keys[index] >> 32))))
        before += weight
        if weight >= min_p:
            score = weight / _noise(key, token)
            if score > best:
                chosen, best = token, score
    return chosen


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _by_candidates(row: Any, total: Any, top_p: Any, top_k: Any, min_p: Any, key: Any) -> Any:
    """The id of a row whose survivors are certainly among a few candidates; -1 if they aren't."""
    width, blocks, found = row[0], row[4], row[5]
    number, limited = -(-width // _BLOCK), top_k < width
    target = top_p * total if top_p < 1 else np.inf
    if not limited and _MOST_OF_A_LOOK < target < np.inf:  # no weight is above one
        return -1
    reach = min(_REACH, 0.0001 - 1.0001 * math.log(min_p)) if min_p > 0 else _REACH
    place = top_k if top_k <= _MOST_BLOCKS else _LOOK
    limit = min(_nth(blocks, number, place), _FINITE) if place < number else _FINITE
    count = _look(row, limit)
    if count > MOST_FOUND:
        return -1
    _sort(found, count)
    certain, kept = float_of(limit) >= reach or count >= top_k, min(count, top_k)
    if limited or not certain:
        mass = _mass(found, kept)
        if limited and top_p < 1:
            target = top_p * mass  # of what top-k leaves
        certain |= not limited and mass >= target
    return _choice(found, kept, target, min_p, key) if certain else -1


# ---- races ----


@njit(fastmath={"reassoc"})  # type: ignore[untyped-decorator]
def _before(row: Any, limit: Any, token: Any) -> Any:
    """The mass of the ids before `token` by rank, which is `limit`."""
    width, _, gaps, weights = row[:4]
    total = 0.0
    for start in range(0, width, _BLOCK):
        count = min(_BLOCK, width - start)
        rank = carray(pointer(gaps + 4 * start), (count,), np.int32)
        weight = carray(pointer(weights + 4 * start), (count,), np.float32)
        some, last = np.float32(0), np.int32(token - start)
        for index in range(count):
            better = rank[index] < limit or (rank[index] == limit and np.int32(index) < last)
            some += weight[index] if better else np.float32(0)
        total += np.float64(some)
    return total


@njit  # type: ignore[untyped-decorator]
def _leave_before(row: Any, limit: Any, token: Any) -> None:
    """Takes the weights of all ids but those before `token` by rank, which is `limit`."""
    width, _, gaps, weights = row[:4]
    rank, weight = carray(pointer(gaps), (width,), np.int32), carray(pointer(weights), (width,), np.float32)
    for index in range(width):
        better = rank[index] < limit or (rank[index] == limit and np.int32(index) < token)
        weight[index] = weight[index] if better else np.float32(0)


@njit  # type: ignore[untyped-decorator]
def _leave_best(row: Any, top_k: Any) -> None:
    """Takes the weights of all but the best `top_k` ids."""
    width, gaps = row[0], row[2]
    limit = _nth(gaps, width, top_k)
    equals = top_k - _up_to(gaps, width, limit - 1)
    rank = carray(pointer(gaps), (width,), np.int32)
    token = 0
    while equals > 0:
        equals -= rank[token] == limit
        token += 1
    _leave_before(row, limit, np.int32(token))


@njit  # type: ignore[untyped-decorator]
def _leave_heavy(row: Any, least: Any) -> None:
    weight = carray(pointer(row[3]), (row[0],), np.float32)
    for index in range(row[0]):
        weight[index] = weight[index] if weight[index] >= least else np.float32(0)


@njit  # type: ignore[untyped-decorator]
def _greatest_hash(key: Any, first: Any, count: Any) -> Any:
    """Of `count` ids from `first` on."""
    start, greatest = key + np.uint64(first) * _GOLDEN, np.uint64(0)
    for index in range(count):
        greatest = max(greatest, _hash(start, index))
    return greatest


@njit  # type: ignore[untyped-decorator]
def _heaviest(weights: Any, count: Any) -> Any:
    """The greatest of the `count` weights at address `weights`, whose bits compare as they do."""
    bits = carray(pointer(weights), (count,), np.int32)
    greatest = np.int32(0)
    for index in range(count):
        greatest = max(greatest, bits[index])
    return float_of(greatest)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _leader(row: Any, key: Any, least: Any) -> Any:
    """The id of the greatest score, weight / noise, if it is `least` or more; else -1.

    A light id scores so much by little noise alone, which few hashes give; the heavy ids are few. So hardly any id
    needs more than a hash, without its last round, and two comparisons.
    """
    width, weights, chosen, luck = row[0], row[3], -1, _LUCKY / row[0]
    # Noise is at most m if the hash is at least 2^64 exp(-m); a few more ids do no harm.
    floor = np.uint64(max(np.int64(math.exp(-luck) * 2.0**31) - 16, 0)) << np.uint64(33)
    heavy = np.float32(least * luck)
    for start in range(0, width, _STRIDE):
        count = min(_STRIDE, width - start)
        if _greatest_hash(key, start, count) < floor and _heaviest(weights + 4 * start, count) < heavy:
            continue
        weight = carray(pointer(weights + 4 * start), (count,), np.float32)
        for index in range(count):
            if _hash(key, start + index) >= floor or weight[index] >= heavy:
                score = weight[index] / _noise(key, start + index)
                if score >= least and (score > least or chosen < 0):
                    chosen, least = start + index, score
                    heavy = np.float32(least * luck)
    return chosen


@njit  # type: ignore[untyped-decorator]
def _by_race(row: Any, total: Any, top_p: Any, top_k: Any, min_p: Any, key: Any) -> Any:
    """The id of any row, its weights used up.

    Noise decides first: the leader among all ids is tested against top-p. If it fails, it bounds the survivors, and the
    race is run again among what lies before it.
    """
    width, weights = row[0], row[3]
    rank = carray(pointer(row[2]), (width,), np.int32)
    if top_k < width:
        _leave_best(row, top_k)
        total = _before(row, _LAST, np.int32(0))
    target = top_p * total if top_p < 1 else np.inf
    if min_p > 0:
        _leave_heavy(row, min_p)
        total = _before(row, _LAST, np.int32(0))
    least = total / _EXPECTED
    while True:
        token = _leader(row, key, least)
        if token < 0:
            least /= _EXPECTED
            continue
        if target == np.inf:
            return token
        before = _before(row, rank[token], token)
        if before < target or before == 0:
            return token
        _leave_before(row, rank[token], np.int32(token))
        least = before / _EXPECTED


# ---- observations ----


@njit  # type: ignore[untyped-decorator]
def _best(row: Any, number: Any) -> None:
    """Makes the keys of the best `number` ids the row's first ones."""
    width, _, ranks, _, blocks, found = row
    held = -(-width // _BLOCK)
    count = MOST_FOUND + 1
    if number <= held:
        count = _look(row, _nth(blocks, held, number))
    if count > MOST_FOUND:  # few blocks, or too many equals: those that fit, lowest ids first
        limit = _nth(ranks, width, number)
        count = _look(row, limit - np.int32(1))
        rank, keys = carray(pointer(ranks), (width,), np.int32), carray(pointer(found), (number,), np.int64)
        for index in range(width):
            if rank[index] == limit and count < number:
                keys[count] = (np.int64(limit) << 32) | index
                count += 1
    _sort(found, count)


# ---- what is called ----

_COUNTER, _THREADS, _ROWS, _WIDTH, _LOGITS, _STEP, _ROOM, _ROOM_SIZE = range(8)
"""Arguments of both functions, all int64: rows and threads begun (zero at first), rows, their width, the logits' address
and the bytes from one row to the next, the address of the first thread's room and the size of one."""
_RAW, _RAW_STEP, _IDS, _STATES, _SETTINGS = range(8, 13)
"""Then those of `_sample`; from the last on an address and a step for each of temperature, top-p, top-k, min-p, seed
and position."""
_ASKED, _ASKED_STEP, _NATURAL, _SCORES, _TOP, _PLACES, _BROKEN = range(8, 15)
"""Then those of `_observe`."""


@njit(inline="always")  # type: ignore[untyped-decorator]
def _row(a: Any, room: Any, logits: Any) -> Any:
    """A row in a thread's room, which is laid out here."""
    padded = -(-a[_WIDTH] // _BLOCK) * _BLOCK
    gaps = room + 8 * MOST_FOUND
    return a[_WIDTH], logits, gaps, gaps + 4 * padded, gaps + 8 * padded, room


def _room_size(width: int) -> int:
    blocks = -(-width // _BLOCK)
    return -(-(8 * MOST_FOUND + 8 * _BLOCK * blocks + 4 * blocks) // 64) * 64


@njit(inline="always")  # type: ignore[untyped-decorator]
def _setting(a: Any, which: Any, number: Any, kind: Any) -> Any:
    place = _SETTINGS + 2 * which
    return carray(pointer(a[place] + number * a[place + 1]), (1,), kind)[0]


@cfunc(types.void(types.voidptr), cache=CACHED)  # type: ignore[untyped-decorator]
def _sample(raw: Any) -> None:
    a = carray(raw, (_SETTINGS + 12,), np.int64)
    room = a[_ROOM] + take(address(raw) + 8 * _THREADS, 1) * a[_ROOM_SIZE]
    ids, states = carray(pointer(a[_IDS]), (a[_ROWS],), np.int64), carray(pointer(a[_STATES]), (a[_ROWS],), np.int8)
    width = a[_WIDTH]
    while True:
        number = take(address(raw), 1)
        if number >= a[_ROWS]:
            return
        logits = a[_LOGITS] + number * a[_STEP]
        peak = _peak(logits, width)
        raw_peak = peak if a[_RAW] == a[_LOGITS] else _peak(a[_RAW] + number * a[_RAW_STEP], width)
        ids[number] = 0
        states[number] = 0
        if not np.isfinite(raw_peak):
            states[number] = 1
        elif peak == -np.inf:
            states[number] = 2
        if not np.isfinite(peak):
            continue
        row = _row(a, room, logits)
        total = _weigh(row, peak, _setting(a, 0, number, np.float32))
        top_p, top_k = np.float64(_setting(a, 1, number, np.float32)), _setting(a, 2, number, np.int64)
        min_p = _setting(a, 3, number, np.float32)
        seed, position = _setting(a, 4, number, np.uint64), _setting(a, 5, number, np.uint64)
        key = _mixed((seed ^ _mixed(np.uint64(0), position)) - _GOLDEN, np.uint64(0))
        token = np.int64(-1)
        if top_p < 1 or top_k < width or min_p > 0:
            token = _by_candidates(row, total, top_p, top_k, min_p, key)
        ids[number] = token if token >= 0 else _by_race(row, total, top_p, top_k, min_p, key)


@cfunc(types.void(types.voidptr), cache=CACHED)  # type: ignore[untyped-decorator]
def _observe(raw: Any) -> None:
    a = carray(raw, (15,), np.int64)
    room = a[_ROOM] + take(address(raw) + 8 * _THREADS, 1) * a[_ROOM_SIZE]
    width, natural, asked, broken = a[_WIDTH], a[_NATURAL], a[_ASKED_STEP], carray(pointer(a[_BROKEN]), (1,), np.int64)
    while True:
        number = take(address(raw), 1)
        if number >= a[_ROWS]:
            return
        ids = carray(pointer(a[_ASKED] + 8 * number * asked), (asked,), np.int64)
        row = _row(a, room, a[_LOGITS] + ids[0] * a[_STEP])
        logits = carray(pointer(row[1]), (width,), np.float32)
        peak = _peak(row[1], width)
        if not np.isfinite(peak):
            broken[0] = 1
            continue
        spread = math.log(_weigh(row, peak, np.float32(1)))
        scores = carray(pointer(a[_SCORES] + 8 * number * (asked - 1 + natural)), (asked - 1 + natural,), np.float64)
        for index in range(asked - 1):
            scores[index] = np.float64(logits[ids[index + 1]]) - np.float64(peak) - spread
        _rank(row)
        rank = carray(pointer(row[2]), (width,), np.int32)
        carray(pointer(a[_PLACES] + 8 * number), (1,), np.int64)[0] = 1 + _up_to(
            row[2], width, rank[ids[1]] - np.int32(1)
        )
        if natural > 0:
            _best(row, natural)
            keys = carray(pointer(row[5]), (natural,), np.int64)
            top = carray(pointer(a[_TOP] + 8 * number * natural), (natural,), np.int64)
            for index in range(natural):
                top[index] = keys[index] & 0xFFFFFFFF
                scores[asked - 1 + index] = np.float64(logits[top[index]]) - np.float64(peak) - spread


def choose(logits: Tensor, raw: Tensor, *settings: Tensor) -> tuple[Tensor, Tensor]:
    """Ids [rows] int64 and states [rows] int8, see `execution.sampler.Sampled`, of float32 `logits` [rows, vocab], which
    penalties and masks made of `raw` (or left it as it was). `settings`: temperature, top-p (float32), top-k (int64),
    min-p (float32), seed and position (int64), [rows] each."""
    raw = _dense(raw)
    ids, states = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits), dtype=torch.int8)
    places = [raw.data_ptr(), 4 * raw.stride(0), ids.data_ptr(), states.data_ptr()]
    for setting in settings:
        places += [setting.data_ptr(), setting.stride(0) * setting.element_size()]
    _deal(_sample.address, len(logits), logits, places)
    return ids, states


@dataclass(frozen=True, slots=True)
class Seen:
    """Log probabilities float64 of ids asked for [n, ids] and of the greatest logits' [n, natural], the latter's ids, and
    one plus how many logits are greater than the first asked id's [n]."""

    picked: Tensor
    top: Tensor
    top_ids: Tensor
    rank: Tensor


def observe(logits: Tensor, asked: Tensor, natural: int) -> Seen | None:
    """Log probabilities under float32 `logits` [rows, vocab]: `asked` int64 [n, 1 + ids] holds a row's number and ids
    that are asked for, at least one; `natural` (up to MOST_FOUND) that many of the greatest. None if the greatest logit
    of a row isn't finite. Raises IndexError for ids beyond the vocabulary."""
    count, picks = len(asked), asked.shape[1] - 1
    if int(asked.amin()) < 0 or int(asked[:, 1:].amax()) >= logits.shape[1] or int(asked[:, 0].amax()) >= len(logits):
        raise IndexError(f"rows and ids {asked.tolist()} of logits {tuple(logits.shape)}")
    asked = asked.contiguous()
    scores = torch.empty(count, picks + natural, dtype=torch.float64)
    top, rank = torch.empty(count, natural, dtype=torch.int64), torch.empty(count, dtype=torch.int64)
    broken = torch.zeros(1, dtype=torch.int64)
    places = [part.data_ptr() for part in (scores, top, rank, broken)]
    _deal(_observe.address, count, logits, [asked.data_ptr(), picks + 1, natural, *places])
    return None if broken.item() else Seen(scores[:, :picks], scores[:, picks:], top, rank)


def _deal(function: int, count: int, logits: Tensor, places: list[int]) -> None:
    logits = _dense(logits)
    threads, size = max(1, min(count, torch.get_num_threads())), _room_size(logits.shape[1])
    rooms = torch.empty(threads * size, dtype=torch.uint8)
    numbers = count, logits.shape[1], logits.data_ptr(), 4 * logits.stride(0), rooms.data_ptr(), size
    arguments = (ctypes.c_int64 * (8 + len(places)))(0, 0, *numbers, *places)
    team.run(function, threads, arguments)


def _dense(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()
