"""Slots: every running request's row on the device, at a fixed address for its whole life.

Owns the last token, the length and the page table of each slot, on the device for the forward pass and mirrored on
the host, where lengths advance without waiting for tokens. Sampling state is in `sampling_state`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.execution.device import Device
from engine.scheduler.step import SlotSetup


class Slots:
    """`count` slots of at most `pages` pages each. `lengths` and `tables` are the host's; `last` [count] int64 and
    `device_tables` [count, pages] int32 the device's."""

    def __init__(self, count: int, pages: int, device: Device) -> None:
        self._device = device
        self.count = count
        self.lengths = np.zeros(count, dtype=np.int64)
        self.tables = np.zeros((count, pages), dtype=np.int32)
        self.last = torch.zeros(count, dtype=torch.int64, device=device.torch)
        shared = device.torch.type == "cpu"
        self.device_tables = (
            torch.from_numpy(self.tables)
            if shared
            else torch.zeros(count, pages, dtype=torch.int32, device=device.torch)
        )
        self._shared = shared
        self.observed: dict[int, tuple[int, tuple[int, ...]]] = {}
        """slot → (natural alternatives, explicit ids) of slots that want log probabilities."""
        self.kept: dict[int, Tensor] = {}
        """slot → hidden row after its last scored position, which scores the next chunk's first token."""

    def bind(self, setup: SlotSetup) -> None:
        self.lengths[setup.slot] = setup.length
        self.kept.pop(setup.slot, None)
        if setup.logprobs is not None or setup.logprob_ids:
            self.observed[setup.slot] = (setup.logprobs or 0, setup.logprob_ids)
        else:
            self.observed.pop(setup.slot, None)

    def release(self, slot: int) -> None:
        self.kept.pop(slot, None)
        self.observed.pop(slot, None)

    def extend(self, tables: Sequence[tuple[int, int, list[int]]]) -> None:
        """Writes (slot, index of the first page, page ids) into the page tables."""
        for slot, first, pages in tables:
            self.tables[slot, first : first + len(pages)] = pages
        if tables and not self._shared:
            width = self.tables.shape[1]
            where = [slot * width + first + index for slot, first, pages in tables for index in range(len(pages))]
            values = [page for _, _, pages in tables for page in pages]
            packed = self._device.upload(np.array([where, values], dtype=np.int64))
            self.device_tables.view(-1).index_copy_(0, packed[0], packed[1].int())
