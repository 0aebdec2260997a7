"""Sampling: raw logits to token ids, exact, seeded, and the same in any batch.

Order: penalties, temperature, grammar mask and banned ids, top-k, top-p, min-p, then Gumbel arg-max. The noise of a
token is hashed from (seed, position, token id), so a result depends on nothing but its own row. Nothing sorts a
vocabulary, and noise is drawn only for ids that survive the filters. What each slot needs is in `sampling_state`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.execution.candidates import by_candidates
from engine.execution.noise import noise_keys, noise_keys_on_host
from engine.execution.sampling_rows import Bans, Mask, Part, Penalties, SamplingRows
from engine.execution.selection import block_maxima
from engine.execution.thresholds import by_filters, plain
from engine.kernels import team

__all__ = ["Bans", "Mask", "Penalties", "Sampled", "SamplingRows", "compile_ahead", "sample"]

NOT_FINITE_TEXT = "the model's logits were not finite"
NOTHING_ALLOWED_TEXT = "the output constraint allows no token here"


@dataclass(frozen=True, slots=True)
class Sampled:
    """`ids` [rows] int64 and `state` [rows] int8: 0 sampled, 1 logits not finite, 2 nothing allowed."""

    ids: Tensor
    state: Tensor

    def failures(self) -> dict[int, str]:
        """row → what went wrong. Waits for the device."""
        texts = {1: NOT_FINITE_TEXT, 2: NOTHING_ALLOWED_TEXT}
        return {row: texts[state] for row, state in enumerate(self.state.tolist()) if state}


def compile_ahead(device: torch.device) -> None:
    """Compiles what sampling and observing take on `device`, or loads it, so that no step has to wait for that."""
    if device.type == "cpu" and not team.missing():
        for name in ("sampling", "observing"):
            importlib.import_module(f"engine.kernels.{name}")


def sample(logits: Tensor, rows: SamplingRows, mask: Mask | None = None, threads: int | None = None) -> Sampled:
    """Samples one id for each row of raw float32 `logits` [rows, vocab], which stay unchanged. Where compiled kernels
    run they take the rows on `threads` threads, by default as many as torch's passes.

    On a CUDA device nothing waits for the host. A row whose logits aren't finite, or whose mask allows nothing,
    yields some id and a state that says so.
    """
    working = _transformed(logits, rows, mask)
    if not logits.is_cuda and not team.missing():
        from engine.kernels import sampling  # compiles at import, so only where it runs

        threads = threads or torch.get_num_threads()
        settings = rows.temperature, rows.top_p, rows.top_k, rows.min_p, rows.seed, rows.position
        return Sampled(*sampling.choose(working, logits, threads, *settings))
    raw_maxima = block_maxima(logits)
    finite = torch.isfinite(raw_maxima.amax(1))
    maxima = raw_maxima if working is logits else block_maxima(working)
    peak = maxima.amax(1)
    part = Part(working, maxima, peak, rows, _keys(rows))
    ids = _on_accelerator(part) if logits.is_cuda else _on_cpu(part)
    state = torch.where(finite, torch.where(torch.isneginf(peak), 2, 0), 1).to(torch.int8)
    return Sampled(ids, state)


def _keys(rows: SamplingRows) -> Tensor:
    if rows.seed.is_cuda:
        return noise_keys(rows.seed, rows.position)
    return torch.from_numpy(noise_keys_on_host(rows.seed.numpy(), rows.position.numpy()))


def _on_accelerator(part: Part) -> Tensor:
    if part.rows.split is None:
        return _in_slices(part, by_filters if part.rows.filtered else plain)
    ids = torch.zeros(len(part.logits), dtype=torch.int64, device=part.logits.device)
    for index, pick in zip(part.rows.split, (by_filters, plain), strict=True):
        ids[index] = _in_slices(part.only(index), pick)
    return ids


def _in_slices(part: Part, pick: Callable[[Part], Tensor]) -> Tensor:
    """Takes so many rows at once that their temporaries, some of eight bytes an id, stay in bounds."""
    size = max(1, (1 << 24) // part.logits.shape[1])
    if len(part.logits) <= size:
        return pick(part)
    starts = range(0, len(part.logits), size)
    return torch.cat([pick(part.only(slice(start, start + size))) for start in starts])


def _on_cpu(part: Part) -> Tensor:
    """Takes few enough rows at once that their temporaries stay in the cache; rows that can't be sampled stay out of
    the candidate search, whose bounds would be NaN."""
    good = torch.isfinite(part.peak).nonzero()[:, 0]
    size = max(1, (1 << 20) // part.logits.shape[1])
    if len(good) == len(part.logits) <= size:
        return by_candidates(part)
    ids = torch.zeros(len(part.logits), dtype=torch.int64)
    for start in range(0, len(good), size):
        index = good[start : start + size]
        ids[index] = by_candidates(part.only(index))
    return ids


def _transformed(logits: Tensor, rows: SamplingRows, mask: Mask | None) -> Tensor:
    """Logits after penalties, mask and bans; a copy only if some row needs one. Temperature is applied later, to
    distances from the maximum, which keeps small temperatures exact."""
    if rows.penalties is None and rows.bans is None and mask is None:
        return logits
    working = logits.clone()
    if rows.penalties is not None:
        penalties = rows.penalties
        working[penalties.rows] = _penalised(working[penalties.rows], penalties)
    if mask is not None:
        working.index_add_(0, mask.rows, _bars(mask.words, logits.shape[1]))
    if rows.bans is not None:
        bans = rows.bans
        banned = rows.position[bans.rows] < bans.until
        current = working[bans.rows, bans.ids]
        working[bans.rows, bans.ids] = torch.where(banned, -torch.inf, current)
    return working


def _penalised(logits: Tensor, penalties: Penalties) -> Tensor:
    """Repetition (prompt and output) divides positive and multiplies negative logits; presence and frequency count
    the output alone."""
    generated = penalties.counts > 0
    factor = torch.where(penalties.in_prompt | generated, penalties.repetition[:, None], 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - penalties.frequency[:, None] * penalties.counts - penalties.presence[:, None] * generated


def _bars(words: Tensor, width: int) -> Tensor:
    """For mask words [n, words]: [n, width] zeros, -inf where the bit isn't set. Adding is three times as fast on a CPU
    as filling by a mask, which branches at every id; bits are looked up eight at a time."""
    bits = (torch.arange(256, device=words.device)[:, None] >> torch.arange(8, device=words.device)) & 1
    table = torch.where(bits > 0, 0.0, -torch.inf)
    bars = torch.nn.functional.embedding(words.view(torch.uint8).int(), table).flatten(1)[:, :width]
    missing = width - bars.shape[1]
    return torch.nn.functional.pad(bars, (0, missing), value=-torch.inf) if missing else bars
