"""Log probabilities against float64, ties across the border, explicit ids, ranks, and values that aren't finite."""

from __future__ import annotations

import pytest
import torch

from engine.execution.logprobs import NOT_FINITE, Asked, observe, score_prompt
from engine.execution.selection import largest, row_sums
from engine.kernels import team

torch.set_num_threads(1)


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything here holds of both ways of the CPU."""
    if request.param == "torch":
        monkeypatch.setattr(team, "missing", lambda: "not asked for")
    elif team.missing():
        pytest.skip(team.missing())


def test_values_are_a_float64_log_softmax() -> None:
    logits = torch.randn(6, 50_003, generator=torch.Generator().manual_seed(0)) * 5 + 300
    exact = logits.double().log_softmax(1)
    chosen = torch.tensor([0, 1, 50_002, 3, 4, 5])
    asked = [Asked(0, 20), Asked(2, 0), Asked(3, 5), Asked(5, 0, (7, 50_002, 0))]
    observations = observe(logits, chosen, asked)
    assert observations is not None
    entries = observations.entries()
    assert set(entries) == {0, 2, 3, 5}
    for row, (value, alternatives) in entries.items():
        assert value == pytest.approx(float(exact[row, chosen[row]]), abs=1e-6)
        for token, score in alternatives:
            assert score == pytest.approx(float(exact[row, token]), abs=1e-6)
    assert [len(entries[row][1]) for row in (0, 2, 3, 5)] == [20, 0, 5, 3]
    assert [token for token, _ in entries[5][1]] == [7, 50_002, 0]
    assert [token for token, _ in entries[0][1]] == exact[0].topk(20).indices.tolist()


def test_nothing_asked_computes_nothing() -> None:
    assert observe(torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64), []) is None


@pytest.mark.parametrize("vocab", [50, 3000, 40_000])
@pytest.mark.parametrize("levels", [1, 3, 200])
def test_ties_across_the_border_go_by_increasing_id(vocab: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(levels)
    values = torch.randint(levels, (4, vocab), generator=generator).float() - levels / 2
    got, ids = largest(values, 20)
    for row in range(4):
        pairs = values[row].sort(descending=True, stable=True).indices[:20].tolist()
        assert ids[row].tolist() == pairs
        assert got[row].tolist() == values[row, pairs].tolist()


def test_negative_zero_equals_zero_and_minus_infinity_is_last() -> None:
    values = torch.full((1, 400), -torch.inf)
    values[0, 300], values[0, 7], values[0, 9] = 0.0, -0.0, -5.0
    assert largest(values, 5)[1].tolist() == [[7, 300, 9, 0, 1]]


def test_largest_survives_nan() -> None:
    values = torch.zeros(2, 5000)
    values[0, 17] = torch.nan
    got, ids = largest(values, 3)
    assert got.shape == ids.shape == (2, 3)
    assert ids[1].tolist() == [0, 1, 2]


def test_sums_do_not_depend_on_rows_or_threads() -> None:
    values = torch.rand(5, 151_937, generator=torch.Generator().manual_seed(4))
    together = row_sums(values)
    alone = [float(row_sums(values[n : n + 1])) for n in range(5)]
    torch.set_num_threads(2)
    try:
        threaded = [float(row_sums(values[n : n + 1])) for n in range(5)]
    finally:
        torch.set_num_threads(1)
    assert together.tolist() == alone == threaded


def test_prompt_scores_have_ranks_by_strictly_greater_values() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    entries = score_prompt(logits, torch.tensor([4, 2]), 4).entries()
    exact = logits.double().log_softmax(1)
    target, value, rank, alternatives = entries[0]
    assert (target, rank) == (4, 4)
    assert value == pytest.approx(float(exact[0, 4]))
    assert [(token, place) for token, _, place in alternatives] == [(1, 1), (2, 1), (3, 3), (0, 4)]
    assert entries[1][2] == 1
    assert [place for _, _, place in entries[1][3]] == [1, 1, 1, 1]
    assert score_prompt(logits, torch.tensor([0, 0]), 0).entries()[0][3] == []


def test_values_that_are_not_finite_are_reported_as_a_number() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0]])
    target, value, rank, alternatives = score_prompt(logits, torch.tensor([1]), 3).entries()[0]
    assert (target, value, rank) == (1, NOT_FINITE, 3)
    assert alternatives[2] == (1, NOT_FINITE, 3)
    observations = observe(logits, torch.tensor([1]), [Asked(0, 0, (1, 0))])
    assert observations is not None
    chosen, picked = observations.entries()[0]
    assert chosen == NOT_FINITE and picked[0] == (1, NOT_FINITE)
    assert picked[1][1] == pytest.approx(-1.3132616875)
