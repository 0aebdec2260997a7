"""The demo model against transformers, from the file's own bytes dequantised by the gguf package."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.execution import loading
from engine.kernels import team
from engine.models.layers import Many, Precision
from tests.support.smollm2 import reference, smollm2
from tests.support.tiny_models import Captured, Driver, tokens

IDS = tokens(90, seed=21, vocab=49000)


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    """transformers' float32 logits [positions, vocab] of IDS and six more tokens."""
    model = reference()
    with torch.inference_mode():
        return torch.as_tensor(model(torch.tensor([[*IDS, *tokens(6, seed=3)]])).logits[0])


def feed(driver: Driver, more: list[int]) -> torch.Tensor:
    """Logits of IDS' last position and of `more`, each a one-token chunk."""
    captured = Captured(driver)
    driver.prefill(0, IDS, chunk=32)
    for index in range(len(more)):
        place = len(IDS) + index
        driver.prefill(0, [*IDS, *more[: index + 1]], cached=place, table=list(range(40)))
    return captured.take()


@pytest.mark.parametrize("numerics", ["invariant", "fast"])
def test_float32_equals_transformers(expected: torch.Tensor, numerics: str) -> None:
    driver = Driver.load(smollm2(), dtype="float32", numerics=numerics, kv_bytes=64 << 20)
    found = feed(driver, tokens(6, seed=3))
    assert torch.allclose(found, expected[len(IDS) - 1 :], rtol=0, atol=1e-4), (found - expected[-7:]).abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_many_rows_take_the_dense_copy(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Whatever a machine measures, both kernels of a layer give nearly the same logits for the same rows."""

    def fixed(precision: Precision, *_: Any) -> Precision:
        return replace(precision, int8=False, many=Many(4, dtype), many_head=Many(4, torch.bfloat16))

    monkeypatch.setattr(loading, "tuned", fixed)
    driver = Driver.load(smollm2(), dtype="auto", numerics="fast", kv_bytes=64 << 20)
    captured = Captured(driver)
    for slot in range(6):
        driver.prefill(slot, IDS, room=20)
    captured.take()
    many, _ = driver.decode(list(range(6)), 1), driver.decode([0], 1)
    driver.prefill(7, [*IDS, many[0][0]], cached=len(IDS), table=list(range(40)), room=20)
    found = captured.take().log_softmax(-1)
    assert torch.allclose(found[:6], found[:1], atol=0.5)  # some rows have lanes, some don't: other rounding
    assert (found[0].exp() * (found[0] - found[-1])).sum() < 0.05


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("numerics", ["invariant", "fast"])
def test_quantised_weights_stay_close(
    monkeypatch: pytest.MonkeyPatch, expected: torch.Tensor, numerics: str, compiled: bool
) -> None:
    """With kernels of our own where the processor has what they need, and with torch's."""
    if not compiled:
        monkeypatch.setattr(team, "missing", lambda: "as on another processor")
    elif team.missing():
        pytest.skip(team.missing())
    found = feed(Driver.load(smollm2(), dtype="auto", numerics=numerics, kv_bytes=64 << 20), tokens(6, seed=3))
    wanted = expected[len(IDS) - 1 :].log_softmax(-1)
    divergence = (wanted.exp() * (wanted - found.log_softmax(-1))).sum(-1)
    assert divergence.max() < 0.02, divergence
