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

Linear = Callable[[Tensor], Tensor]
"""[n, width] → [n, rows], in the model's dtype."""


@dataclass(frozen=True, slots=True)
class Precision:
    """How a model computes. `dtype`: of activations and dense weights. `quantized`: quantised weights stay so.
    `invariant`: one kernel for every row count. `many_rows`: rows from which a dense copy beats int4 in `fast`."""

    device: torch.device
    dtype: torch.dtype
    quantized: bool
    invariant: bool
    many_rows: int = 32

    @property
    def row_multiple(self) -> int:
        """Rows of a step are padded to a multiple of this, so that dense kernels give each row one result."""
        if not self.invariant:
            return 1
        return 4 if self.dtype == torch.float32 else 2


class DenseLinear:
    """A plain matrix product with torch's own kernel."""

    dense = True

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


class PackedLinear:
    """A dense matrix in oneDNN's own order, packed once."""

    dense = True

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.nbytes = weight.nbytes
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 64)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], None)
        return result


class QuantizedLinear:
    """Int4 products, their sum, and a bias."""

    dense = False

    def __init__(self, parts: tuple[quantized.Int4, ...], bias: Tensor | None = None) -> None:
        self._first, self._rest, self._bias = parts[0], parts[1:], bias
        self.nbytes = sum(part.nbytes for part in parts)

    def __call__(self, x: Tensor) -> Tensor:
        out = self._first(x)
        for part in self._rest:
            out = out + part(x)
        return out if self._bias is None else out + self._bias


class RowsLinear:
    """Few rows through one kernel, many through another with the same effective weights."""

    dense = True

    def __init__(self, few: QuantizedLinear, many: PackedLinear, border: int) -> None:
        self._few, self._many, self._border = few, many, border
        self.nbytes = few.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._few(x) if x.shape[0] < self._border else self._many(x)


class StackedLinear:
    """Matrices of unlike formats, side by side."""

    def __init__(self, parts: list[Any]) -> None:
        self._parts = parts
        self.dense = any(part.dense for part in parts)
        self.nbytes = sum(part.nbytes for part in parts)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self._parts], dim=1)


AnyLinear = DenseLinear | PackedLinear | QuantizedLinear | RowsLinear | StackedLinear


def linear(weights: list[Weight], precision: Precision, bias: Tensor | None = None) -> AnyLinear:
    """The product with `weights` stacked along their rows, by the kernel that `precision` asks for."""
    kept = [weight for weight in weights if isinstance(weight, Grouped) and quantized.packable(weight)]
    if not precision.quantized or not kept:
        stacked = torch.cat([dense(weight, precision.dtype).to(precision.device) for weight in weights])
        bias = bias if bias is None else bias.to(precision.device, precision.dtype)
        return _dense_linear(stacked, precision, bias)
    whole = quantized.concatenated(kept) if len(kept) == len(weights) else None
    if whole is None:
        if len(weights) == 1:
            raise WeightsError("a single matrix can't differ from itself")
        sizes = [weight.shape[0] for weight in weights]
        biases = torch.split(bias, sizes) if bias is not None else [None] * len(weights)
        return StackedLinear([linear([weight], precision, part) for weight, part in zip(weights, biases, strict=True)])
    bias = bias if bias is None else bias.to(precision.dtype)
    few = QuantizedLinear(quantized.pack(whole), bias)
    if precision.invariant:
        return few
    return RowsLinear(few, PackedLinear(quantized.effective(whole).to(precision.dtype), bias), precision.many_rows)


def _dense_linear(weight: Tensor, precision: Precision, bias: Tensor | None) -> AnyLinear:
    if precision.device.type == "cpu":
        return PackedLinear(weight, bias)
    return DenseLinear(weight.contiguous(), bias)


class RmsNorm:
    """x / sqrt(mean(x²) + eps) * weight, computed in float32 (Zhang and Sennrich, 2019)."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps, self._shape = weight, eps, (weight.shape[0],)

    def __call__(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self._shape, self._weight, self._eps)


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

    def __init__(self, inverse: Tensor, context: int, precision: Precision) -> None:
        angles = torch.outer(torch.arange(context, dtype=torch.float32), inverse)
        self._cos = torch.cat((angles.cos(), angles.cos()), 1).to(precision.device, precision.dtype)
        self._sin = torch.cat((-angles.sin(), angles.sin()), 1).to(precision.device, precision.dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin of `positions` [n], each [n, 1, dim]."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` [n, heads, dim] rotated: x * cos + (second half, first half) * signed sin."""
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half])
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


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
