"""Weight files: every GGUF type against the gguf package, row order, and what is said of broken files."""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine.kernels import team
from engine.models import quantized
from engine.models.gguf import FACTORS, QUANTIZED, Grouped, read_gguf
from engine.models.layers import Precision, linear
from engine.models.weights import (
    DummySource,
    GgufSource,
    SafetensorsSource,
    Weight,
    WeightsError,
    columns,
    dense,
    half_split,
    rows,
    shard_files,
)
from tests.support.smollm2 import smollm2_file

CONFIG: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}


def quantised_blocks(name: str, count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Random blocks of a format with finite scales."""
    kind = gguf.GGMLQuantizationType[name]
    rng = np.random.default_rng(len(name))
    raw = rng.integers(0, 256, (count, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    for at in FACTORS[name]:
        raw[:, at : at + 2] = rng.normal(size=count).astype(np.float16).view(np.uint8).reshape(count, 2)
    return raw


def write(path: Path, tensors: dict[str, tuple[Any, str]], architecture: str = "llama") -> Path:
    """`tensors`: name → (data or raw blocks, type name)."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", QUANTIZED)
def test_dequantised_as_the_gguf_package_does(name: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[name]
    width = gguf.GGML_QUANT_SIZES[kind][0] * 2
    raw = quantised_blocks(name, 6).reshape(3, -1)
    file = read_gguf(write(tmp_path / "x.gguf", {"t": (raw, name)}))
    assert file.tensors["t"].shape == (3, width)
    assert np.array_equal(file.blocks("t").dequantize(), gguf.dequantize(raw, kind))


@pytest.mark.parametrize("name", QUANTIZED)
def test_kernels_add_less_than_the_format_has_lost(name: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[name]
    raw = quantised_blocks(name, 2048 // gguf.GGML_QUANT_SIZES[kind][0])
    grouped = read_gguf(write(tmp_path / "x.gguf", {"w": (raw.reshape(4, -1), name)})).blocks("w")
    exact = torch.from_numpy(grouped.dequantize())
    used = quantized.effective(grouped) if quantized.packable(grouped) else exact.to(torch.bfloat16).float()
    added = float((used - exact).square().mean().sqrt())
    assert 0 < added < float(np.sqrt(np.mean(np.square(grouped.scales)) / 12))


@pytest.mark.parametrize(("name", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_plain_types(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    wanted = torch.arange(12).reshape(3, 4).to(dtype)
    raw = wanted.view(torch.uint8).numpy() if name == "BF16" else wanted.numpy()
    source = GgufSource(write(tmp_path / "x.gguf", {"token_embd.weight": (raw, name)}), CONFIG)
    found = source.get("model.embed_tokens.weight", (3, 4))
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, wanted)


def test_rotated_rows_of_llama_files_are_put_back(tmp_path: Path) -> None:
    """Pair order (x0 y0 x1 y1) becomes halves (x0 x1 y0 y1), only where the architecture has it."""
    data = np.arange(32, dtype=np.float32).reshape(16, 2)
    for architecture, first in (("llama", [0, 2, 1, 3]), ("qwen2", [0, 1, 2, 3])):
        path = write(tmp_path / f"{architecture}.gguf", {"blk.0.attn_q.weight": (data, "F32")}, architecture)
        found = dense(GgufSource(path, CONFIG).get("model.layers.0.self_attn.q_proj.weight", (16, 2)), torch.float32)
        assert (found[:4, 0] / 2).tolist() == first


def test_row_order_is_the_same_for_quantised_rows() -> None:
    weight = grouped(8, 64, 4)
    moved = half_split(weight, 2)
    assert torch.equal(dense(moved, torch.float32), dense(half_split(dense(weight, torch.float32), 2), torch.float32))


def grouped(count: int, width: int, bits: int, group: int = 32) -> Grouped:
    rng = np.random.default_rng(bits)
    shape = (count, width // group)
    return Grouped(
        rng.integers(0, 1 << bits, (count, width), dtype=np.uint8),
        (rng.random(shape) / 100).astype(np.float32),
        (rng.random(shape) - 0.5).astype(np.float32),
        group,
        bits,
    )


def test_slices() -> None:
    weight = grouped(8, 96, 4)
    whole = dense(weight, torch.float32)
    assert torch.equal(dense(rows(weight, 2, 3), torch.float32), whole[2:5])
    assert torch.equal(dense(columns(weight, 32, 64), torch.float32), whole[:, 32:96])
    assert torch.equal(dense(columns(weight, 40, 24), torch.float32), whole[:, 40:64])


@pytest.mark.parametrize("bits", [4, 5, 8])
@pytest.mark.parametrize("count", [16, 21])
def test_packed_products_are_within_their_scales_rounding(bits: int, count: int) -> None:
    weight = grouped(count, 128, bits)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = x.float() @ quantized.effective(weight).t()
    precision = Precision(torch.device("cpu"), torch.bfloat16, True, True)
    found = linear([weight], precision)(x).float()
    assert found.shape == (5, count)
    assert (found - exact).abs().max() < 0.02 * exact.abs().max()
    true = dense(weight, torch.float32)
    assert (quantized.effective(weight) - true).abs().max() < 2**-7 * true.abs().max()


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_unlike_formats_stand_side_by_side(int8: bool, dtype: torch.dtype) -> None:
    """Quantised in several ways and not at all, whatever dtype a neighbour gives."""
    if int8 and team.missing():
        pytest.skip(team.missing())
    plain = torch.randn(16, 64, generator=torch.Generator().manual_seed(2))
    parts: list[Weight] = [grouped(16, 64, 4), grouped(16, 64, 6, group=16), plain, grouped(32, 64, 8)]
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    bias = torch.arange(80).float()
    precision = Precision(torch.device("cpu"), torch.bfloat16, True, True, int8=int8)
    exact = x.float() @ torch.cat([dense(part, torch.float32) for part in parts]).t() + bias
    for order in (parts, parts[::-1]):
        wanted = (
            exact if order is parts else torch.cat([exact[:, 48:], exact[:, 32:48], exact[:, 16:32], exact[:, :16]], 1)
        )
        biases = bias if order is parts else torch.cat([bias[48:], bias[32:48], bias[16:32], bias[:16]])
        found = linear(list(order), precision, biases)(x.to(dtype))
        assert (found.float() - wanted).abs().max() < 0.02 * exact.abs().max()


def test_scales_beyond_float16_stay_out_of_our_products() -> None:
    small = grouped(16, 64, 4)
    large = replace(small, zeros=small.zeros * np.float32(1e9))
    assert quantized.fits_int8(small)
    assert not quantized.fits_int8(large)
    assert not quantized.fits_int8(replace(small, group=64))


def test_a_shard_index_names_its_files(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, 2)}, tmp_path / "one.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    with pytest.raises(WeightsError, match=r"two\.safetensors"):
        shard_files(index)
    save_file({"b": torch.zeros(2, 2)}, tmp_path / "two.safetensors")
    source = SafetensorsSource(shard_files(index))
    assert dense(source.get("b", (2, 2)), torch.float32).sum() == 0
    with pytest.raises(WeightsError, match="no tensor c"):
        source.get("c", (2, 2))
    with pytest.raises(WeightsError, match=r"tensor a has shape \(2, 2\)"):
        source.get("a", (2, 3))


def test_safetensors_of_unsupported_type_or_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(64, 2, dtype=torch.int8)}, path)
    with pytest.raises(WeightsError, match=r"tensor a has unsupported type torch\.int8"):
        SafetensorsSource([path]).get("a", (64, 2))
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(WeightsError, match=r"x\.safetensors is corrupt or truncated"):
        SafetensorsSource([path])


def test_broken_gguf_files_are_named(tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    write(whole, {"token_embd.weight": (np.ones((4, 32), np.float32), "F32")})
    data = whole.read_bytes()
    for name, content, words in (
        ("empty", b"", "isn't a GGUF file"),
        ("other", b"PK" + data[2:], "isn't a GGUF file"),
        ("version", data[:4] + struct.pack("<I", 9) + data[8:], "version 9"),
        ("header", data[:40], "truncated"),
        ("tail", data[:-64], r"truncated: tensor token_embd\.weight"),
    ):
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        with pytest.raises(WeightsError, match=words):
            read_gguf(path)
    with pytest.raises(WeightsError, match="can't read"):
        read_gguf(tmp_path / "absent.gguf")


def test_an_unsupported_gguf_type_names_tensor_and_type(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.IQ4_NL
    raw = np.zeros((2, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    path = write(tmp_path / "x.gguf", {"blk.0.ffn_up.weight": (raw, "IQ4_NL")})
    with pytest.raises(WeightsError, match=r"blk\.0\.ffn_up\.weight has unsupported type IQ4_NL"):
        read_gguf(path)


def test_the_demo_file_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    shutil.copyfile(smollm2_file(), path)
    with path.open("r+b") as file:
        file.truncate(90_000_000)
    with pytest.raises(WeightsError, match="truncated: tensor"):
        read_gguf(path)


def test_dummy_weights_depend_on_seed_and_name() -> None:
    one = dense(DummySource({}, 1).get("a", (40, 8)), torch.float32)
    assert torch.equal(one, dense(DummySource({}, 1).get("a", (40, 8)), torch.float32))
    assert not torch.equal(one, dense(DummySource({}, 2).get("a", (40, 8)), torch.float32))
    assert not torch.equal(one, dense(DummySource({}, 1).get("b", (40, 8)), torch.float32))
    assert 0.9e-3 < float(one.abs().max()) <= 1e-3
