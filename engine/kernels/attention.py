"""Attention over pages of bfloat16 keys and values, one pass, for queries that share a key head.

Keys come in blocks of 32 from the slot's first position on: a block's scores, the greatest score so far, weights, and
the weighted values are worked off before the next ("online softmax", Milakov and Gimelshein, 2018). A query's
operations and their order depend on its own position alone, so its result is the same in any batch and however its
context was cut. Import only where `team.missing()` is empty: compiles at import (seconds once, then from a cache).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from engine.kernels.emitter import FLOAT, FLOATS, I32, INTS, LANES, SHORTS, Emitter
from engine.kernels.memory import compiled, pointer
from engine.kernels.program import KERNEL

BLOCK = 2 * LANES
"""Keys of a block."""
QUERIES = 32
"""Most queries of one unit of work."""
DIM_MULTIPLE, MOST_DIM = 32, 256
"""What a head's size must be a multiple of, and at most."""
PAGE_MULTIPLE = LANES
"""What a page's tokens must be a multiple of."""
TO_BASE_2 = 1 / math.log(2)
"""Scores are multiplied by this beforehand, so that weights are powers of two."""

_TILE = 4
"""Queries that are worked on at once: as many as registers hold."""
_SCRATCH = 4 * (2 * MOST_DIM * (BLOCK + QUERIES) + 3 * QUERIES + _TILE * BLOCK) + 1024


@intrinsic  # type: ignore[untyped-decorator]
def _scratch(typing: Any) -> Any:
    """The address of _SCRATCH bytes on the stack, a multiple of 64."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        with builder.goto_entry_block():
            memory = builder.alloca(ir.IntType(8), size=_SCRATCH)
        memory.align = 64
        return builder.ptrtoint(memory, ir.IntType(64))

    return types.int64(), emit


@intrinsic  # type: ignore[untyped-decorator]
def _turn(typing: Any, source: Any, stride: Any, target: Any, dim: Any) -> Any:
    """Reads 16 keys, bfloat16 [dim] each `stride` bytes after the one before, and writes them as float32 [dim, BLOCK]
    of which they are 16 neighbouring columns."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start, stride, target, dim = arguments
        make = Emitter(builder)
        eight = ir.VectorType(I32, 8)

        def sixteen(index: Any, carried: list[Any]) -> list[Any]:
            """16 dimensions. A lane holds two of them: the earlier one below."""
            here = make.plus(start, make.times(index, 2 * LANES))
            rows = [make.load(make.plus(here, make.times(stride, key)), eight, 2) for key in range(LANES)]
            # Key i and key i + 8 in one vector, eight lanes each, which are then turned by themselves.
            pairs = [make.shuffle(rows[key], rows[key + 8], range(LANES)) for key in range(8)]
            for distance in (4, 2, 1):
                pairs = _exchanged(make, pairs, distance)
            sixteen_bits, above = ir.Constant(INTS, [16] * LANES), ir.Constant(INTS, [0xFFFF0000] * LANES)
            out = make.plus(target, make.times(index, LANES * 4 * BLOCK))
            for lane, pair in enumerate(pairs):
                for half, bits in enumerate((builder.shl(pair, sixteen_bits), builder.and_(pair, above))):
                    make.store(builder.bitcast(bits, FLOATS), make.plus(out, (2 * lane + half) * 4 * BLOCK), 64)
            return []

        make.loop(builder.lshr(dim, ir.Constant(dim.type, 4)), [], sixteen)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), emit


def _exchanged(make: Emitter, vectors: list[Any], distance: int) -> list[Any]:
    """One step of turning 8 by 8 lanes, twice side by side: vectors `distance` apart exchange their halves, quarters or
    eighths that lie so far apart."""
    low = [lane if not lane & distance else LANES + (lane ^ distance) for lane in range(LANES)]
    high = [lane ^ distance if not lane & distance else LANES + lane for lane in range(LANES)]
    turned = list(vectors)
    for index in range(8):
        if not index & distance:
            left, right = vectors[index], vectors[index + distance]
            turned[index], turned[index + distance] = make.shuffle(left, right, low), make.shuffle(left, right, high)
    return turned


@intrinsic  # type: ignore[untyped-decorator]
def _widen(typing: Any, source: Any, stride: Any, target: Any, dim: Any) -> Any:
    """Reads 16 values, bfloat16 [dim] each `stride` bytes after the one before, and writes float32 [16, dim]."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start, stride, target, dim = arguments
        make = Emitter(builder)
        pieces = builder.lshr(dim, ir.Constant(dim.type, 4))

        def one(number: Any, carried: list[Any]) -> list[Any]:
            here, out = (
                make.plus(start, make.times(number, stride)),
                make.plus(target, make.times(number, make.times(dim, 4))),
            )

            def piece(index: Any, carried: list[Any]) -> list[Any]:
                short = make.load(make.plus(here, make.times(index, 2 * LANES)), SHORTS, 2)
                bits = builder.shl(builder.zext(short, INTS), ir.Constant(INTS, [16] * LANES))
                make.store(builder.bitcast(bits, FLOATS), make.plus(out, make.times(index, 4 * LANES)), 64)
                return []

            make.loop(pieces, [], piece)
            return []

        make.loop(ir.Constant(dim.type, LANES), [], one)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), emit


class _Tile(Emitter):
    """Some queries by the keys of one block."""

    def __init__(self, builder: Any, queries: int) -> None:
        super().__init__(builder)
        self.queries = queries

    def scores(self, queries: Any, keys: Any, dim: Any) -> list[tuple[Any, Any]]:
        """A query's scores with the block's first 16 keys and with its last."""

        def add(index: Any, sofar: list[Any]) -> list[Any]:
            here = self.plus(keys, self.times(index, 4 * BLOCK))
            halves = [self.load(self.plus(here, half), FLOATS, 64) for half in (0, 4 * LANES)]
            place = self.plus(queries, self.times(index, 4))
            found = []
            for number in range(self.queries):
                factor = self.spread_at(self.plus(place, self.times(dim, 4 * number)), FLOAT)
                found += [self.fma(factor, half, sofar[2 * number + at]) for at, half in enumerate(halves)]
            return found

        flat = self.loop(dim, [self.constant(0.0)] * (2 * self.queries), add)
        return list(zip(flat[::2], flat[1::2], strict=True))

    def weigh(self, scores: tuple[Any, Any], state: Any, limit: Any, weights: Any) -> Any:
        """Turns one query's scores of keys up to `limit` into weights at `weights`, updates its state (greatest score,
        sum of weights), and gives the factor on what was summed before, in all lanes."""
        builder = self.builder
        spread = self.spread(limit)
        seen = [
            builder.icmp_signed("<=", ir.Constant(INTS, list(range(first, first + LANES))), spread)
            for first in (0, LANES)
        ]
        low, high = (
            builder.select(mask, part, self.constant(-math.inf)) for mask, part in zip(seen, scores, strict=True)
        )
        before = self.spread_at(state, FLOAT)
        greatest = self.greater(self.fold(self.greater(low, high), self.greater), before)
        fade = self.exp2(builder.fsub(before, greatest))
        parts = [self.exp2(builder.fsub(part, greatest)) for part in (low, high)]
        for half, part in enumerate(parts):
            self.store(part, self.plus(weights, 4 * LANES * half), 64)
        total = self.fold(builder.fadd(*parts), builder.fadd)
        whole = self.fma(self.spread_at(self.plus(state, 4), FLOAT), fade, total)
        for offset, value in ((0, greatest), (4, whole)):
            self.store(builder.extract_element(value, ir.Constant(I32, 0)), self.plus(state, offset))
        return fade

    def mix(self, sums: Any, fades: list[Any], weights: Any, values: Any, dim: Any, reach: Any) -> None:
        """Fades the sums and adds the weighted values of the block's first `reach` keys, 32 dimensions at a time."""
        row = self.times(dim, 4)

        def piece(index: Any, carried: list[Any]) -> list[Any]:
            offset = self.times(index, 8 * LANES)
            places = [
                self.plus(sums, offset, self.times(row, number), half)
                for number in range(self.queries)
                for half in (0, 4 * LANES)
            ]

            def key(number: Any, sofar: list[Any]) -> list[Any]:
                here = self.plus(values, self.times(number, row), offset)
                halves = [self.load(self.plus(here, half), FLOATS, 64) for half in (0, 4 * LANES)]
                place = self.plus(weights, self.times(number, 4))
                found = []
                for query in range(self.queries):
                    factor = self.spread_at(self.plus(place, 4 * BLOCK * query), FLOAT)
                    found += [self.fma(factor, half, sofar[2 * query + at]) for at, half in enumerate(halves)]
                return found

            begun = [
                self.builder.fmul(fades[index // 2], self.load(place, FLOATS, 64)) for index, place in enumerate(places)
            ]
            for place, total in zip(places, self.loop(reach, begun, key), strict=True):
                self.store(total, place, 64)
            return []

        self.loop(self.builder.lshr(dim, ir.Constant(dim.type, 5)), [], piece)


def _tile(queries: int) -> Any:
    """A function for numba code of nine addresses and sizes (int64): scaled queries float32 [queries, dim], keys
    [dim, BLOCK], values [BLOCK, dim], sums [queries, dim], states float32 [queries, 2], last positions int32 [queries]
    counted from the block's first, room for weights [queries, BLOCK], dim, and how many keys any query sees."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        query, keys, values, sums, states, limits, weights, dim, reach = arguments
        make = _Tile(builder, queries)
        fades = [
            make.weigh(
                scores,
                make.plus(states, 8 * number),
                make.load(make.plus(limits, 4 * number), I32, 4),
                make.plus(weights, 4 * BLOCK * number),
            )
            for number, scores in enumerate(make.scores(query, keys, dim))
        ]
        make.mix(sums, fades, weights, values, dim, reach)
        return context.get_dummy_value()

    @intrinsic  # type: ignore[untyped-decorator]
    def function(
        typing: Any,
        query: Any,
        keys: Any,
        values: Any,
        sums: Any,
        states: Any,
        limits: Any,
        weights: Any,
        dim: Any,
        reach: Any,
    ) -> Any:
        return types.void(*[types.int64] * 9), emit

    return function


_one, _two, _three, _four = (_tile(queries) for queries in range(1, _TILE + 1))


# Arguments of `attend`, all int64, sizes in elements and strides in bytes. WORK: int64 [pieces, 4] of (first row, rows,
# position of the first, slot). TABLES: int32 page ids, TABLE_WIDTH a slot. POOL: bfloat16 [positions, 2 * key heads,
# dim]. UNITS: pieces times key heads.
_CHUNK, _UNITS, _KV_HEADS, _GROUP, _DIM, _WORK, _QUERY, _QUERY_ROW, _OUT, _OUT_ROW = range(10)
_POOL, _TABLES, _TABLE_WIDTH, _PAGE_TOKENS, _SCALE, _ARGUMENTS = range(10, 16)


@njit  # type: ignore[untyped-decorator]
def _row(a: Any, base: Any, stride: Any, work: Any, head: Any, index: Any) -> Any:
    """Query or result `index` of a unit, float32 [dim], where rows begin at `base`, `stride` bytes each."""
    group, dim = a[_GROUP], a[_DIM]
    place = base + (work[0] + index // group) * stride + (head * group + index % group) * dim * 4
    return carray(pointer(place), (dim,), np.float32)


@njit  # type: ignore[untyped-decorator]
def _begin(a: Any, work: Any, head: Any, places: Any) -> None:
    """Scaled queries, empty sums and states, and how far each query sees."""
    dim, (_, _, queries, sums, _, states, limits) = a[_DIM], places
    query = carray(pointer(queries), (QUERIES, dim), np.float32)
    mixed = carray(pointer(sums), (QUERIES, dim), np.float32)
    state = carray(pointer(states), (QUERIES, 2), np.float32)
    limit = carray(pointer(limits), (QUERIES,), np.int32)
    scale = carray(pointer(a[_SCALE]), (1,), np.float32)[0]
    for index in range(work[1] * a[_GROUP]):
        source = _row(a, a[_QUERY], a[_QUERY_ROW], work, head, index)
        for at in range(dim):
            query[index, at] = source[at] * scale
            mixed[index, at] = np.float32(0)
        state[index, 0], state[index, 1] = np.float32(-np.inf), np.float32(0)
        limit[index] = work[2] + index // a[_GROUP]


@njit  # type: ignore[untyped-decorator]
def _fetch(a: Any, table: Any, head: Any, block: Any, end: Any, places: Any) -> None:
    """The block's keys and values from its pages, as far as there are any before position `end`."""
    keys, values, _, _, _, _, _ = places
    dim, page = a[_DIM], a[_PAGE_TOKENS]
    stride = 4 * a[_KV_HEADS] * dim
    for part in range(0, BLOCK, LANES):
        place = block + part
        if place < end:
            position = table[place // page] * page + place % page
            source = a[_POOL] + position * stride + 2 * head * dim
            _turn(source, stride, keys + 4 * part, dim)
            _widen(source + 2 * a[_KV_HEADS] * dim, stride, values + 4 * part * dim, dim)


@njit  # type: ignore[untyped-decorator]
def _work_off(dim: Any, total: Any, places: Any) -> None:
    """All queries by the block at hand, some at a time; then their limits count from the next block's first key."""
    keys, values, queries, sums, weights, states, limits = places
    limit = carray(pointer(limits), (QUERIES,), np.int32)
    for first in range(0, total, _TILE):
        size = min(_TILE, total - first)
        reach = min(BLOCK, limit[first + size - 1] + 1)
        if reach > 0:
            query, mixed = queries + 4 * first * dim, sums + 4 * first * dim
            state, ends = states + 8 * first, limits + 4 * first
            if size == 4:
                _four(query, keys, values, mixed, state, ends, weights, dim, reach)
            elif size == 3:
                _three(query, keys, values, mixed, state, ends, weights, dim, reach)
            elif size == 2:
                _two(query, keys, values, mixed, state, ends, weights, dim, reach)
            else:
                _one(query, keys, values, mixed, state, ends, weights, dim, reach)
    for index in range(total):
        limit[index] -= BLOCK


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _finish(a: Any, work: Any, head: Any, places: Any) -> None:
    dim, (_, _, _, sums, _, states, _) = a[_DIM], places
    mixed = carray(pointer(sums), (QUERIES, dim), np.float32)
    state = carray(pointer(states), (QUERIES, 2), np.float32)
    for index in range(work[1] * a[_GROUP]):
        target = _row(a, a[_OUT], a[_OUT_ROW], work, head, index)
        inverse = np.float32(1) / state[index, 1]
        for at in range(dim):
            target[at] = mixed[index, at] * inverse


@njit  # type: ignore[untyped-decorator]
def _unit(a: Any, number: Any, memory: Any) -> None:
    """The queries of one piece of work and one key head."""
    dim, head = a[_DIM], number % a[_KV_HEADS]
    work = carray(pointer(a[_WORK] + number // a[_KV_HEADS] * 32), (4,), np.int64)
    table = carray(pointer(a[_TABLES] + work[3] * a[_TABLE_WIDTH] * 4), (a[_TABLE_WIDTH],), np.int32)
    values, queries = memory + 4 * BLOCK * dim, memory + 8 * BLOCK * dim
    sums = queries + 4 * QUERIES * dim
    weights = sums + 4 * QUERIES * dim
    states = weights + 4 * _TILE * BLOCK
    places = memory, values, queries, sums, weights, states, states + 8 * QUERIES
    _begin(a, work, head, places)
    end = work[2] + work[1]
    for block in range(0, end, BLOCK):
        _fetch(a, table, head, block, end, places)
        _work_off(dim, work[1] * a[_GROUP], places)
    _finish(a, work, head, places)


@compiled(KERNEL)
def attend(raw: Any, first: Any, last: Any) -> None:
    a = carray(raw, (_ARGUMENTS,), np.int64)
    memory = _scratch()
    for number in range(first, last):
        _unit(a, number, memory)
