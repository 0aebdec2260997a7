"""The layers as one program give the same bits as the layers called one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention import choose
from engine.attention.protocol import Batch, KvPool, Needs, Query
from engine.kernels import team
from engine.models.compiled import compilable
from engine.models.gguf import Grouped
from engine.models.layers import Precision
from engine.models.llama import Llama
from engine.models.weights import Weight
from engine.parallel.collectives import Alone

Formats = Mapping[str, tuple[int, int] | tuple[()]]
CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 192,
    "vocab_size": 96,
    "rope_theta": 10000.0,
}
PRECISION = Precision(CPU, torch.bfloat16, quantized=True, invariant=True, int8=True)


class Source:
    """Random weights, matrices quantised: `formats` gives (group, bits) by a part of the name, () for a dense one."""

    def __init__(self, formats: Formats, extras: Sequence[str]) -> None:
        self._formats, self._extras = formats, extras
        self._random = np.random.default_rng(5)

    def has(self, name: str) -> bool:
        return any(part in name for part in self._extras)

    def get(self, name: str, shape: Sequence[int]) -> Weight:
        values = self._random.normal(size=tuple(shape)).astype(np.float32)
        if len(shape) == 1:
            return torch.from_numpy(values * 0.1 + ("norm" in name))
        form = next((form for part, form in self._formats.items() if part in name), (32, 4))
        if not form or "embed" in name:
            return torch.from_numpy(values * shape[1] ** -0.5)
        group, bits = form
        codes = self._random.integers(0, 1 << bits, tuple(shape)).astype(np.uint8)
        scales = self._random.random((shape[0], shape[1] // group)).astype(np.float16).astype(np.float32)
        scales *= np.float32(2.0 ** -(bits + 2))
        return Grouped(codes, scales, -scales * (1 << bits - 1), group, bits)


def model(formats: Formats, extras: Sequence[str]) -> Llama:
    return Llama(CONFIG, Source(formats, extras), PRECISION, Alone(), context=400)


def steps(found: Llama) -> list[torch.Tensor]:
    """Hidden rows of a long chunk, decode rows and another chunk beside them, and a padded step."""
    needs = Needs("cpu", torch.bfloat16, found.heads, found.kv_heads, found.head_dim, 3, 16, True)
    pool = KvPool(80, needs, CPU)
    attention = choose("compiled", needs, pool)
    tables = np.random.default_rng(1).permutation(80).reshape(4, 20).astype(np.int32)
    results = []
    for parts, padding in (
        ([(0, 0, 150)], 0),
        ([(1, 0, 5), (2, 0, 33)], 0),
        ([(0, 150, 1), (1, 5, 1), (2, 33, 17)], 0),
        ([(0, 151, 1), (1, 6, 1)], 2),
        ([(0, 152, 1)], 0),
    ):
        queries: list[Query] = []
        writes: list[int] = []
        positions: list[int] = []
        for slot, start, count in parts:
            queries.append(Query(slot, start, count, len(positions)))
            places = np.arange(start, start + count)
            positions += places.tolist()
            writes += (tables[slot, places // 16].astype(np.int64) * 16 + places % 16).tolist()
        real = len(positions)
        positions += [0] * padding
        writes += [pool.pages * 16] * padding
        batch = Batch(queries, len(positions), tables, torch.from_numpy(tables), torch.tensor(writes))
        ids = torch.tensor(positions) * 7 % CONFIG["vocab_size"]
        hidden = found.forward(ids, torch.tensor(positions), attention, attention.prepare(batch))
        results.append(hidden[:real].clone())
    return results


@pytest.mark.skipif(bool(team.missing()), reason=team.missing())
@pytest.mark.parametrize(
    ("formats", "extras"),
    [
        ({}, ()),
        ({"v_proj": (16, 6), "down": (16, 6), "up": (32, 8)}, ()),
        ({}, ("q_norm", "k_norm")),
        ({"v_proj": (32, 8)}, ("q_proj.bias", "k_proj.bias", "v_proj.bias")),
    ],
    ids=["plain", "mixed formats", "norms of heads", "biases"],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_the_program_equals_its_layers(formats: Formats, extras: Sequence[str], threads: int) -> None:
    torch.set_num_threads(threads)
    try:
        compiled, layered = model(formats, extras), model(formats, extras)
        assert compilable(compiled)
        layered._fits = False
        for found, wanted in zip(steps(compiled), steps(layered), strict=True):
            assert torch.isfinite(wanted).all()
            assert torch.equal(found, wanted)
        assert compiled._compiled is not None
    finally:
        torch.set_num_threads(1)


@pytest.mark.skipif(bool(team.missing()), reason=team.missing())
def test_a_model_with_another_matrix_runs_layer_by_layer() -> None:
    found = model({"o_proj": ()}, ())
    assert not compilable(found)
    assert all(torch.isfinite(part).all() for part in steps(found))


@pytest.mark.skipif(bool(team.missing()), reason=team.missing())
def test_positions_beyond_the_context_are_refused() -> None:
    found = model({}, ())
    needs = Needs("cpu", torch.bfloat16, found.heads, found.kv_heads, found.head_dim, 3, 16, True)
    pool = KvPool(30, needs, CPU)
    attention = choose("compiled", needs, pool)
    tables = np.arange(30, dtype=np.int32).reshape(1, 30)
    for position in (399, 400):
        step = Batch([Query(0, position, 1, 0)], 1, tables, torch.from_numpy(tables), torch.tensor([position]))
        metadata = attention.prepare(step)
        if position < 400:
            found.forward(torch.tensor([1]), torch.tensor([position]), attention, metadata)
        else:
            with pytest.raises(IndexError, match="position 400 is outside the context of 400 tokens"):
                found.forward(torch.tensor([1]), torch.tensor([position]), attention, metadata)
