"""Attention on the CPU through our own kernel, which reads pages where they lie: no copies, no masks, no padding.

A row's result depends on its own position alone, so `fast` and `invariant` numerics are the same here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.protocol import Batch, Capabilities, KvPool, Needs
from engine.kernels import team

if TYPE_CHECKING:
    from engine.kernels.program import Call

_PIECE_ROWS = 8
"""Positions of a chunk that go through its keys together, where their heads allow it."""


@dataclass(frozen=True, slots=True)
class CompiledMetadata:
    """`work`: int64 [pieces, 4] of (first row, rows, position of the first, slot), the longest first. `complete`: they
    cover all rows."""

    writes: Tensor
    work: NDArray[np.int64]
    tables: NDArray[np.int32]
    complete: bool


class CompiledAttention:
    """Takes and gives float32; other dtypes are converted."""

    name = "compiled"
    capabilities = Capabilities(devices=("cpu",), dtypes=(torch.bfloat16,), page_multiple=16, invariant=True)

    def __init__(self, pool: KvPool, needs: Needs) -> None:
        from engine.kernels import attention, program, rows  # compile at import, so only where they run

        self._pool, self._kernel, self._store, self._run = pool, attention, rows.store, program.run
        self._heads, self._kv_heads, self._dim = needs.heads, needs.kv_heads, needs.head_dim
        group = needs.heads // needs.kv_heads
        self._piece = max(1, min(_PIECE_ROWS, attention.QUERIES // group))
        self._scale = np.array([attention.TO_BASE_2 / math.sqrt(needs.head_dim)], dtype=np.float32)

    @staticmethod
    def missing(needs: Needs) -> list[str]:
        """What `needs` asks beyond this, in words."""
        lacking = team.missing()
        if lacking:
            return [lacking]
        from engine.kernels import attention

        found = CompiledAttention.capabilities.missing(needs)
        if needs.head_dim % attention.DIM_MULTIPLE or needs.head_dim > attention.MOST_DIM:
            most = f"at most {attention.MOST_DIM}"
            found.append(f"head size {needs.head_dim} (has multiples of {attention.DIM_MULTIPLE}, {most})")
        if needs.heads // needs.kv_heads > attention.QUERIES:
            found.append(f"{needs.heads // needs.kv_heads} heads a key head (has at most {attention.QUERIES})")
        return found

    def forget(self, slot: int) -> None:
        """Nothing is kept between steps."""

    def prepare(self, batch: Batch) -> CompiledMetadata:
        """Raises IndexError where a row would be written outside the pool, since a kernel doesn't notice."""
        places, positions = batch.writes.numpy(), (self._pool.pages + 1) * self._pool.page_tokens
        if len(places) and not 0 <= places.min() <= places.max() < positions:
            raise IndexError(f"rows would be written to positions {places.min()} to {places.max()} of {positions}")
        piece = self._piece
        work = [
            (query.offset + at, min(piece, query.count - at), query.start + at, query.slot)
            for query in batch.queries
            for at in range(0, query.count, piece)
        ]
        work.sort(key=lambda entry: -entry[2])
        covered = sum(query.count for query in batch.queries)
        return CompiledMetadata(
            batch.writes, np.array(work, dtype=np.int64).reshape(-1, 4), batch.tables, covered == batch.rows
        )

    def forward(self, query: Tensor, kv: Tensor, layer: int, metadata: CompiledMetadata) -> Tensor:
        self._store(_rows(kv), metadata.writes, self._pool.layers[layer])
        rows = _rows(query)
        out = (torch.empty if metadata.complete else torch.zeros)(len(rows), self._heads * self._dim)
        function, arguments = self.call(rows.data_ptr(), 4 * rows.stride(0), out.data_ptr(), layer)
        values = self.values(metadata)
        known = [values[value] if isinstance(value, str) else value for value in arguments]
        self._run((function, known), torch.get_num_threads())
        return out.to(query.dtype)

    def call(self, query: int, query_row: int, out: int, layer: int) -> Call:
        """The kernel on queries float32 at address `query`, `query_row` bytes a row; the result goes to `out`, without
        gaps."""
        group, row = self._heads // self._kv_heads, 4 * self._heads * self._dim
        sizes = 1, "units", self._kv_heads, group, self._dim
        pool = self._pool.layers[layer].data_ptr(), "tables", "table width", self._pool.page_tokens
        function = self._kernel.attend.address
        return function, (*sizes, "work", query, query_row, out, row, *pool, self._scale.ctypes.data)

    def pool(self, layer: int) -> int:
        """Address of a layer's keys and values."""
        return self._pool.layers[layer].data_ptr()

    def values(self, metadata: CompiledMetadata) -> dict[str, int]:
        """What a step gives for the names in `call`."""
        return {
            "units": len(metadata.work) * self._kv_heads,
            "work": metadata.work.ctypes.data,
            "tables": metadata.tables.ctypes.data,
            "table width": metadata.tables.shape[1],
        }


def _rows(part: Tensor) -> Any:
    """`part` [rows, heads, dim] as float32 whose heads lie without gaps."""
    wide = part.float()
    return wide if wide.stride()[1:] == (wide.shape[2], 1) else wide.contiguous()
