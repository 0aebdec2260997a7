"""From settings and manifest to a loaded model: device, precision, weights, pool and attention, and the report.

Each choice left to "auto" is made here, once; an explicit one that can't be served raises, naming what is missing.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.attention import choose
from engine.attention.protocol import AttentionBackend, KvPool, Metadata, Needs, Query
from engine.config import EngineConfig, Manifest
from engine.execution.device import Device
from engine.kernels import team
from engine.models.errors import WeightsError
from engine.models.layers import Precision
from engine.models.tuning import tuned
from engine.models.weights import open_weights
from engine.parallel.collectives import Collectives
from engine.recipes.catalog import RECIPES
from engine.scheduler.step import RankReport, SlotSetup


class Model(Protocol):
    """What a file of `engine.models` builds. Ids and positions are int64 [n], hidden rows [n, hidden]."""

    heads: int
    kv_heads: int
    head_dim: int
    layer_count: int
    vocab: int
    row_multiple: int
    """Step rows are padded to a multiple of this."""
    kv_bytes: int | None
    """The model's own default for the pool's size; None leaves it to the device."""

    @property
    def weight_bytes(self) -> int: ...

    def bind(self, setup: SlotSetup) -> None:
        """A request takes a slot; most models don't care."""
        ...

    def begin(self, queries: Sequence[Query]) -> None:
        """A step's rows, before its forward pass."""
        ...

    def forward(self, ids: Tensor, positions: Tensor, attention: AttentionBackend, metadata: Metadata) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Raw float32 [n, vocab]."""
        ...


@dataclass(frozen=True, slots=True)
class Loaded:
    device: Device
    model: Model
    pool: KvPool
    attention: AttentionBackend
    context: int
    report: RankReport


def load(config: EngineConfig, manifest: Manifest, group: Collectives, device: Device) -> Loaded:
    """Raises WeightsError or AttentionUnavailable."""
    precision = choose_precision(config, manifest, device)
    context = config.context or manifest.context
    module = "scripted" if manifest.format == "scripted" else RECIPES[manifest.recipe].module
    if module is None:
        raise WeightsError(f"this build can't run models of the {manifest.recipe} recipe yet")
    source = None if module == "scripted" else open_weights(manifest, config.weights_seed)
    model: Model = importlib.import_module(f"engine.models.{module}").build(manifest, config, source, precision, group)
    needs = Needs(
        device.torch.type,
        precision.dtype,
        model.heads,
        model.kv_heads,
        model.head_dim,
        model.layer_count,
        config.page_tokens,
        precision.invariant,
    )
    page_bytes = KvPool.page_bytes(needs)
    pages = group.least((config.kv_bytes or model.kv_bytes or device.kv_bytes()) // page_bytes)
    if pages < 1:
        raise WeightsError(f"kv_bytes holds no page: one of {config.page_tokens} tokens takes {page_bytes} bytes")
    pool = KvPool(pages, needs, device.torch)
    attention = choose(config.attention, needs, pool)
    read = group.sum(torch.tensor([model.weight_bytes], dtype=torch.float64, device=device.torch))
    report = RankReport(
        pages,
        page_bytes,
        int(read.item()),
        model.vocab,
        device.torch.type,
        attention.name,
        "invariant" if precision.invariant else "fast",
        "quantised" if precision.quantized else str(precision.dtype).removeprefix("torch."),
        "vnni-int8" if precision.int8 else "torch-int4" if precision.quantized else "torch",
    )
    return Loaded(device, model, pool, attention, context, report)


def choose_precision(config: EngineConfig, manifest: Manifest, device: Device) -> Precision:
    """`auto` numerics: invariant on the CPU, fast elsewhere. `auto` dtype: quantised files stay quantised on the CPU,
    everything else computes in bfloat16."""
    on_cpu = device.torch.type == "cpu"
    invariant = config.numerics == "invariant" or (config.numerics == "auto" and on_cpu)
    quantized = config.dtype == "auto" and manifest.format == "gguf" and on_cpu and config.weights_seed is None
    dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
    residual = torch.float32 if on_cpu else dtype
    precision = Precision(device.torch, dtype, quantized, invariant, residual, int8=quantized and not team.missing())
    return tuned(precision, manifest.config, device.cache_bytes) if quantized else precision
