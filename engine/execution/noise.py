"""Position-keyed noise: unit exponentials hashed from (seed, position, token id), the same on every device.

The id with the greatest probability / noise is the Gumbel arg-max, since log p - log E = log p + G. Two forms of one
formula: torch, for any device, and numpy in blocks that stay in the cache, for whole vocabularies on the CPU.
"""

from __future__ import annotations

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
    steps = _steps(len(weights)) if ids is None else (ids + 1).view(np.uint64) * np.uint64(GOLDEN)
    scores = np.empty(len(weights), np.float64)
    start_value = np.uint64(key & 0xFFFFFFFFFFFFFFFF)
    with np.errstate(over="ignore"):
        for start in range(0, len(weights), _BLOCK):
            bits = steps[start : start + _BLOCK] + start_value
            bits ^= bits >> np.uint64(30)
            bits *= np.uint64(_MIX1)
            bits ^= bits >> np.uint64(27)
            bits *= np.uint64(_MIX2)
            bits ^= bits >> np.uint64(31)
            bits >>= np.uint64(12)
            noise = bits.view(np.int64).astype(np.float64)
            noise += 0.5
            noise *= 2.0**-52
            np.log(noise, out=noise)
            np.divide(
                weights[start : start + _BLOCK], np.negative(noise, out=noise), out=scores[start : start + _BLOCK]
            )
    return scores


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
