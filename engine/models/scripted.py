"""A model without weights: its logits make a script's next token win, so that everything around a model is testable.

Owns which turn of the script answers a slot and the logits, delays and failures it asks for. The rest (pages, slots,
sampling, log probabilities) is the real path. The file format is in `engine.script`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.attention.protocol import AttentionBackend, Metadata, Query
from engine.config import EngineConfig, Manifest
from engine.models.layers import Precision
from engine.models.weights import WeightSource
from engine.parallel.collectives import Collectives
from engine.scheduler.step import SlotSetup
from engine.script import CHOSEN_LOGIT, Script, ScriptTurn


@dataclass(slots=True)
class _Answer:
    """A slot's turn. `prompt`: the ids that the turn answers."""

    turn: ScriptTurn
    prompt: list[int]


class Scripted:
    """`decode` renders prompt ids, control tokens included, for the script's "when"."""

    heads, kv_heads, head_dim, layer_count, row_multiple, weight_bytes = 1, 1, 64, 1, 1, 0

    def __init__(
        self, script: Script, decode: Callable[[Sequence[int]], str], vocab: int, context: int, device: torch.device
    ) -> None:
        self.vocab, self._script, self._decode, self._device = vocab, script, decode, device
        self.kv_bytes: int | None = max(64 << 20, 4 * context * 2 * self.head_dim * 4)
        self._answers: dict[int, _Answer] = {}
        self._slots: list[int] = []

    def bind(self, setup: SlotSetup) -> None:
        """Chooses the slot's turn by its prompt. Raises ValueError when the scheduler sent none."""
        if not setup.prompt:
            raise ValueError("a scripted model needs the prompt of every slot")
        prompt = np.frombuffer(setup.prompt, dtype="<i4")[: setup.prompt_length].tolist()
        self._answers[setup.slot] = _Answer(self._script.select(self._decode(prompt)), prompt)

    def begin(self, queries: Sequence[Query]) -> None:
        """Waits as long as the slowest turn in the step asks."""
        delays = [0.0]
        self._slots = []
        for query in queries:
            answer = self._answers[query.slot]
            self._slots += [query.slot] * query.count
            end = query.start + query.count
            if end > len(answer.prompt):
                delays.append(answer.turn.delay_ms)
            elif end == len(answer.prompt):
                delays.append(answer.turn.prefill_delay_ms)
        if max(delays) > 0:
            time.sleep(max(delays) / 1000)

    def forward(self, ids: Tensor, positions: Tensor, attention: AttentionBackend, metadata: Metadata) -> Tensor:
        """Rows [n, 2]: the slot and the position of the token to come."""
        slots = torch.tensor(self._slots, dtype=torch.int64, device=self._device)
        return torch.stack((slots, positions[: len(slots)] + 1), dim=1)

    def logits(self, hidden: Tensor) -> Tensor:
        """CHOSEN_LOGIT for the script's token (in the prompt: the prompt's own), 0 or the script's logits elsewhere."""
        out = torch.zeros(len(hidden), self.vocab, dtype=torch.float32)
        for row, (slot, position) in zip(out, hidden.tolist(), strict=True):
            answer = self._answers[slot]
            place = position - len(answer.prompt)
            if place < 0:
                row[answer.prompt[position]] = CHOSEN_LOGIT
                continue
            for token, logit in answer.turn.logits.get(place, ()):
                row[token] = logit
            row[answer.turn.token_at(place, self._script.eos)] = CHOSEN_LOGIT
            if answer.turn.fail_at == place:
                row.fill_(torch.nan)
        return out.to(self._device)


def build(
    manifest: Manifest, config: EngineConfig, source: WeightSource | None, precision: Precision, group: Collectives
) -> Scripted:
    """The scripted model of a prepared directory."""
    from engine.prepared import PreparedModel

    tokens = PreparedModel.load(config.prepared).tokens
    script = Script.load(config.prepared / (manifest.script or "script.json"))
    context = config.context or manifest.context
    return Scripted(script, tokens.decode, manifest.vocab_size, context, precision.device)
