"""The same engine on a CUDA device: equal logits, equal tokens ahead of their results, FlashAttention as the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention import choose
from engine.attention.flash import FlashAttention
from engine.attention.protocol import Batch, KvPool, Needs, Query
from engine.attention.reference import ReferenceAttention
from engine.config import Manifest
from engine.scheduler.step import Row, Step
from tests.support.tiny_models import KINDS, SAMPLED, Captured, Driver, checkpoint, not_late, reference, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OPTIONS: dict[str, Any] = {"device": "cuda", "attention": "reference"}


@pytest.mark.parametrize("kind", list(KINDS))
def test_logits_equal_transformers(kind: str, tmp_path: Path) -> None:
    ids = tokens(150)
    model = checkpoint(kind, tmp_path)
    for chunk in (512, 37):
        driver = Driver.load(model, **OPTIONS)
        captured = Captured(driver)
        first = driver.prefill(0, ids, chunk=chunk)[-1].sampled[0].id
        more = driver.decode([0], 6)[0]
        with torch.inference_mode():
            wanted = reference(kind)(torch.tensor([[*ids, first, *more]])).logits[0][len(ids) - 1 : -1]
        assert torch.allclose(captured.take().cpu(), wanted, rtol=0, atol=1e-4)


@pytest.fixture
def model(tmp_path: Path) -> Manifest:
    return checkpoint("llama", tmp_path)


def test_steps_launched_ahead_of_their_results(model: Manifest) -> None:
    """The next step's input token never visits the host."""
    driver = Driver.load(model, **OPTIONS)
    lone = driver.generate(0, tokens(30), 9, sampling=SAMPLED)
    driver.prefill(1, tokens(30), sampling=SAMPLED)
    steps = [driver.runner.launch(Step(number, [Row(1, 1)]), not_late) for number in range(70, 78)]
    assert [step().sampled[0].id for step in steps] == lone[1:]


def test_decode_waits_for_nothing(model: Manifest) -> None:
    driver = Driver.load(model, **OPTIONS)
    driver.prefill(0, tokens(30), sampling=SAMPLED)
    driver.decode([0], 3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step = driver.runner.launch(Step(90, [Row(0, 1)]), not_late)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(step().sampled) == 1


def test_scores_and_logprobs(model: Manifest) -> None:
    ids = tokens(70)
    driver = Driver.load(model, **OPTIONS)
    results = driver.prefill(0, ids, chunk=32, score=2, logprobs=4)
    with torch.inference_mode():
        wanted = reference("llama")(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    entries = [entry for result in results for row in result.scored for entry in row.entries]
    for position, (token, value, _, _) in enumerate(entries, 1):
        assert token == ids[position]
        assert value == pytest.approx(float(wanted[position - 1][token]), abs=1e-4)
    row = results[-1].sampled[0]
    assert row.logprob == pytest.approx(float(wanted[-1][row.id]), abs=1e-4)


NEEDS = Needs("cuda", torch.bfloat16, heads=8, kv_heads=2, head_dim=128, layers=1, page_tokens=64, invariant=False)


@pytest.mark.parametrize("parts", [[(40, 1), (700, 1)], [(300, 1), (0, 200), (64, 100)], [(0, 513)]])
def test_flash_equals_the_oracle(parts: list[tuple[int, int]]) -> None:
    missing = FlashAttention.missing(NEEDS)
    if missing:
        pytest.skip(f"flash attention can't run here; missing: {', '.join(missing)}")
    device = torch.device("cuda")
    pools = [KvPool(64, NEEDS, device) for _ in range(2)]
    torch.manual_seed(1)
    pools[0].data.normal_()
    pools[1].data.copy_(pools[0].data)
    tables = torch.randperm(64)[: len(parts) * 16].view(len(parts), 16).int()
    queries, writes, offset = [], [], 0
    for slot, (start, count) in enumerate(parts):
        queries.append(Query(slot, start, count, offset))
        places = torch.arange(start, start + count)
        writes.append(tables[slot, places // 64].long() * 64 + places % 64)
        offset += count
    step = Batch(queries, offset, tables.numpy(), tables.to(device), torch.cat(writes).to(device))
    query = torch.randn(offset, 8, 128, device=device, dtype=torch.bfloat16)
    kv = torch.randn(offset, 4, 128, device=device, dtype=torch.bfloat16)
    flash, oracle = choose("flash", NEEDS, pools[0]), ReferenceAttention(pools[1])
    found = flash.forward(query, kv, 0, flash.prepare(step))
    wanted = oracle.forward(query, kv, 0, oracle.prepare(step))
    assert (found - wanted).abs().max() < 0.03
