"""Which kernel serves how many rows, for quantised weights on the CPU.

Under `fast` numerics a short measurement at start decides from how many rows on a dense copy beats int4, and in which
dtype. What is measured fits into the cache, where a model doesn't, so no product counts as faster than memory gives its
weights. Under `invariant` nothing is timed: a choice that a busy machine could change would change results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.models import quantized
from engine.models.gguf import Grouped
from engine.models.layers import Many, PackedLinear, Precision

_WIDEST = 64
_ROWS = (1, 2, 4, 8, 16, 32, _WIDEST)
_COPIES = 6
"""Weights in turn, so that a copy isn't found in the first cache as it wouldn't be in a model."""
_REPEATS = 3
_STREAMED = 256 << 20
"""Bytes that are read to learn what memory gives."""


def tuned(precision: Precision, config: Mapping[str, Any], cache_bytes: int) -> Precision:
    """`precision` with the kernels for a quantised model of `config`. `cache_bytes`: the processor's last-level cache.

    A dense head reads twice what two int4 halves do, which costs nothing where it stays in the cache, and computes in
    half the time: under `invariant` that decides it.
    """
    if precision.int8:
        return precision
    if precision.invariant:
        return replace(precision, dense_head=cache_bytes >= 4 * int(config["vocab_size"]) * int(config["hidden_size"]))
    width = int(config["hidden_size"]) // 32 * 32
    few = [quantized.pack(_random(config, index))[0] for index in range(_COPIES)]
    rate = _bandwidth()
    times: dict[torch.dtype | None, dict[int, float]] = {}
    times[None] = _bounded(_times(list(few), torch.bfloat16, width), sum(product.nbytes for product in few) / rate)
    for dtype in (torch.bfloat16, torch.float32):
        copies = [PackedLinear(quantized.effective(_random(config, index)).to(dtype)) for index in range(_COPIES)]
        floor = sum(product.nbytes for product in copies) / rate
        times[dtype] = _bounded(_times(list(copies), dtype, width), floor)
    return replace(precision, many=_many(times, 1), many_head=_many(times, 2))


def _many(times: Mapping[torch.dtype | None, Mapping[int, float]], halves: int) -> Many:
    """The dense dtype that is best at many rows, and the rows from which it beats `halves` int4 products for good."""
    dtype = min((torch.bfloat16, torch.float32), key=lambda kind: times[kind][_WIDEST])
    if halves == 2:  # the head serves few rows mostly, and bfloat16 reads half as much
        dtype = torch.bfloat16
    slower = [rows for rows in _ROWS if times[dtype][rows] >= halves * times[None][rows]]
    last = max(slower, default=0)
    return Many(next((rows for rows in _ROWS if rows > last), 2 * _WIDEST), dtype)


def _bandwidth() -> float:
    """Bytes a second that this process's threads read from memory."""
    data = torch.ones(_STREAMED // 4)
    spans = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        data.sum()
        spans.append(time.perf_counter() - start)
    return _STREAMED / min(spans)


def _bounded(times: Mapping[int, float], floor: float) -> dict[int, float]:
    """`times` where reading the weights alone takes `floor` seconds."""
    return {rows: max(seconds, floor) for rows, seconds in times.items()}


def _random(config: Mapping[str, Any], seed: int) -> Grouped:
    """A 4-bit matrix of the shape of gate and up."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = 2 * int(config["intermediate_size"]), int(config["hidden_size"]) // 32 * 32
    codes = torch.randint(0, 16, (rows, width), dtype=torch.uint8, generator=generator)
    scales = torch.rand(rows, width // 32, generator=generator)
    return Grouped(codes.numpy(), scales.numpy(), (scales * -8).numpy(), 32, 4)


def _times(products: list[Callable[[Tensor], Tensor]], dtype: torch.dtype, width: int) -> dict[int, float]:
    """rows → the least seconds that all `products` took."""
    found = {}
    with torch.inference_mode():
        for rows in _ROWS:
            x = torch.ones(rows, width, dtype=dtype)
            spans = []
            for _ in range(_REPEATS):
                start = time.perf_counter()
                for product in products:
                    product(x)
                spans.append(time.perf_counter() - start)
            found[rows] = min(spans)
    return found
