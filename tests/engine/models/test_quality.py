"""What quantised kernels cost in quality: perplexity of the licence's opening against the dequantised weights."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from engine.kernels import team
from engine.prepare import prepare
from engine.prepared import PreparedModel
from tests.support.smollm2 import smollm2
from tests.support.tiny_models import Driver

TEXT = (Path(__file__).parents[3] / "LICENSE").read_text()[:2400]


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    tokenizer = PreparedModel.load(prepare("builtin:smollm2", tmp_path_factory.mktemp("cache"))).tokenizer
    return tokenizer.encode(TEXT, specials=False)


def perplexity(ids: list[int], dtype: str, numerics: str) -> float:
    driver = Driver.load(smollm2(), dtype=dtype, numerics=numerics, kv_bytes=64 << 20)
    results = driver.prefill(0, ids, chunk=256, room=1, score=0)
    values = [value for result in results for row in result.scored for _, value, _, _ in row.entries]
    assert len(values) == len(ids) - 1
    return math.exp(-sum(values) / len(values))


@pytest.mark.parametrize("compiled", [True, False])
def test_perplexity_stays_within_half_a_percent(
    monkeypatch: pytest.MonkeyPatch, ids: list[int], compiled: bool
) -> None:
    """With kernels of our own where the processor has what they need, and with torch's."""
    if not compiled:
        monkeypatch.setattr(team, "missing", lambda: "as on another processor")
    elif team.missing():
        pytest.skip(team.missing())
    exact = perplexity(ids, "float32", "fast")
    assert exact < 60  # the text means something to the model
    for numerics in ("invariant", "fast"):
        assert perplexity(ids, "auto", numerics) == pytest.approx(exact, rel=0.005)
