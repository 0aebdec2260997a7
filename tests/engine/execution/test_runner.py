"""The runner against its own pieces: log probabilities, prompt scores, late inputs, bans, mixed steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.config import Manifest
from engine.scheduler.step import LateInputs, Row, SlotSetup, Step
from tests.support.tiny_models import GREEDY, SAMPLED, Captured, Driver, checkpoint, not_late, reference, tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return checkpoint("llama", tmp_path_factory.mktemp("runner"))


@pytest.fixture
def driver(model: Manifest) -> Driver:
    return Driver.load(model)


def logprobs(ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.as_tensor(reference("llama")(torch.tensor([ids])).logits[0]).double().log_softmax(-1)


def packed(ids: list[int]) -> bytes:
    return np.array(ids, dtype="<i4").tobytes()


def test_generation_logprobs(driver: Driver) -> None:
    ids = tokens(40)
    row = driver.prefill(0, ids, logprobs=3)[-1].sampled[0]
    wanted = logprobs(ids)[-1]
    assert row.logprob == pytest.approx(float(wanted[row.id]), abs=1e-4)
    assert [token for token, _ in row.alternatives] == wanted.topk(3).indices.tolist()
    row = driver.prefill(1, ids, logprob_ids=(7, 3))[-1].sampled[0]
    assert [token for token, _ in row.alternatives] == [7, 3]
    assert [value for _, value in row.alternatives] == pytest.approx(wanted[[7, 3]].tolist(), abs=1e-4)
    assert driver.prefill(2, ids)[-1].sampled[0].logprob is None


@pytest.mark.parametrize("chunk", [512, 16, 7, 1])
def test_prompt_scores_in_any_chunks(driver: Driver, chunk: int) -> None:
    ids = tokens(53)
    results = driver.prefill(0, ids, chunk=chunk, score=2)
    scored = [row for result in results for row in result.scored]
    entries = {row.start + index: entry for row in scored for index, entry in enumerate(row.entries)}
    assert sorted(entries) == list(range(1, len(ids)))
    wanted = logprobs(ids)
    for position, (token, value, rank, alternatives) in entries.items():
        line = wanted[position - 1]
        assert token == ids[position]
        assert value == pytest.approx(float(line[token]), abs=1e-4)
        assert rank == 1 + int((line > line[token]).sum())
        assert [other for other, _, _ in alternatives] == line.topk(2).indices.tolist()


def test_scores_of_a_slots_former_owner_are_forgotten(driver: Driver) -> None:
    driver.prefill(0, tokens(20), score=0)
    scored = driver.prefill(0, tokens(20, seed=3), score=0)[0].scored[0]
    assert scored.start == 1


def test_masks_and_forced_ids_wait_for_late_inputs(driver: Driver) -> None:
    for slot in range(3):
        driver.prefill(slot, tokens(10 + slot))
    mask = np.zeros(10, dtype="<u4")
    mask[100 // 32] = 1 << 100 % 32
    calls: list[int] = []

    def late() -> LateInputs:
        calls.append(1)
        return LateInputs(50, masks={0: mask.tobytes()}, forced={1: 77})

    rows = [Row(0, 1, gated=True), Row(1, 1, gated=True), Row(2, 1)]
    result = driver.runner.launch(Step(50, rows), late)()
    assert [row.id for row in result.sampled][:2] == [100, 77]
    assert not any(row.failure for row in result.sampled)
    assert calls == [1]
    captured = Captured(driver)
    driver.run([Row(1, 1)])  # the forced token is the next input
    first = driver.prefill(9, tokens(11))[-1].sampled[0].id
    driver.prefill(10, [*tokens(11), first, 77])
    found = captured.take()
    assert torch.allclose(found[0], found[-1], atol=1e-4)


def test_a_mask_that_allows_nothing_fails_the_row_alone(driver: Driver) -> None:
    driver.prefill(0, tokens(10))
    driver.prefill(1, tokens(12))
    late = LateInputs(60, masks={0: bytes(40)})
    broken, fine = driver.runner.launch(Step(60, [Row(0, 1, gated=True), Row(1, 1)]), lambda: late)().sampled
    assert "allows no token" in broken.failure
    assert not fine.failure


def test_banned_ids_until_a_position(driver: Driver) -> None:
    ids = tokens(20)
    free = driver.generate(0, ids, 1)[0]
    held = driver.prefill(1, ids, banned_ids=(free,), banned_until=21)[-1].sampled[0].id
    again = driver.prefill(2, ids, banned_ids=(free,), banned_until=20)[-1].sampled[0].id
    assert held != free
    assert again == free


def test_decodes_and_chunks_share_a_step(driver: Driver) -> None:
    ids, other = tokens(30), tokens(45, seed=8)
    lone = [driver.generate(0, ids, 3, sampling=SAMPLED), driver.generate(1, other, 2, sampling=SAMPLED)]
    first = driver.prefill(2, ids, sampling=SAMPLED)[-1].sampled[0].id
    second = driver.run(
        [Row(2, 1), Row(3, 20, 0, packed(other[:20]), sample=False)],
        setups=[SlotSetup(3, SAMPLED, 0, len(other))],
        tables=[(3, 0, driver.pages(80))],
    ).sampled
    third = driver.run([Row(2, 1), Row(3, 25, 20, packed(other[20:]))]).sampled
    last = driver.run([Row(3, 1)]).sampled
    assert [row.slot for row in second] == [2]
    assert [first, second[0].id, third[0].id] == lone[0]
    assert [third[1].id, last[0].id] == lone[1]


def test_steps_launched_ahead_of_their_results(driver: Driver) -> None:
    lone = driver.generate(0, tokens(30), 4)
    driver.prefill(1, tokens(30))
    steps = [driver.runner.launch(Step(number, [Row(1, 1)]), not_late) for number in (70, 71, 72)]
    assert [step().sampled[0].id for step in steps] == lone[1:]


def test_what_a_page_held_before_is_never_read(driver: Driver) -> None:
    """NaN in stale pages, as a failed request leaves them, reaches nobody."""
    ids = tokens(21)
    wanted = driver.generate(0, ids, 3)
    pool = driver.runner._pool
    pool.keys[:, driver.used :] = torch.nan
    pool.values[:, driver.used :] = torch.nan
    pool.keys[:, pool.pages], pool.values[:, pool.pages] = 0, 0
    assert driver.generate(1, ids, 3) == wanted


def test_a_step_of_nothing(driver: Driver) -> None:
    result = driver.run([], release=[4])
    assert (result.sampled, result.scored) == ([], [])


def test_the_report(driver: Driver) -> None:
    report = driver.runner.report
    assert (report.device, report.attention, report.numerics, report.dtype) == ("cpu", "cpu", "invariant", "float32")
    assert report.page_bytes == 2 * 3 * 16 * 2 * 16 * 4
    assert report.pages == (24 << 20) // report.page_bytes


def test_a_row_that_is_not_finite_fails_alone(driver: Driver) -> None:
    driver.prefill(0, tokens(10), sampling=replace(GREEDY, top_k=-1))
    driver.prefill(1, tokens(11))
    pool = driver.runner._pool
    pool.values[:, 0] = torch.nan  # slot 0's first page
    broken, fine = driver.run([Row(0, 1), Row(1, 1)]).sampled
    assert "finite" in broken.failure
    assert not fine.failure


def test_a_copied_page_goes_on_as_its_own(driver: Driver) -> None:
    """Two prompts part in the second page: its beginning is copied, and each goes on alone."""
    first, second = tokens(40), [*tokens(40)[:24], *tokens(16, seed=9)]
    fresh = [driver.generate(slot, ids, 6) for slot, ids in enumerate((first, second))]
    table = driver.pages(64)
    driver.prefill(2, first, table=table)
    own = [table[0], *driver.pages(48)]
    setup = SlotSetup(3, GREEDY, 24, len(second))
    row = Row(3, 16, 24, packed(second[24:]))
    begun = driver.run([row], setups=[setup], tables=[(3, 0, own)], copies=[(table[1], own[1])])
    slots = {2: [fresh[0][0]], 3: [begun.sampled[0].id]}
    for slot, ids in driver.decode([2, 3], 5).items():
        slots[slot] += ids
    assert [slots[2], slots[3]] == fresh
