"""Sampling: the filters against a plain sorted reference, exact distributions, penalties, masks, and independence."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.execution.noise import exponential_noise, leaders, noise_keys, noise_keys_on_host, noise_on_host
from engine.execution.sampler import Mask, SamplingRows, sample
from engine.execution.sampling_rows import Part
from engine.execution.sampling_state import SamplingState
from engine.execution.selection import block_maxima
from engine.execution.thresholds import by_rank, by_threshold
from engine.kernels import team
from engine.scheduler.step import SlotSetup
from engine.types.request import SamplingParams

torch.set_num_threads(1)


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything here holds of both ways of the CPU."""
    if request.param == "torch":
        monkeypatch.setattr(team, "missing", lambda: "not asked for")
    elif team.missing():
        pytest.skip(team.missing())


NEUTRAL = SamplingParams(1.0, 1.0, -1, 0.0, 1.0, 0.0, 0.0, 7)


def rows_of(params: list[SamplingParams], vocab: int, positions: list[int] | None = None) -> SamplingRows:
    state = SamplingState(len(params), vocab)
    for slot, sampling in enumerate(params):
        state.bind(SlotSetup(slot, sampling, 0, 0))
    return state.rows(range(len(params)), torch.tensor(positions or list(range(len(params)))))


def survivors(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Ids that the filters leave, by a full sort in float64."""
    gaps = ((logits.max() - logits) / torch.tensor(sampling.temperature)).float()
    order = torch.sort(gaps, stable=True).indices
    weights = gaps[order].neg().exp().double()
    if 0 < sampling.top_k < len(logits):
        order, weights = order[: sampling.top_k], weights[: sampling.top_k]
    if sampling.top_p < 1:
        keep = weights.cumsum(0) - weights < torch.tensor(sampling.top_p).double() * weights.sum()
        order, weights = order[keep], weights[keep]
    return order[weights >= torch.tensor(sampling.min_p)]


def expected(logits: Tensor, sampling: SamplingParams, position: int) -> int:
    ids = survivors(logits, sampling)
    gaps = (logits.max() - logits[ids]) / sampling.temperature
    key = noise_keys(torch.tensor([sampling.seed]), torch.tensor([position]))
    return int(ids[((-gaps).exp().double() / exponential_noise(key, ids)).argmax()])


FILTERS = [
    replace(NEUTRAL, temperature=0.7),
    replace(NEUTRAL, top_p=0.9),
    replace(NEUTRAL, top_p=0.3, temperature=1.7),
    replace(NEUTRAL, top_k=1),
    replace(NEUTRAL, top_k=20),
    replace(NEUTRAL, top_k=20, top_p=0.8),
    replace(NEUTRAL, top_k=900, top_p=0.95),
    replace(NEUTRAL, top_k=70, top_p=0.95, temperature=0.3),
    replace(NEUTRAL, top_k=5000, top_p=0.7, temperature=0.3),
    replace(NEUTRAL, min_p=0.05),
    replace(NEUTRAL, min_p=0.001, top_p=0.99, top_k=300),
    replace(NEUTRAL, min_p=0.3, top_p=0.7),
    replace(NEUTRAL, temperature=0.01),
    replace(NEUTRAL, temperature=0.01, top_p=0.5),
    replace(NEUTRAL, top_p=0.02),
    replace(NEUTRAL, top_p=0.4, min_p=0.4, top_k=30_000),
]


@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0, 30.0])
@pytest.mark.parametrize("vocab", [5, 128, 1000, 70_001])
def test_every_filter_matches_a_sorted_reference(scale: float, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    params = [replace(each, seed=n * 977) for n, each in enumerate(FILTERS)]
    logits = torch.randn(len(params), vocab, generator=generator) * scale
    # Coarse values make many ties, across every border.
    logits = torch.where(torch.rand(len(params), 1, generator=generator) < 0.5, logits, logits.round())
    got = sample(logits, rows_of(params, vocab)).ids.tolist()
    assert got == [expected(logits[n], sampling, n) for n, sampling in enumerate(params)]


@pytest.mark.parametrize(
    "sampling",
    [
        NEUTRAL,
        replace(NEUTRAL, top_p=0.9),
        replace(NEUTRAL, top_p=0.3),
        replace(NEUTRAL, top_p=0.02),
        replace(NEUTRAL, min_p=0.7),
        replace(NEUTRAL, min_p=0.6, top_p=0.5),
        replace(NEUTRAL, top_k=2000, top_p=0.6),
        replace(NEUTRAL, top_k=1500, temperature=2.0),
    ],
)
def test_races_over_flat_rows_have_the_references_winner(sampling: SamplingParams) -> None:
    """Often the leader fails a filter, or the race must be run again."""
    generator = torch.Generator().manual_seed(6)
    logits = (torch.randn(150, 2500, generator=generator) / 5).round(decimals=2)
    params = [replace(sampling, seed=n) for n in range(150)]
    got = sample(logits, rows_of(params, 2500)).ids.tolist()
    assert got == [expected(logits[n], each, n) for n, each in enumerate(params)]


@pytest.mark.parametrize("vocab", [5, 300, 4000])
@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0])
def test_the_accelerators_way_selects_the_same(vocab: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(vocab)
    params = [replace(each, seed=n * 31) for n, each in enumerate(FILTERS)]
    logits = (torch.randn(len(params), vocab, generator=generator) * scale).round(decimals=1)
    rows = rows_of(params, vocab)
    maxima = block_maxima(logits)
    part = Part(logits, maxima, maxima.amax(1), rows, noise_keys(rows.seed, rows.position))
    wanted = sample(logits, rows).ids.tolist()
    assert by_threshold(part).tolist() == wanted
    small = [row for row, sampling in enumerate(params) if 0 < sampling.top_k <= 300]
    few = part.only(torch.tensor(small))
    assert by_rank(few, min(300, vocab)).tolist() == [wanted[row] for row in small]


@pytest.mark.parametrize("sampling", [*FILTERS[:7], *FILTERS[9:11]])
def test_twenty_thousand_samples_follow_the_filtered_distribution(sampling: SamplingParams) -> None:
    draws, vocab = 20_000, 150
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 2
    ids = survivors(logits, sampling)
    chances = ((logits[ids] - logits.max()) / sampling.temperature).double().softmax(0)
    one = rows_of([sampling], vocab)
    rows = SamplingRows(
        temperature=one.temperature.expand(draws),
        top_p=one.top_p.expand(draws),
        top_k=one.top_k.expand(draws),
        min_p=one.min_p.expand(draws),
        seed=one.seed.expand(draws),
        position=torch.arange(draws),
        filtered=tuple(range(draws)),
    )
    counts = torch.bincount(sample(logits.expand(draws, vocab).contiguous(), rows).ids, minlength=vocab)
    assert int(counts[ids].sum()) == draws
    wanted = chances * draws
    often = wanted >= 5
    observed = torch.cat((counts[ids][often], counts[ids][~often].sum()[None])).double()
    ideal = torch.cat((wanted[often], wanted[~often].sum()[None]))
    statistic = float(((observed - ideal) ** 2 / ideal.clamp_min(1e-9)).sum())
    freedom = int(often.sum())
    # Wilson-Hilferty: five sigmas above the mean of chi-square.
    assert statistic < max(freedom, 1) * (1 + 5 * (2 / (9 * max(freedom, 1))) ** 0.5) ** 3


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(8)), st.integers(1, 8))
def test_a_row_is_the_same_alone_in_any_batch_and_order(order: list[int], count: int) -> None:
    vocab = 3000
    logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(1)) * 3
    params = [replace(FILTERS[n], seed=n) for n in range(8)]
    alone = [int(sample(logits[n : n + 1], rows_of([params[n]], vocab, [n])).ids[0]) for n in range(8)]
    some = order[:count]
    batch = sample(logits[some], rows_of([params[n] for n in some], vocab, list(some)))
    assert batch.ids.tolist() == [alone[n] for n in some]


def test_padding_the_vocabulary_with_minus_infinity_changes_nothing() -> None:
    logits = torch.randn(len(FILTERS), 1000, generator=torch.Generator().manual_seed(2)) * 3
    wide = torch.nn.functional.pad(logits, (0, 77), value=-torch.inf)
    assert sample(logits, rows_of(FILTERS, 1000)).ids.tolist() == sample(wide, rows_of(FILTERS, 1077)).ids.tolist()


def test_noise_is_keyed_by_seed_position_and_token_and_pinned() -> None:
    seeds = torch.tensor([0, 1, -1])
    keys = noise_keys(seeds, torch.tensor([0, 0, 0]))
    ids = torch.arange(100_000)
    noise = exponential_noise(keys[:, None], ids)
    assert noise.min() > 0 and noise.max() < 37
    assert torch.allclose(noise.mean(1), torch.ones(3, dtype=torch.float64), atol=0.02)
    assert abs(float(torch.corrcoef(noise)[0, 1])) < 0.02
    assert not torch.equal(keys, noise_keys(seeds, torch.tensor([1, 1, 1])))
    # A seed's tokens must not change between releases.
    assert noise[1, 2] == pytest.approx(_written_out(1, 0, 2), rel=1e-12)
    assert noise[2, 99_999] == pytest.approx(_written_out(2**64 - 1, 0, 99_999), rel=1e-12)


def _written_out(seed: int, position: int, token: int) -> float:
    """The noise in Python's unbounded integers."""
    word, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mixed(value: int) -> int:
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & word
        value = (value ^ value >> 27) * 0x94D049BB133111EB & word
        return value ^ value >> 31

    key = mixed(seed ^ mixed((position + 1) * golden & word))
    bits = mixed(key + (token + 1) * golden & word) >> 12
    return -math.log((bits + 0.5) / 2**52)


def test_both_forms_of_the_noise_agree() -> None:
    seeds, positions = torch.tensor([12345, -1, 2**62]), torch.tensor([6, 0, 2**40])
    keys = noise_keys(seeds, positions)
    assert noise_keys_on_host(seeds.numpy(), positions.numpy()).tolist() == keys.tolist()
    ids = torch.tensor([0, 5, 19_999, 123_456_789])
    for key in keys:
        assert np.allclose(noise_on_host(int(key), ids.numpy()), exponential_noise(key, ids).numpy(), rtol=1e-12)


def test_leaders_are_all_ids_that_reach_a_score_best_first() -> None:
    random = np.random.default_rng(0)
    for number in range(80):
        count = int(random.integers(1, 120_000 if number % 4 == 0 else 3000))
        weights = np.exp(-random.exponential((0.1, 5)[number % 2], count)).astype(np.float32)
        weights[1:][random.random(count - 1) < (0, 0.7, 0.9)[number % 3]] = 0
        key = int(random.integers(-(2**63), 2**63 - 1))
        scores = weights / noise_on_host(key, np.arange(count))
        for least in (weights.sum() / 8, weights.sum() / 100, scores.max(), scores.max() * 1.01):
            wanted = np.flatnonzero(scores >= least)
            wanted = wanted[np.argsort(-scores[wanted], kind="stable")]
            ids, found = leaders(weights, key, float(least))
            assert ids.tolist() == wanted.tolist() and found.tolist() == scores[wanted].tolist()


def test_penalties_follow_their_formulas() -> None:
    vocab = 6
    state = SamplingState(2, vocab)
    sampling = replace(NEUTRAL, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, top_k=1)
    ids = np.array([0, 1, 3, 3], "<i4")
    state.bind(SlotSetup(1, sampling, 0, 2, prompt=ids.tobytes()))
    state.observe([0, 1], torch.tensor([5, 4]))
    logits = torch.tensor([[2.0, -1.0, 0.9, 4.0, -0.1, 0.0]])
    rows = state.rows([1], torch.tensor([4]))
    # 0: 1.0, 1: -2.0, 2: 0.9, 3: 2 - 0.5 - 2 * 0.25 = 1.0, 4: -0.2 - 0.75; 0 and 3 tie, the lower id is kept
    assert sample(logits, rows).ids.tolist() == [0]
    logits[0, 3] += 0.01
    assert sample(logits, rows).ids.tolist() == [3]
    assert logits[0, 3] == pytest.approx(4.01)  # the raw logits stay raw
    state.bind(SlotSetup(1, replace(NEUTRAL, top_k=1), 0, 0))
    assert state.rows([1], torch.tensor([4])).penalties is None


def test_a_slots_rows_are_those_of_its_last_binding() -> None:
    state = SamplingState(3, 50)
    for slot in (0, 1):
        state.bind(SlotSetup(slot, replace(NEUTRAL, seed=slot), 0, 0))
    first = state.rows([0, 1], torch.tensor([4, 5]))
    again = state.rows([0, 1], torch.tensor([5, 6]))
    assert first.position.tolist() == [4, 5] and again.position.tolist() == [5, 6]
    state.bind(SlotSetup(1, replace(NEUTRAL, seed=9, top_k=3), 0, 0, banned_until=9, banned_ids=(2,)))
    later = state.rows([0, 1], torch.tensor([6, 0]))
    assert later.seed.tolist() == [0, 9] and later.top_k.tolist() == [50, 3]
    assert later.filtered == (1,) and later.bans is not None and first.seed.tolist() == [0, 1]
    assert state.rows([1, 0], torch.tensor([1, 7])).seed.tolist() == [9, 0]
    state.release(1)
    assert state.rows([0, 1], torch.tensor([7, 1])).bans is None


def test_masks_forbid_ids_also_beyond_their_words() -> None:
    vocab = 70
    logits = torch.zeros(3, vocab)
    logits[:, 69], logits[:, 2] = 9.0, 5.0
    words = np.zeros((1, 2), np.uint32)
    words[0, 0], words[0, 1] = 1 << 31 | 1 << 3, 1 << 1
    mask = Mask(torch.tensor([1]), torch.from_numpy(words.view(np.int32)))
    logits[1, 33] = 1.0
    params = [replace(NEUTRAL, top_k=1)] * 3
    assert sample(logits, rows_of(params, vocab), mask).ids.tolist() == [69, 33, 69]


@pytest.mark.parametrize("allowed", [1, 3, 40, 300, 20_000])
def test_masks_leave_what_a_full_sort_of_the_allowed_ids_would(allowed: int) -> None:
    vocab = 40_000
    generator = torch.Generator().manual_seed(allowed)
    logits = torch.randn(len(FILTERS), vocab, generator=generator) * 6 - 3
    open_to = torch.randperm(vocab, generator=generator)[:allowed]
    bits = np.zeros(vocab, np.uint8)
    bits[open_to.numpy()] = 1
    words = torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))
    mask = Mask(torch.arange(len(FILTERS)), words.repeat(len(FILTERS), 1))
    masked = torch.full_like(logits, -torch.inf)
    masked[:, open_to] = logits[:, open_to]
    wanted = [expected(masked[row], sampling, row) for row, sampling in enumerate(FILTERS)]
    assert sample(logits, rows_of(FILTERS, vocab), mask).ids.tolist() == wanted


def test_banned_ids_wait_for_their_position() -> None:
    state = SamplingState(1, 4)
    state.bind(SlotSetup(0, replace(NEUTRAL, top_k=1), 0, 0, banned_until=10, banned_ids=(2, 3)))
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    assert sample(logits, state.rows([0], torch.tensor([9]))).ids.tolist() == [1]
    assert sample(logits, state.rows([0], torch.tensor([10]))).ids.tolist() == [3]


def test_rows_that_cannot_be_sampled_say_why_and_leave_the_others_alone() -> None:
    vocab = 64
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(5))
    params = [replace(NEUTRAL, top_p=0.9, seed=n) for n in range(5)]
    good = sample(logits, rows_of(params, vocab)).ids.tolist()
    logits[1, 3], logits[2, 4] = torch.nan, torch.inf
    logits[4, 5] = -torch.inf
    mask = Mask(torch.tensor([3]), torch.zeros(1, 2, dtype=torch.int32))
    result = sample(logits, rows_of(params, vocab), mask)
    failures = result.failures()
    assert set(failures) == {1, 2, 3}
    assert "finite" in failures[1] and "finite" in failures[2] and "constraint" in failures[3]
    assert result.ids[0] == good[0]


def test_a_tiny_temperature_is_the_arg_max() -> None:
    logits = torch.randn(20, 5000, generator=torch.Generator().manual_seed(8)) * 4
    logits += torch.linspace(-1e4, 1e4, 20)[:, None]
    params = [replace(NEUTRAL, temperature=1e-4, seed=n, top_p=1.0 if n % 2 else 0.9) for n in range(20)]
    assert sample(logits, rows_of(params, 5000)).ids.tolist() == logits.argmax(1).tolist()
