"""The runner: turns a Step into a forward pass, samples, and a StepResult that can be read later.

Owns the model, the page pool and the slots of one rank. Decides nothing: rows, pages and limits come with the Step.
Sampled tokens stay on the device on their way to the next step; the host reads them from a copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.protocol import Batch, Query
from engine.config import EngineConfig, Manifest
from engine.execution.device import Device, Readback, open_device
from engine.execution.loading import Loaded, load
from engine.execution.logprobs import Asked, Observations, PromptObservations, observe, score_prompt
from engine.execution.sampler import Mask, Sampled, compile_ahead, sample
from engine.execution.sampling_state import SamplingState
from engine.execution.slots import Slots
from engine.parallel.collectives import Collectives
from engine.scheduler.step import LateInputs, Row, SampledRow, ScoredRow, Step, StepResult

Late = Callable[[], LateInputs]
FEW_ROWS = 16
"""Rows over which one thread makes torch's passes sooner than several do."""
SCORE_ROWS = 256
"""Prompt rows that go through the head at once: bounds the memory of their logits."""


@dataclass(slots=True)
class _Rows:
    """A step's rows laid out: `queries` in order, `ids` of host-known tokens, `decodes` the slots of decode rows."""

    queries: list[Query]
    packed: NDArray[np.int64]
    decodes: list[int]
    sampled: list[tuple[int, int, int]]
    """(slot, row of the last position, position to sample)."""


@dataclass(slots=True)
class _Scores:
    slot: int
    start: int
    parts: list[PromptObservations]


class Pending:
    """A launched step. Calling it gives the StepResult, once; blocks until the device has it."""

    def __init__(self, number: int, started: float, waited: float) -> None:
        self.number, self.started, self.waited = number, started, waited
        self.slots: list[int] = []
        self.sampled: Sampled | None = None
        self.forced: dict[int, int] = {}
        self.observations: Observations | None = None
        self.scores: list[_Scores] = []
        self.readback: Readback | None = None

    def tensors(self) -> list[Tensor]:
        """Everything to bring to the host, in the order in which `_restore` takes it back."""
        parts = [] if self.sampled is None else [self.sampled.ids, self.sampled.state]
        if self.observations is not None:
            seen = self.observations
            parts += [seen.chosen, seen.top, seen.top_ids, seen.picked]
        for scores in self.scores:
            for part in scores.parts:
                parts += [part.targets, part.chosen, part.rank, part.top, part.top_ids]
        return parts

    def ready(self) -> bool:
        return self.readback is None or self.readback.ready()

    def __call__(self) -> StepResult:
        if self.readback is not None:
            self._restore(self.readback.wait())
        result = StepResult(self.number, seconds=time.perf_counter() - self.started - self.waited)
        if self.sampled is not None:
            result.sampled = self._rows(self.sampled)
        for scores in self.scores:
            entries = [entry for part in scores.parts for entry in part.entries()]
            result.scored.append(ScoredRow(scores.slot, scores.start, entries))
        return result

    def _restore(self, host: list[Tensor]) -> None:
        left = iter(host)
        if self.sampled is not None:
            self.sampled = Sampled(next(left), next(left))
        if self.observations is not None:
            self.observations = replace(
                self.observations, chosen=next(left), top=next(left), top_ids=next(left), picked=next(left)
            )
        for scores in self.scores:
            scores.parts = [
                PromptObservations(next(left), next(left), next(left), next(left), next(left)) for _ in scores.parts
            ]

    def _rows(self, sampled: Sampled) -> list[SampledRow]:
        failures = sampled.failures()
        seen = self.observations.entries() if self.observations is not None else {}
        found = []
        for row, (slot, token) in enumerate(zip(self.slots, sampled.ids.tolist(), strict=True)):
            logprob, alternatives = seen.get(row, (None, []))
            failure = "" if slot in self.forced and failures.get(row) == _NOTHING_ALLOWED else failures.get(row, "")
            found.append(SampledRow(slot, token, logprob, list(alternatives), failure))
        return found


_NOTHING_ALLOWED = "the output constraint allows no token here"


class Runner:
    """One rank's forward passes. For one thread."""

    def __init__(
        self, config: EngineConfig, manifest: Manifest, collectives: Collectives, device: Device | None = None
    ) -> None:
        """Loads the weights onto `device`, or the one that `config` names. Raises WeightsError, AttentionUnavailable
        or DeviceUnavailable."""
        device = device or open_device(config.device, collectives.rank, collectives.size, config.threads)
        self._loaded: Loaded = load(config, manifest, collectives, device)
        self._device, self._model = self._loaded.device, self._loaded.model
        self._pool, self._attention = self._loaded.pool, self._loaded.attention
        self.report = self._loaded.report
        self.asynchronous = self._device.asynchronous
        """Whether `launch` returns before its step is done."""
        pages = -(-self._loaded.context // config.page_tokens)
        compile_ahead(self._device.torch)
        self._slots = Slots(config.max_requests, pages, self._device)
        self._sampling = SamplingState(
            config.max_requests, self.report.vocab_size, self._device.torch, self._device.upload
        )
        self._multiple = self._model.row_multiple

    @torch.inference_mode()
    def launch(self, step: Step, late: Late) -> Pending:
        """Runs `step`. On CUDA returns before the device is done. `late` is called, once, only if rows are gated."""
        started = time.perf_counter()
        self._prepare(step)
        rows = self._lay_out(step)
        pending = Pending(step.number, started, 0.0)
        if rows.queries:
            hidden = self._forward(rows)
            self._score(step, rows, hidden, pending)
            if rows.sampled:
                last = self._device.upload(np.array([row for _, row, _ in rows.sampled], dtype=np.int64))
                logits = self._model.logits(hidden.index_select(0, last))
                self._sample(step, rows, logits, late, pending)
        parts = pending.tensors()
        if parts:
            pending.readback = self._device.readback(parts)
        return pending

    def _prepare(self, step: Step) -> None:
        for slot in step.release:
            self._slots.release(slot)
            self._attention.forget(slot)
            self._sampling.release(slot)
        for setup in step.setups:
            self._slots.bind(setup)
            self._attention.forget(setup.slot)
            self._sampling.bind(setup)
            self._model.bind(setup)
        self._slots.extend(step.tables)
        if step.copies:
            self._pool.copy(self._device.upload(np.array(step.copies, dtype=np.int64)))

    def _lay_out(self, step: Step) -> _Rows:
        total = sum(row.count for row in step.rows)
        padded = -(-total // self._multiple) * self._multiple
        size, padding = self._pool.page_tokens, self._pool.pages * self._pool.page_tokens
        packed = np.zeros((3, padded), dtype=np.int64)  # ids, positions, writes
        packed[2] = padding
        rows = _Rows([], packed, [], [])
        offset = 0
        for row in step.rows:
            start = int(self._slots.lengths[row.slot]) if row.start < 0 else row.start
            end = offset + row.count
            if row.start < 0:
                rows.decodes.append(row.slot)
            else:
                packed[0, offset:end] = np.frombuffer(row.tokens, dtype="<i4")
            position = np.arange(start, start + row.count)
            packed[1, offset:end] = position
            packed[2, offset:end] = self._slots.tables[row.slot, position // size] * np.int64(size) + position % size
            rows.queries.append(Query(row.slot, start, row.count, offset))
            if row.sample:
                rows.sampled.append((row.slot, end - 1, start + row.count))
            self._slots.lengths[row.slot] = start + row.count
            offset = end
        return rows

    def _forward(self, rows: _Rows) -> Tensor:
        ids, positions, writes = self._device.upload(rows.packed)
        if rows.decodes:
            slots = self._device.upload(np.array(rows.decodes, dtype=np.int64))
            ids[: len(rows.decodes)] = self._slots.last[slots]
        batch = Batch(rows.queries, len(ids), self._slots.tables, self._slots.device_tables, writes)
        self._model.begin(rows.queries)
        metadata = self._attention.prepare(batch)
        return self._model.forward(ids, positions, self._attention, metadata)

    def _sample(self, step: Step, rows: _Rows, logits: Tensor, late: Late, pending: Pending) -> None:
        slots = [slot for slot, _, _ in rows.sampled]
        positions = self._device.upload(np.array([position for _, _, position in rows.sampled], dtype=np.int64))
        inputs = LateInputs(step.number)
        if any(row.gated for row in step.rows):
            before = time.perf_counter()
            inputs = late()
            pending.waited = time.perf_counter() - before
        threads = torch.get_num_threads()
        with self._device.undivided() if len(slots) <= FEW_ROWS else nullcontext():
            sampled = sample(logits, self._sampling.rows(slots, positions), self._mask(slots, inputs), threads)
        ids = sampled.ids
        forced = [(row, inputs.forced[slot]) for row, slot in enumerate(slots) if slot in inputs.forced]
        if forced:
            where = self._device.upload(np.array(forced, dtype=np.int64))
            ids = ids.index_copy(0, where[:, 0], where[:, 1])
        self._slots.last.index_copy_(0, self._device.upload(np.array(slots, dtype=np.int64)), ids)
        self._sampling.observe(slots, ids)
        asked = [
            Asked(row, *self._slots.observed[slot]) for row, slot in enumerate(slots) if slot in self._slots.observed
        ]
        pending.slots, pending.forced = slots, inputs.forced
        pending.sampled = Sampled(ids, sampled.state)
        pending.observations = observe(logits, ids, asked, self._device.upload)

    def _mask(self, slots: list[int], inputs: LateInputs) -> Mask | None:
        masked = [row for row, slot in enumerate(slots) if slot in inputs.masks]
        if not masked:
            return None
        words = np.stack([np.frombuffer(inputs.masks[slots[row]], dtype="<i4") for row in masked])
        return Mask(self._device.upload(np.array(masked, dtype=np.int64)), self._device.upload(words))

    def _score(self, step: Step, rows: _Rows, hidden: Tensor, pending: Pending) -> None:
        for row, query in zip(step.rows, rows.queries, strict=True):
            if row.score is not None:
                self._score_chunk(row, row.score, query, hidden, pending)

    def _score_chunk(self, row: Row, alternatives: int, query: Query, hidden: Tensor, pending: Pending) -> None:
        """Position p is scored by the hidden row of p - 1, for the chunk's first one kept from the chunk before."""
        kept = self._slots.kept.get(query.slot)
        part = hidden[query.offset : query.offset + query.count]
        tokens = np.frombuffer(row.tokens, dtype="<i4").astype(np.int64)
        before, start = part[:-1], query.start + 1
        if kept is not None:
            before, start = torch.cat((kept, before)), query.start
        else:
            tokens = tokens[1:]
        self._slots.kept[query.slot] = part[-1:].clone()
        targets = self._device.upload(tokens)
        parts = [
            score_prompt(self._model.logits(before[at : at + SCORE_ROWS]), targets[at : at + SCORE_ROWS], alternatives)
            for at in range(0, len(tokens), SCORE_ROWS)
        ]
        pending.scores.append(_Scores(query.slot, start, parts))
