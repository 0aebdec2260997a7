"""The layers that models are built of: linears over any kernel, RMS norm, rotary tables, sharding arithmetic.

Owns the choice of a linear's kernel from its weight and the numerics in force. Leaves formats to `quantized` and
`weights`, communication to `parallel.collectives`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.models import quantized
from engine.models.errors import WeightsError
from engine.models.gguf import Grouped
from engine.models.weights import Weight, dense


@dataclass(frozen=True, slots=True)
class Precision:
    """How a model computes. `dtype`: of activations between kernels and of dense weights. `residual`: of the stream
    that layers add to. `quantized`: quantised weights stay so. `invariant`: one kernel for every row count. `int8`:
    quantised weights go through our own products in integers of eight bits, the same for any rows. Without it,
    `dense_head`: the head is dense even where weights are quantised; `many`: in `fast`, how many rows take a dense
    copy, and its dtype; `many_head`: the same of the head."""

    device: torch.device
    dtype: torch.dtype
    quantized: bool
    invariant: bool
    residual: torch.dtype = torch.float32
    int8: bool = False
    dense_head: bool = False
    many: Many | None = None
    many_head: Many | None = None


@dataclass(frozen=True, slots=True)
class Many:
    """From `rows` rows on, a copy in `dtype` is faster than the quantised matrix."""

    rows: int
    dtype: torch.dtype


class DenseLinear:
    """A plain matrix product with torch's own kernel."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.nbytes, self.row_multiple = weight.nbytes, 1

    def dtype(self, rows: int) -> torch.dtype:
        return self.weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x.to(self.weight.dtype), self.weight, self.bias)


class PackedLinear:
    """A dense matrix in oneDNN's own order, packed once. Padding rows to `row_multiple` gives a row the same bits
    however many there are (measured: bfloat16 fails at one row, float32 below four)."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.nbytes, self.row_multiple = weight.nbytes, 4 if weight.dtype == torch.float32 else 2
        self._dtype = weight.dtype
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 64)
        self._bias = bias

    def dtype(self, rows: int) -> torch.dtype:
        return self._dtype

    def __call__(self, x: Tensor) -> Tensor:
        x = x.to(self._dtype)  # a neighbour of another format may give another
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], None)
        return result


class QuantizedLinear:
    """Int4 products, their sum, and a bias."""

    row_multiple = 1

    def __init__(self, parts: tuple[quantized.Int4, ...], bias: Tensor | None = None) -> None:
        self._first, self._rest, self._bias = parts[0], parts[1:], bias
        self.nbytes = sum(part.nbytes for part in parts)

    def dtype(self, rows: int) -> torch.dtype:
        return torch.bfloat16

    def __call__(self, x: Tensor) -> Tensor:
        x = x.to(torch.bfloat16)
        out = self._first(x)
        for part in self._rest:
            out = out + part(x)
        return out if self._bias is None else out + self._bias


class Int8Linear:
    """Our own product in integers of eight bits, two an activation, and a bias. Takes and gives float32."""

    row_multiple = 1

    def __init__(self, weight: Grouped, bias: Tensor | None = None) -> None:
        from engine.kernels import int8  # compiles at import, so only where it runs

        self._multiply = int8.multiply
        self.matrix = int8.pack(weight.codes, weight.scales, weight.zeros, weight.group, weight.bits)
        self.bias, self.nbytes = bias, self.matrix.nbytes

    def dtype(self, rows: int) -> torch.dtype:
        return torch.float32

    def __call__(self, x: Tensor) -> Tensor:
        out = self._multiply(x.float(), self.matrix)
        return out if self.bias is None else out + self.bias


class RowsLinear:
    """Few rows through one kernel, many through another with the same effective weights."""

    row_multiple = 1

    def __init__(self, few: QuantizedLinear, many: PackedLinear, border: int) -> None:
        self._few, self._many, self._border = few, many, border
        self.nbytes = few.nbytes

    def dtype(self, rows: int) -> torch.dtype:
        return (self._few if rows < self._border else self._many).dtype(rows)

    def __call__(self, x: Tensor) -> Tensor:
        return self._few(x) if x.shape[0] < self._border else self._many(x)


class StackedLinear:
    """Matrices of unlike formats, side by side."""

    def __init__(self, parts: list[AnyLinear]) -> None:
        self.parts = parts
        self.nbytes: int = sum(part.nbytes for part in parts)
        self.row_multiple: int = max(part.row_multiple for part in parts)

    def dtype(self, rows: int) -> torch.dtype:
        return self.parts[0].dtype(rows)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x.to(part.dtype(x.shape[0]))).to(x.dtype) for part in self.parts], dim=1)


AnyLinear = DenseLinear | PackedLinear | QuantizedLinear | Int8Linear | RowsLinear | StackedLinear
"""`dtype(rows)`: what it takes and gives at that many rows. `row_multiple`: what rows must be padded to under invariant
numerics. `nbytes`: what one row reads."""


def linear(weights: list[Weight], precision: Precision, bias: Tensor | None = None, *, head: bool = False) -> AnyLinear:
    """The product with `weights` stacked along their rows, by the kernel that `precision` asks for."""
    packable = quantized.fits_int8 if precision.int8 else quantized.packable
    kept = [weight for weight in weights if isinstance(weight, Grouped) and packable(weight)]
    if not precision.quantized or not kept or (head and precision.dense_head):
        stacked = torch.cat([dense(weight, precision.dtype).to(precision.device) for weight in weights])
        return _dense(stacked, precision, bias)
    whole = quantized.concatenated(kept) if len(kept) == len(weights) else None
    if whole is None:
        biases = (
            torch.split(bias, [weight.shape[0] for weight in weights]) if bias is not None else [None] * len(weights)
        )
        return StackedLinear([linear([weight], precision, part) for weight, part in zip(weights, biases, strict=True)])
    if precision.int8:
        return Int8Linear(whole, None if bias is None else bias.float())
    many = precision.many_head if head else precision.many
    if many is None:
        return _quantized(whole, bias)
    copy = PackedLinear(quantized.effective(whole).to(many.dtype), None if bias is None else bias.to(many.dtype))
    return copy if many.rows <= 1 else RowsLinear(_quantized(whole, bias), copy, many.rows)


def _quantized(weight: Grouped, bias: Tensor | None) -> QuantizedLinear:
    return QuantizedLinear(quantized.pack(weight), None if bias is None else bias.to(torch.bfloat16))


def _dense(weight: Tensor, precision: Precision, bias: Tensor | None) -> AnyLinear:
    bias = bias if bias is None else bias.to(precision.device, precision.dtype)
    return PackedLinear(weight, bias) if precision.device.type == "cpu" else DenseLinear(weight, bias)


class RmsNorm:
    """x / sqrt(mean(x²) + eps) * weight, computed in float32 (Zhang and Sennrich, 2019). `weight` is float32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._scale = weight, 1.0 / weight.shape[0]
        self._eps = torch.tensor(eps, device=weight.device)

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """`x` [..., width] normalised, in `dtype`. Four small kernels: torch's own composite takes nine on the CPU."""
        length = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32)
        inverse = torch.addcmul(self._eps, length, length, value=self._scale).rsqrt_()
        return (x * inverse).mul_(self._weight).to(dtype)


class CompiledRmsNorm:
    """The same in one pass of our own, for the activations of `Int8Linear`."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        from engine.kernels import rows  # compiles at import, so only where it runs

        self._norm, self.weight, self.eps = rows.norm, weight.contiguous(), torch.tensor([eps])

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """`x` float32 [..., width]."""
        return self._norm(x.reshape(-1, x.shape[-1]), self.weight, self.eps).view(x.shape).to(dtype)


class FusedRmsNorm:
    """The same in torch's one kernel, for devices where that is one."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps, self._shape = weight, eps, (weight.shape[0],)

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return functional.rms_norm(x, self._shape, self._weight, self._eps).to(dtype)


Norm = RmsNorm | CompiledRmsNorm | FusedRmsNorm


def rms_norm(weight: Weight, eps: float, precision: Precision) -> Norm:
    """The norm of `weight` on the model's device."""
    if precision.int8:
        return CompiledRmsNorm(dense(weight, torch.float32), eps)
    if precision.device.type == "cpu":
        return RmsNorm(dense(weight, torch.float32), eps)
    return FusedRmsNorm(dense(weight, precision.residual).to(precision.device), eps)


def swiglu(precision: Precision) -> Callable[[Tensor], Tensor]:
    """silu(gate) * up of rows that hold gate before up; compiled where they are float32 on the CPU."""
    if precision.int8:
        from engine.kernels import rows

        return lambda x: rows.swiglu(x) if x.dtype == torch.float32 else _swiglu(x)
    return _swiglu


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=1)
    return functional.silu(gate).mul_(up)


def rope_frequencies(config: Mapping[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies float32 [head_dim / 2] and the factor on cosine and sine, from `rope_parameters` (or
    `rope_theta` and `rope_scaling`). Kinds: default, linear, llama3. Raises WeightsError for others.

    llama3: wavelengths above `low` are stretched by `factor`, below `high` kept, between them blended.
    """
    scaling: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if kind == "default":
        return inverse, 1.0
    if kind == "linear":
        return inverse / float(scaling["factor"]), 1.0
    if kind != "llama3":
        raise WeightsError(f"rope scaling {kind!r} is not supported; supported: default, linear, llama3")
    factor, original = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    low, high = original / float(scaling["low_freq_factor"]), original / float(scaling["high_freq_factor"])
    wavelength = 2 * math.pi / inverse
    stretched = torch.where(wavelength > low, inverse / factor, inverse)
    blend = (original / wavelength - original / low) / (original / high - original / low)
    smooth = (1 - blend) * stretched / factor + blend * stretched
    between = (wavelength >= high) & (wavelength <= low)
    return torch.where(between, smooth, stretched), 1.0


class Rope:
    """Rotary embedding, half-split. The tables hold every position: cos and signed sin, float32 [context, dim]."""

    def __init__(self, inverse: Tensor, context: int, device: torch.device) -> None:
        angles = torch.outer(torch.arange(context, dtype=torch.float32), inverse)
        self.cos = torch.cat((angles.cos(), angles.cos()), 1).to(device)
        self.sin = torch.cat((-angles.sin(), angles.sin()), 1).to(device)

    def at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and signed sin of `positions` [n], each [n, 1, dim] in `dtype`."""
        return self.cos[positions].to(dtype).unsqueeze(1), self.sin[positions].to(dtype).unsqueeze(1)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates `x` [n, heads, dim] in place: x * cos + (second half, first half) * signed sin."""
    swapped = x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)  # type: ignore[no-untyped-call]
    return x.mul_(cos).addcmul_(swapped, sin)


def rotation(precision: Precision) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """`rotate_`, compiled where activations are float32 on the CPU anyway."""
    if precision.int8:
        from engine.kernels import rows

        return lambda x, cos, sin: (rows.rotate_ if x.dtype == torch.float32 else rotate_)(x, cos, sin)
    return rotate_


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of something divided: [start, start + count)."""

    start: int
    count: int


def share(total: int, rank: int, size: int, what: str) -> Share:
    """An equal part of `total`. Raises WeightsError naming `what` when it doesn't divide."""
    if total % size:
        raise WeightsError(f"{total} {what} can't be divided among {size} ranks")
    return Share(rank * (total // size), total // size)


def kv_share(heads: int, rank: int, size: int) -> Share:
    """Key/value heads of a rank; fewer heads than ranks are replicated. Raises WeightsError otherwise."""
    if heads < size:
        if size % heads:
            raise WeightsError(f"{heads} key/value heads can be neither divided nor repeated among {size} ranks")
        return Share(rank * heads // size, 1)
    return share(heads, rank, size, "key/value heads")
