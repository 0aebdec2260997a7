"""A decoder's layers as one program of compiled calls, for quantised models on the CPU.

The same kernels as the layers call one by one, in the same order, on buffers that stay, without Python between them.
Only for a rank that is alone, since ranks add up their parts within a layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.attention.compiled import CompiledAttention, CompiledMetadata
from engine.kernels import INT8_GROUPS
from engine.models.layers import AnyLinear, CompiledRmsNorm, Int8Linear, Norm, StackedLinear

if TYPE_CHECKING:
    from engine.kernels.program import Call
    from engine.models.llama import Layer, Llama

_OUTPUTS = 16
"""A product writes a multiple of this many outputs."""
_LEAST_ROWS = 32
_SHARES = 4
"""Pieces of a row-wise call a thread."""


def compilable(model: Llama) -> bool:
    """Whether all parts of all layers are compiled kernels of sizes that lie side by side."""
    return all(_whole(layer) for layer in model.layers)


def _whole(layer: Layer) -> bool:
    norms = [layer.before, layer.between, *(norm for norm in (layer.query_norm, layer.key_norm) if norm is not None)]
    parts = [_parts(linear) for linear in layer.linears]
    return (
        all(isinstance(norm, CompiledRmsNorm) for norm in norms)
        and all(parts)
        and all(part.matrix.rows % _OUTPUTS == 0 for linear in parts for part in linear)
        and all(part.bias is None for linear in parts[1:] for part in linear)
    )


def _parts(linear: AnyLinear) -> list[Int8Linear]:
    """The products that `linear` puts side by side; empty where one isn't ours."""
    parts = linear.parts if isinstance(linear, StackedLinear) else [linear]
    found = [part for part in parts if isinstance(part, Int8Linear)]
    return found if len(found) == len(parts) else []


class CompiledLayers:
    """The layers of `model`, which must be `compilable`, over `attention`'s pool. Buffers hold the most rows that a
    step had so far, rounded up to a power of two."""

    def __init__(self, model: Llama, attention: CompiledAttention) -> None:
        from engine.kernels import int8, program, rows  # compile at import, so only where they run

        self._int8, self._rows, self._program = int8, rows, program.Program
        self._model, self.attention = model, attention
        self._biases = [_bias(layer) for layer in model.layers]
        self._capacity = 0

    def __call__(self, embedded: Tensor, positions: Tensor, metadata: CompiledMetadata) -> Tensor:
        """What the layers make of rows [n, hidden] at `positions` int64 [n]: float32 [n, hidden]. Raises IndexError for
        a position that the rotary tables lack, since a kernel doesn't notice."""
        count, last, context = len(embedded), int(positions.max()), len(self._model.rope.cos)
        if last >= context:
            raise IndexError(f"position {last} is outside the context of {context} tokens")
        if count > self._capacity:
            self._build(max(_LEAST_ROWS, 1 << (count - 1).bit_length()))
        self._stream[:count].copy_(embedded)
        if not metadata.complete:
            self._mixed[:count].zero_()
        values = {
            "rows": count,
            "share": -(-count // (_SHARES * torch.get_num_threads())),
            "positions": positions.data_ptr(),
            "writes": metadata.writes.data_ptr(),
        }
        self.program.run(values | self.attention.values(metadata))
        return self._stream[:count] + self._delta[:count]

    def _build(self, capacity: int) -> None:
        """Buffers for `capacity` rows, and the program over them."""
        shape, layers = self._model.shape, self._model.layers
        inner, mixed = _parts(layers[0].down)[0].matrix.width, self._model.heads * shape.head_dim
        widest = max(shape.hidden, inner, mixed)
        self._capacity = capacity
        self._stream, self._delta, self._normed = (torch.empty(capacity, shape.hidden) for _ in range(3))
        self._heads = torch.empty(capacity, mixed + 2 * self._model.kv_heads * shape.head_dim)
        self._mixed = torch.empty(capacity, mixed)
        self._gate_up, self._gated = torch.empty(capacity, 2 * inner), torch.empty(capacity, inner)
        self._activations = torch.empty(capacity, 2 * widest, dtype=torch.int8)
        self._factors = torch.empty(2, capacity, widest // min(INT8_GROUPS))
        calls: list[Call] = []
        for index, layer in enumerate(layers):
            calls += self._layer(index, layer)
        self.program = self._program(calls)

    def _layer(self, index: int, layer: Layer) -> list[Call]:
        """As `Layer.__call__`, but that a norm adds what the product before it gave."""
        attention, heads = self.attention, self._heads
        attend = attention.call(heads.data_ptr(), 4 * heads.shape[1], self._mixed.data_ptr(), index)
        return [
            self._norm(layer.before, self._delta if index else None),
            *self._product(layer.qkv, self._normed, heads),
            self._prepared(index, layer),
            attend,
            *self._product(layer.output, self._mixed, self._delta),
            self._norm(layer.between, self._delta),
            *self._product(layer.gate_up, self._normed, self._gate_up),
            self._rows.swiglu_call(
                "rows", "share", self._gated.shape[1], self._gate_up.data_ptr(), self._gated.data_ptr()
            ),
            *self._product(layer.down, self._gated, self._delta),
        ]

    def _norm(self, norm: Norm, added: Tensor | None) -> Call:
        assert isinstance(norm, CompiledRmsNorm)
        places = self._stream.data_ptr(), norm.weight.data_ptr(), self._normed.data_ptr(), norm.eps.data_ptr()
        first = 0 if added is None else added.data_ptr()
        return self._rows.norm_call("rows", "share", self._stream.shape[1], *places, first)

    def _prepared(self, index: int, layer: Layer) -> Call:
        bias, (query, key), rope = self._biases[index], (layer.query_norm, layer.key_norm), self._model.rope
        found = self._rows.Heads(
            self._model.heads,
            self._model.kv_heads,
            self._model.head_dim,
            0 if bias is None else bias.data_ptr(),
            query.weight.data_ptr() if isinstance(query, CompiledRmsNorm) else 0,
            key.weight.data_ptr() if isinstance(key, CompiledRmsNorm) else 0,
            query.eps.data_ptr() if isinstance(query, CompiledRmsNorm) else 0,
        )
        tables = rope.cos.data_ptr(), rope.sin.data_ptr()
        pool = self.attention.pool(index)
        return self._rows.heads_call("rows", "share", found, self._heads.data_ptr(), tables, pool)

    def _product(self, linear: AnyLinear, x: Tensor, out: Tensor) -> list[Call]:
        """`x` through `linear` into `out`; parts whose groups are alike share the rounding."""
        rounded = self._int8.Rounded(
            self._activations.data_ptr(), self._factors[0].data_ptr(), self._factors[1].data_ptr()
        )
        calls: list[Call] = []
        group = column = 0
        for part in _parts(linear):
            matrix = part.matrix
            if matrix.group != group:
                group = matrix.group
                calls.append(self._int8.rounding("rows", "share", matrix.width, group, x.data_ptr(), rounded))
            place = out.data_ptr() + 4 * column
            calls.append(self._int8.product(matrix, "rows", rounded, place, 4 * out.shape[1]))
            column += matrix.rows
        return calls


def _bias(layer: Layer) -> Tensor | None:
    """The bias of queries, keys and values, float32; zeros where a part has none."""
    parts = _parts(layer.qkv)
    if all(part.bias is None for part in parts):
        return None
    return torch.cat([torch.zeros(part.matrix.rows) if part.bias is None else part.bias for part in parts])
