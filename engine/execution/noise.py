"""Position-keyed noise: unit exponentials hashed from (seed, position, token id), the same on every device.

The id with the greatest probability / noise is the Gumbel arg-max, since log p - log E = log p + G. Two forms of one
formula: torch, for any device, and numpy in blocks that stay in the cache, for whole vocabularies on the CPU.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
"""SplitMix64's increment; source of it and of the mixer: Steele, Lea and Flood, "Fast splittable pseudorandom number
generators" (2014)."""

_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB
_WORD = 0xFFFFFFFFFFFFFFFF
_STEP, _FACTOR1, _FACTOR2 = np.uint64(GOLDEN), np.uint64(_MIX1), np.uint64(_MIX2)
_SHIFT1, _SHIFT2 = np.uint64(30), np.uint64(27)


def signed(value: int) -> int:
    """The bit pattern of an unsigned 64-bit number as a signed one, which is all that torch has."""
    return value - (1 << 64) if value >= 1 << 63 else value


def noise_keys(seed: Tensor, position: Tensor) -> Tensor:
    """The 64-bit key [rows] of each row's noise, from seed and absolute position [rows] int64."""
    return _mixed(seed ^ _mixed(position * signed(GOLDEN) + signed(GOLDEN)))


def exponential_noise(keys: Tensor, ids: Tensor) -> Tensor:
    """Unit exponentials, float64, of `keys` and token `ids`, broadcast against each other.

    Step id + 1 of SplitMix64 started at the key gives 52 bits v; (v + 1/2) / 2^52 is exact and its -log is right to
    an ulp, so the tails reach 2^-53 and 36.7.
    """
    bits = _shifted(_mixed(ids * signed(GOLDEN) + (keys + signed(GOLDEN))), 12)
    return bits.double().add_(0.5).mul_(2.0**-52).log_().neg_()


def noise_keys_on_host(seed: NDArray[np.int64], position: NDArray[np.int64]) -> NDArray[np.int64]:
    """`noise_keys`, without a tensor's cost for each operation of a short row."""
    with np.errstate(over="ignore"):
        place = (position.astype(np.uint64) + np.uint64(1)) * _STEP
        return _mixed_on_host(seed.view(np.uint64) ^ _mixed_on_host(place)).view(np.int64)


def noise_on_host(key: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """`exponential_noise` of `ids` [n] under one signed 64-bit `key`."""
    with np.errstate(over="ignore"):
        bits = _mixed_on_host((ids.astype(np.uint64) + np.uint64(1)) * _STEP + np.uint64(key & _WORD))
    noise = (bits >> np.uint64(12)).astype(np.float64)
    noise += 0.5
    noise *= 2.0**-52
    return np.negative(np.log(noise, out=noise), out=noise)


def leaders(weights: NDArray[np.float32], key: int, least: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """(ids, scores) by decreasing score of every id whose score, weight / noise under `key`, reaches `least` > 0.
    `weights` [vocab].

    A light id reaches it by little noise alone, which few hashes give; the heavy ids are few. So hardly any id needs
    more than a hash, without its last round, and two comparisons.
    """
    count = len(weights)
    ids = np.flatnonzero(_hashed_at_least(_FEW / count, count, key) | (weights >= np.float32(least * _FEW / count)))
    scores = weights[ids] / noise_on_host(key, ids)
    reached = scores >= least
    ids, scores = ids[reached], scores[reached]
    order = np.argsort(-scores, kind="stable")
    return ids[order], scores[order]


_FEW = 1024
"""How many of the light ids, on average, get a logarithm."""

_BLOCK = 1 << 14
"""Ids hashed at once: their hashes stay in the cache."""


def _hashed_at_least(most: float, count: int, key: int) -> NDArray[np.bool_]:
    """For ids 0 … count - 1, whether the hash alone leaves the noise at `most`; a few that it doesn't are there too.

    Noise is at most m if the hash is at least 2^64 exp(-m). Only the upper 31 bits are asked, since SplitMix64's last
    round, which is left out, doesn't change them.
    """
    floor = np.uint64(max(int(math.exp(-most) * 2.0**31) - 16, 0) << 33)
    steps = _first_steps()
    bits, scratch = np.empty((2, _BLOCK), np.uint64)
    reached = np.empty(count, np.bool_)
    for start in range(0, count, _BLOCK):
        size = min(_BLOCK, count - start)
        part, shifted = bits[:size], scratch[:size]
        np.add(steps[:size], np.uint64((key + start * GOLDEN) & _WORD), out=part)
        for shift, factor in ((_SHIFT1, _FACTOR1), (_SHIFT2, _FACTOR2)):
            np.right_shift(part, shift, out=shifted)
            np.bitwise_xor(part, shifted, out=part)
            np.multiply(part, factor, out=part)
        np.greater_equal(part, floor, out=reached[start : start + size])
    return reached


def _mixed_on_host(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = (bits ^ (bits >> _SHIFT1)) * _FACTOR1
    bits = (bits ^ (bits >> _SHIFT2)) * _FACTOR2
    return bits ^ (bits >> np.uint64(31))


@cache
def _first_steps() -> NDArray[np.uint64]:
    steps = np.arange(1, _BLOCK + 1, dtype=np.uint64) * _STEP
    steps.setflags(write=False)
    return steps


def _shifted(value: Tensor, by: int) -> Tensor:
    """Logical right shift: torch's own keeps the sign."""
    return (value >> by).bitwise_and_((1 << (64 - by)) - 1)


def _mixed(value: Tensor) -> Tensor:
    value = (value ^ _shifted(value, 30)).mul_(signed(_MIX1))
    value = value.bitwise_xor_(_shifted(value, 27)).mul_(signed(_MIX2))
    return value.bitwise_xor_(_shifted(value, 31))
