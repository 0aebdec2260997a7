"""The scripted model through the real runner: turns, repetition, logits, failures, prompt scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.models import scripted
from engine.scheduler.step import Row, SlotSetup
from engine.script import CHOSEN_LOGIT, Script, ScriptTurn
from engine.types.request import SamplingParams
from tests.support.tiny_models import Driver, manifest

EOS = 0
FIRST = ScriptTurn((10, 11, 12), logits={1: ((50, 38.0), (51, 36.0))})
SECOND = ScriptTurn((20, 21), when="?", then="repeat")
BROKEN = ScriptTurn((30, 31), when="!", fail_at=1)
HOT = SamplingParams(2.0, 1.0, -1, 0.0, 1.0, 0.0, 0.0, 99)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    def decode(ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def build(*args: Any) -> scripted.Scripted:
        model = scripted.Scripted(Script((FIRST, SECOND, BROKEN), EOS), decode, 400, 256, args[3].device)
        return model

    monkeypatch.setattr(scripted, "build", build)
    config = {"max_position_embeddings": 256, "vocab_size": 400}
    yield Driver.load(manifest(config, [Path("none")], "scripted"), dtype="auto")


def generate(driver: Driver, slot: int, prompt: str, count: int) -> list[int]:
    ids = [ord(letter) for letter in prompt]
    return driver.generate(slot, ids, count, prompt=_bytes(ids), sampling=HOT, chunk=3)


def _bytes(ids: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in ids)


def test_turns_repeat_and_end(driver: Driver) -> None:
    assert generate(driver, 0, "hello", 5) == [10, 11, 12, EOS, EOS]
    assert generate(driver, 1, "hello?", 5) == [20, 21, 20, 21, 20]
    assert generate(driver, 2, "is it? no", 3) == [20, 21, 20]


def test_rows_of_one_step_follow_their_own_turns(driver: Driver) -> None:
    for slot, prompt in ((3, "hello"), (1, "why?")):
        ids = [ord(letter) for letter in prompt]
        driver.prefill(slot, ids, prompt=_bytes(ids))
    assert driver.decode([3, 1], 2) == {3: [11, 12], 1: [21, 20]}


def test_recompute_goes_on_where_it_was(driver: Driver) -> None:
    """Committed tokens after the prompt count as output already."""
    prompt, committed = [ord(letter) for letter in "hi"], [10, 11]
    table = driver.pages(32)
    ids = [*prompt, *committed]
    setup = SlotSetup(0, HOT, 0, len(prompt), _bytes(ids))
    result = driver.run([Row(0, 4, 0, _bytes(ids))], setups=[setup], tables=[(0, 0, table)])
    assert [row.id for row in result.sampled] == [12]
    assert driver.decode([0], 1)[0] == [EOS]


def test_failure_is_the_rows_own(driver: Driver) -> None:
    for slot, prompt in ((0, "go!"), (1, "why?")):
        ids = [ord(letter) for letter in prompt]
        driver.prefill(slot, ids, prompt=_bytes(ids))
    broken, fine = driver.run([Row(0, 1), Row(1, 1)]).sampled
    assert "finite" in broken.failure
    assert (fine.id, fine.failure) == (21, "")


def test_scripted_logits_give_the_alternatives(driver: Driver) -> None:
    ids = [ord(letter) for letter in "hello"]
    driver.prefill(0, ids, prompt=_bytes(ids), logprobs=3)
    row = driver.run([Row(0, 1)]).sampled[0]
    assert [token for token, _ in row.alternatives] == [11, 50, 51]
    assert row.alternatives[0][1] - row.alternatives[1][1] == pytest.approx(CHOSEN_LOGIT - 38.0)


def test_prompt_scores_name_the_prompts_tokens(driver: Driver) -> None:
    ids = [ord(letter) for letter in "hello"]
    results = driver.prefill(0, ids, prompt=_bytes(ids), score=1, chunk=2)
    entries = [entry for result in results for scored in result.scored for entry in scored.entries]
    assert [result.scored[0].start for result in results] == [1, 2, 4]
    assert [(token, rank) for token, _, rank, _ in entries] == [(token, 1) for token in ids[1:]]


def test_a_slot_without_its_prompt_is_refused(driver: Driver) -> None:
    with pytest.raises(ValueError, match="prompt"):
        driver.prefill(0, [1, 2])
