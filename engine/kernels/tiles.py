"""The innermost loop of a quantised product, as LLVM instructions: some rows by sixteen outputs.

One vector instruction (VNNI's vpdpbusd) multiplies 64 unsigned weight codes by 64 signed activations and adds them up
by fours, exactly. An activation is two bytes, step * (high + low / 254): what that loses is far below what bfloat16
would. out = sum over groups of scale * step * (codes · high + codes · low / 254) + zero * (sum of activations).

A row's operations and their order are the same in every tile, so its result doesn't depend on how many rows there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.emitter import FLOAT, FLOATS, HALVES, I32, INTS, LANES, Emitter
from engine.kernels.memory import compiled
from engine.kernels.program import KERNEL

_AHEAD = 8192
"""Bytes before they are used that weights are asked for: the processor itself doesn't look beyond a page."""
FINE = 254
"""Units of an activation's low byte in one of its high byte: half a unit is left over, and 127 units say it."""


class _Emitter(Emitter):
    def __init__(self, builder: Any) -> None:
        super().__init__(builder)
        dot = ir.FunctionType(INTS, [INTS, INTS, INTS])
        self._dot = cgutils.get_or_insert_function(builder.module, dot, "llvm.x86.avx512.vpdpbusd.512")

    def codes(self, address: Any, steps: int, nibbles: bool) -> Iterator[tuple[int, Any]]:
        """The group's codes, for each step a vector of 16 outputs by 4 inputs. Nibbles: step i and step i + steps / 2
        share a byte, the earlier one below."""
        if not nibbles:
            for step in range(steps):
                yield step, self.load(self.plus(address, 64 * step), INTS, 64)
            return
        mask, four = ir.Constant(INTS, [0x0F0F0F0F] * LANES), ir.Constant(INTS, [4] * LANES)
        for step in range(steps // 2):
            pair = self.load(self.plus(address, 64 * step), INTS, 64)
            yield step, self.builder.and_(pair, mask)
            yield step + steps // 2, self.builder.and_(self.builder.lshr(pair, four), mask)

    def dots(self, codes: Any, steps: int, nibbles: bool, activations: list[Any]) -> list[Any]:
        """float32 [16] for each address in `activations`: the codes times the activations (int8) there. Step by step
        through all of them, since a sum waits for itself longer than for the processor."""
        totals = [ir.Constant(INTS, [0] * LANES)] * len(activations)
        for step, vector in self.codes(codes, steps, nibbles):
            for index, address in enumerate(activations):
                factors = self.spread_at(self.plus(address, 4 * step), I32)
                totals[index] = self.builder.call(self._dot, [totals[index], vector, factors])
        return [self.builder.sitofp(total, FLOATS) for total in totals]


def code_bytes(group: int, nibbles: bool) -> int:
    """Bytes of 16 outputs' codes of one group."""
    return LANES * group // (2 if nibbles else 1)


def group_bytes(group: int, nibbles: bool) -> int:
    """Bytes of 16 outputs' codes of one group with their scales and zeros behind them, float16 both: what is read
    together lies together."""
    return code_bytes(group, nibbles) + 4 * LANES


def tile(rows: int, group: int, nibbles: bool) -> Any:
    """A function for numba code of eight addresses and sizes (int64): activations int8 [groups, high and low, inputs],
    their steps and sums float32 by group, weights by group (see `group_bytes`), output float32, number of groups, bytes
    from one row's activations to the next, and from one row's output to the next."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        activations, steps, sums, weights, out, groups, row, out_row = arguments
        make = _Emitter(builder)

        def add(index: Any, sofar: list[Any]) -> list[Any]:
            here = make.plus(weights, make.times(index, group_bytes(group, nibbles)))
            make.prefetch(make.plus(here, _AHEAD), group_bytes(group, nibbles) // 64)
            highs = [
                make.plus(activations, make.times(row, number), make.times(index, 2 * group)) for number in range(rows)
            ]
            places = [place for high in highs for place in (high, make.plus(high, group))]
            products = make.dots(here, group // 4, nibbles, places)
            factors = make.plus(here, code_bytes(group, nibbles))
            scale = builder.fpext(make.load(factors, HALVES, 32), FLOATS)
            zero = builder.fpext(make.load(make.plus(factors, 2 * LANES), HALVES, 32), FLOATS)
            totals = []
            for number in range(rows):
                product = make.fma(products[2 * number + 1], make.constant(1 / FINE), products[2 * number])
                place = make.plus(make.times(index, 4), make.times(make.times(groups, 4), number))
                step, total = (make.spread_at(make.plus(base, place), FLOAT) for base in (steps, sums))
                totals.append(make.fma(zero, total, make.fma(builder.fmul(scale, step), product, sofar[number])))
            return totals

        for number, total in enumerate(make.loop(groups, [make.constant(0.0)] * rows, add)):
            make.store(total, make.plus(out, make.times(out_row, number)))
        return context.get_dummy_value()

    @intrinsic  # type: ignore[untyped-decorator]
    def function(
        typing: Any,
        activations: Any,
        steps: Any,
        sums: Any,
        weights: Any,
        out: Any,
        groups: Any,
        row: Any,
        out_row: Any,
    ) -> Any:
        return types.void(*[types.int64] * 8), emit

    return function


# Arguments of `multiply`, all int64.
_CHUNK, _BLOCKS, _ROWS, _DEPTH, _OUT_ROW, _KIND = range(6)
_ACTIVATIONS, _STEPS, _SUMS, _WEIGHTS, _OUT = range(6, 11)


def _block(group: int, nibbles: bool) -> Any:
    """A function for numba code: all rows of sixteen outputs, as many at a time as registers hold."""
    eight, four, two, one = (tile(rows, group, nibbles) for rows in (8, 4, 2, 1))
    size = group_bytes(group, nibbles)

    @njit  # type: ignore[untyped-decorator]
    def block(a: Any, number: Any) -> None:
        groups, out_row = a[_DEPTH], a[_OUT_ROW]
        row, factors = 2 * groups * group, groups * 4
        weights = a[_WEIGHTS] + number * groups * size
        x, steps, sums, out = a[_ACTIVATIONS], a[_STEPS], a[_SUMS], a[_OUT] + number * 64
        left = a[_ROWS]
        while left > 0:
            if left >= 8:
                done = 8
                eight(x, steps, sums, weights, out, groups, row, out_row)
            elif left >= 4:
                done = 4
                four(x, steps, sums, weights, out, groups, row, out_row)
            elif left >= 2:
                done = 2
                two(x, steps, sums, weights, out, groups, row, out_row)
            else:
                done = 1
                one(x, steps, sums, weights, out, groups, row, out_row)
            left -= done
            x += done * row
            steps += done * factors
            sums += done * factors
            out += done * out_row

    return block


_fine_nibbles, _fine_bytes = _block(16, True), _block(16, False)
_coarse_nibbles, _coarse_bytes = _block(32, True), _block(32, False)


@compiled(KERNEL)
def multiply(raw: Any, first: Any, last: Any) -> None:
    a = carray(raw, (11,), np.int64)
    for number in range(first, last):
        if a[_KIND] == 0:
            _fine_bytes(a, number)
        elif a[_KIND] == 1:
            _fine_nibbles(a, number)
        elif a[_KIND] == 2:
            _coarse_bytes(a, number)
        else:
            _coarse_nibbles(a, number)
