"""LLVM instructions for what compiled Python can't say: vectors of sixteen lanes at addresses, and loops over them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

LANES = 16
"""Four-byte values of a vector."""

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT, HALF = ir.FloatType(), ir.HalfType()
INTS, FLOATS, HALVES, SHORTS = (ir.VectorType(kind, LANES) for kind in (I32, FLOAT, HALF, I16))
ROUNDING = 1.5 * 2**23
"""A float32 so great that adding it leaves no room for a fraction; subtracting it again has rounded."""
_TERMS = [math.log(2) ** power / math.factorial(power) for power in range(7)]
"""Of 2 ** x around zero (Taylor): right to 2e-7 for |x| <= 1/2."""

Values = list[Any]


class Emitter:
    """Instructions on addresses that are plain 64-bit integers."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        fma = ir.FunctionType(FLOATS, [FLOATS, FLOATS, FLOATS])
        self._fma = cgutils.get_or_insert_function(builder.module, fma, "llvm.fma.v16f32")

    # ---- addresses ----

    def plus(self, base: Any, *terms: Any) -> Any:
        for term in terms:
            base = self.builder.add(base, ir.Constant(I64, term) if isinstance(term, int) else term)
        return base

    def times(self, value: Any, factor: Any) -> Any:
        return self.builder.mul(value, ir.Constant(I64, factor) if isinstance(factor, int) else factor)

    def place(self, address: Any, kind: Any) -> Any:
        return self.builder.inttoptr(address, kind.as_pointer())

    def load(self, address: Any, kind: Any, align: int) -> Any:
        return self.builder.load(self.place(address, kind), align=align)

    def store(self, value: Any, address: Any, align: int = 4) -> None:
        self.builder.store(value, self.place(address, value.type), align=align)

    def prefetch(self, address: Any, count: int) -> None:
        """Asks for the `count` cache lines from `address` on."""
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        for line in range(count):
            place = self.builder.inttoptr(self.plus(address, 64 * line), byte)
            self.builder.call(function, [place, *(ir.Constant(I32, value) for value in (0, 3, 1))])

    # ---- vectors ----

    def constant(self, value: float) -> Any:
        return ir.Constant(FLOATS, [value] * LANES)

    def spread(self, value: Any) -> Any:
        """`value` in every lane."""
        vector = ir.VectorType(value.type, LANES)
        first = self.builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(I32, 0))
        return self.builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), ir.Constant(INTS, [0] * LANES))

    def spread_at(self, address: Any, kind: Any) -> Any:
        """The value at `address` in every lane."""
        return self.spread(self.load(address, kind, 4))

    def shuffle(self, left: Any, right: Any, lanes: Sequence[int]) -> Any:
        kind = ir.VectorType(I32, len(lanes))
        return self.builder.shuffle_vector(left, right, ir.Constant(kind, list(lanes)))

    def fma(self, left: Any, right: Any, added: Any) -> Any:
        return self.builder.call(self._fma, [left, right, added])

    def greater(self, left: Any, right: Any) -> Any:
        """The greater of each lane; the left one where either is NaN."""
        return self.builder.select(self.builder.fcmp_ordered("<", left, right), right, left)

    def fold(self, vector: Any, join: Callable[[Any, Any], Any]) -> Any:
        """All lanes joined pairwise, in a fixed order, and the result in every lane."""
        for distance in (8, 4, 2, 1):
            other = self.shuffle(vector, vector, [lane ^ distance for lane in range(LANES)])
            vector = join(vector, other)
        return vector

    def exp2(self, x: Any) -> Any:
        """2 ** x of lanes up to 127; zero for lanes below -64, whose products would be numbers so small that processors
        take a hundred times as long over them. NaN stays."""
        builder, rounding, least = self.builder, self.constant(ROUNDING), self.constant(-64.0)
        small = builder.fcmp_ordered("<", x, least)
        x = self.greater(x, least)
        whole = builder.fsub(builder.fadd(x, rounding), rounding)
        rest = builder.fsub(x, whole)
        series = self.constant(_TERMS[-1])
        for term in reversed(_TERMS[:-1]):
            series = self.fma(series, rest, self.constant(term))
        biased = builder.add(builder.fptosi(whole, INTS), ir.Constant(INTS, [127] * LANES))
        power = builder.bitcast(builder.shl(biased, ir.Constant(INTS, [23] * LANES)), FLOATS)
        return builder.select(small, self.constant(0.0), builder.fmul(series, power))

    # ---- control ----

    def loop(self, count: Any, carried: Values, body: Callable[[Any, Values], Values]) -> Values:
        """Runs `body` (index, values) `count` times, at least once, each on what the one before gave."""
        builder, before = self.builder, self.builder.block
        inside, after = builder.append_basic_block("loop"), builder.append_basic_block("after")
        builder.branch(inside)
        builder.position_at_end(inside)
        index, sofar = builder.phi(I64), [builder.phi(value.type) for value in carried]
        results = body(index, list(sofar))
        end, following = builder.block, self.plus(index, 1)
        for phi, first, later in zip(
            [index, *sofar], [ir.Constant(I64, 0), *carried], [following, *results], strict=True
        ):
            phi.add_incoming(first, before)
            phi.add_incoming(later, end)
        builder.cbranch(builder.icmp_signed("<", following, count), inside, after)
        builder.position_at_end(after)
        return results
