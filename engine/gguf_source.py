"""Reads a .gguf file as a model source: metadata to config, tokenizer, template and end tokens; no tensor data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.checkpoint_files import ModelSourceError
from engine.gguf_config import config_of, eos_ids_of
from engine.gguf_tokenizer import tokenizer_definition
from engine.models.errors import WeightsError
from engine.models.gguf import read_gguf
from engine.prepare import Material


def read_gguf_source(path: Path, model_id: str) -> Material:
    """Raises ModelSourceError naming the file for what is corrupt, truncated, missing or unsupported in it."""
    try:
        file = read_gguf(path)
        parts = int(file.metadata.get("split.count", 1))
        if parts > 1:
            raise ValueError(f"the file is one of {parts} parts; join them first")
        config, tokenizer = config_of(file), tokenizer_definition(file.metadata)
    except WeightsError as error:
        raise ModelSourceError(f"{path}: {error}") from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ModelSourceError(f"{path} can't be served: {error}") from error
    count = len(tokenizer["model"]["vocab"])
    tokens = file.metadata["tokenizer.ggml.tokens"]
    if count != len(tokens) or count > config["vocab_size"]:
        raise ModelSourceError(
            f"{path} can't be served: {len(tokens)} tokens ({count} different) for an output head of "
            f"{config['vocab_size']} rows"
        )
    return Material(
        format="gguf",
        model_id=model_id,
        config=config,
        weights=(path,),
        tokenizer=tokenizer,
        context=config["max_position_embeddings"],
        vocab_size=config["vocab_size"],
        bos_id=_optional(file.metadata.get("tokenizer.ggml.bos_token_id")),
        eos_ids=tuple(eos_ids_of(file.metadata)),
        template=file.metadata.get("tokenizer.chat_template"),
    )


def _optional(value: Any) -> int | None:
    return None if value is None else int(value)
