"""Small row-wise passes between the products of a layer, each one call where torch takes several.

All in float32, a row at a time in a fixed order, so that a row's result depends on nothing but itself. Import only
where `team.missing()` is empty: compiles at import (seconds once, then from a cache).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from engine.kernels.memory import ROUND, compiled, float_of, pointer
from engine.kernels.program import KERNEL, Call, run

_ALONE = 1 << 16
"""Elements that one thread passes over sooner than several do."""


@njit(error_model="numpy", fastmath={"reassoc", "contract"})  # type: ignore[untyped-decorator]
def _normed(x: Any, weight: Any, epsilon: Any, out: Any, width: Any) -> None:
    """One row: x / sqrt(mean(x²) + epsilon) * weight."""
    squares = np.float32(0)
    for index in range(width):
        squares += x[index] * x[index]
    inverse = np.float32(1) / np.sqrt(squares / np.float32(width) + epsilon)
    for index in range(width):
        out[index] = x[index] * inverse * weight[index]


@compiled(KERNEL)
def _norm(raw: Any, first: Any, last: Any) -> None:
    """Arguments: chunk, rows, width, input, weight, output, address of epsilon (float32), what is added to the
    input beforehand, in place (0: nothing)."""
    a = carray(raw, (8,), np.int64)
    width = a[2]
    weight = carray(pointer(a[4]), (width,), np.float32)
    epsilon = carray(pointer(a[6]), (1,), np.float32)[0]
    for row in range(first, last):
        x = carray(pointer(a[3] + 4 * row * width), (width,), np.float32)
        if a[7] != 0:
            added = carray(pointer(a[7] + 4 * row * width), (width,), np.float32)
            for index in range(width):
                x[index] += added[index]
        _normed(x, weight, epsilon, carray(pointer(a[5] + 4 * row * width), (width,), np.float32), width)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _exp(x: Any) -> Any:
    """e to the power of a float32 up to 88, below -87 as of -87; right to 2e-7. Unlike the library's it becomes vector
    code: 2 ** n * e ** r with |r| <= ln 2 / 2, the latter by its Taylor series."""
    x = max(x, np.float32(-87.0))
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
    return series * float_of((np.int32(n) + np.int32(127)) << np.int32(23))


@compiled(KERNEL, error_model="numpy")
def _swiglu(raw: Any, first: Any, last: Any) -> None:
    """Arguments: chunk, rows, width, input of twice the width, output."""
    a = carray(raw, (5,), np.int64)
    width = a[2]
    for row in range(first, last):
        x = carray(pointer(a[3] + 8 * row * width), (2, width), np.float32)
        out = carray(pointer(a[4] + 4 * row * width), (width,), np.float32)
        for index in range(width):
            gate = max(x[0, index], np.float32(-87.0))  # where the product has vanished; NaN goes through
            out[index] = gate / (np.float32(1) + _exp(-gate)) * x[1, index]


@njit(inline="always")  # type: ignore[untyped-decorator]
def _rotated(x: Any, cos: Any, sin: Any, half: Any) -> None:
    """One head in place: x * cos + (second half, first half) * signed sin."""
    for index in range(half):
        left, right = x[0, index], x[1, index]
        x[0, index] = left * cos[0, index] + right * sin[0, index]
        x[1, index] = right * cos[1, index] + left * sin[1, index]


@njit(inline="always")  # type: ignore[untyped-decorator]
def _shortened(bits: Any, out: Any, count: Any) -> None:
    """float32 bit patterns as bfloat16: to the nearest, ties to even; NaN as torch writes it."""
    for index in range(count):
        value = np.int64(bits[index])
        rounded = (value + 0x7FFF + ((value >> 16) & 1)) >> 16
        out[index] = 0x7FC0 if (value & 0x7FFFFFFF) > 0x7F800000 else rounded


@compiled(KERNEL)
def _rotate(raw: Any, first: Any, last: Any) -> None:
    """Arguments: chunk, rows, floats of a row, heads, half a head, input and output, cosines, signed sines."""
    a = carray(raw, (8,), np.int64)
    heads, half = a[3], a[4]
    for row in range(first, last):
        x = carray(pointer(a[5] + 4 * row * a[2]), (heads, 2, half), np.float32)
        cos = carray(pointer(a[6] + 8 * row * half), (2, half), np.float32)
        sin = carray(pointer(a[7] + 8 * row * half), (2, half), np.float32)
        for head in range(heads):
            _rotated(x[head], cos, sin, half)


@compiled(KERNEL)
def _store(raw: Any, first: Any, last: Any) -> None:
    """Arguments: chunk, rows, floats of a row, floats to write, input, positions in the pool, pool."""
    a = carray(raw, (7,), np.int64)
    for row in range(first, last):
        bits = carray(pointer(a[4] + 4 * row * a[2]), (a[3],), np.int32)
        place = carray(pointer(a[5] + 8 * row), (1,), np.int64)[0]
        _shortened(bits, carray(pointer(a[6] + 2 * place * a[3]), (a[3],), np.uint16), a[3])


@compiled(KERNEL)
def _heads(raw: Any, first: Any, last: Any) -> None:
    """What lies between the product that gives queries, keys and values, and attention: bias, norms of query and key
    heads, rotation, and storing. Arguments: chunk, rows, heads, key heads, size of a head, rows' floats in
    place (queries, keys, values), positions, tables of cosines and signed sines, positions in the pool, pool, bias,
    query norm, key norm (0: none of these), address of the norms' epsilon."""
    a = carray(raw, (15,), np.int64)
    heads, kv_heads, dim = a[2], a[3], a[4]
    width, half = (heads + 2 * kv_heads) * dim, dim // 2
    for row in range(first, last):
        place = a[5] + 4 * row * width
        if a[11] != 0:
            flat, bias = carray(pointer(place), (width,), np.float32), carray(pointer(a[11]), (width,), np.float32)
            for index in range(width):
                flat[index] += bias[index]
        position = carray(pointer(a[6] + 8 * row), (1,), np.int64)[0]
        cos = carray(pointer(a[7] + 4 * position * dim), (2, half), np.float32)
        sin = carray(pointer(a[8] + 4 * position * dim), (2, half), np.float32)
        for head in range(heads + kv_heads):
            weights = a[12] if head < heads else a[13]
            if weights != 0:
                x = carray(pointer(place + 4 * head * dim), (dim,), np.float32)
                weight = carray(pointer(weights), (dim,), np.float32)
                _normed(x, weight, carray(pointer(a[14]), (1,), np.float32)[0], x, dim)
            _rotated(carray(pointer(place + 4 * head * dim), (2, half), np.float32), cos, sin, half)
        count = 2 * kv_heads * dim
        target = carray(pointer(a[9] + 8 * row), (1,), np.int64)[0]
        bits = carray(pointer(place + 4 * heads * dim), (count,), np.int32)
        _shortened(bits, carray(pointer(a[10] + 2 * target * count), (count,), np.uint16), count)


def norm(x: Tensor, weight: Tensor, epsilon: Tensor) -> Tensor:
    """float32 [n, width] / sqrt(mean(x²) + epsilon) * weight; `weight` [width], `epsilon` [1], both float32."""
    x = x.contiguous()
    out = torch.empty_like(x)
    places = x.data_ptr(), weight.data_ptr(), out.data_ptr(), epsilon.data_ptr()
    _call(_norm.address, len(x), x.shape[1], *places, 0)
    return out


def swiglu(x: Tensor) -> Tensor:
    """float32 [n, 2 * width] → silu(first half) * second half, [n, width]."""
    x = x.contiguous()
    out = torch.empty(len(x), x.shape[1] // 2)
    _call(_swiglu.address, len(x), out.shape[1], x.data_ptr(), out.data_ptr())
    return out


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates float32 `x` [n, heads, dim] in place, whose heads lie without gaps: x * cos + (second half, first half) *
    signed sin; `cos`, `sin` [n, 1, dim]."""
    if x.stride()[1:] != (x.shape[2], 1):
        raise ValueError(f"heads of strides {x.stride()} don't lie without gaps")
    cos, sin = cos.contiguous(), sin.contiguous()
    threads = torch.get_num_threads() if x.numel() > _ALONE else 1
    numbers = (len(x), x.stride(0), x.shape[1], x.shape[2] // 2, x.data_ptr(), cos.data_ptr(), sin.data_ptr())
    run((_rotate.address, (-(-len(x) // (4 * threads)), *numbers)), threads)
    return x


def norm_call(rows: str, share: str, width: int, x: int, weight: int, out: int, epsilon: int, added: int) -> Call:
    """`norm` at addresses; `added` is added to `x` beforehand, in place (0: nothing)."""
    return _norm.address, (share, rows, width, x, weight, out, epsilon, added)


def swiglu_call(rows: str, share: str, width: int, x: int, out: int) -> Call:
    """`swiglu` at addresses; `width` floats a row of the result."""
    return _swiglu.address, (share, rows, width, x, out)


@dataclass(frozen=True, slots=True)
class Heads:
    """The sizes of attention, and what a layer does to its heads before it: addresses of bias, query and key norm
    (float32; 0 for none) and the norms' epsilon."""

    heads: int
    kv_heads: int
    dim: int
    bias: int = 0
    query_norm: int = 0
    key_norm: int = 0
    epsilon: int = 0


def heads_call(rows: str, share: str, heads: Heads, x: int, tables: tuple[int, int], pool: int) -> Call:
    """Prepares queries, keys and values [rows, heads + 2 * key heads, dim] float32 at address `x` in place and stores
    the latter in the pool. `tables`: cosines and signed sines float32 [positions, dim]. Each run names the addresses of
    the rows' `positions` and of their places in the pool, `writes`."""
    sizes = share, rows, heads.heads, heads.kv_heads, heads.dim
    places = x, "positions", *tables, "writes", pool
    return _heads.address, (*sizes, *places, heads.bias, heads.query_norm, heads.key_norm, heads.epsilon)


def store(x: Tensor, positions: Tensor, pool: Tensor) -> None:
    """Puts float32 rows [n, heads, dim], whose heads lie without gaps, at `positions` int64 [n] of `pool` bfloat16
    [positions, heads, dim]."""
    threads = torch.get_num_threads() if x.numel() > _ALONE else 1
    sizes = len(x), x.stride(0), x.shape[1] * x.shape[2]
    places = x.data_ptr(), positions.data_ptr(), pool.data_ptr()
    run((_store.address, (-(-len(x) // (4 * threads)), *sizes, *places)), threads)


def _call(function: int, count: int, width: int, *places: int) -> None:
    threads = torch.get_num_threads() if count * width > _ALONE else 1
    chunk = -(-count // (4 * threads))
    run((function, (chunk, count, width, *places)), threads)
