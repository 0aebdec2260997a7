"""Reading a checkpoint's files: JSON, safetensors headers, tokenizer settings. Torch-free.

Owns finding and checking what a directory holds. Every error is a ModelSourceError that names the file. Leaves what
to make of the contents to `engine.prepare`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_MOST_HEADER: Final = 100_000_000


class ModelSourceError(ValueError):
    """A model source that can't be served. The message names what is wrong, and where."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; empty when there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelSourceError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelSourceError(f"{path} must hold a JSON object")
    return value


def safetensors_files(directory: Path) -> list[Path]:
    """The weight files of a directory, checked, in order; empty when it has none."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        names = sorted({str(name) for name in read_json(index).get("weight_map", {}).values()})
        files = [directory / name for name in names]
        missing = [path.name for path in files if not path.exists()]
        if missing:
            raise ModelSourceError(f"{directory} lacks {missing[0]}, which {index.name} lists")
    elif (directory / "model.safetensors").exists():
        files = [directory / "model.safetensors"]
    else:
        files = sorted(path for path in directory.glob("*.safetensors") if not path.name.startswith("consolidated"))
    for path in files:
        _check_safetensors(path)
    return files


def _check_safetensors(path: Path) -> None:
    """Header and extents against the file's size. Source: the safetensors format."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
        if not 0 < length <= min(_MOST_HEADER, size - 8):
            raise ModelSourceError(f"{path} is not a whole safetensors file: its header doesn't fit in {size} bytes")
        try:
            header = json.loads(file.read(length))
            ends = [(entry["data_offsets"][1], name) for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ModelSourceError(f"{path} has a corrupt safetensors header") from error
    end, name = max(ends, default=(0, ""))
    if 8 + length + end > size:
        raise ModelSourceError(
            f"{path} is truncated: tensor {name} ends at byte {8 + length + end}, the file at {size}"
        )


def chat_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """The chat template of a checkpoint: chat_template.jinja, or the default one of tokenizer_config.json
    (`settings`) or chat_template.json."""
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    found = settings.get("chat_template") or read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, Mapping)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def special_token(settings: Mapping[str, Any], name: str) -> str | None:
    """The spelling of bos_token, eos_token and the like in tokenizer_config.json (a string, or an object)."""
    value = settings.get(name)
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def tokenizer_definition(directory: Path) -> dict[str, Any]:
    """tokenizer.json, or its equivalent converted from the checkpoint's slow tokenizer."""
    found = read_json(directory / "tokenizer.json")
    if found:
        return found
    if not any((directory / name).exists() for name in ("tokenizer.model", "vocab.json", "spiece.model")):
        raise ModelSourceError(f"{directory} has no tokenizer: neither tokenizer.json nor a file to convert to it")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory))
        definition = json.loads(tokenizer.backend_tokenizer.to_str())
    except (OSError, ValueError, AttributeError, ImportError) as error:
        raise ModelSourceError(f"{directory}: the tokenizer can't be converted to tokenizer.json: {error}") from error
    assert isinstance(definition, dict)
    return definition


def with_bos(definition: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """`definition` with a frame that adds BOS, where `settings` ask for it and no frame exists."""
    token = special_token(settings, "bos_token")
    if not settings.get("add_bos_token") or token is None or _has_frame(definition.get("post_processor")):
        return definition
    number = token_id(definition, token)
    if number is None:
        return definition
    pieces = [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    frame = {
        "type": "TemplateProcessing",
        "single": pieces,
        "pair": [*pieces, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }
    return {**definition, "post_processor": frame}


def _has_frame(processor: Any) -> bool:
    if not isinstance(processor, Mapping):
        return False
    inner = processor.get("processors") or []
    return processor.get("type") == "TemplateProcessing" or any(_has_frame(entry) for entry in inner)


def token_id(definition: Mapping[str, Any], token: str) -> int | None:
    """The id of the token spelled `token` in a tokenizer.json."""
    for entry in definition.get("added_tokens") or []:
        if entry["content"] == token:
            return int(entry["id"])
    vocabulary = definition["model"].get("vocab") or {}
    if isinstance(vocabulary, Mapping):
        found = vocabulary.get(token)
        return None if found is None else int(found)
    return next((number for number, entry in enumerate(vocabulary) if entry[0] == token), None)
