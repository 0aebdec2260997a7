"""On CUDA: what the CPU samples, without waiting for the device, and the same observations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.execution.device import CudaDevice
from engine.execution.logprobs import Asked, observe, score_prompt
from engine.execution.sampler import Mask, sample
from engine.execution.sampling_state import SamplingState
from engine.scheduler.step import SlotSetup
from engine.types.request import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]

FILTERS = [
    SamplingParams(temperature, top_p, top_k, min_p, repetition, 0.1, 0.0, seed)
    for seed, (temperature, top_p, top_k, min_p, repetition) in enumerate(
        [
            (1.0, 1.0, -1, 0.0, 1.0),
            (0.7, 0.9, -1, 0.0, 1.0),
            (1.0, 0.95, 20, 0.0, 1.2),
            (1.0, 1.0, -1, 0.05, 1.0),
            (0.01, 0.5, 5000, 0.0, 1.0),
        ]
        * 12
    )
]


SMALL_TOP_K = [SamplingParams(0.9, 0.95, 20 + seed % 3, 0.01, 1.0, 0.0, 0.0, seed) for seed in range(60)]


def states(vocab: int, filters: list[SamplingParams]) -> tuple[SamplingState, SamplingState, CudaDevice]:
    device = CudaDevice(0)
    pair = (
        SamplingState(len(FILTERS), vocab),
        SamplingState(len(FILTERS), vocab, device.torch, device.upload),
    )
    prompt = np.arange(50, dtype="<i4").tobytes()
    for state in pair:
        for slot, sampling in enumerate(filters):
            state.bind(SlotSetup(slot, sampling, 0, 40, prompt=prompt, banned_until=60, banned_ids=(3, 7)))
    return *pair, device


@pytest.mark.parametrize("vocab", [1000, 151_936])
@pytest.mark.parametrize("filters", [FILTERS, SMALL_TOP_K])
def test_cuda_samples_what_the_cpu_samples_without_waiting(vocab: int, filters: list[SamplingParams]) -> None:
    host, device, cuda = states(vocab, filters)
    rows, count = list(range(len(filters))), len(filters)
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(1)) * 3
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (2, -(-vocab // 32)), dtype=np.int32)
    positions = torch.arange(count)
    mask = Mask(torch.tensor([2, 5]), torch.from_numpy(words))
    on_device = [part.cuda() for part in (logits, positions, mask.rows, mask.words)]
    wanted = sample(logits, host.rows(rows, positions), mask).ids
    sample(on_device[0], device.rows(rows, on_device[1]), Mask(*on_device[2:]))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampled = sample(on_device[0], device.rows(rows, on_device[1]), Mask(*on_device[2:]))
        device.observe(rows, sampled.ids)
        seen = observe(on_device[0], sampled.ids, [Asked(0, 20), Asked(3, 0, (5, 6))], cuda.upload)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sampled.ids.tolist() == wanted.tolist() and not sampled.failures()
    reference = observe(logits, wanted, [Asked(0, 20), Asked(3, 0, (5, 6))])
    assert seen is not None and reference is not None
    for row, (value, alternatives) in reference.entries().items():
        found, others = seen.entries()[row]
        assert found == pytest.approx(value, abs=1e-5)
        assert [token for token, _ in others] == [token for token, _ in alternatives]


def test_prompt_scores_agree() -> None:
    logits = torch.randn(64, 50_000, generator=torch.Generator().manual_seed(2)).round(decimals=1)
    targets = torch.arange(64)
    host, device = score_prompt(logits, targets, 5).entries(), score_prompt(logits.cuda(), targets.cuda(), 5).entries()
    for (target, value, rank, top), (target_2, value_2, rank_2, top_2) in zip(host, device, strict=True):
        assert (target, rank) == (target_2, rank_2) and value_2 == pytest.approx(value, abs=1e-5)
        assert [(token, place) for token, _, place in top] == [(token, place) for token, _, place in top_2]
