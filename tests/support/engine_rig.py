"""An engine over fake ranks that a test drives round by round, and what its groups were told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.config import EngineConfig
from engine.engine import Engine, OnStep
from engine.scheduler.guide import OpenGuide
from engine.types.events import EngineEnd, Update
from engine.types.request import PreparedPrompt
from tests.support.fake_rank import FakeRank, FakeRanks, alone, fake_model

SMALL = EngineConfig(Path("unused"), page_tokens=4, max_requests=4, queue=8, prefill_chunk=8, step_tokens=12)


class Rig:
    """`ranks` makes each group of ranks, in turn; `groups` are those that were made."""

    def __init__(
        self,
        config: EngineConfig = SMALL,
        *,
        pages: int = 64,
        ranks: Callable[[], FakeRanks] | None = None,
        context: int = 64,
        rebuilds: int = 3,
        open_guide: OpenGuide | None = None,
        on_step: OnStep | None = None,
    ) -> None:
        self.groups: list[FakeRanks] = []
        self.news: dict[str, list[Update]] = {}
        self.context = context

        def factory() -> FakeRanks:
            group = ranks() if ranks is not None else FakeRanks(FakeRank(pages, config.page_tokens))
            self.groups.append(group)
            return group

        self.engine = Engine(
            config, fake_model(context), factory, rebuilds=rebuilds, open_guide=open_guide, on_step=on_step
        )

    @property
    def ranks(self) -> FakeRanks:
        return self.groups[-1]

    def submit(self, name: str, *prompts: PreparedPrompt) -> None:
        self.engine.submit(name, prompts, self.news.setdefault(name, []).extend)

    def run(self, rounds: int = 1000) -> None:
        """Until nothing is left to do, or `rounds` rounds."""
        for _ in range(rounds):
            if not self.engine.step():
                compiling = [request.opening for request in self.engine._scheduler.waiting if request.opening]
                if not compiling:
                    return
                for opening in compiling:
                    opening.exception(20)
        assert rounds < 1000, "the engine never comes to rest"

    def child(self, name: str, child: int = 0) -> list[Update]:
        return [update for update in self.news[name] if update.child == child]

    def ids(self, name: str, child: int = 0) -> list[int]:
        return [record.id for update in self.child(name, child) for record in update.records]

    def ended(self, name: str, child: int = 0) -> EngineEnd | None:
        ends = [update.end for update in self.child(name, child) if update.end is not None]
        assert len(ends) <= 1, "a choice ended twice"
        if ends:
            assert self.child(name, child)[-1].end is not None, "something came after the end"
        return ends[0] if ends else None

    def end(self, name: str, child: int = 0) -> EngineEnd:
        end = self.ended(name, child)
        assert end is not None, "the choice hasn't ended"
        return end

    def cached(self, name: str, child: int = 0) -> int | None:
        counts = [update.cached_tokens for update in self.child(name, child)]
        assert all(count is None for count in counts[1:]), "the cached count was told twice"
        return counts[0]

    def check(self, name: str, *prompts: PreparedPrompt) -> None:
        """Each choice ended as it would have alone."""
        for child, prompt in enumerate(prompts):
            assert (self.ids(name, child), self.end(name, child).cause) == alone(prompt, self.context)

    def check_returned(self) -> None:
        """Every page, slot and id is back."""
        scheduler = self.engine._scheduler
        assert scheduler.idle
        pool = scheduler.kv.pool
        pool.check()
        assert pool.available == pool.total
        assert not scheduler.kv._promised
        assert sorted(scheduler._slots) == list(range(self.engine.config.max_requests))
        assert self.engine._live == 0 and not self.engine._ids and not self.engine._groups
