"""FlashAttention over paged keys, through whichever package is installed: FA3's own module or vLLM's bundled copy.

One call serves a whole mixed step: rows packed, cumulative counts, each slot's page table. Chosen by name it refuses
at start when no package, device or shape fits.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.attention.protocol import AttentionUnavailable, Batch, Capabilities, KvPool, Needs

_MODULES = ("flash_attn_interface", "vllm.vllm_flash_attn")


@dataclass(frozen=True, slots=True)
class FlashMetadata:
    """`starts`: cumulative rows int32 [queries + 1]; `lengths`: keys int32 [queries]; `tables` [queries, pages]."""

    starts: Tensor
    lengths: Tensor
    tables: Tensor
    longest_query: int
    longest_key: int
    rows: int
    writes: Tensor


class FlashAttention:
    """FA3 (Hopper)."""

    name = "flash"
    capabilities = Capabilities(
        devices=("cuda",), dtypes=(torch.bfloat16, torch.float16), head_dims=(64, 128, 192, 256), page_multiple=16
    )

    def __init__(self, pool: KvPool, needs: Needs) -> None:
        self._pool, self._splits = pool, 1 if needs.invariant else 0
        self._call = _adapter()

    @classmethod
    def missing(cls, needs: Needs) -> list[str]:
        """What stands in the way of serving `needs`, the packages and the device's generation included."""
        found = cls.capabilities.missing(needs)
        if installed() is None:
            found.append("a package: tokenspeed-fa3 (extra 'hopper') or vllm (extra 'vllm-flash-attn')")
        if needs.device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
            found.append(f"a Hopper device (this one is sm{''.join(map(str, torch.cuda.get_device_capability()))})")
        return found

    def prepare(self, batch: Batch) -> FlashMetadata:
        counts = np.array([query.count for query in batch.queries], dtype=np.int32)
        lengths = np.array([query.start + query.count for query in batch.queries], dtype=np.int32)
        slots = np.array([query.slot for query in batch.queries], dtype=np.int32)
        starts = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        packed = torch.from_numpy(np.concatenate((starts, lengths, slots))).pin_memory()
        device = packed.to(batch.writes.device, non_blocking=True)
        size = len(counts)
        return FlashMetadata(
            device[: size + 1],
            device[size + 1 : 2 * size + 1],
            batch.device_tables[device[2 * size + 1 :].long()],
            int(counts.max()),
            int(lengths.max()),
            int(starts[-1]),
            batch.writes,
        )

    def forget(self, slot: int) -> None:
        """Remembers nothing."""

    def forward(self, query: Tensor, kv: Tensor, layer: int, metadata: FlashMetadata) -> Tensor:
        self._pool.store(layer, metadata.writes, kv)
        keys, values = self._pool.data[layer].chunk(2, dim=2)
        out = self._call(query[: metadata.rows].contiguous(), keys, values, metadata, self._splits)
        if metadata.rows < query.shape[0]:
            out = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, query.shape[0] - metadata.rows))
        return out.flatten(1)


def installed() -> str | None:
    """The FlashAttention module that can be imported, if any."""
    for name in _MODULES:
        try:
            if importlib.util.find_spec(name) is not None:
                return name
        except ModuleNotFoundError:  # the parent package of a dotted name is absent
            continue
    return None


Call = Callable[[Tensor, Tensor, Tensor, FlashMetadata, int], Tensor]


def _adapter() -> Call:
    name = installed()
    if name is None:
        raise AttentionUnavailable("no FlashAttention package is installed")
    module: Any = importlib.import_module(name)
    return _hopper(module.flash_attn_with_kvcache) if name == _MODULES[0] else _bundled(module.flash_attn_varlen_func)


def _hopper(function: Any) -> Call:
    def call(query: Tensor, keys: Tensor, values: Tensor, metadata: FlashMetadata, splits: int) -> Tensor:
        out = function(
            query,
            keys,
            values,
            cache_seqlens=metadata.lengths,
            page_table=metadata.tables,
            cu_seqlens_q=metadata.starts,
            max_seqlen_q=metadata.longest_query,
            causal=True,
            num_splits=splits,
        )
        return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]

    return call


def _bundled(function: Any) -> Call:
    def call(query: Tensor, keys: Tensor, values: Tensor, metadata: FlashMetadata, splits: int) -> Tensor:
        out = function(
            query,
            keys,
            values,
            cu_seqlens_q=metadata.starts,
            max_seqlen_q=metadata.longest_query,
            seqused_k=metadata.lengths,
            max_seqlen_k=metadata.longest_key,
            block_table=metadata.tables,
            causal=True,
            fa_version=3,
            num_splits=splits,
        )
        return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]

    return call
