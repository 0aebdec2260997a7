"""Attention on the CPU through torch's fused SDPA: grouped heads folded into query rows, pages gathered by index.

Decode rows of like length go through one call; every prefill chunk is a call of its own. Under invariant numerics the
shapes that decide rounding are fixed: folded query rows padded to a multiple of 4, keys to a multiple of 512, an
explicit mask always, so that a row's result depends neither on its batch nor on how its context was cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.attention.protocol import Batch, Capabilities, KvPool, Needs, Query, flat_positions, store

KEY_MULTIPLE = 512
ROW_MULTIPLE = 4
_FAST_KEY_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class Call:
    """One SDPA call: `batch` slots with `count` positions each, whose rows start at `offset` or lie at `index`.
    `flat`: pool positions int64 [batch * keys]; `mask`: additive [batch, 1, folded rows, keys]."""

    batch: int
    count: int
    offset: int
    index: Tensor | None
    keys: int
    flat: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class CpuMetadata:
    calls: list[Call]
    writes: Tensor


class CpuAttention:
    """SDPA over gathered pages."""

    name = "cpu"
    capabilities = Capabilities(devices=("cpu",), dtypes=(torch.float32, torch.bfloat16), invariant=True)

    def __init__(self, pool: KvPool, needs: Needs) -> None:
        self._pool, self._invariant, self._dtype = pool, needs.invariant, needs.dtype
        self._kv_heads, self._dim = needs.kv_heads, needs.head_dim
        self._group = needs.heads // needs.kv_heads

    def prepare(self, batch: Batch) -> CpuMetadata:
        single: dict[int, list[Query]] = {}
        calls = []
        for query in batch.queries:
            keys = self._padded(query.start + query.count)
            if query.count == 1:
                single.setdefault(keys, []).append(query)
            else:
                calls.append(self._call(batch, [query], keys))
        return CpuMetadata([self._call(batch, some, keys) for keys, some in single.items()] + calls, batch.writes)

    def _padded(self, length: int) -> int:
        multiple = KEY_MULTIPLE if self._invariant else _FAST_KEY_MULTIPLE
        return -(-length // multiple) * multiple

    def _call(self, batch: Batch, queries: list[Query], keys: int) -> Call:
        flat = np.concatenate(
            [flat_positions(batch.tables[query.slot], query.start + query.count, keys, self._pool) for query in queries]
        )
        count, offset = queries[0].count, queries[0].offset
        offsets = [query.offset for query in queries]
        together = offsets == list(range(offset, offset + len(queries)))
        position = torch.tensor([query.start for query in queries])[:, None] + torch.arange(count)
        hidden = torch.arange(keys) > position[:, :, None]
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, -torch.inf)
        mask = mask.repeat_interleave(self._group, dim=1)
        padding = -mask.shape[1] % ROW_MULTIPLE if self._invariant else 0
        index = None if together or count > 1 else torch.tensor(offsets)
        return Call(
            len(queries),
            count,
            offset,
            index,
            keys,
            torch.from_numpy(flat),
            functional.pad(mask, (0, 0, 0, padding))[:, None],
        )

    def forward(self, query: Tensor, key: Tensor, value: Tensor, layer: int, metadata: CpuMetadata) -> Tensor:
        store(self._pool, layer, metadata.writes, key, value)
        keys, values = self._pool.keys[layer].flatten(0, 1), self._pool.values[layer].flatten(0, 1)
        out = torch.zeros_like(query, memory_format=torch.contiguous_format)
        for call in metadata.calls:
            rows = slice(call.offset, call.offset + call.batch * call.count)
            picked = query[rows] if call.index is None else query[call.index]
            shape = (call.batch, call.keys, self._kv_heads, self._dim)
            k = keys.index_select(0, call.flat).view(shape).transpose(1, 2)
            v = values.index_select(0, call.flat).view(shape).transpose(1, 2)
            mixed = functional.scaled_dot_product_attention(self._folded(picked, call), k, v, call.mask)
            mixed = self._unfolded(mixed, call)
            if call.index is None:
                out[rows] = mixed
            else:
                out[call.index] = mixed
        return out.flatten(1)

    def _folded(self, query: Tensor, call: Call) -> Tensor:
        """[batch * count, heads, dim] → [batch, kv heads, count * group (padded), dim]."""
        split = query.reshape(call.batch, call.count, self._kv_heads, self._group, self._dim)
        folded = split.transpose(1, 2).reshape(call.batch, self._kv_heads, call.count * self._group, self._dim)
        padding = call.mask.shape[2] - folded.shape[2]
        return functional.pad(folded, (0, 0, 0, padding)) if padding else folded

    def _unfolded(self, mixed: Tensor, call: Call) -> Tensor:
        real = mixed[:, :, : call.count * self._group]
        split = real.reshape(call.batch, self._kv_heads, call.count, self._group, self._dim)
        return split.transpose(1, 2).reshape(call.batch * call.count, self._kv_heads * self._group, self._dim)
