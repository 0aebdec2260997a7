"""The rows of one sampling call: parameters, penalties, bans and masks, all tensors on the logits' device.

Owns the shapes that `sampling_state` cuts, the runner completes with masks, and `sampler` and its two ways read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

Upload = Callable[[NDArray[Any]], Tensor]
"""A host array's copy on the device, ordered before what is launched next. Must not wait for the device."""


def uploader(device: torch.device | str) -> Upload:
    """An Upload for where waiting doesn't matter."""
    return lambda array: torch.from_numpy(array).to(device)


@dataclass(frozen=True, slots=True)
class Penalties:
    """For the rows in `rows` (host list and device ids): whether an id is in the prompt [n, vocab] bool, how often
    it was generated [n, vocab] int32, and the three penalties [n] float32."""

    rows: Tensor
    in_prompt: Tensor
    counts: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


@dataclass(frozen=True, slots=True)
class Bans:
    """(row, id) pairs that can't be sampled while the row's position is below `until` [pairs]."""

    rows: Tensor
    ids: Tensor
    until: Tensor


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """What sampling needs of each row, on the logits' device.

    `temperature`, `top_p`, `min_p` [rows] float32; `top_k` [rows] int64, as many as the vocabulary when disabled;
    `seed` (the unsigned 64-bit number's bit pattern) and `position` (absolute, of the token to sample) [rows] int64.
    `filtered` and `plain` split the row numbers by whether a filter is on, known without asking the device; `split`
    holds both on the device when neither is empty. `any_top_k`, `any_top_p`: some row may have that filter;
    `most_top_k`: the greatest of the filtered rows' top-k, None if that isn't known.
    """

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor
    filtered: tuple[int, ...] = ()
    plain: tuple[int, ...] = ()
    split: tuple[Tensor, Tensor] | None = None
    any_top_k: bool = True
    any_top_p: bool = True
    most_top_k: int | None = None
    penalties: Penalties | None = None
    bans: Bans | None = None


@dataclass(frozen=True, slots=True)
class Mask:
    """Grammar masks: `words` [n, words] int32, bit set = allowed, ids beyond the words forbidden; `rows` [n] int64."""

    rows: Tensor
    words: Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows on their way to an id: logits [rows, vocab], their block maxima and maximum, parameters, noise keys."""

    logits: Tensor
    maxima: Tensor
    peak: Tensor
    rows: SamplingRows
    keys: Tensor

    def only(self, index: Tensor | slice) -> Part:
        rows = SamplingRows(
            self.rows.temperature[index],
            self.rows.top_p[index],
            self.rows.top_k[index],
            self.rows.min_p[index],
            self.rows.seed[index],
            self.rows.position[index],
            any_top_k=self.rows.any_top_k,
            any_top_p=self.rows.any_top_p,
            most_top_k=self.rows.most_top_k,
        )
        return Part(self.logits[index], self.maxima[index], self.peak[index], rows, self.keys[index])

    def gaps(self, logits: Tensor) -> Tensor:
        """Distances [rows, …] >= 0 below each row's maximum, in units of its temperature."""
        return (self.peak[:, None] - logits).div_(self.rows.temperature[:, None])
