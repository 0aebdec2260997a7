"""Our own products against plain torch: the same numbers, for every format, number of rows and number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels import INT8_GROUPS, team

if team.missing():
    pytest.skip(team.missing(), allow_module_level=True)

from engine.kernels import int8, rows
from engine.models.layers import Rope, rotate_

WIDTH = 192


@pytest.fixture(autouse=True)
def one_thread_afterwards() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


def weights(group: int, bits: int, outputs: int) -> tuple[int8.Matrix, Tensor]:
    """A random matrix as the kernels take it, and its values, float64 [outputs, WIDTH]."""
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 1 << bits, (outputs, WIDTH)).astype(np.uint8)
    scales = rng.random((outputs, WIDTH // group)).astype(np.float16).astype(np.float32)
    zeros = (-scales * 2 ** (bits - 1)).astype(np.float16).astype(np.float32)
    values = codes.reshape(outputs, -1, group) * scales[:, :, None].astype(np.float64) + zeros[:, :, None]
    return int8.pack(codes, scales, zeros, group, bits), torch.from_numpy(values.reshape(outputs, WIDTH))


@pytest.mark.parametrize("group", INT8_GROUPS)
@pytest.mark.parametrize("bits", [2, 4, 5, 6, 8])
@pytest.mark.parametrize(("count", "outputs"), [(1, 16), (2, 100), (7, 48), (33, 40)])
def test_a_product_loses_next_to_nothing(group: int, bits: int, count: int, outputs: int) -> None:
    matrix, values = weights(group, bits, outputs)
    x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(count))
    exact = x.double() @ values.t()
    found = int8.multiply(x, matrix)
    assert found.shape == (count, outputs)
    # An activation is off by at most a 2 * 254 * 127th of its group's greatest, at random.
    size = x.abs().max() * values.square().sum(1).sqrt() / (2 * 254 * 127)
    assert ((found - exact).abs() < 4 * size).all()


@pytest.mark.parametrize("group", INT8_GROUPS)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_depends_on_itself_alone(group: int, bits: int) -> None:
    matrix, _ = weights(group, bits, 80)
    x = torch.randn(45, WIDTH, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([int8.multiply(row[None], matrix) for row in x])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for count in (1, 2, 3, 5, 8, 15, 16, 45):
            assert torch.equal(int8.multiply(x[:count], matrix), alone[:count]), (threads, count)
        assert torch.equal(int8.multiply(x[7:30], matrix), alone[7:30])


def test_rows_of_zeros_and_views() -> None:
    matrix, values = weights(32, 4, 16)
    x = torch.randn(6, 2 * WIDTH)
    x[2] = 0.0
    found = int8.multiply(x[:, WIDTH:], matrix)
    assert torch.equal(found[2], torch.zeros(16))
    assert torch.allclose(
        found.double(), x[:, WIDTH:].double() @ values.t(), atol=0.05 * float(values.abs().sum(1).max())
    )
    assert int8.multiply(x[:0, :WIDTH], matrix).shape == (0, 16)


def test_groups_of_next_to_nothing_are_zero() -> None:
    """Steps of numbers near float32's least have no inverse: gates far below zero make such numbers."""
    matrix, values = weights(32, 4, 16)
    x = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(3))
    for power in range(-149, 0):
        x[:, :32] = 2.0**power
        found = int8.multiply(x, matrix)
        near = x.double() @ values.t()
        assert torch.allclose(found.double(), near, atol=0.01 * float(near.abs().max())), power


def test_what_is_not_finite_stays_seen() -> None:
    """A broken activation must not become a number that looks right."""
    matrix, _ = weights(32, 4, 16)
    x = torch.randn(2, WIDTH)
    x[0, 3], x[1, 5] = float("nan"), float("inf")
    assert not torch.isfinite(int8.multiply(x, matrix)).any()


@pytest.mark.parametrize("count", [1, 3, 200])
def test_small_passes_equal_torch(count: int) -> None:
    torch.set_num_threads(2)
    x, weight = torch.randn(count, 576), torch.rand(576)
    exact: Any = functional.rms_norm(x, (576,), weight, 1e-5)
    assert torch.allclose(rows.norm(x, weight, torch.tensor([1e-5])), exact, atol=2e-6)
    gate, up = x.chunk(2, 1)
    assert torch.allclose(rows.swiglu(x), functional.silu(gate) * up, atol=2e-6)
    one = torch.cat([rows.norm(row[None], weight, torch.tensor([1e-5])) for row in x])
    assert torch.equal(one, rows.norm(x, weight, torch.tensor([1e-5])))
    assert torch.equal(torch.cat([rows.swiglu(row[None]) for row in x]), rows.swiglu(x))


@pytest.mark.parametrize("count", [1, 5, 300])
def test_rotation_equals_torch(count: int) -> None:
    """Of some heads of wider rows, which leave the others alone."""
    torch.set_num_threads(2)
    x = torch.randn(count, 15, 64)
    cos, sin = Rope(torch.rand(32), 400, torch.device("cpu")).at(torch.arange(count) + 7, torch.float32)
    exact = x.clone()
    rotate_(exact[:, :12], cos, sin)
    rows.rotate_(x[:, :12], cos, sin)
    assert torch.allclose(x, exact, atol=2e-6)
    assert torch.equal(x[:, 12:], exact[:, 12:])
    with pytest.raises(ValueError, match="gaps"):
        rows.rotate_(x.transpose(1, 2), cos, sin)


def test_gates_of_any_size() -> None:
    gate = torch.tensor([0.0, -0.0, 1e-30, 20.0, -20.0, 87.5, -87.5, 1e4, -1e4, 3e38, -3e38, torch.inf, torch.nan])
    up = torch.full_like(gate, 1.5)
    found, exact = rows.swiglu(torch.cat((gate, up))[None])[0], functional.silu(gate) * up
    assert torch.allclose(found, exact, rtol=1e-6, atol=1e-30, equal_nan=True), (found, exact)
    x = torch.linspace(-30, 30, 4096)
    found = rows.swiglu(torch.cat((x, torch.ones_like(x)))[None])[0]
    assert torch.allclose(found.double(), x.double() * torch.sigmoid(x.double()), rtol=1e-6, atol=0)
