"""Compiled sampling and observing beside torch's way: the same ids, whatever is dealt to how many threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.execution.logprobs import Asked, observe, score_prompt
from engine.execution.sampler import Mask, SamplingRows, sample
from engine.execution.sampling_rows import Bans
from engine.execution.sampling_state import SamplingState
from engine.kernels import team
from engine.scheduler.step import SlotSetup
from engine.types.request import SamplingParams

if team.missing():
    pytest.skip(team.missing(), allow_module_level=True)

VOCABULARIES = (1, 5, 128, 300, 3000, 8193, 40_000)
SCALES = (0.0, 0.05, 0.5, 3.0, 30.0)
TEMPERATURES = (1.0, 1.0, 0.7, 0.2, 0.01, 1.7)
TOP_P = (1.0, 1.0, 0.999, 0.95, 0.9, 0.5, 0.1)
TOP_K = (-1, -1, 1, 20, 100, 256, 257, 1000, 5000)
MIN_P = (0.0, 0.0, 0.001, 0.05, 0.5, 1.0)


@pytest.fixture(autouse=True)
def one_thread_afterwards() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


def parameters(count: int, random: np.random.Generator) -> list[SamplingParams]:
    return [
        SamplingParams(
            float(random.choice(TEMPERATURES)),
            float(random.choice(TOP_P)),
            int(random.choice(TOP_K)),
            float(random.choice(MIN_P)),
            1.0,
            0.0,
            0.0,
            int(random.integers(0, 2**64, dtype=np.uint64)),
        )
        for _ in range(count)
    ]


def rows_of(params: list[SamplingParams], vocab: int, positions: Tensor | None = None) -> SamplingRows:
    state = SamplingState(len(params), vocab)
    for slot, sampling in enumerate(params):
        state.bind(SlotSetup(slot, sampling, 0, 0))
    return state.rows(range(len(params)), torch.arange(len(params)) if positions is None else positions)


def by_torch(monkeypatch: pytest.MonkeyPatch, logits: Tensor, rows: SamplingRows, mask: Mask | None = None) -> Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(team, "missing", lambda: "not asked for")
        return sample(logits, rows, mask).ids


def shaped(count: int, vocab: int, scale: float, generator: torch.Generator) -> Tensor:
    """Logits of every kind: some coarse, so that many are equal, some far from zero, some mostly -inf."""
    logits = torch.randn(count, vocab, generator=generator) * scale
    logits[::3] = logits[::3].round(decimals=1)
    logits[1::4] += 1000.0
    logits[2::5, 1:] = torch.where(
        torch.rand(len(logits[2::5]), vocab - 1, generator=generator) < 0.97, -torch.inf, logits[2::5, 1:]
    )
    return logits


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_ids_are_those_of_torchs_way(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are rounded differently, by some 1e-7 of themselves, so that about one id in ten million may differ; but
    for these samples none does."""
    random, generator = np.random.default_rng(vocab), torch.Generator().manual_seed(vocab)
    for scale in SCALES:
        params = parameters(150, random)
        logits = shaped(len(params), vocab, scale, generator)
        rows = rows_of(params, vocab, torch.from_numpy(random.integers(0, 10_000, len(params))))
        wanted = by_torch(monkeypatch, logits, rows)
        found = sample(logits, rows)
        different = (found.ids != wanted).nonzero()[:, 0].tolist()
        assert not different, [(scale, params[row]) for row in different]
        assert not found.state.any()


def test_a_row_depends_on_itself_alone() -> None:
    vocab, random = 20_000, np.random.default_rng(1)
    params = parameters(40, random)
    logits = shaped(40, vocab, 2.0, torch.Generator().manual_seed(1))
    positions = torch.from_numpy(random.integers(0, 10_000, 40))
    alone = torch.cat(
        [sample(logits[n : n + 1], rows_of([params[n]], vocab, positions[n : n + 1])).ids for n in range(40)]
    )
    for threads in (1, 2, 3):
        assert torch.equal(sample(logits, rows_of(params, vocab, positions), None, threads).ids, alone)
    order = torch.from_numpy(random.permutation(40))
    shuffled = rows_of([params[n] for n in order.tolist()], vocab, positions[order])
    torch.set_num_threads(2)
    assert torch.equal(sample(logits[order], shuffled).ids, alone[order])


def test_rows_with_gaps_between_them_and_in_them() -> None:
    params = parameters(7, np.random.default_rng(2))
    wide = torch.randn(7, 2000, generator=torch.Generator().manual_seed(2)) * 3
    rows = rows_of(params, 1000)
    assert torch.equal(sample(wide[:, :1000], rows).ids, sample(wide[:, :1000].clone(), rows).ids)
    assert torch.equal(sample(wide[:, ::2], rows).ids, sample(wide[:, ::2].clone(), rows).ids)
    assert sample(wide[:0], rows_of([], 2000)).ids.tolist() == []


def test_masks_and_bans_come_before(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab, count = 5000, 60
    random = np.random.default_rng(3)
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(3)) * 3
    words = torch.from_numpy(random.integers(-(2**31), 2**31, (count, vocab // 32), dtype=np.int32))
    mask = Mask(torch.arange(count), words)
    rows = rows_of(parameters(count, random), vocab)
    free = sample(logits, rows, mask).ids
    assert torch.equal(free, by_torch(monkeypatch, logits, rows, mask))
    rows = SamplingRows(
        *(rows.temperature, rows.top_p, rows.top_k, rows.min_p, rows.seed, rows.position),
        bans=Bans(torch.arange(count), free, torch.full((count,), 1 << 40)),
    )
    banned = sample(logits, rows, mask).ids
    assert (banned != free).all()
    assert torch.equal(banned, by_torch(monkeypatch, logits, rows, mask))


def test_a_temperature_that_is_none_ends_too() -> None:
    """Settings are clamped before, so that this can't be asked for; but compiled code mustn't run for ever."""
    rows = rows_of([SamplingParams(0.0, 1.0, -1, 0.0, 1.0, 0.0, 0.0, 1)], 300)
    assert 0 <= int(sample(torch.zeros(1, 300), rows).ids) < 300


@pytest.mark.parametrize("vocab", [5, 300, 3000, 50_003])
@pytest.mark.parametrize("levels", [0, 3, 50])
def test_observations_are_those_of_torchs_way(vocab: int, levels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(levels)
    logits = torch.randn(12, vocab, generator=generator) * 5 + 30
    if levels:
        logits = torch.randint(levels, logits.shape, generator=generator).float() - levels // 2
    logits[3, 1:] = -torch.inf
    logits[4] = torch.where(torch.rand(vocab, generator=generator) < 0.5, 0.0, -0.0)
    logits[5] = 300 + torch.rand(vocab, generator=generator) / 1e4
    most = min(20, vocab)
    chosen = torch.arange(12) % vocab
    asked = [Asked(0, most), Asked(2), Asked(5, 1), *(Asked(row, most) for row in (3, 4, 6)), Asked(7, 0, (2, 0, 2))]
    torch.set_num_threads(2)
    seen, scored = observe(logits, chosen, asked), score_prompt(logits, chosen, most)
    monkeypatch.setattr(team, "missing", lambda: "not asked for")
    exact, wanted = observe(logits, chosen, asked), score_prompt(logits, chosen, most)
    assert seen is not None and exact is not None
    assert torch.equal(seen.top_ids, exact.top_ids)
    assert torch.equal(scored.top_ids, wanted.top_ids) and torch.equal(scored.rank, wanted.rank)
    pairs = [(seen.chosen, exact.chosen), (seen.top, exact.top), (seen.picked, exact.picked)]
    for found, right in (*pairs, (scored.chosen, wanted.chosen), (scored.top, wanted.top)):
        assert torch.allclose(found, right, rtol=0, atol=1e-6)


def test_observing_depends_on_nothing_but_the_row() -> None:
    logits = torch.randn(9, 4000, generator=torch.Generator().manual_seed(4))
    chosen = torch.arange(9)
    together = score_prompt(logits, chosen, 5)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        for row in range(9):
            alone = score_prompt(logits[row : row + 1], chosen[row : row + 1], 5)
            assert float(alone.chosen) == float(together.chosen[row])
            assert torch.equal(alone.top[0], together.top[row])


def test_ids_that_are_not_there_are_refused() -> None:
    """Compiled code would read what lies beyond."""
    for target in (-1, 10):
        with pytest.raises(IndexError):
            score_prompt(torch.zeros(1, 10), torch.tensor([target]), 0)


def test_tensors_that_compiled_code_would_misread_are_refused() -> None:
    rows = rows_of(parameters(2, np.random.default_rng(5)), 10)
    for logits in (torch.zeros(2, 10, dtype=torch.float64), torch.zeros(3, 10)):
        with pytest.raises(TypeError):
            sample(logits, rows)
    with pytest.raises(TypeError):
        sample(torch.zeros(2, 10), replace(rows, top_k=rows.top_k.int()))
    with pytest.raises(TypeError):
        score_prompt(torch.zeros(1, 10, dtype=torch.bfloat16), torch.tensor([1]), 0)
