"""Where a model's weights come from: safetensors, GGUF or seeded random ones, under Hugging Face tensor names.

A source answers by name and reads lazily; a quantised tensor stays `Grouped`. Owns the GGUF name mapping, the q/k row
order and slicing for tensor parallel. Leaves the choice of kernels to `quantized` and `layers`.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.config import Manifest
from engine.models.errors import WeightsError
from engine.models.gguf import PLAIN, GgufFile, Grouped, read_gguf

__all__ = ["Weight", "WeightSource", "WeightsError", "columns", "dense", "open_weights", "rows"]

Weight = Tensor | Grouped
"""A plain tensor in the checkpoint's dtype, or a quantised matrix."""

DUMMY_BOUND = 1e-3


class WeightSource(Protocol):
    """Tensors by Hugging Face name."""

    def has(self, name: str) -> bool: ...

    def get(self, name: str, shape: Sequence[int]) -> Weight:
        """The tensor. Raises WeightsError when it is missing or doesn't have `shape`."""
        ...


def open_weights(manifest: Manifest, seed: int | None = None) -> WeightSource:
    """The source that `manifest` names, or dummy weights when `seed` is given. Raises WeightsError."""
    if seed is not None:
        return DummySource(manifest.config, seed)
    paths = [Path(path) for path in manifest.weights]
    if not paths:
        raise WeightsError(f"{manifest.model_id} names no weight files")
    if manifest.format == "gguf":
        return GgufSource(paths[0], manifest.config)
    return SafetensorsSource(paths)


def dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    """`weight` dequantised, in `dtype`."""
    tensor = torch.from_numpy(weight.dequantize()) if isinstance(weight, Grouped) else weight
    return tensor.to(dtype)


def rows(weight: Weight, start: int, count: int) -> Weight:
    """Output rows [start, start + count)."""
    if isinstance(weight, Grouped):
        part = slice(start, start + count)
        return Grouped(weight.codes[part], weight.scales[part], weight.zeros[part], weight.group, weight.bits)
    return weight[start : start + count]


def columns(weight: Weight, start: int, count: int) -> Weight:
    """Input columns [start, start + count). A cut within a quantisation group dequantises the matrix."""
    if not isinstance(weight, Grouped):
        return weight[:, start : start + count]
    group = weight.group
    if start % group or count % group:
        return torch.from_numpy(weight.dequantize()[:, start : start + count])
    groups = slice(start // group, (start + count) // group)
    codes = weight.codes[:, start : start + count]
    return Grouped(codes, weight.scales[:, groups], weight.zeros[:, groups], group, weight.bits)


def _checked(weight: Weight, name: str, shape: Sequence[int], where: str) -> Weight:
    if tuple(weight.shape) != tuple(shape):
        raise WeightsError(
            f"{where}: tensor {name} has shape {tuple(weight.shape)}, the config asks for {tuple(shape)}"
        )
    return weight


class SafetensorsSource:
    """One or several safetensors files, memory-mapped."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._stack = ExitStack()
        self._files: dict[str, tuple[Path, object]] = {}
        for path in paths:
            try:
                handle = self._stack.enter_context(safe_open(path, framework="pt"))
                names = list(handle.keys())
            except (OSError, SafetensorError) as error:
                raise WeightsError(f"{path.name} is corrupt or truncated: {error}") from error
            for name in names:
                self._files[name] = (path, handle)

    def has(self, name: str) -> bool:
        return name in self._files

    def get(self, name: str, shape: Sequence[int]) -> Weight:
        if name not in self._files:
            raise WeightsError(f"the checkpoint has no tensor {name}")
        path, handle = self._files[name]
        try:
            tensor = handle.get_tensor(name)  # type: ignore[attr-defined]
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{path.name}: tensor {name} can't be read: {error}") from error
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise WeightsError(
                f"{path.name}: tensor {name} has unsupported type {tensor.dtype}; supported: F32, F16, BF16"
            )
        return _checked(tensor, name, shape, path.name)


_GGUF_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "rope_freqs.weight": "rope_freqs.weight",
}
_ROTATED = ("self_attn.q_proj", "self_attn.k_proj")


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face one."""
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    parts = name.split(".")
    if parts[:2] == ["model", "layers"] and len(parts) > 4:
        inner = _GGUF_LAYER.get(".".join(parts[3:-1]))
        if inner is not None:
            return f"blk.{parts[2]}.{inner}.{parts[-1]}"
    return name


class GgufSource:
    """One .gguf file. llama files keep q and k rows in pair order (x0 x1 rotated together); they come out in the
    half-split order of Hugging Face checkpoints, which the models rotate."""

    def __init__(self, path: Path, config: dict[str, object]) -> None:
        self._file: GgufFile = read_gguf(path)
        self._paired = self._file.metadata.get("general.architecture") == "llama"
        self._heads = {
            "self_attn.q_proj": int(str(config["num_attention_heads"])),
            "self_attn.k_proj": int(str(config.get("num_key_value_heads") or config["num_attention_heads"])),
        }

    def has(self, name: str) -> bool:
        return gguf_name(name) in self._file.tensors

    def get(self, name: str, shape: Sequence[int]) -> Weight:
        path, stored = self._file.path, gguf_name(name)
        if stored not in self._file.tensors:
            raise WeightsError(f"{path.name} has no tensor {stored}")
        entry = self._file.tensors[stored]
        weight: Weight = self._file.blocks(stored) if entry.type not in PLAIN else self._plain(stored)
        weight = _checked(weight, stored, shape, path.name)
        module = next((module for module in _ROTATED if f".{module}." in name), None)
        return weight if module is None or not self._paired else half_split(weight, self._heads[module])

    def _plain(self, stored: str) -> Tensor:
        entry = self._file.tensors[stored]
        raw = np.array(self._file.raw(stored))
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[entry.type]
        return torch.from_numpy(raw).view(dtype).reshape(entry.shape)


def half_split(weight: Weight, heads: int) -> Weight:
    """Reorders output rows from rotated pairs (x0 y0 x1 y1 …) to halves (x0 x1 … y0 y1 …), head by head."""
    count = weight.shape[0]
    order = np.arange(count).reshape(heads, count // heads // 2, 2).swapaxes(1, 2).reshape(-1)
    if isinstance(weight, Grouped):
        return Grouped(weight.codes[order], weight.scales[order], weight.zeros[order], weight.group, weight.bits)
    return weight[torch.from_numpy(order)]


_QK_NORM_TYPES = ("qwen3",)
_QKV_BIAS_TYPES = ("qwen2",)


class DummySource:
    """Seeded uniform weights in ±1e-3 of whatever shape is asked, bfloat16, for measuring a shape without a
    checkpoint. A tensor depends on the seed and its name alone."""

    def __init__(self, config: dict[str, object], seed: int) -> None:
        self._seed = seed
        self._config = config

    def has(self, name: str) -> bool:
        kind = str(self._config.get("model_type", ""))
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            return kind in _QK_NORM_TYPES
        if name.endswith("_proj.bias"):
            return kind in _QKV_BIAS_TYPES and ".o_proj" not in name and ".mlp." not in name
        if name == "lm_head.weight":
            return not self._config.get("tie_word_embeddings")
        return name.endswith(".weight") and name != "rope_freqs.weight"

    def get(self, name: str, shape: Sequence[int]) -> Weight:
        device = "cuda" if torch.cuda.is_available() else "cpu"  # billions of numbers take minutes on a host
        generator = torch.Generator(device).manual_seed(self._seed ^ zlib.crc32(name.encode()))
        tensor = torch.empty(*shape, dtype=torch.bfloat16, device=device)
        return tensor.uniform_(-DUMMY_BOUND, DUMMY_BOUND, generator=generator)


def shard_files(index: Path) -> list[Path]:
    """The files named by a `model.safetensors.index.json`. Raises WeightsError when one is missing."""
    try:
        mapping: dict[str, str] = json.loads(index.read_text())["weight_map"]
    except (OSError, ValueError, KeyError) as error:
        raise WeightsError(f"{index.name} is corrupt: {error}") from error
    paths = [index.parent / name for name in sorted(set(mapping.values()))]
    missing: Iterable[str] = [path.name for path in paths if not path.exists()]
    if missing:
        raise WeightsError(f"{index.name} names missing files: {', '.join(missing)}")
    return paths


def weight_bytes(weight: Weight) -> int:
    """Bytes that one pass over the weight reads in its own format."""
    if isinstance(weight, Grouped):
        return math.prod(weight.shape) * weight.bits // 8 + weight.scales.size * 4
    return weight.numel() * weight.element_size()
