"""Builds scripted model files (format: `engine.script`) and their prepared directories for tests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.prepare import prepare
from engine.prepared import PreparedModel

Piece = str | Mapping[str, Any]

CHATML: Mapping[str, Any] = {
    "synthetic": {
        "specials": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        "added": ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"],
    }
}
"""A synthetic tokenizer with the control tokens of the ChatML families (qwen38, qwen3, mimo_v2, step5, nemotron_h)."""


def token(spelling: str) -> dict[str, Any]:
    """The control token spelled so."""
    return {"token": spelling}


def spelled(text: str) -> dict[str, Any]:
    """`text` with one token a byte: delimiters in ordinary pieces, characters spread over tokens."""
    return {"spelled": text}


def times(count: int, piece: str) -> dict[str, Any]:
    """`piece` encoded once and repeated."""
    return {"text": piece, "times": count}


def turn(*output: Piece, when: str | None = None, **fields: Any) -> dict[str, Any]:
    """One answer; `fields` as in the format (then, delay_ms, prefill_delay_ms, fail_at, logits)."""
    return {"when": when, "output": list(output), **fields}


def script(
    directory: Path,
    turns: Iterable[Mapping[str, Any]],
    *,
    recipe: str = "generic",
    tokenizer: Mapping[str, Any] | None = None,
    name: str = "scripted",
    **fields: Any,
) -> str:
    """Writes a script file into `directory` and returns its model source, `scripted:FILE`."""
    path = directory / f"{name}.json"
    body = {"recipe": recipe, "tokenizer": dict(tokenizer or CHATML), "turns": [dict(each) for each in turns], **fields}
    path.write_text(json.dumps(body, ensure_ascii=False), encoding="utf-8")
    return f"scripted:{path}"


def prepared(directory: Path, turns: Sequence[Mapping[str, Any]], **fields: Any) -> PreparedModel:
    """A script (see `script`), prepared under `directory` / cache."""
    return PreparedModel.load(prepare(script(directory, turns, **fields), directory / "cache"))
