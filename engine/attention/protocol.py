"""The attention seam: what a backend can do, what it is told of a step, and the paged pool it works on.

A backend writes the step's keys and values into the pool and attends over each row's pages. Pages are named by the
scheduler; page `pages` (one past the last) is padding: finite, written by padded rows, read by nobody.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Metadata = Any
"""What a backend's `prepare` made for its own `forward`."""


_ALIGNMENT = 64
"""Bytes: a cache line, and a vector register."""


class AttentionUnavailable(RuntimeError):
    """A backend that was asked for by name can't serve this model here. The message names what is missing."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a model asks of its attention on this rank."""

    device: str
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    page_tokens: int
    invariant: bool


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend declares. Empty `head_dims` or `dtypes`: any."""

    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...] = ()
    head_dims: tuple[int, ...] = ()
    page_multiple: int = 1
    invariant: bool = False

    def missing(self, needs: Needs) -> list[str]:
        """What `needs` asks beyond this, in words."""
        found = []
        if needs.device not in self.devices:
            found.append(f"device {needs.device} (has {', '.join(self.devices)})")
        if self.dtypes and needs.dtype not in self.dtypes:
            found.append(f"dtype {needs.dtype}")
        if self.head_dims and needs.head_dim not in self.head_dims:
            found.append(f"head size {needs.head_dim} (has {', '.join(map(str, self.head_dims))})")
        if needs.page_tokens % self.page_multiple:
            found.append(f"pages of {needs.page_tokens} tokens (needs a multiple of {self.page_multiple})")
        if needs.invariant and not self.invariant:
            found.append("invariant numerics")
        return found


class KvPool:
    """All layers' pages: [layers, pages + 1, page tokens, 2 * kv heads, head dim], a position's keys before its values,
    so that one copy moves both."""

    def __init__(self, pages: int, needs: Needs, device: torch.device) -> None:
        self.pages, self.page_tokens, self.kv_heads = pages, needs.page_tokens, needs.kv_heads
        shape = (needs.layers, pages + 1, needs.page_tokens, 2 * needs.kv_heads, needs.head_dim)
        self.data = zeros(shape, needs.dtype, device)
        self.layers = [layer.flatten(0, 1) for layer in self.data.unbind(0)]
        """Per layer, by flat position: [(pages + 1) * page tokens, 2 * kv heads, head dim]."""

    @property
    def keys(self) -> Tensor:
        return self.data[:, :, :, : self.kv_heads]

    @property
    def values(self) -> Tensor:
        return self.data[:, :, :, self.kv_heads :]

    @staticmethod
    def page_bytes(needs: Needs) -> int:
        """Bytes of one page over all layers."""
        return 2 * needs.layers * needs.page_tokens * needs.kv_heads * needs.head_dim * needs.dtype.itemsize

    def store(self, layer: int, writes: Tensor, kv: Tensor) -> None:
        """Puts rows [rows, 2 * kv heads, dim] at flat positions `writes`."""
        self.layers[layer].index_copy_(0, writes, kv if kv.dtype == self.data.dtype else kv.to(self.data.dtype))

    def copy(self, pairs: Tensor) -> None:
        """Copies whole pages: (source, destination) each, [copies, 2] int64 on the pool's device."""
        source, target = pairs.unbind(1)
        self.data[:, target] = self.data[:, source]


@dataclass(frozen=True, slots=True)
class Query:
    """`count` consecutive positions of one slot from `start`; its rows begin at `offset` in the step's rows."""

    slot: int
    start: int
    count: int
    offset: int


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one step. `rows`: how many, padding rows at the end included. `tables`: page ids int32
    [slots, most pages], host side; `device_tables` the same on the device. `writes`: flat pool positions
    (page * page tokens + offset) int64 [rows] on the device, padding rows in the padding page."""

    queries: Sequence[Query]
    rows: int
    tables: NDArray[np.int32]
    device_tables: Tensor
    writes: Tensor


class AttentionBackend(Protocol):
    """One way to attend. Stateless between steps but for caches of its own."""

    name: str
    capabilities: Capabilities

    def prepare(self, batch: Batch) -> Metadata:
        """Once a step; every layer's `forward` of the step must follow with its result."""
        ...

    def forget(self, slot: int) -> None:
        """The slot's pages will be another request's."""
        ...

    def forward(self, query: Tensor, kv: Tensor, layer: int, metadata: Metadata) -> Tensor:
        """Writes `kv` [rows, 2 * kv heads, dim], keys before values, to the pool and attends with `query` [rows, heads,
        dim], causally over each row's slot: [rows, heads * dim]. Padding rows give anything finite."""
        ...


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take memory only where they are written: torch fills its own at once, the system gives zero pages."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    raw = torch.from_numpy(np.zeros(size + _ALIGNMENT, dtype=np.uint8))
    start = -raw.data_ptr() % _ALIGNMENT
    return raw[start : start + size].view(dtype).view(shape)


def flat_positions(table: NDArray[np.int32], length: int, padded: int, pool: KvPool) -> NDArray[np.int64]:
    """Flat pool positions int64 [padded] of a slot's positions 0 … length - 1; the rest lie in the padding page, so
    that what a former owner left in a page (perhaps NaN) is never read."""
    size = pool.page_tokens
    position = np.arange(padded, dtype=np.int64)
    flat = np.full(padded, pool.pages * size, dtype=np.int64)
    flat[:length] = table[position[:length] // size].astype(np.int64) * size + position[:length] % size
    return flat
