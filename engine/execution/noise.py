"""Position-keyed noise: unit exponentials hashed from (seed, position, token id), the same on every device.

The id with the greatest probability / noise is the Gumbel arg-max, since log p - log E = log p + G. Two forms of one
formula: torch, for any device, and numpy in blocks that stay in the cache, for whole vocabularies on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
"""SplitMix64's increment; source of it and of the mixer: Steele, Lea and Flood, "Fast splittable pseudorandom number
generators" (2014)."""

_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB
_BLOCK = 8192


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


def race(weights: NDArray[np.float32], key: int, ids: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
    """`weights` [n] / noise of `ids` [n] (None for 0 … n-1) under the signed 64-bit `key`."""
    scores = np.empty(len(weights), np.float64)
    for start, bits in _hashes(len(weights), key, ids):
        part = slice(start, start + len(bits))
        np.divide(weights[part], _exponential(bits), out=scores[part])
    return scores


def winner(weights: NDArray[np.float32], key: int, ids: NDArray[np.int64] | None = None) -> int:
    """The index of the greatest in `race`, several times as fast: an id whose hash alone shows that its noise is
    too great for its block's greatest weight needs no logarithm."""
    best, lead = 0, 0.0
    for start, bits in _hashes(len(weights), key, ids):
        part = weights[start : start + len(bits)]
        heaviest = float(part.max())
        if heaviest <= 0:
            continue
        # weight / E > lead needs E < heaviest / lead, so a hash of at least 2^52 exp(-heaviest / lead), less rounding
        floor = int(math.exp(-heaviest / lead) * 2.0**52) - 16 if lead > 0 else 0
        near = np.flatnonzero(bits >= np.uint64(floor << 12)) if floor > 0 else np.arange(len(bits))
        if len(near):
            scores = part[near] / _exponential(bits[near])
            place = int(scores.argmax())
            if scores[place] > lead:
                best, lead = start + int(near[place]), float(scores[place])
    return best


def _hashes(count: int, key: int, ids: NDArray[np.int64] | None) -> Iterator[tuple[int, NDArray[np.uint64]]]:
    """(start, 64-bit hashes) of blocks of `ids`. A block is overwritten by the next."""
    steps = _steps(count) if ids is None else None
    offset = np.uint64(key & 0xFFFFFFFFFFFFFFFF)
    block, scratch = np.empty(_BLOCK, np.uint64), np.empty(_BLOCK, np.uint64)
    with np.errstate(over="ignore"):
        for start in range(0, count, _BLOCK):
            size = min(_BLOCK, count - start)
            bits, shifted = block[:size], scratch[:size]
            if steps is not None:
                np.add(steps[start : start + size], offset, out=bits)
            else:
                assert ids is not None
                np.add(ids[start : start + size].view(np.uint64), np.uint64(1), out=bits)
                bits *= np.uint64(GOLDEN)
                bits += offset
            for shift, factor in ((30, _MIX1), (27, _MIX2), (31, 1)):
                np.right_shift(bits, np.uint64(shift), out=shifted)
                bits ^= shifted
                if factor != 1:
                    bits *= np.uint64(factor)
            yield start, bits


def _exponential(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    noise = (bits >> np.uint64(12)).view(np.int64).astype(np.float64)
    noise += 0.5
    noise *= 2.0**-52
    np.log(noise, out=noise)
    return np.negative(noise, out=noise)


@lru_cache(maxsize=4)
def _steps(count: int) -> NDArray[np.uint64]:
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    steps.setflags(write=False)
    return steps


def _shifted(value: Tensor, by: int) -> Tensor:
    """Logical right shift: torch's own keeps the sign."""
    return (value >> by).bitwise_and_((1 << (64 - by)) - 1)


def _mixed(value: Tensor) -> Tensor:
    value = (value ^ _shifted(value, 30)).mul_(signed(_MIX1))
    value = value.bitwise_xor_(_shifted(value, 27)).mul_(signed(_MIX2))
    return value.bitwise_xor_(_shifted(value, 31))
