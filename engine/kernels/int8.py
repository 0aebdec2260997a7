"""Products of quantised matrices on the CPU's eight-bit integer vector units.

Activations are rounded per row and group to two bytes, the high one in steps of the greatest magnitude / 127; codes
are multiplied exactly, and only the sums over groups round. A row's result doesn't depend on the rows beside it, the
number of threads or how the work was dealt out. Import only where `team.missing()` is empty: compiles at import
(seconds once, then from a cache).
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, types
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels import team
from engine.kernels.memory import CACHED, ROUND, address, float_of, pointer, take
from engine.kernels.program import Call
from engine.kernels.tiles import FINE, LANES, group_bytes
from engine.kernels.tiles import multiply as _multiply

_SHARED_ROWS = 16
"""From this many rows on, threads share the quantising."""
_CHUNKS = 4
"""Chunks of work a thread."""


@cfunc(types.void(types.voidptr), cache=CACHED)  # type: ignore[untyped-decorator]
def _quantise(raw: Any) -> None:
    """Arguments: counter, chunk, rows, groups, group, float32 input, int8 activations [rows, groups, high and
    low, group], steps, sums."""
    a = carray(raw, (9,), np.int64)
    rows, groups, group = a[2], a[3], a[4]
    while True:
        first = take(address(raw), a[1])
        if first >= rows:
            return
        for row in range(first, min(first + a[1], rows)):
            steps = carray(pointer(a[7] + row * groups * 4), (groups,), np.float32)
            sums = carray(pointer(a[8] + row * groups * 4), (groups,), np.float32)
            for number in range(groups):
                place = row * groups * group + number * group
                x = carray(pointer(a[5] + 4 * place), (group,), np.float32)
                bits = carray(pointer(a[5] + 4 * place), (group,), np.int32)
                high = carray(pointer(a[6] + 2 * place), (group,), np.int8)
                low = carray(pointer(a[6] + 2 * place + group), (group,), np.int8)
                # As integers magnitudes sort alike, infinity and NaN above all, so that these are never lost.
                most = np.int32(0)
                for index in range(group):
                    most = max(most, bits[index] & np.int32(0x7FFFFFFF))
                top = float_of(np.int32(most))
                inverse = np.float32(127) / top if most > 0 else np.float32(0)
                total = np.int32(0)
                for index in range(group):
                    units = x[index] * inverse
                    whole = (units + ROUND) - ROUND
                    rest = np.int32(((units - whole) * np.float32(FINE) + ROUND) - ROUND)
                    high[index] = np.int32(whole)
                    low[index] = rest
                    total += FINE * np.int32(whole) + rest
                steps[number] = top * np.float32(1 / 127)
                sums[number] = steps[number] * (np.float32(total) * np.float32(1 / FINE))


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix laid out for the tiles: uint8 [blocks of 16 outputs, groups, bytes of a group], see `pack`, and where it
    lies. `rows`, `width`: outputs, inputs."""

    data: NDArray[np.uint8]
    address: int
    rows: int
    width: int
    group: int
    nibbles: bool

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


def pack(
    codes: NDArray[np.uint8], scales: NDArray[np.float32], zeros: NDArray[np.float32], group: int, bits: int
) -> Matrix:
    """The matrix of values code * scale + zero. `codes` [rows, width] below 2 ** `bits`, two in a byte for up to four
    bits; `scales`, `zeros` [rows, width / group], kept as float16."""
    rows, width = codes.shape
    blocks, groups = -(-rows // LANES), width // group

    def padded(part: NDArray[Any]) -> NDArray[Any]:
        return np.pad(part, ((0, blocks * LANES - rows), (0, 0)))

    steps = padded(codes).reshape(blocks, LANES, groups, group // 4, 4).transpose(0, 2, 3, 1, 4)
    nibbles = bits <= 4
    if nibbles:
        half = group // 8
        steps = np.bitwise_or(steps[:, :, :half], steps[:, :, half:] << 4)
    scale, zero = (padded(part).reshape(blocks, LANES, groups).transpose(0, 2, 1) for part in (scales, zeros))
    factors = np.ascontiguousarray(np.concatenate((scale, zero), axis=2), dtype=np.float16)
    data = _aligned((blocks, groups, group_bytes(group, nibbles)))
    data[:, :, : -4 * LANES] = steps.reshape(blocks, groups, -1)
    data[:, :, -4 * LANES :] = factors.view(np.uint8)
    return Matrix(data, data.ctypes.data, rows, width, group, nibbles)


@dataclass(frozen=True, slots=True)
class Rounded:
    """Where rounded activations lie: int8 [rows, groups, high and low, group], their steps and sums float32 [rows,
    groups]. Addresses."""

    activations: int
    steps: int
    sums: int


def rounding(rows: int | str, share: int | str, width: int, group: int, x: int, to: Rounded) -> Call:
    """Rounds float32 [rows, width] at address `x`, `share` rows at a time."""
    return _quantise.address, (0, share, rows, width // group, group, x, to.activations, to.steps, to.sums)


def product(matrix: Matrix, rows: int | str, x: Rounded, out: int, out_row: int) -> Call:
    """Writes rows float32 at address `out`, each `out_row` bytes after the one before; a multiple of 16 outputs."""
    blocks = len(matrix.data)
    chunk = -(-blocks // (torch.get_num_threads() * _CHUNKS))
    kind = 2 * (matrix.group == 32) + matrix.nibbles
    sizes = 0, chunk, blocks, rows, matrix.width // matrix.group, out_row, kind
    return _multiply.address, (*sizes, x.activations, x.steps, x.sums, matrix.address, out)


def multiply(x: Tensor, matrix: Matrix) -> Tensor:
    """float32 [n, width] → [n, rows]."""
    x = x.contiguous()
    count, threads = len(x), torch.get_num_threads()
    groups, outputs = matrix.width // matrix.group, len(matrix.data) * LANES
    activations = torch.empty(count, 2 * matrix.width, dtype=torch.int8)
    factors = torch.empty(2, count, groups)
    rounded = Rounded(activations.data_ptr(), factors.data_ptr(), factors.data_ptr() + 4 * count * groups)
    shared = threads if count >= _SHARED_ROWS else 1
    chunk = -(-count // (shared * _CHUNKS))
    _run(rounding(count, chunk, matrix.width, matrix.group, x.data_ptr(), rounded), shared)
    out = torch.empty(count, outputs)
    _run(product(matrix, count, rounded, out.data_ptr(), 4 * outputs), threads)
    return out if outputs == matrix.rows else out[:, : matrix.rows]


def _run(call: Call, threads: int) -> None:
    function, arguments = call
    team.run(function, threads, (ctypes.c_int64 * len(arguments))(*arguments))


def _aligned(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Uninitialised bytes that begin at a multiple of 64, as vector loads want them."""
    size = math.prod(shape)
    raw = np.empty(size + 64, dtype=np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].reshape(shape)
