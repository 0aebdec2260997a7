"""Products of quantised matrices on the CPU's eight-bit integer vector units.

Activations are rounded per row and group to two bytes, the high one in steps of the greatest magnitude / 127; codes
are multiplied exactly, and only the sums over groups round. A row's result doesn't depend on the rows beside it, the
number of threads or how the work was dealt out. Import only where `team.missing()` is empty: compiles at import
(seconds once, then from a cache).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.emitter import FLOATS, I8, INTS, LANES, ROUNDING, Emitter
from engine.kernels.memory import compiled
from engine.kernels.program import KERNEL, Call, run
from engine.kernels.tiles import FINE, group_bytes
from engine.kernels.tiles import multiply as _multiply

_SHARED_ROWS = 16
"""From this many rows on, threads share the quantising."""
_CHUNKS = 4
"""Chunks of work a thread."""
_LEAST = 2.0**-100
"""A group of inputs no greater than this is zero: 127 units over a number near float32's least would be infinite."""


def _round(group: int) -> Any:
    """A function for numba code that rounds one group: addresses of its float32 inputs, its int8 activations (high,
    then low), its step and its sum."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, activations, step, total = arguments
        make, rounding = Emitter(builder), ir.Constant(FLOATS, [ROUNDING] * LANES)
        parts = [make.load(make.plus(x, 4 * first), FLOATS, 4) for first in range(0, group, LANES)]
        # As integers magnitudes sort alike, infinity and NaN above all, so that these are never lost.
        sizes = [builder.and_(builder.bitcast(part, INTS), ir.Constant(INTS, [0x7FFFFFFF] * LANES)) for part in parts]

        def greater(left: Any, right: Any) -> Any:
            return builder.select(builder.icmp_signed(">", left, right), left, right)

        most = make.fold(reduce(greater, sizes), greater)
        top = builder.bitcast(most, FLOATS)
        some = builder.fcmp_unordered(">", top, make.constant(_LEAST))  # or NaN
        inverse = builder.select(some, builder.fdiv(make.constant(127.0), top), make.constant(0.0))
        sums = []
        for first, part in zip(range(0, group, LANES), parts, strict=True):
            units = builder.fmul(part, inverse)
            whole = builder.fsub(builder.fadd(units, rounding), rounding)
            fine = builder.fmul(builder.fsub(units, whole), make.constant(FINE))
            rest = builder.fsub(builder.fadd(fine, rounding), rounding)
            for offset, value in ((0, whole), (group, rest)):
                short = builder.trunc(builder.fptosi(value, INTS), ir.VectorType(I8, LANES))
                make.store(short, make.plus(activations, offset + first), 1)
            sums.append(make.fma(whole, make.constant(FINE), rest))  # whole numbers, exact far beyond these
        one = builder.fmul(top, make.constant(1 / 127))
        whole_sum = builder.fmul(make.fold(reduce(builder.fadd, sums), builder.fadd), make.constant(1 / FINE))
        for place, value in ((step, one), (total, builder.fmul(one, whole_sum))):
            make.store(builder.extract_element(value, ir.Constant(ir.IntType(32), 0)), place)
        return context.get_dummy_value()

    @intrinsic  # type: ignore[untyped-decorator]
    def function(typing: Any, x: Any, activations: Any, step: Any, total: Any) -> Any:
        return types.void(*[types.int64] * 4), emit

    return function


_round_fine, _round_coarse = _round(16), _round(32)


@compiled(KERNEL)
def _quantise(raw: Any, first: Any, last: Any) -> None:
    """Arguments: chunk, rows, groups, group, float32 input, int8 activations [rows, groups, high and low, group],
    steps, sums."""
    a = carray(raw, (8,), np.int64)
    groups, group = a[2], a[3]
    for number in range(first * groups, last * groups):
        x, activations, factor = a[4] + 4 * number * group, a[5] + 2 * number * group, 4 * number
        if group == 16:
            _round_fine(x, activations, a[6] + factor, a[7] + factor)
        else:
            _round_coarse(x, activations, a[6] + factor, a[7] + factor)


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
    return _quantise.address, (share, rows, width // group, group, x, to.activations, to.steps, to.sums)


def product(matrix: Matrix, rows: int | str, x: Rounded, out: int, out_row: int) -> Call:
    """Writes rows float32 at address `out`, each `out_row` bytes after the one before; a multiple of 16 outputs."""
    blocks = len(matrix.data)
    chunk = -(-blocks // (torch.get_num_threads() * _CHUNKS))
    kind = 2 * (matrix.group == 32) + matrix.nibbles
    sizes = chunk, blocks, rows, matrix.width // matrix.group, out_row, kind
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
    run(rounding(count, chunk, matrix.width, matrix.group, x.data_ptr(), rounded), shared)
    out = torch.empty(count, outputs)
    run(product(matrix, count, rounded, out.data_ptr(), 4 * outputs), threads)
    return out if outputs == matrix.rows else out[:, : matrix.rows]


def _aligned(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Uninitialised bytes that begin at a multiple of 64, as vector loads want them."""
    size = math.prod(shape)
    raw = np.empty(size + 64, dtype=np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].reshape(shape)
