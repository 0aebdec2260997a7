"""Writes small GGUF files for tests, through the `gguf` package's own writer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    tokens: Sequence[str],
    types: Sequence[int],
    model: str = "gpt2",
    pre: str | None = "gpt-2",
    merges: Sequence[str] | None = (),
    scores: Sequence[float] | None = None,
    numbers: Mapping[str, int] | None = None,
    flags: Mapping[str, bool] | None = None,
    floats: Mapping[str, float] | None = None,
    strings: Mapping[str, str] | None = None,
    tensors: Mapping[str, Any] | None = None,
    hidden: int = 32,
) -> Path:
    """A file of two layers with `hidden` features, whose only tensor is the embedding unless `tensors` are given.
    `numbers`, `flags`, `floats` and `strings` are more metadata by their full keys."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("Tiny Test")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(types))
    if merges:
        writer.add_token_merges(list(merges))
    if scores is not None:
        writer.add_token_scores(list(scores))
    for key, value in (numbers or {}).items():
        writer.add_uint32(key, value)
    for key, flag in (flags or {}).items():
        writer.add_bool(key, flag)
    for key, real in (floats or {}).items():
        writer.add_float32(key, real)
    for key, text in (strings or {}).items():
        writer.add_string(key, text)
    for name, tensor in (tensors or {"token_embd.weight": np.zeros((len(tokens), hidden), np.float32)}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
