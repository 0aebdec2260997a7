"""Inline: an engine and one rank in this process, for tests, notebooks and offline benchmarks.

Loads torch when entered. Generates whole answers or streams updates; many callers may share one.
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.engine import Engine
from engine.parallel.ranks import InlineRanks, RankGroup
from engine.types.events import EngineEnd, PositionScore, TokenRecord, Update
from engine.types.request import PreparedPrompt

if TYPE_CHECKING:
    from engine.prepared import PreparedModel


class GenerationFailed(RuntimeError):
    """A choice ended as failed."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole answer. `scores`: the prompt's, when asked for, by position."""

    records: tuple[TokenRecord, ...]
    end: EngineEnd
    cached_tokens: int
    scores: tuple[PositionScore | None, ...] = ()

    @property
    def ids(self) -> list[int]:
        return [record.id for record in self.records]


class Inline:
    """Context manager. `ranks_factory` replaces the real rank in tests."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        model: PreparedModel | None = None,
        ranks_factory: Callable[[], RankGroup] | None = None,
    ) -> None:
        if model is None:
            from engine.prepared import PreparedModel

            model = PreparedModel.load(config.prepared)
        self.model = model
        manifest = model.manifest
        self.engine = Engine(config, self.model, ranks_factory or (lambda: InlineRanks.load(config, manifest)))
        self._numbers = itertools.count()

    def __enter__(self) -> Inline:
        self.engine.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.close(patience=60.0)

    def stream(self, prompts: Sequence[PreparedPrompt]) -> Iterator[Update]:
        """Submits the prompts as one group and yields its updates as they come. A consumer that leaves early cancels
        the group. Raises QueueFull and RequestError at once."""
        news: queue.SimpleQueue[list[Update]] = queue.SimpleQueue()
        group_id = f"inline-{next(self._numbers)}"
        self.engine.submit(group_id, prompts, news.put)
        return self._follow(group_id, len(prompts), news)

    def _follow(self, group_id: str, live: int, news: queue.SimpleQueue[list[Update]]) -> Iterator[Update]:
        try:
            while live:
                for update in news.get():
                    live -= update.end is not None
                    yield update
        finally:
            if live:
                self.engine.cancel(group_id)

    def choices(self, prompts: Sequence[PreparedPrompt]) -> list[Choice]:
        """Whole answers, in the order of the prompts, which run together as far as slots go."""
        parts = [Choice((), EngineEnd("cancelled"), 0) for _ in prompts]
        records: list[list[TokenRecord]] = [[] for _ in prompts]
        scores: list[list[PositionScore | None]] = [[] for _ in prompts]
        for update in self.stream(prompts):
            child = update.child
            records[child] += update.records
            if update.scores is not None:
                scores[child][update.scores.start :] = update.scores.entries
            if update.cached_tokens is not None:
                parts[child] = replace(parts[child], cached_tokens=update.cached_tokens)
            if update.end is not None:
                parts[child] = replace(parts[child], end=update.end)
        return [
            replace(part, records=tuple(tokens), scores=tuple(scored))
            for part, tokens, scored in zip(parts, records, scores, strict=True)
        ]

    def generate(self, prompts: Sequence[PreparedPrompt]) -> list[list[TokenRecord]]:
        """The tokens of each prompt's answer. Raises GenerationFailed when one failed."""
        choices = self.choices(prompts)
        for choice in choices:
            if choice.end.cause == "failed":
                raise GenerationFailed(choice.end.message)
        return [list(choice.records) for choice in choices]
