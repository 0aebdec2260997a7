"""Quantised matrices as torch's grouped int4 kernel takes them.

Owns what a `Grouped` becomes: one int4 matrix (4-bit formats, exact up to bfloat16 scales) or two int4 halves
(5- to 8-bit formats: code = 16 * high + low). Formats whose groups the kernel can't take are dequantised by `layers`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels import INT8_GROUPS
from engine.models.gguf import Grouped

KERNEL_GROUPS = (32, 64, 128, 256)
_HALF = 65504.0
"""The greatest float16."""
_ROWS = 16
"""The kernel's output width is a multiple of this; rows are padded to it."""


def packable(weight: Grouped) -> bool:
    """Whether torch's int4 kernel can compute with `weight`."""
    return weight.group in KERNEL_GROUPS and weight.bits <= 8 and weight.shape[1] % weight.group == 0


def fits_int8(weight: Grouped) -> bool:
    """Whether our own products can compute with `weight`: they keep scales and zeros as float16."""
    regular = weight.group in INT8_GROUPS and weight.bits <= 8 and weight.shape[1] % weight.group == 0
    return regular and all(float(np.abs(part).max(initial=0.0)) < _HALF for part in (weight.scales, weight.zeros))


def concatenated(parts: list[Grouped]) -> Grouped | None:
    """`parts` stacked along output rows, or None when their formats differ."""
    if len({(part.group, part.bits) for part in parts}) > 1:
        return None
    return Grouped(
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.scales for part in parts]),
        np.concatenate([part.zeros for part in parts]),
        parts[0].group,
        parts[0].bits,
    )


@dataclass(frozen=True, slots=True)
class Int4:
    """One packed matrix: value = (code - 8) * scale + zero with bfloat16 scale and zero [width / group, rows, 2]."""

    packed: Tensor
    scales: Tensor
    group: int
    rows: int

    def __call__(self, x: Tensor) -> Tensor:
        """bfloat16 [n, width] → [n, rows]. A row's result doesn't depend on n."""
        out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.packed, self.group, self.scales)
        return out if out.shape[1] == self.rows else out[:, : self.rows]

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes


def _pack(codes: Tensor, scale: Tensor, zero: Tensor, group: int) -> Int4:
    """`codes` uint8 [rows, width] below 16; value = (code - 8) * scale + zero, both float32 [rows, groups]."""
    count = codes.shape[0]
    padding = -count % _ROWS
    if padding:
        codes, scale, zero = (functional.pad(part, (0, 0, 0, padding)) for part in (codes, scale, zero))
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
    scales = torch.stack((scale.t(), zero.t()), dim=2).to(torch.bfloat16).contiguous()
    return Int4(packed, scales, group, count)


def pack(weight: Grouped) -> tuple[Int4, ...]:
    """The int4 matrices whose results add up to `weight`'s: one, or a high and a low half.

    With code = 16 h + l and c the middle of h: code * s + z = (h - c) * 16 s + (l - 8) * s + (z + (16 c + 8) s). The
    high codes are moved to the kernel's own middle, 8, so that scales round around small numbers.
    """
    codes = torch.from_numpy(np.ascontiguousarray(weight.codes))
    scale, zero = torch.from_numpy(weight.scales), torch.from_numpy(weight.zeros)
    if weight.bits <= 4:
        return (_pack(codes, scale, zero + 8 * scale, weight.group),)
    middle = _middle(weight.bits)
    high = _pack((codes >> 4) + (8 - middle), 16 * scale, torch.zeros_like(scale), weight.group)
    return high, _pack(codes & 15, scale, zero + (16 * middle + 8) * scale, weight.group)


def _middle(bits: int) -> int:
    """The middle of the codes' high halves."""
    return 1 << (bits - 5)


def effective(weight: Grouped) -> Tensor:
    """What the packed matrices compute with, float32 [rows, width]: the codes under their bfloat16 scales and zeros.

    Both halves' scales round alike (16 is a power of two), so one multiplication by the whole code is exact enough.
    """
    rows, width = weight.shape
    codes = torch.from_numpy(np.ascontiguousarray(weight.codes)).view(rows, -1, weight.group)
    scale, zero = torch.from_numpy(weight.scales)[:, :, None], torch.from_numpy(weight.zeros)[:, :, None]
    middle = 8 if weight.bits <= 4 else 16 * _middle(weight.bits) + 8
    rounded = scale.to(torch.bfloat16).float()
    offset = (zero + middle * scale).to(torch.bfloat16).float() - middle * rounded
    return codes.float().mul_(rounded).add_(offset).view(rows, width)
