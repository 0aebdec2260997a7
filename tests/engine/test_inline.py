"""The engine over a real rank: a tiny random llama in `invariant` numerics."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from engine.config import EngineConfig, Manifest
from engine.engine import Engine
from engine.execution.rank import rank_main
from engine.inline import GenerationFailed, Inline
from engine.parallel.ranks import InlineRanks, RankGroup, RankGroupFailed
from engine.parallel.step_link import LinkedRanks, SocketLink, StepListener, dial
from engine.prepared import PreparedModel
from engine.types.events import TokenRecord, Update
from engine.types.request import OutputOptions, PreparedPrompt, SamplingParams
from tests.support.tiny_models import checkpoint, engine_config, tokens

CONTEXT = 256


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return checkpoint("llama", tmp_path_factory.mktemp("tiny"))


def config(**changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "context": CONTEXT,
        "max_requests": 8,
        "step_tokens": 64,
        "prefill_chunk": 32,
        "kv_bytes": 4 << 20,
        "numerics": "invariant",
    }
    return engine_config(**{**values, **changes})


def inline(manifest: Manifest, ranks: Callable[[], RankGroup] | None = None, **changes: Any) -> Inline:
    used = config(**changes)
    model = cast(PreparedModel, SimpleNamespace(manifest=manifest))
    return Inline(used, model=model, ranks_factory=ranks or (lambda: InlineRanks.load(used, manifest)))


def prompt(length: int, seed: int, **fields: Any) -> PreparedPrompt:
    """The first half is the same for all."""
    ids = [*tokens(length // 2, seed=99), *tokens(length - length // 2, seed=seed)]
    sampling = SamplingParams(1.0, 0.95, -1, 0.0, 1.2 if seed % 2 else 1.0, 0.0, 0.0, seed)
    values: dict[str, Any] = {"max_tokens": 12, "eos_ids": (2,), "ignore_eos": True, **fields}
    return PreparedPrompt(np.array(ids, dtype=np.int32), sampling, **values)


PROMPTS = [prompt(length, seed) for seed, length in enumerate((1, 17, 40, 70, 100, 33))]


@pytest.fixture(scope="module")
def alone(manifest: Manifest) -> list[list[int]]:
    """Each prompt's tokens with nobody beside it, one chunk, no reuse."""
    with inline(manifest, prefix_cache=False, prefill_chunk=256, step_tokens=256) as engine:
        return [engine.choices([one])[0].ids for one in PROMPTS]


@pytest.mark.parametrize(
    "changes",
    [{}, {"prefill_chunk": 7, "step_tokens": 16}, {"max_requests": 2}, {"prefix_cache": False, "prefill_chunk": 50}],
)
def test_batches_chunks_and_reuse_change_no_token(
    manifest: Manifest, alone: list[list[int]], changes: dict[str, Any]
) -> None:
    with inline(manifest, **changes) as engine:
        for _ in range(2):
            assert [choice.ids for choice in engine.choices(PROMPTS)] == alone
        warm = engine.choices([PROMPTS[4]])[0]
        assert warm.cached_tokens == (99 if engine.engine.config.prefix_cache else 0)
        assert warm.ids == alone[4]


def test_preemption_changes_no_token(manifest: Manifest) -> None:
    page = 3 * 2 * 2 * 16 * 16 * 4
    prompts = [prompt(5, seed, max_tokens=60) for seed in range(3)]
    with inline(manifest) as engine:
        wanted = [engine.choices([one])[0].ids for one in prompts]
    with inline(manifest, kv_bytes=7 * page) as engine:
        assert engine.engine.report.pages == 7
        assert [choice.ids for choice in engine.choices(prompts)] == wanted
        assert engine.engine.stats().preemptions > 0


def test_a_lost_rank_and_a_resubmission_change_no_token(manifest: Manifest, alone: list[list[int]]) -> None:
    class Dying(InlineRanks):
        left = 6

        def receive(self, timeout: float) -> Any:
            Dying.left -= 1
            if Dying.left == 0:
                raise RankGroupFailed("killed")
            return super().receive(timeout)

    used = config()
    load = lambda: Dying(lambda link: rank_main(used, manifest, 0, 1, link, None))  # noqa: E731
    with inline(manifest, load) as engine:
        assert [choice.ids for choice in engine.choices(PROMPTS)] == alone
        assert engine.engine.stats().rebuilds == 1
        committed = tuple(TokenRecord(token) for token in alone[3][:5])
        assert engine.choices([replace(PROMPTS[3], committed=committed)])[0].ids == alone[3][5:]


def test_over_sockets_too(manifest: Manifest, alone: list[list[int]]) -> None:
    used = config()
    threads: list[threading.Thread] = []

    def serve(link: SocketLink) -> None:
        rank_main(used, manifest, 0, 1, link, None)
        link.close()

    def ranks() -> LinkedRanks:
        with StepListener(1) as listener:
            link = dial(listener.addresses, 0, listener.key)
            threads.append(threading.Thread(target=serve, args=(link,)))
            threads[-1].start()
            group = listener.accept(20)
        group.wait_ready(60)
        return group

    with inline(manifest, ranks) as engine:
        assert [choice.ids for choice in engine.choices(PROMPTS)] == alone
    threads[0].join(20)
    assert not threads[0].is_alive()


def test_observations(manifest: Manifest) -> None:
    options = OutputOptions(logprobs=3, prompt_logprobs=2, timestamps=True)
    with inline(manifest) as engine:
        whole = engine.choices([prompt(70, 4, output=options)])[0]
        again = engine.choices([prompt(70, 4, output=options)])[0]
    assert len(whole.scores) == 70 and whole.scores[0] is None
    assert all(entry is not None and len(entry.alternatives) == 2 for entry in whole.scores[1:])
    assert all(record.logprob is not None and len(record.alternatives) == 3 for record in whole.records)
    assert again.cached_tokens == 0 and again.scores == whole.scores and again.ids == whole.ids


def test_min_tokens_and_stops(manifest: Manifest, alone: list[list[int]]) -> None:
    stop = (alone[2][3], alone[2][4])
    with inline(manifest) as engine:
        stopped = engine.choices([replace(PROMPTS[2], stop_sequences=(stop,))])[0]
        assert stopped.ids == alone[2][:5] and stopped.end.cause == "token_stop"
        single = (alone[2][0],)
        kept = engine.choices([replace(PROMPTS[2], stop_sequences=(single,), min_tokens=6)])[0]
        assert single[0] not in kept.ids[:6] and len(kept.ids) >= 6


def test_streams_come_token_by_token_and_leaving_cancels(manifest: Manifest, alone: list[list[int]]) -> None:
    with inline(manifest) as engine:
        stream: Iterator[Update] = engine.stream([PROMPTS[1]])
        first = next(stream)
        assert [record.id for record in first.records] == alone[1][:1] and first.cached_tokens == 0
        assert [record.id for update in stream for record in update.records] == alone[1][1:]
        left = engine.stream([replace(PROMPTS[1], max_tokens=200)])
        next(left)
        left.close()  # type: ignore[attr-defined]
        assert engine.engine.drain(20)
        stats = engine.engine.stats()
        assert (stats.active, stats.pending) == (0, 0)
        assert stats.free_pages + stats.cached_pages == stats.total_pages


def test_generate_raises_for_a_failed_choice(manifest: Manifest) -> None:
    with inline(manifest) as engine:
        assert [len(records) for records in engine.generate(PROMPTS[:2])] == [12, 12]
        engine.engine.submit("others", [PROMPTS[0]] * 7)
        engine.engine._post(lambda: engine.engine._down("the end"))
        with pytest.raises((GenerationFailed, RuntimeError), match="the end"):
            while True:
                engine.generate([PROMPTS[0]])


def test_an_engine_is_entered_through_its_config() -> None:
    with pytest.raises(Exception, match="not a prepared model"):
        Engine.inline(config(prepared=Path("/nowhere")))
