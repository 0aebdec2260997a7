"""EngineConfig: every choice that fixes an engine at start. Frozen; validated once by `serve_app.settings`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Dtype = Literal["auto", "bfloat16", "float32"]
Numerics = Literal["auto", "invariant", "fast"]
Device = Literal["auto", "cpu", "cuda"]
Attention = Literal["auto", "reference", "cpu", "compiled", "triton_paged", "flash"]


@dataclass(frozen=True, slots=True)
class LogprobLimits:
    """Capabilities fixed at start. `max_top` 0: no generation logprobs at all."""

    max_top: int = 20
    token_ids: bool = True
    prompt: bool = False


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """`prepared`: the directory written by `engine.prepare`. `context`: prompt plus output tokens, None for the
    model's own limit. `kv_bytes`: size of the KV pool over all layers, None for the device's default (1 GiB on the
    CPU). `max_requests`: device slots. `queue`: requests that may wait for a slot. `threads`: torch threads of each
    rank, None to divide the cores among ranks. `step_tokens`: the token budget of one step."""

    prepared: Path
    device: Device = "auto"
    dtype: Dtype = "auto"
    numerics: Numerics = "auto"
    attention: Attention = "auto"
    context: int | None = None
    page_tokens: int = 64
    kv_bytes: int | None = None
    max_requests: int = 64
    queue: int = 256
    prefill_chunk: int = 512
    step_tokens: int = 768
    prefix_cache: bool = True
    tensor_parallel: int = 1
    threads: int | None = None
    logprobs: LogprobLimits = field(default_factory=LogprobLimits)
    step_timeout: float = 120.0
    decode_stall: float = 0.25
    """Seconds that a step may take because of prefill while answers are running: chunks shrink to hold it, measured."""
    weights_seed: int | None = None
    """Random dummy weights instead of the checkpoint's, for benchmarks of a shape."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """`manifest.json` of a prepared directory: all that torch-free processes need to know of a model.

    `model_id`: the checkpoint identifier. `config`: the architecture in Hugging Face `config.json` terms, for GGUF
    files translated from their metadata. `weights`: absolute paths of the weight files; empty for scripted models.
    `context`: the checkpoint's own limit. `vocab_size`: rows of the output head. `eos_ids`: every id that ends
    generation. `sampling`: `generation_config.json` fields, when present. `digest`: SHA-256 hex over identity and
    contents that matter (config, tokenizer, weight file sizes), part of every page key.
    """

    model_id: str
    recipe: str
    format: Literal["safetensors", "gguf", "scripted"]
    config: dict[str, Any]
    weights: list[str]
    context: int
    vocab_size: int
    bos_id: int | None
    eos_ids: list[int]
    sampling: dict[str, Any]
    digest: str
    script: str | None = None
