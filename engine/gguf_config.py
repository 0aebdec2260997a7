"""A GGUF file's metadata in the terms of Hugging Face's config.json, and its end-of-generation tokens.

Owns the translation of hyperparameters. Leaves tensors to `engine.models.gguf` and tokens to `engine.gguf_tokenizer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from engine.gguf_tokenizer import CONTROL
from engine.models.gguf import GgufFile

ARCHITECTURES: Final[Mapping[str, str]] = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3_text",
}
"""GGUF architecture → config.json model type."""

ENDS: Final = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>", "</s>")
"""Spellings that end generation wherever they are control tokens: files often name one of several."""


def config_of(file: GgufFile) -> dict[str, Any]:
    """config.json of the file. Raises ValueError naming an unsupported architecture or a missing key."""
    metadata = file.metadata
    architecture = str(metadata.get("general.architecture"))
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}")

    def value(key: str, default: Any = None) -> Any:
        return metadata.get(f"{architecture}.{key}", default)

    def number(key: str) -> Any:
        found = value(key)
        if found is None:
            raise ValueError(f"the metadata key {architecture}.{key} is missing")
        return found

    heads, hidden = int(number("attention.head_count")), int(number("embedding_length"))
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ValueError("the tensor token_embd.weight is missing")
    config: dict[str, Any] = {
        "model_type": ARCHITECTURES[architecture],
        "name": str(metadata.get("general.name", "")),
        "hidden_size": hidden,
        "intermediate_size": int(number("feed_forward_length")),
        "num_hidden_layers": int(number("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(value("attention.head_count_kv", heads)),
        "head_dim": int(value("attention.key_length") or value("rope.dimension_count") or hidden // heads),
        "rms_norm_eps": round(float(number("attention.layer_norm_rms_epsilon")), 12),
        "rope_theta": float(value("rope.freq_base", 10000.0)),
        "max_position_embeddings": int(number("context_length")),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
    }
    config |= _rope_scaling(metadata, architecture)
    return config | _gemma(metadata, config) if architecture == "gemma3" else config


def _rope_scaling(metadata: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    kind = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if kind == "none":
        return {}
    scaling = {"rope_type": kind, "factor": float(metadata.get(f"{architecture}.rope.scaling.factor", 1.0))}
    original = metadata.get(f"{architecture}.rope.scaling.original_context_length")
    if original is not None:
        scaling["original_max_position_embeddings"] = int(original)
    return {"rope_scaling": scaling}


def _gemma(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Gemma 3's extras. Files carry neither the local rotary base nor the pattern: the family's are constant, every
    sixth layer attends globally. Source: the published configs."""
    pattern, local = 6, 10000.0
    kinds = [
        "full_attention" if (index + 1) % pattern == 0 else "sliding_attention"
        for index in range(config["num_hidden_layers"])
    ]
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": int(metadata.get("gemma3.attention.sliding_window", 512)),
        "layer_types": kinds,
        "rope_local_base_freq": local,
        "query_pre_attn_scalar": config["head_dim"],
    }


def eos_ids_of(metadata: Mapping[str, Any]) -> list[int]:
    """Ids that end generation: the file's EOS first, then its other ends, then control tokens spelled like one."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    ids = [int(number) for number in found if number is not None]
    tokens, types = metadata.get("tokenizer.ggml.tokens") or [], metadata.get("tokenizer.ggml.token_type") or []
    ids += [
        number
        for number, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == CONTROL and token in ENDS
    ]
    return list(dict.fromkeys(ids))
