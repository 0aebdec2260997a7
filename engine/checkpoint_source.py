"""Reads a directory of safetensors with config.json as a model source; no tensor data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from engine.checkpoint_files import (
    ModelSourceError,
    chat_template,
    read_json,
    safetensors_files,
    special_token,
    token_id,
    tokenizer_definition,
    with_bos,
)
from engine.prepare import Material

_CONTEXT_KEYS: Final = ("max_position_embeddings", "n_positions", "max_sequence_length", "model_max_length")


def read_checkpoint(directory: Path, model_id: str) -> Material:
    """Raises ModelSourceError naming the file for what is missing or malformed."""
    config = read_json(directory / "config.json")
    if not config:
        raise ModelSourceError(f"{directory} has no config.json")
    weights = safetensors_files(directory)
    settings, generation = (
        read_json(directory / "tokenizer_config.json"),
        read_json(directory / "generation_config.json"),
    )
    context, vocab_size = _number(config, _CONTEXT_KEYS, directory), _number(config, ("vocab_size",), directory)
    tokenizer = _fitting(with_bos(tokenizer_definition(directory), settings), vocab_size, directory)
    return Material(
        format="safetensors",
        model_id=model_id,
        config=config,
        weights=tuple(weights),
        tokenizer=tokenizer,
        context=context,
        vocab_size=vocab_size,
        bos_id=_bos(tokenizer, settings, config),
        eos_ids=_eos(tokenizer, settings, generation, config),
        template=chat_template(directory, settings),
        sampling=generation,
    )


def _number(config: Mapping[str, Any], keys: tuple[str, ...], directory: Path) -> int:
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, Mapping) else {}):
        for key in keys:
            value = part.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    raise ModelSourceError(f"{directory / 'config.json'} has no positive {keys[0]}")


def _fitting(definition: dict[str, Any], vocab_size: int, directory: Path) -> dict[str, Any]:
    """`definition` without added tokens that the output head lacks (as image placeholders of text-only variants)."""
    try:
        vocabulary = definition["model"]["vocab"]
        numbers = vocabulary.values() if isinstance(vocabulary, Mapping) else range(len(vocabulary))
        added = definition.get("added_tokens") or []
        most = max(numbers, default=-1)
        kept = [entry for entry in added if entry["id"] < vocab_size]
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelSourceError(f"{directory / 'tokenizer.json'} is not a tokenizer: {error!r}") from error
    beyond = {entry["id"] for entry in added} - {entry["id"] for entry in kept}
    if most >= vocab_size and most not in beyond:
        raise ModelSourceError(f"{directory}: the tokenizer has ids up to {most}, the output head {vocab_size} rows")
    return {**definition, "added_tokens": kept}


def _bos(tokenizer: Mapping[str, Any], settings: Mapping[str, Any], config: Mapping[str, Any]) -> int | None:
    """Without tokenizer_config.json the config decides; with it, a null BOS there means none."""
    token = special_token(settings, "bos_token")
    if token is not None:
        return token_id(tokenizer, token)
    value = config.get("bos_token_id")
    return value if not settings and isinstance(value, int) else None


def _eos(
    tokenizer: Mapping[str, Any], settings: Mapping[str, Any], generation: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[int, ...]:
    token = special_token(settings, "eos_token")
    found = [] if token is None else [token_id(tokenizer, token)]
    for part in (generation, config, config.get("text_config") or {}):
        value = part.get("eos_token_id")
        found += value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(number for number in found if isinstance(number, int)))
