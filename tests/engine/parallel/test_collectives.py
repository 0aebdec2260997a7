"""Several ranks over gloo, each in a process of its own, give what one rank gives."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import Manifest
from engine.execution.runner import Runner
from engine.models.errors import WeightsError
from engine.models.layers import kv_share, share
from engine.parallel.collectives import Alone, join
from tests.support.smollm2 import smollm2
from tests.support.tiny_models import SAMPLED, Captured, Driver, checkpoint, engine_config, tokens

PROMPTS = [tokens(50), tokens(33, seed=9)]
PATIENCE = 240.0
"""Seconds that loading models in several processes may take on a busy machine."""
Found = tuple[list[list[int]], torch.Tensor]


def generate(driver: Driver) -> Found:
    captured = Captured(driver)
    first = [driver.prefill(slot, ids, sampling=SAMPLED)[-1].sampled[0].id for slot, ids in enumerate(PROMPTS)]
    more = driver.decode([0, 1], 5)
    return [[first[slot], *more[slot]] for slot in (0, 1)], captured.take()


def _rank(
    rank: int, size: int, rendezvous: str, models: list[Manifest], changes: dict[str, Any], out: Connection
) -> None:
    group = join(rank, size, rendezvous, torch.device("cpu"))
    try:
        for model in models:
            runner = Runner(engine_config(**changes), model, group)
            ids, logits = generate(Driver(runner))
            out.send((ids, logits.numpy(), runner.report))
    finally:
        group.close()
        out.close()


def ranks(size: int, models: list[Manifest], directory: Path, **changes: Any) -> list[list[Any]]:
    """What each rank found for each model. Processes end by themselves; they are joined here."""
    context = multiprocessing.get_context("spawn")
    rendezvous = f"file://{directory / 'rendezvous'}"
    started = []
    for rank in range(size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(rank, size, rendezvous, models, changes, sender))
        process.start()
        sender.close()
        started.append((process, receiver))
    found = [[receiver.recv() for _ in models if receiver.poll(PATIENCE)] for _, receiver in started]
    for process, receiver in started:
        process.join(10)
        receiver.close()
        if process.is_alive():
            process.kill()
            process.join()
    return found


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    models = []
    for kind in ("llama-tied-llama3", "qwen2", "qwen3"):
        (tmp_path / kind).mkdir()
        models.append(checkpoint(kind, tmp_path / kind))
    found = ranks(2, models, tmp_path)
    for index, model in enumerate(models):
        alone = Driver.load(model)
        ids, logits = generate(alone)
        for rank in (0, 1):
            other_ids, other_logits, report = found[rank][index]
            assert other_ids == ids
            assert torch.allclose(torch.from_numpy(other_logits), logits, rtol=0, atol=1e-5)
            assert report.pages > alone.runner.report.pages  # each holds one of the two key/value heads
            assert report.weight_bytes == alone.runner.report.weight_bytes, (
                "what the model reads, on however many ranks"
            )


def test_four_ranks_repeat_two_key_heads(tmp_path: Path) -> None:
    model = checkpoint("llama", tmp_path)
    ids, logits = generate(Driver.load(model))
    for ((other_ids, other_logits, _),) in ranks(4, [model], tmp_path):
        assert other_ids == ids
        assert torch.allclose(torch.from_numpy(other_logits), logits, rtol=0, atol=1e-5)


def test_three_ranks_of_the_quantised_demo_model_agree(tmp_path: Path) -> None:
    """Its nine heads, three key/value heads and 1536 inner features divide by three, in whole groups."""
    options: dict[str, Any] = {"dtype": "auto", "kv_bytes": 64 << 20}
    _, logits = generate(Driver.load(smollm2(), **options))
    found = ranks(3, [smollm2()], tmp_path, **options)
    for ((other_ids, other_logits, _),) in found:
        assert other_ids == found[0][0][0]
        assert torch.corrcoef(torch.stack((torch.from_numpy(other_logits)[0], logits[0])))[0, 1] > 0.999


def test_heads_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    model = checkpoint("llama", tmp_path)
    with pytest.raises(WeightsError, match="4 attention heads can't be divided among 3 ranks"):
        Runner(engine_config(), model, Alone(rank=1, size=3))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: share(10, 0, 4, "attention heads"), "10 attention heads"),
        (lambda: kv_share(3, 0, 2), "3 key/value heads"),
        (lambda: kv_share(2, 0, 3), "2 key/value heads"),
    ],
)
def test_unequal_shares(call: Callable[[], object], words: str) -> None:
    with pytest.raises(WeightsError, match=words):
        call()


def test_repeated_key_heads_lie_with_their_queries() -> None:
    assert [kv_share(2, rank, 4).start for rank in range(4)] == [0, 0, 1, 1]
    assert [kv_share(4, rank, 2).start for rank in range(2)] == [0, 2]
