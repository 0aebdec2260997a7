"""Under invariant numerics a row's bits depend on nothing but its own request."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.smollm2 import smollm2
from tests.support.tiny_models import SAMPLED, Captured, Driver, checkpoint, tokens


@pytest.fixture(scope="module", params=["float32", "bfloat16", "quantised"])
def driver_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if request.param == "quantised":
        return lambda: Driver.load(smollm2(), dtype="auto", numerics="invariant", kv_bytes=96 << 20)
    model = checkpoint("llama", tmp_path_factory.mktemp("invariance"))
    return lambda: Driver.load(model, dtype=request.param, numerics="invariant")


def test_alone_in_a_batch_and_in_any_chunks(driver_of: Any) -> None:
    lengths = [5, 16, 33, 70, 129, 200, 17, 600]
    prompts = [tokens(length, seed=length) for length in lengths]

    def alone(chunk: int) -> list[tuple[list[int], torch.Tensor]]:
        driver = driver_of()
        captured = Captured(driver)
        found = []
        for slot, ids in enumerate(prompts):
            first = driver.prefill(slot, ids, chunk=chunk, sampling=SAMPLED)[-1].sampled[0].id
            found.append(([first, *driver.decode([slot], 4)[slot]], captured.take()))
        return found

    whole, cut = alone(512), alone(16)
    for (tokens_a, logits_a), (tokens_b, logits_b) in zip(whole, cut, strict=True):
        assert torch.equal(logits_a, logits_b)
        assert tokens_a == tokens_b
    driver = driver_of()
    captured = Captured(driver)
    first = [driver.prefill(slot, ids, sampling=SAMPLED)[-1].sampled[0].id for slot, ids in enumerate(prompts)]
    start = captured.take()
    more = driver.decode(list(range(8)), 4)
    together = captured.take().view(4, 8, -1)
    for slot, (ids, logits) in enumerate(whole):
        assert torch.equal(torch.cat((start[slot : slot + 1], together[:, slot])), logits)
        assert [first[slot], *more[slot]] == ids


def test_a_cached_prefix_changes_no_bit(driver_of: Any) -> None:
    driver = driver_of()
    shared, tail = tokens(64), tokens(21, seed=4)
    captured = Captured(driver)
    table = driver.pages(160)
    driver.prefill(0, shared + tail, table=table, sampling=SAMPLED)
    cold = captured.take()
    driver.prefill(1, shared + tail, cached=64, table=table[:4] + driver.pages(96), sampling=SAMPLED)
    assert torch.equal(captured.take(), cold)
