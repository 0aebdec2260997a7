"""Small row-wise passes between the products of a layer, each one call where torch takes several.

All in float32, a row at a time in a fixed order, so that a row's result depends on nothing but itself. Import only
where `team.missing()` is empty: compiles at import (seconds once, then from a cache).
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, njit, types
from torch import Tensor

from engine.kernels import team
from engine.kernels.memory import CACHED, ROUND, address, float_of, pointer, take

_ALONE = 1 << 16
"""Elements that one thread passes over sooner than several do."""


@cfunc(types.void(types.voidptr), cache=CACHED, fastmath={"reassoc", "contract"})  # type: ignore[untyped-decorator]
def _norm(raw: Any) -> None:
    """Arguments: counter, chunk, rows, width, input, weight, output, address of epsilon (float32)."""
    a = carray(raw, (8,), np.int64)
    rows, width = a[2], a[3]
    weight = carray(pointer(a[5]), (width,), np.float32)
    epsilon = carray(pointer(a[7]), (1,), np.float32)[0]
    while True:
        first = take(address(raw), a[1])
        if first >= rows:
            return
        for row in range(first, min(first + a[1], rows)):
            x = carray(pointer(a[4] + 4 * row * width), (width,), np.float32)
            out = carray(pointer(a[6] + 4 * row * width), (width,), np.float32)
            squares = np.float32(0)
            for index in range(width):
                squares += x[index] * x[index]
            inverse = np.float32(1) / np.sqrt(squares / np.float32(width) + epsilon)
            for index in range(width):
                out[index] = x[index] * inverse * weight[index]


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


@cfunc(types.void(types.voidptr), cache=CACHED, error_model="numpy")  # type: ignore[untyped-decorator]
def _swiglu(raw: Any) -> None:
    """Arguments: counter, chunk, rows, width, input of twice the width, output."""
    a = carray(raw, (6,), np.int64)
    rows, width = a[2], a[3]
    while True:
        first = take(address(raw), a[1])
        if first >= rows:
            return
        for row in range(first, min(first + a[1], rows)):
            x = carray(pointer(a[4] + 8 * row * width), (2, width), np.float32)
            out = carray(pointer(a[5] + 4 * row * width), (width,), np.float32)
            for index in range(width):
                gate = max(x[0, index], np.float32(-87.0))  # where the product has vanished; NaN goes through
                out[index] = gate / (np.float32(1) + _exp(-gate)) * x[1, index]


@cfunc(types.void(types.voidptr), cache=CACHED)  # type: ignore[untyped-decorator]
def _rotate(raw: Any) -> None:
    """Arguments: counter, chunk, rows, floats of a row, heads, half a head, input and output, cosines, signed sines."""
    a = carray(raw, (9,), np.int64)
    heads, half = a[4], a[5]
    while True:
        first = take(address(raw), a[1])
        if first >= a[2]:
            return
        for row in range(first, min(first + a[1], a[2])):
            x = carray(pointer(a[6] + 4 * row * a[3]), (heads, 2, half), np.float32)
            cos = carray(pointer(a[7] + 8 * row * half), (2, half), np.float32)
            sin = carray(pointer(a[8] + 8 * row * half), (2, half), np.float32)
            for head in range(heads):
                for index in range(half):
                    left, right = x[head, 0, index], x[head, 1, index]
                    x[head, 0, index] = left * cos[0, index] + right * sin[0, index]
                    x[head, 1, index] = right * cos[1, index] + left * sin[1, index]


def norm(x: Tensor, weight: Tensor, epsilon: Tensor) -> Tensor:
    """float32 [n, width] / sqrt(mean(x²) + epsilon) * weight; `weight` [width], `epsilon` [1], both float32."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _call(_norm.address, len(x), x.shape[1], x.data_ptr(), weight.data_ptr(), out.data_ptr(), epsilon.data_ptr())
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
    arguments = (ctypes.c_int64 * 9)(0, -(-len(x) // (4 * threads)), *numbers)
    team.run(_rotate.address, threads, arguments)
    return x


def _call(function: int, count: int, width: int, *places: int) -> None:
    threads = torch.get_num_threads() if count * width > _ALONE else 1
    chunk = -(-count // (4 * threads))
    team.run(function, threads, (ctypes.c_int64 * (4 + len(places)))(0, chunk, count, width, *places))
