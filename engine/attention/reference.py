"""Attention in plain torch, one request at a time in float32: the oracle that the other backends are held to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.protocol import Batch, Capabilities, KvPool, Query


@dataclass(frozen=True, slots=True)
class ReferenceMetadata:
    """Per query its pool positions int64 [start + count]."""

    queries: list[tuple[Query, Tensor]]
    writes: Tensor


class ReferenceAttention:
    """softmax(q kᵀ / sqrt(dim)) v over each slot's own positions, causally."""

    name = "reference"
    capabilities = Capabilities(devices=("cpu", "cuda"))

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool

    def prepare(self, batch: Batch) -> ReferenceMetadata:
        """Computed from the device's own page tables: nothing crosses from the host, so nothing waits for it."""
        size, tables = self._pool.page_tokens, batch.device_tables
        found = []
        for query in batch.queries:
            position = torch.arange(query.start + query.count, device=tables.device)
            found.append((query, tables[query.slot][position // size].long() * size + position % size))
        return ReferenceMetadata(found, batch.writes)

    def forget(self, slot: int) -> None:
        """Remembers nothing."""

    def forward(self, query: Tensor, kv: Tensor, layer: int, metadata: ReferenceMetadata) -> Tensor:
        self._pool.store(layer, metadata.writes, kv)
        out = torch.zeros_like(query, memory_format=torch.contiguous_format)
        pages, heads = self._pool.layers[layer], self._pool.kv_heads
        group = query.shape[1] // heads
        for part, flat in metadata.queries:
            window = slice(part.offset, part.offset + part.count)
            k, v = pages[flat].float().repeat_interleave(group, dim=1).chunk(2, dim=1)
            scores = torch.einsum("qhd,khd->hqk", query[window].float(), k) * query.shape[2] ** -0.5
            position = torch.arange(part.start, part.start + part.count, device=query.device)
            future = torch.arange(len(flat), device=query.device)[None] > position[:, None]
            weights = scores.masked_fill(future, -torch.inf).softmax(-1)
            out[window] = torch.einsum("hqk,khd->qhd", weights, v).to(query.dtype)
        return out.flatten(1)
