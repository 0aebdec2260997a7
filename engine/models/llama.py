"""Llama and its close relatives: RMS norm, rotary embedding, grouped-query attention, SwiGLU.

One dense decoder with three switches found in the checkpoint itself: query/key norms (Qwen3), q/k/v biases (Qwen2)
and a head size of its own. Knows neither requests nor pages: attention and collectives are handed in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.attention.compiled import CompiledAttention
from engine.attention.protocol import AttentionBackend, Metadata, Query
from engine.config import EngineConfig, Manifest
from engine.models.compiled import CompiledLayers, compilable
from engine.models.errors import WeightsError
from engine.models.layers import (
    AnyLinear,
    Norm,
    Precision,
    Rope,
    kv_share,
    linear,
    rms_norm,
    rope_frequencies,
    rotation,
    share,
    swiglu,
)
from engine.models.weights import Weight, WeightSource, columns, dense, rows
from engine.parallel.collectives import Collectives
from engine.scheduler.step import SlotSetup


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes that `config.json` declares."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    eps: float

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """Raises WeightsError naming a missing field, or an activation other than SiLU."""
        try:
            heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
            shape = cls(
                hidden=hidden,
                layers=int(config["num_hidden_layers"]),
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or hidden // heads),
                intermediate=int(config["intermediate_size"]),
                vocab=int(config["vocab_size"]),
                eps=float(config.get("rms_norm_eps", 1e-6)),
            )
        except KeyError as error:
            raise WeightsError(f"the model's config has no {error.args[0]}") from error
        activation = config.get("hidden_act", "silu")
        if activation != "silu":
            raise WeightsError(f"activation {activation!r} is not supported by the llama module; supported: silu")
        if config.get("use_sliding_window") and config.get("sliding_window"):
            raise WeightsError("sliding-window attention is not supported by the llama module")
        return shape


class Layer:
    """One decoder layer's share of one rank."""

    def __init__(self, source: WeightSource, index: int, shape: Shape, precision: Precision, group: Collectives):
        prefix, width = f"model.layers.{index}.", shape.head_dim
        query = share(shape.heads, group.rank, group.size, "attention heads")
        kv = kv_share(shape.kv_heads, group.rank, group.size)
        inner = share(shape.intermediate, group.rank, group.size, "intermediate features")
        self._heads, self._kv_heads, self._dim = query.count, kv.count, width

        def heads_of(name: str, total: int, part: tuple[int, int]) -> tuple[Weight, Tensor | None]:
            full = f"{prefix}self_attn.{name}_proj"
            weight = rows(source.get(full + ".weight", (total * width, shape.hidden)), part[0] * width, part[1] * width)
            if not source.has(full + ".bias"):
                return weight, None
            bias = dense(source.get(full + ".bias", (total * width,)), precision.dtype)
            return weight, bias[part[0] * width : (part[0] + part[1]) * width]

        projections = [
            heads_of("q", shape.heads, (query.start, query.count)),
            heads_of("k", shape.kv_heads, (kv.start, kv.count)),
            heads_of("v", shape.kv_heads, (kv.start, kv.count)),
        ]
        biases = [bias for _, bias in projections if bias is not None]
        bias = torch.cat(biases) if biases else None
        self.qkv = linear([weight for weight, _ in projections], precision, bias)
        output = source.get(prefix + "self_attn.o_proj.weight", (shape.hidden, shape.heads * width))
        self.output = linear([columns(output, query.start * width, query.count * width)], precision)

        def part_of(name: str) -> Weight:
            weight = source.get(f"{prefix}mlp.{name}_proj.weight", (shape.intermediate, shape.hidden))
            return rows(weight, inner.start, inner.count)

        self.gate_up = linear([part_of("gate"), part_of("up")], precision)
        down = source.get(prefix + "mlp.down_proj.weight", (shape.hidden, shape.intermediate))
        self.down = linear([columns(down, inner.start, inner.count)], precision)
        self._gated, self._rotate = swiglu(precision), rotation(precision)

        def norm(name: str, size: int) -> Norm:
            return rms_norm(source.get(prefix + name + ".weight", (size,)), shape.eps, precision)

        self.before, self.between = (
            norm("input_layernorm", shape.hidden),
            norm("post_attention_layernorm", shape.hidden),
        )
        normed = source.has(prefix + "self_attn.q_norm.weight")
        self.query_norm = norm("self_attn.q_norm", width) if normed else None
        self.key_norm = norm("self_attn.k_norm", width) if normed else None

    @property
    def linears(self) -> list[AnyLinear]:
        return [self.qkv, self.output, self.gate_up, self.down]

    def __call__(
        self,
        x: Tensor,
        index: int,
        angles: tuple[Tensor, Tensor],
        attention: AttentionBackend,
        metadata: Metadata,
        group: Collectives,
    ) -> Tensor:
        """Adds this layer to the residual stream `x` [n, hidden], in place. `angles` have the kernels' dtype."""
        dtype, heads = angles[0].dtype, self._heads
        projected = self.qkv(self.before(x, dtype)).view(len(x), -1, self._dim)
        if self.query_norm is not None and self.key_norm is not None:
            for part, norm in (
                (projected[:, :heads], self.query_norm),
                (projected[:, heads : -self._kv_heads], self.key_norm),
            ):
                part.copy_(norm(part, dtype))
        self._rotate(projected[:, : -self._kv_heads], *angles)
        mixed = attention.forward(projected[:, :heads], projected[:, heads:], index, metadata)
        x.add_(group.sum(self.output(mixed)))
        x.add_(group.sum(self.down(self._gated(self.gate_up(self.between(x, dtype))))))
        return x


class Llama:
    """The decoder of one rank. `context`: positions that the rotary tables cover."""

    def __init__(
        self,
        config: Mapping[str, Any],
        source: WeightSource,
        precision: Precision,
        group: Collectives,
        context: int,
    ) -> None:
        self.shape = shape = Shape.of(config)
        self.precision, self._group = precision, group
        self.kv_bytes: int | None = None
        self.head_dim, self.layer_count, self.vocab = shape.head_dim, shape.layers, shape.vocab
        self.layers = [Layer(source, index, shape, precision, group) for index in range(shape.layers)]
        table = source.get("model.embed_tokens.weight", (shape.vocab, shape.hidden))
        self.kv_heads = kv_share(shape.kv_heads, group.rank, group.size).count
        self.heads = shape.heads // group.size
        self._embedding = dense(table, precision.dtype).to(precision.device)
        self._norm = rms_norm(source.get("model.norm.weight", (shape.hidden,)), shape.eps, precision)
        tied = not source.has("lm_head.weight")
        head = table if tied else source.get("lm_head.weight", (shape.vocab, shape.hidden))
        self._vocab_part = -(-shape.vocab // group.size)
        start = group.rank * self._vocab_part
        self.head = linear([rows(head, start, min(self._vocab_part, shape.vocab - start))], precision, head=True)
        linears = [part for layer in self.layers for part in layer.linears]
        self.row_multiple = max(part.row_multiple for part in linears) if precision.invariant else 1
        inverse, _ = rope_frequencies(config, shape.head_dim)
        if source.has("rope_freqs.weight"):
            inverse = inverse / dense(source.get("rope_freqs.weight", (shape.head_dim // 2,)), torch.float32)
        self.rope = Rope(inverse, context, precision.device)
        self._fits = group.size == 1 and compilable(self)
        self._compiled: CompiledLayers | None = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one decode step reads."""
        return sum(part.nbytes for layer in self.layers for part in layer.linears) + self.head.nbytes

    def bind(self, setup: SlotSetup) -> None:
        """A request takes a slot: nothing to do."""

    def begin(self, queries: Sequence[Query]) -> None:
        """A step begins: nothing to do."""

    def forward(self, ids: Tensor, positions: Tensor, attention: AttentionBackend, metadata: Metadata) -> Tensor:
        """Hidden rows [n, hidden] of token `ids` at `positions`, both int64 [n], before the last norm."""
        x = functional.embedding(ids, self._embedding)
        if self._fits and isinstance(attention, CompiledAttention):
            if self._compiled is None or self._compiled.attention is not attention:
                self._compiled = CompiledLayers(self, attention)
            return self._compiled(x, positions, metadata)
        x = x.to(self.precision.residual)
        angles = self.rope.at(positions, self.layers[0].qkv.dtype(len(ids)))
        for index, layer in enumerate(self.layers):
            x = layer(x, index, angles, attention, metadata, self._group)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, vocab] of hidden rows [n, hidden]."""
        count = hidden.shape[0]
        padding = -count % self.head.row_multiple if self.precision.invariant else 0
        padded = functional.pad(hidden, (0, 0, 0, padding)) if padding else hidden
        part = self.head(self._norm(padded, self.head.dtype(len(padded))))[:count].float()
        return self._group.gather_columns(part, self._vocab_part, self.shape.vocab)


def build(
    manifest: Manifest, config: EngineConfig, source: WeightSource | None, precision: Precision, group: Collectives
) -> Llama:
    """The decoder of `manifest`. Raises WeightsError."""
    if source is None:
        raise WeightsError(f"{manifest.model_id} has no weights")
    return Llama(manifest.config, source, precision, group, config.context or manifest.context)
