"""Logits equal transformers' within 1e-4 in float32: whole prompts, chunks, cached prefixes, decode."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config import Manifest
from engine.models.errors import WeightsError
from tests.support.tiny_models import KINDS, Captured, Driver, checkpoint, reference, tokens

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return checkpoint(kind, tmp_path_factory.mktemp(kind))


def expected(kind: str, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.as_tensor(reference(kind)(torch.tensor([ids])).logits[0])


@pytest.mark.parametrize(("attention", "numerics"), [("cpu", "invariant"), ("cpu", "fast"), ("reference", "fast")])
def test_whole_prompt_chunks_and_decode(kind: str, model: Manifest, attention: str, numerics: str) -> None:
    ids = tokens(150)
    for chunk in (512, 16, 37):
        driver = Driver.load(model, attention=attention, numerics=numerics)
        captured = Captured(driver)
        first = driver.prefill(0, ids, chunk=chunk)[-1].sampled[0].id
        more = driver.decode([0], 6)[0]
        logits = captured.take()
        wanted = expected(kind, [*ids, first, *more])[len(ids) - 1 : -1]
        assert torch.allclose(logits, wanted, rtol=0, atol=TOLERANCE), (logits - wanted).abs().max()


def test_cached_prefix(kind: str, model: Manifest) -> None:
    """A page table that points at pages which another request filled."""
    driver = Driver.load(model)
    shared, tail = tokens(96), tokens(30, seed=1)
    table = driver.pages(200)
    driver.prefill(0, shared + tokens(9, seed=2), table=table)
    captured = Captured(driver)
    driver.prefill(5, shared + tail, cached=96, table=table[:6] + driver.pages(100))
    wanted = expected(kind, shared + tail)[-1:]
    assert torch.allclose(captured.take(), wanted, rtol=0, atol=TOLERANCE)


def test_page_copies_come_before_the_forward(kind: str, model: Manifest) -> None:
    driver = Driver.load(model)
    ids = tokens(40)
    table, copy = driver.pages(48), driver.pages(48)
    driver.prefill(0, ids, table=table)
    captured = Captured(driver)
    driver.run([], copies=list(zip(table[:2], copy[:2], strict=True)))
    driver.prefill(1, ids, cached=32, table=copy)
    assert torch.allclose(captured.take(), expected(kind, ids)[-1:], rtol=0, atol=TOLERANCE)


def test_bfloat16_is_close(kind: str, model: Manifest) -> None:
    driver = Driver.load(model, dtype="bfloat16")
    captured = Captured(driver)
    ids = tokens(60)
    driver.prefill(0, ids)
    wanted = expected(kind, ids)[-1]
    assert torch.corrcoef(torch.stack((captured.take()[0], wanted)))[0, 1] > 0.99


def test_unsupported_parts_are_named(tmp_path: Path) -> None:
    model = checkpoint("llama", tmp_path)
    for change, word in (
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"num_hidden_layers": 4}, "model.layers.3"),
        ({"intermediate_size": 97}, "mlp.gate_proj"),
    ):
        model_config = dict(model.config, **change)
        broken = Manifest(**{**{f: getattr(model, f) for f in model.__slots__}, "config": model_config})
        with pytest.raises(WeightsError, match=word):
            Driver.load(broken)
