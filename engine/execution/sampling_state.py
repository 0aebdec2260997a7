"""What sampling needs of every slot, bound once from a SlotSetup and kept on the device.

Owns the slots' sampling parameters, penalty counts and banned ids, and cuts a step's rows from them. Costs memory of
the vocabulary's size only once some slot has penalties. Leaves the arithmetic to `sampler`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.execution.noise import signed
from engine.execution.sampling_rows import Bans, Penalties, SamplingRows, Upload, uploader
from engine.scheduler.step import SlotSetup
from engine.types.request import SamplingParams


class SamplingState:
    """Sampling state of `slots` slots over a vocabulary of `vocab` ids on `device`. With an `upload` that doesn't wait,
    nothing here waits for the device."""

    def __init__(
        self, slots: int, vocab: int, device: torch.device | str = "cpu", upload: Upload | None = None
    ) -> None:
        self._vocab = vocab
        self._upload = upload or uploader(device)
        self._device = torch.device(device)
        # temperature, top_p, min_p, repetition, presence, frequency
        self._numbers = torch.ones(slots, 6, dtype=torch.float32, device=self._device)
        # top_k, seed
        self._integers = torch.zeros(slots, 2, dtype=torch.int64, device=self._device)
        self._filtered = [False] * slots
        self._top_k, self._has_top_p = [vocab] * slots, [False] * slots
        self._penalised = [False] * slots
        self._bans: list[tuple[int, tuple[int, ...]]] = [(0, ())] * slots
        self._in_prompt: Tensor | None = None
        self._counts: Tensor | None = None
        self._known: tuple[tuple[int, ...], SamplingRows] | None = None
        """The slots of the last step and their rows, while no slot changes."""

    def bind(self, setup: SlotSetup) -> None:
        """Takes over `setup`; whatever the slot held before is gone. `setup.prompt` past `prompt_length` counts as
        output already generated."""
        sampling, slot, self._known = setup.sampling, setup.slot, None
        numbers = (
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
        top_k = sampling.top_k if 0 < sampling.top_k < self._vocab else self._vocab
        self._numbers[slot] = self._upload(np.array(numbers, dtype=np.float32))
        self._integers[slot] = self._upload(np.array((top_k, signed(sampling.seed)), dtype=np.int64))
        self._filtered[slot] = top_k < self._vocab or sampling.top_p < 1 or sampling.min_p > 0
        self._top_k[slot], self._has_top_p[slot] = top_k, sampling.top_p < 1
        self._penalised[slot] = needs_counts(sampling)
        self._bans[slot] = (setup.banned_until, setup.banned_ids)
        if self._penalised[slot]:
            self._count_prompt(setup)

    def release(self, slot: int) -> None:
        """Forgets the slot; its rows in steps still in flight sample something that nobody reads."""
        self._penalised[slot] = False
        self._bans[slot] = (0, ())
        self._known = None

    def rows(self, slots: Sequence[int], positions: Tensor) -> SamplingRows:
        """The rows of a step that sample, in this order; `positions` [rows] int64 are those of the tokens to sample."""
        asked = tuple(slots)
        if self._known is None or self._known[0] != asked:
            self._known = asked, self._cut(asked, positions)
        return replace(self._known[1], position=positions, penalties=self._penalties(asked))

    def _cut(self, slots: tuple[int, ...], positions: Tensor) -> SamplingRows:
        """What stays the same from one step to the next."""
        on = np.array([self._filtered[slot] for slot in slots], dtype=np.bool_)
        filtered, plain = np.flatnonzero(on), np.flatnonzero(~on)
        packed = self._upload(np.concatenate((np.array(slots, dtype=np.int64), filtered, plain)))
        numbers, integers = self._numbers[packed[: len(slots)]], self._integers[packed[: len(slots)]]
        split = packed[len(slots) :].tensor_split([len(filtered)])
        return SamplingRows(
            temperature=numbers[:, 0],
            top_p=numbers[:, 1],
            top_k=integers[:, 0],
            min_p=numbers[:, 2],
            seed=integers[:, 1],
            position=positions,
            filtered=tuple(filtered.tolist()),
            plain=tuple(plain.tolist()),
            split=(split[0], split[1]) if len(filtered) and len(plain) else None,
            any_top_k=any(self._top_k[slot] < self._vocab for slot in slots),
            any_top_p=any(self._has_top_p[slot] for slot in slots),
            most_top_k=max((self._top_k[slots[row]] for row in filtered.tolist()), default=None),
            bans=self._banned(slots),
        )

    def observe(self, slots: Sequence[int], ids: Tensor) -> None:
        """Counts the committed `ids` [rows] (sampled or forced) of `slots` that have penalties."""
        rows = [row for row, slot in enumerate(slots) if self._penalised[slot]]
        if rows and self._counts is not None:
            index, where = self._upload(np.array((rows, [slots[row] for row in rows]), dtype=np.int64))
            one = torch.ones(len(rows), dtype=torch.int32, device=self._device)
            self._counts.index_put_((where, ids[index]), one, accumulate=True)

    def _count_prompt(self, setup: SlotSetup) -> None:
        if self._in_prompt is None or self._counts is None:
            shape = (len(self._filtered), self._vocab)
            self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=self._device)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
        ids = np.frombuffer(setup.prompt, dtype="<i4").astype(np.int64)
        prompt = self._upload(np.unique(ids[: setup.prompt_length]))
        output = np.bincount(ids[setup.prompt_length :], minlength=self._vocab).astype(np.int32)
        self._in_prompt[setup.slot] = False
        self._in_prompt[setup.slot].index_fill_(0, prompt, True)
        self._counts[setup.slot] = self._upload(output)

    def _penalties(self, slots: Sequence[int]) -> Penalties | None:
        rows = [row for row, slot in enumerate(slots) if self._penalised[slot]]
        if not rows or self._in_prompt is None or self._counts is None:
            return None
        index, where = self._upload(np.array((rows, [slots[row] for row in rows]), dtype=np.int64))
        chosen = self._numbers[where]
        return Penalties(index, self._in_prompt[where], self._counts[where], chosen[:, 3], chosen[:, 4], chosen[:, 5])

    def _banned(self, slots: Sequence[int]) -> Bans | None:
        triples = [(row, token, self._bans[slot][0]) for row, slot in enumerate(slots) for token in self._bans[slot][1]]
        if not triples:
            return None
        rows, ids, until = self._upload(np.array(triples, dtype=np.int64)).unbind(1)
        return Bans(rows, ids, until)


def needs_counts(sampling: SamplingParams) -> bool:
    """Whether a penalty is on, so that SlotSetup must carry the prompt's ids."""
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
