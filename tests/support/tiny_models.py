"""Tiny random checkpoints made by transformers, a runner over them, and transformers' own logits to compare with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from engine.config import EngineConfig, Manifest
from engine.execution.runner import Runner
from engine.parallel.collectives import Alone
from engine.scheduler.step import LateInputs, Row, SlotSetup, Step, StepResult
from engine.types.request import SamplingParams

torch.set_num_threads(1)

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "initializer_range": 0.15,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied-llama3": {"model_type": "llama", "tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE},
    "llama-linear": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 24},
}
GREEDY = SamplingParams(1.0, 1.0, 1, 0.0, 1.0, 0.0, 0.0, 7)
SAMPLED = SamplingParams(1.0, 0.95, -1, 0.0, 1.0, 0.0, 0.0, 7)


@cache
def reference(kind: str) -> Any:
    """transformers' model, float32, eager attention, seeded; norms and biases made random too."""
    import transformers

    fields = dict(SIZES, **KINDS[kind])
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", ".bias")):
            parameter.data.add_(torch.rand(parameter.shape, generator=generator) * 0.4 - 0.2)
    return model


def checkpoint(kind: str, directory: Path) -> Manifest:
    """Writes the checkpoint as one safetensors file, and its manifest."""
    model = reference(kind)
    path = directory / "model.safetensors"
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    save_file(state, path)
    config = json.loads(model.config.to_json_string(use_diff=False))
    return manifest(config, [path], "safetensors")


def manifest(config: dict[str, Any], weights: list[Path], form: Any) -> Manifest:
    return Manifest(
        model_id="tiny",
        recipe="llama",
        format=form,
        config=config,
        weights=[str(path) for path in weights],
        context=int(config["max_position_embeddings"]),
        vocab_size=int(config["vocab_size"]),
        bos_id=1,
        eos_ids=[2],
        sampling={},
        digest="00",
    )


def engine_config(**changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "prepared": Path("."),
        "device": "cpu",
        "dtype": "float32",
        "context": 2048,
        "page_tokens": 16,
        "kv_bytes": 24 << 20,
        "max_requests": 16,
        "threads": 1,
    }
    return EngineConfig(**{**values, **changes})


def not_late() -> LateInputs:
    raise AssertionError("no row is gated")


def tokens(count: int, seed: int = 0, vocab: int = 320) -> list[int]:
    return [int(value) for value in np.random.default_rng(seed).integers(3, vocab, count)]


@dataclass
class Driver:
    """Drives a Runner as a scheduler would, one request per slot, handing out pages in order."""

    runner: Runner
    page: int = 16
    used: int = 0
    number: int = 0

    @classmethod
    def load(cls, manifest: Manifest, **changes: Any) -> Driver:
        config = engine_config(**changes)
        return cls(Runner(config, manifest, Alone()), config.page_tokens)

    def pages(self, count: int) -> list[int]:
        first = self.used
        self.used += -(-count // self.page)
        assert self.used <= self.runner.report.pages
        return list(range(first, self.used))

    def run(self, rows: list[Row], **parts: Any) -> StepResult:
        self.number += 1
        return self.runner.launch(Step(self.number, rows, **parts), not_late)()

    def prefill(
        self,
        slot: int,
        ids: list[int],
        *,
        chunk: int = 512,
        room: int = 64,
        cached: int = 0,
        table: list[int] | None = None,
        sampling: SamplingParams = GREEDY,
        score: int | None = None,
        **setup: Any,
    ) -> list[StepResult]:
        """Binds `slot` and computes `ids` from `cached` on, in chunks; the last chunk samples."""
        table = self.pages(len(ids) + room) if table is None else table
        parts: dict[str, Any] = {
            "setups": [SlotSetup(slot, sampling, cached, len(ids), **setup)],
            "tables": [(slot, 0, table)],
        }
        results = []
        for start in range(cached, len(ids), chunk):
            part = ids[start : start + chunk]
            data = np.array(part, dtype="<i4").tobytes()
            last = start + len(part) == len(ids)
            results.append(self.run([Row(slot, len(part), start, data, sample=last, score=score)], **parts))
            parts = {}
        return results

    def decode(self, slots: list[int], count: int) -> dict[int, list[int]]:
        """`count` more tokens of each slot."""
        found: dict[int, list[int]] = {slot: [] for slot in slots}
        for _ in range(count):
            for row in self.run([Row(slot, 1) for slot in slots]).sampled:
                assert not row.failure
                found[row.slot].append(row.id)
        return found

    def generate(self, slot: int, ids: list[int], count: int, **options: Any) -> list[int]:
        """`count` tokens after `ids`."""
        first = self.prefill(slot, ids, **options)[-1].sampled[0].id
        return [first, *(self.decode([slot], count - 1)[slot] if count > 1 else [])]


class Captured:
    """Records the logits that a runner's model computes."""

    def __init__(self, driver: Driver) -> None:
        self.logits: list[torch.Tensor] = []
        model = driver.runner._model
        inner = model.logits

        def logits(hidden: torch.Tensor) -> torch.Tensor:
            found = inner(hidden)
            self.logits.append(found.clone())
            return found

        model.logits = logits  # type: ignore[method-assign]

    def take(self) -> torch.Tensor:
        found, self.logits = torch.cat(self.logits), []
        return found
