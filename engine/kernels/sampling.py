"""Rows of logits to sampled ids in a few compiled passes where torch takes many.

One thread takes a row from its first pass to its id, in a fixed order, so that a row depends on nothing but itself.
`execution.candidates` says what is chosen and why, and does the same with torch on other machines. Import only where
`team.missing()` is empty: compiles at import (seconds once, then from a cache).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import carray, njit, types
from torch import Tensor

from engine.kernels.memory import address, compiled, float_of, pointer, take
from engine.kernels.ranking import (
    BLOCK,
    FINITE,
    LAST,
    LOGITS,
    MOST_FOUND,
    OWN,
    ROWS,
    STEP,
    WIDTH,
    deal,
    dense,
    look,
    nth,
    peak_of,
    room_of,
    row_of,
    sort,
    up_to,
    weigh,
    weight_of,
)

_LOOK = 64
"""Candidates for top-p are the ids at least as good as the best of so many blocks; nearly always enough."""
_MOST_OF_A_LOOK = 256.0
"""Hardly ever are there more candidates: a nucleus of a greater mass needs no look."""
_MOST_BLOCKS = 256
"""A top-k of up to so many takes the ids at least as good as the best of that many blocks."""
_REACH = 41.0
"""Noise spans 2^-53 … 36.8, so an id with a greater gap can't win."""
_EXPECTED = 8.0
"""How many ids reach the score that a race asks for, on average: an eighth of the mass is hardly ever out of reach."""
_LUCKY = 64.0
"""How many ids, on average, have so little noise that a race looks at them whatever their weight."""
_STRIDE = 64
"""Ids whose hashes are asked at once whether one of them is worth a closer look: half a block."""
_ROUNDED = 1e-5
"""More than the rounding of a weight changes its logarithm."""

_GOLDEN, _MIX1, _MIX2 = (np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""SplitMix64, see `execution.noise`."""

# ---- noise ----


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
def _noise_key(seed: Any, position: Any) -> Any:
    """See `execution.noise.noise_keys`."""
    return _mixed((seed ^ _mixed(np.uint64(0), position)) - _GOLDEN, np.uint64(0))


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
        total += np.float64(weight_of(float_of(np.int32(keys[index] >> 32))))
    return total


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _choice(found: Any, count: Any, target: Any, min_p: Any, key: Any) -> Any:
    """Among `count` sorted candidates, the id of the greatest weight / noise; only while the mass before it is below
    `target`."""
    keys = carray(pointer(found), (count,), np.int64)
    chosen, best, before = keys[0] & 0xFFFFFFFF, 0.0, 0.0
    for index in range(count):
        if before >= target:
            break
        token = keys[index] & 0xFFFFFFFF
        weight = np.float64(weight_of(float_of(np.int32(keys[index] >> 32))))
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
    number, limited = -(-width // BLOCK), top_k < width
    target = top_p * total if top_p < 1 else np.inf
    if not limited and _MOST_OF_A_LOOK < target < np.inf:  # no weight is above one
        return -1
    reach = _REACH  # beyond, no id survives; but where top-p is of what top-k leaves, their mass counts
    if min_p > 0 and not (limited and top_p < 1):
        reach = min(reach, 0.0001 - 1.0001 * math.log(min_p))
    place = top_k if top_k <= _MOST_BLOCKS else _LOOK
    limit = min(nth(blocks, number, place), FINITE) if place < number else FINITE
    count = look(row, limit)
    if count > MOST_FOUND:
        return -1
    sort(row, count)
    kept = min(count, top_k)
    mass, certain = _mass(found, kept), float_of(limit) >= reach or count >= top_k
    if not limited:
        certain |= mass >= target
    elif top_p < 1:
        target = top_p * mass
    return _choice(found, kept, target, min_p, key) if certain else -1


# ---- races ----


@njit(fastmath={"reassoc"})  # type: ignore[untyped-decorator]
def _before(row: Any, limit: Any, token: Any) -> Any:
    """The mass of the ids before `token` by rank, which is `limit`."""
    width, _, gaps, weights = row[:4]
    total = 0.0
    for start in range(0, width, BLOCK):
        count = min(BLOCK, width - start)
        rank = carray(pointer(gaps + 4 * start), (count,), np.int32)
        weight = carray(pointer(weights + 4 * start), (count,), np.float32)
        some = np.float32(0)
        for index in range(count):
            better = rank[index] < limit or (rank[index] == limit and index < token - start)
            some += weight[index] if better else np.float32(0)
        total += np.float64(some)
    return total


@njit  # type: ignore[untyped-decorator]
def _leave_before(row: Any, limit: Any, token: Any) -> None:
    """Takes the weights of all ids but those before `token` by rank, which is `limit`."""
    width, _, gaps, weights = row[:4]
    rank, weight = carray(pointer(gaps), (width,), np.int32), carray(pointer(weights), (width,), np.float32)
    for index in range(width):
        better = rank[index] < limit or (rank[index] == limit and index < token)
        weight[index] = weight[index] if better else np.float32(0)


@njit  # type: ignore[untyped-decorator]
def _leave_best(row: Any, top_k: Any) -> None:
    """Takes the weights of all but the best `top_k` ids."""
    width, gaps = row[0], row[2]
    limit = nth(gaps, width, top_k)
    equals = top_k - up_to(gaps, width, np.int32(limit - 1))
    rank = carray(pointer(gaps), (width,), np.int32)
    token = 0
    while equals > 0:
        equals -= rank[token] == limit
        token += 1
    _leave_before(row, limit, token)


@njit  # type: ignore[untyped-decorator]
def _leave_heavy(row: Any, least: Any) -> None:
    """Takes the weights below `least`."""
    weight = carray(pointer(row[3]), (row[0],), np.float32)
    for index in range(row[0]):
        weight[index] = weight[index] if weight[index] >= least else np.float32(0)


@njit  # type: ignore[untyped-decorator]
def _greatest_hash(key: Any, first: Any) -> Any:
    """Of _STRIDE ids from `first` on."""
    start, greatest = key + np.uint64(first) * _GOLDEN, np.uint64(0)
    for index in range(_STRIDE):
        greatest = max(greatest, _hash(start, index))
    return greatest


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _leader(row: Any, key: Any, least: Any) -> Any:
    """The id of the greatest score, weight / noise, if it is `least` or more; else -1.

    A light id scores so much by little noise alone, which few hashes give; the heavy ids are few. So hardly any id
    needs more than a hash, without its last round, and two comparisons.
    """
    width, weights, chosen, luck = row[0], row[3], -1, _LUCKY / row[0]
    gap = carray(pointer(row[4]), (-(-width // BLOCK),), np.float32)
    # Noise is at most m if the hash is at least 2^64 exp(-m); a few more ids do no harm.
    upper = np.int64(math.exp(-luck) * 2.0**31) - 16
    floor = np.uint64(upper if upper > 0 else 0) << np.uint64(33)
    heavy = np.float32(least * luck)
    reach = _ROUNDED - math.log(heavy)
    for start in range(0, width, _STRIDE):
        if gap[start // BLOCK] > reach and _greatest_hash(key, start) < floor:
            continue
        count = min(_STRIDE, width - start)
        weight = carray(pointer(weights + 4 * start), (count,), np.float32)
        for index in range(count):
            if weight[index] >= heavy or _hash(key, start + index) >= floor:
                score = weight[index] / _noise(key, start + index)
                if score >= least and (score > least or chosen < 0):
                    chosen, least = start + index, score
                    heavy = np.float32(least * luck)
                    reach = _ROUNDED - math.log(heavy)
    return chosen


@njit  # type: ignore[untyped-decorator]
def _by_race(row: Any, total: Any, top_p: Any, top_k: Any, min_p: Any, key: Any) -> Any:
    """The id of any row, its weights used up.

    Noise decides first: the leader among all ids is tested against top-p. If it fails, it bounds the survivors, and the
    race is run again among what lies before it.
    """
    width = row[0]
    if top_k < width:
        _leave_best(row, top_k)
        total = _before(row, LAST, 0)
    target = top_p * total if top_p < 1 else np.inf
    if min_p > 0:
        _leave_heavy(row, min_p)
        total = _before(row, LAST, 0)
    rank, least = carray(pointer(row[2]), (width,), np.int32), total / _EXPECTED
    while least > 0:
        token = _leader(row, key, least)
        if token < 0:
            least /= _EXPECTED
            continue
        before = _before(row, rank[token], token)
        if before < target or before == 0:
            return token
        _leave_before(row, rank[token], token)
        least = before / _EXPECTED
    return 0  # weights that aren't numbers, of a temperature that isn't one


# ---- what is called ----

_RAW, _RAW_STEP, _IDS, _STATES, _SETTINGS = range(OWN, OWN + 5)
"""Own arguments: addresses and the bytes from one raw row to the next; from the last on an address and such a step for
each of the settings."""
_TEMPERATURE, _TOP_P, _TOP_K, _MIN_P, _SEED, _POSITION = range(6)
_KINDS = torch.float32, torch.float32, torch.int64, torch.float32, torch.int64, torch.int64


@njit(inline="always")  # type: ignore[untyped-decorator]
def _setting(a: Any, which: Any, number: Any, kind: Any) -> Any:
    place = _SETTINGS + 2 * which
    return carray(pointer(a[place] + number * a[place + 1]), (1,), kind)[0]


@njit  # type: ignore[untyped-decorator]
def _sampled(row: Any, peak: Any, a: Any, number: Any) -> Any:
    """The id of row `number`, whose greatest logit is `peak`."""
    total = weigh(row, peak, _setting(a, _TEMPERATURE, number, np.float32))
    top_p = np.float64(_setting(a, _TOP_P, number, np.float32))
    top_k, min_p = _setting(a, _TOP_K, number, np.int64), _setting(a, _MIN_P, number, np.float32)
    key = _noise_key(_setting(a, _SEED, number, np.uint64), _setting(a, _POSITION, number, np.uint64))
    token = np.int64(-1)
    if top_p < 1 or top_k < row[0] or min_p > 0:
        token = _by_candidates(row, total, top_p, top_k, min_p, key)
    return token if token >= 0 else _by_race(row, total, top_p, top_k, min_p, key)


@compiled(types.void(types.voidptr))
def _sample(raw: Any) -> None:
    a = carray(raw, (_SETTINGS + 12,), np.int64)
    room, width, count = room_of(raw, a), a[WIDTH], a[ROWS]
    ids, states = carray(pointer(a[_IDS]), (count,), np.int64), carray(pointer(a[_STATES]), (count,), np.int8)
    while True:
        number = take(address(raw), 1)
        if number >= count:
            return
        logits = a[LOGITS] + number * a[STEP]
        peak = peak_of(logits, width)
        raw_peak = peak if a[_RAW] == a[LOGITS] else peak_of(a[_RAW] + number * a[_RAW_STEP], width)
        ids[number] = states[number] = 0
        if not np.isfinite(raw_peak):
            states[number] = 1
        elif peak == -np.inf:
            states[number] = 2
        if np.isfinite(peak):
            ids[number] = _sampled(row_of(width, logits, room), peak, a, number)


def choose(logits: Tensor, raw: Tensor, threads: int, *settings: Tensor) -> tuple[Tensor, Tensor]:
    """Ids int64 and states int8 [rows], see `execution.sampler.Sampled`, of float32 `logits` [rows, vocab], which
    penalties and masks made of `raw`, or left as it was. `settings` [rows]: temperature and top-p (float32), top-k
    (int64), min-p (float32), seed and position (int64). Raises TypeError for tensors of other kinds or lengths."""
    logits, raw = dense(logits), dense(raw)
    if raw.shape != logits.shape:
        raise TypeError(f"logits {tuple(logits.shape)} made of {tuple(raw.shape)}")
    ids, states = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits), dtype=torch.int8)
    own = [raw.data_ptr(), 4 * raw.stride(0), ids.data_ptr(), states.data_ptr()]
    for setting, kind in zip(settings, _KINDS, strict=True):
        if setting.dtype is not kind or len(setting) != len(logits):
            raise TypeError(f"{len(setting)} settings of {setting.dtype} for {len(logits)} rows that take {kind}")
        own += [setting.data_ptr(), setting.stride(0) * setting.element_size()]
    deal(_sample.address, threads, len(logits), logits, own)
    return ids, states
