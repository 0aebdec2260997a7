"""Groups and their client over real sockets in one process: acknowledgement, order, every way to end, slots, deaths."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest

from engine.engine import QueueFull
from engine.types.events import EngineEnd, PositionScore, PromptScores, TokenRecord, Update
from engine.types.request import OutputOptions, PreparedPrompt, PreparedRequest, RequestError, SamplingParams
from protocols.errors import InvalidRequest, ProtocolError, SlotsExhausted, Unavailable
from serve_app.engine_client import EngineClient, Flight
from serve_app.groups import GroupCall, Groups, Reply

SAMPLING = SamplingParams(1.0, 1.0, -1, 0.0, 1.0, 0.0, 0.0, 7)


def prompt(tokens: int = 8, **fields: Any) -> PreparedPrompt:
    return PreparedPrompt(np.arange(3, dtype=np.int32), SAMPLING, tokens, (0,), **fields)


def request(*children: PreparedPrompt) -> PreparedRequest:
    return PreparedRequest(children or (prompt(),))


class SteppedEngine:
    """An engine whose tokens come when the test says so: token n of a child is 100 * child + n."""

    def __init__(self) -> None:
        self.groups: Groups | None = None
        self.children: dict[str, list[PreparedPrompt]] = {}
        self.stops: list[tuple[int, int]] = []
        self.cancelled: list[str] = []
        self.refuse: Exception | None = None
        self.expected, self.wait = inf, inf
        self.admitted: list[bool] = []

    def submit(self, group_id: str, children: Sequence[PreparedPrompt], *, admitted: bool = False) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.admitted.append(admitted)
        self.children[group_id] = list(children)

    def stop(self, group_id: str, child: int, tokens: int) -> None:
        self.stops.append((child, tokens))
        self.end(child, "cancelled", group_id)

    def cancel(self, group_id: str) -> None:
        self.cancelled.append(group_id)

    @property
    def latest(self) -> str:
        return list(self.children)[-1]

    def tell(self, update: Update, group: str | None = None) -> None:
        assert self.groups is not None
        self.wait = self.groups.on_step([(group or self.latest, [update])], self.expected)

    def token(self, child: int, *ids: int, cached: int | None = None, group: str | None = None) -> None:
        self.tell(Update(child, tuple(map(TokenRecord, ids)), cached_tokens=cached), group)

    def end(self, child: int, cause: Any = "eos", group: str | None = None) -> None:
        self.tell(Update(child, end=EngineEnd(cause)), group)


class Held:
    """A held call as a task on a replica of this process."""

    def __init__(self, task: asyncio.Task[Reply]) -> None:
        self.task = task

    def __await__(self) -> Generator[Any, None, Reply]:
        return asyncio.shield(self.task).__await__()

    def cancel(self) -> None:
        self.task.cancel()


class Replica:
    def __init__(self, name: str, slots: int = 4, digest: str = "d", beat: float = 5.0, pace: float = 0.0) -> None:
        self.name, self.engine = name, SteppedEngine()
        self.groups = Groups(self.engine, slots=slots, digest=digest, replica=name, node="n", beat=beat, pace=pace)
        self.engine.groups = self.groups
        self.calls: list[asyncio.Task[Reply]] = []

    def die(self) -> None:
        """What a killed process looks like from outside: links reset, held calls fail, nothing is said."""
        self.groups.close()
        for call in self.calls:
            call.cancel()


class Replicas:
    """The Caller: takes the preferred replica, else the first live one that isn't to be avoided."""

    def __init__(self, *replicas: Replica) -> None:
        self.live = list(replicas)
        self.delay = 0.0

    def call(self, call: GroupCall, avoid: tuple[str, ...], prefer: str = "") -> Held:
        return Held(asyncio.get_running_loop().create_task(self._call(call, avoid, prefer)))

    async def _call(self, call: GroupCall, avoid: tuple[str, ...], prefer: str) -> Reply:
        await asyncio.sleep(self.delay)
        while not self.live:
            await asyncio.sleep(0.01)
        welcome = [one for one in self.live if one.name not in avoid] or self.live
        replica = next((one for one in welcome if one.name == prefer), welcome[0])
        task = asyncio.create_task(replica.groups.generate(call))
        replica.calls.append(task)
        return await task

    def kill(self, replica: Replica) -> None:
        self.live.remove(replica)
        replica.die()


class Stage:
    def __init__(self, count: int, **client: Any) -> None:
        settings = {"beat": 5.0, "patience": 20.0, "resubmit_patience": 20.0, **client}
        replica = {"beat": settings["beat"], **settings.pop("replica", {})}
        self.replicas = [Replica(f"r{number}", **replica) for number in range(count)]
        self.caller = Replicas(*self.replicas)
        self.client = EngineClient(self.caller, digest="d", node="n", host="127.0.0.1", replicas=count, **settings)

    @property
    def engine(self) -> SteppedEngine:
        return self.replicas[0].engine

    @property
    def groups(self) -> Groups:
        return self.replicas[0].groups

    async def quiet(self) -> None:
        """Waits until no replica alive holds a slot or a group."""
        async with asyncio.timeout(30):
            while any(replica.groups.held or replica.groups._groups for replica in self.caller.live):
                await asyncio.sleep(0.005)
        assert self.client.flying == 0
        assert not self.client._listener._keys


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


def stage(body: Callable[[Stage], Coroutine[Any, Any, None]], count: int = 1, **options: Any) -> None:
    async def main() -> None:
        scene = Stage(count, **options)
        await scene.client.start()
        try:
            await body(scene)
        finally:
            for replica in scene.replicas:
                replica.groups.close()
            await scene.client.close()

    asyncio.run(main())


async def tokens(flight: Flight) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    async for batch in flight:
        for update in batch:
            found.setdefault(update.child, []).extend(record.id for record in update.records)
    return found


def test_a_group_is_acknowledged_followed_and_freed() -> None:
    async def body(scene: Stage) -> None:
        flight = await scene.client.generate("q", request(prompt(), prompt()))
        assert scene.groups.held == 2
        reading = asyncio.create_task(tokens(flight))
        for child in (0, 1):
            scene.engine.token(child, 100 * child, 100 * child + 1, cached=3)
            scene.engine.end(child)
        assert await reading == {0: [0, 1], 1: [100, 101]}
        assert scene.groups.held == 2, "a finished answer holds its slots until it is delivered"
        flight.finish(("completed", "failed"))
        flight.finish(("completed", "failed"))
        await scene.quiet()
        assert (scene.groups.completed, scene.groups.failed) == (1, 1)
        assert scene.engine.cancelled == []

    stage(body)


def test_the_held_call_stays_open_until_generation_ends() -> None:
    async def body(scene: Stage) -> None:
        flight = await scene.client.generate("q", request())
        (call,) = scene.replicas[0].calls
        await asyncio.sleep(0.05)
        assert not call.done()
        scene.engine.end(0)
        assert (await call)["state"] == "done"
        flight.finish(("completed",))

    stage(body)


def test_a_text_stop_reaches_the_engine() -> None:
    async def body(scene: Stage) -> None:
        flight = await scene.client.generate("q", request(prompt(), prompt()))
        scene.engine.end(0)
        scene.engine.token(1, 5)
        flight.stop(1, 1)
        assert await tokens(flight) == {0: [], 1: [5]}
        assert scene.engine.stops == [(1, 1)]
        flight.finish(("completed", "completed"))
        await scene.quiet()

    stage(body)


def paced(scene: Stage) -> SteppedEngine:
    """An engine whose next step is always about to come."""
    scene.engine.expected = 0.0
    return scene.engine


def test_a_paced_stream_tells_the_same_tokens_in_fewer_updates() -> None:
    async def body(scene: Stage) -> None:
        engine = paced(scene)
        flight = await scene.client.generate("q", request(prompt()))
        engine.token(0, 0, cached=3)
        assert await anext(flight) == (Update(0, (TokenRecord(0),), cached_tokens=3),)
        for number in range(1, 6):
            engine.token(0, number)
        assert 0 < engine.wait < inf
        assert not flight._queue
        engine.end(0, "limit")
        assert engine.wait == inf
        rest = Update(0, tuple(map(TokenRecord, range(1, 6))), end=EngineEnd("limit"))
        assert [batch async for batch in flight] == [(rest,)]
        flight.finish(("completed",))
        await scene.quiet()
        assert (scene.groups.completed, engine.cancelled) == (1, [])

    stage(body, replica={"pace": 60.0})


def test_a_text_stop_in_a_paced_stream_frees_its_slot() -> None:
    """The engine has gone on meanwhile: that is told with the end, and what it generated beyond is the reader's to
    ignore."""

    async def body(scene: Stage) -> None:
        engine = paced(scene)
        flight = await scene.client.generate("q", request(prompt()))
        engine.token(0, 1)
        assert [update.records for update in await anext(flight)] == [(TokenRecord(1),)]
        engine.token(0, 2)
        engine.token(0, 3)
        flight.stop(0, 1)
        assert await tokens(flight) == {0: [2, 3]}
        assert engine.stops == [(0, 1)]
        flight.finish(("completed",))
        await scene.quiet()

    stage(body, replica={"pace": 60.0})


def test_a_reader_that_leaves_a_paced_stream_takes_nothing_with_it() -> None:
    async def body(scene: Stage) -> None:
        engine = paced(scene)
        gone = await scene.client.generate("gone", request(prompt()))
        left = engine.latest
        stays = await scene.client.generate("stays", request(prompt()))
        for group in (left, engine.latest):
            engine.token(0, 1, group=group)
            engine.token(0, 2, group=group)
        gone.finish(("cancelled",))
        await until(lambda: engine.cancelled)
        assert engine.cancelled == [left] and scene.groups.held == 1
        engine.end(0, "cancelled", group=left)
        engine.end(0)
        assert await tokens(stays) == {0: [1, 2]}
        stays.finish(("completed",))
        await scene.quiet()

    stage(body, replica={"pace": 60.0})


def test_children_without_work_need_no_engine() -> None:
    async def body(scene: Stage) -> None:
        scene.groups.paused = True
        flight = await scene.client.generate("q", request(prompt(0)))
        batches = [batch async for batch in flight]
        assert batches == [(Update(0, cached_tokens=0, end=EngineEnd("limit")),)]
        flight.finish(("completed",))
        scene.groups.paused = False
        scored = prompt(0, output=OutputOptions(prompt_logprobs=1))
        mixed = await scene.client.generate("q", request(prompt(0), scored))
        assert len(scene.engine.children[scene.engine.latest]) == 1
        scene.engine.end(0, "limit")
        assert sorted(await tokens(mixed)) == [0, 1]
        mixed.finish(("completed", "completed"))
        await scene.quiet()

    stage(body)


@pytest.mark.parametrize(
    ("prepare", "kind", "words"),
    [
        (lambda scene: setattr(scene.groups, "slots", 2), InvalidRequest, "3 choices"),
        (lambda scene: setattr(scene.groups, "held", 2), SlotsExhausted, "slots are in use"),
        (lambda scene: setattr(scene.groups, "paused", True), Unavailable, "paused"),
        (lambda scene: setattr(scene.groups, "_digest", "e"), Unavailable, "other settings"),
        (lambda scene: setattr(scene.engine, "refuse", QueueFull("the queue is full")), Unavailable, "queue is full"),
        (lambda scene: setattr(scene.engine, "refuse", QueueFull("no ranks", "down")), Unavailable, "no ranks"),
        (lambda scene: setattr(scene.engine, "refuse", RequestError("too big", field="x")), InvalidRequest, "too big"),
        (lambda scene: scene.caller.live.clear(), Unavailable, "no engine"),
    ],
)
def test_refusals(prepare: Callable[[Stage], None], kind: type[ProtocolError], words: str) -> None:
    async def body(scene: Stage) -> None:
        prepare(scene)
        before = scene.groups.held
        with pytest.raises(kind, match=words):
            await scene.client.generate("q", request(prompt(), prompt(), prompt()))
        assert scene.groups.held == before
        assert scene.client.flying == 0

    stage(body, patience=0.1 if words == "no engine" else 20.0)


def test_a_full_replica_makes_the_ingress_try_one_other() -> None:
    async def body(scene: Stage) -> None:
        scene.groups.held = 4
        flight = await scene.client.generate("q", request())
        assert scene.replicas[1].groups.held == 1
        flight.finish(("cancelled",))
        await until(lambda: scene.replicas[1].groups.held == 0)
        scene.replicas[1].groups.held = 4
        with pytest.raises(SlotsExhausted):
            await scene.client.generate("q", request())

    stage(body, count=2)


def test_a_replica_that_dies_hands_its_stream_to_another() -> None:
    async def body(scene: Stage) -> None:
        first, second = scene.replicas
        flight = await scene.client.generate("q", request(prompt(), prompt(), prompt()))
        first.engine.token(0, 1, 2, cached=3)
        first.engine.token(1, 9, cached=5)
        first.engine.end(1)
        first.engine.token(2, 7, cached=0)
        reading = asyncio.create_task(tokens(flight))
        await until(lambda: len(flight._records[2]) == 1)
        flight.stop(2, 1)  # its text has ended; nobody knows whether the engine heard
        scene.caller.kill(first)
        await until(lambda: second.engine.children)
        (again,) = second.engine.children[second.engine.latest]
        assert [record.id for record in again.committed] == [1, 2]
        assert again.first_cached == 3
        second.engine.token(0, 3, cached=9)
        second.engine.end(0)
        assert await reading == {0: [1, 2, 3], 1: [9], 2: [7]}
        assert flight._cached == [3, 5, 0]
        flight.finish(("completed", "completed", "completed"))
        await scene.quiet()
        assert second.groups.completed == 3
        assert scene.client.resubmitted == 1

    stage(body, count=2)


def test_a_death_before_the_first_token_and_before_the_acknowledgement() -> None:
    async def body(scene: Stage) -> None:
        first, second = scene.replicas
        flight = await scene.client.generate("q", request())
        scene.caller.kill(first)
        reading = asyncio.create_task(tokens(flight))
        await until(lambda: second.engine.children)
        assert second.engine.children[second.engine.latest][0].committed == ()
        second.engine.token(0, 4)
        second.engine.end(0)
        assert await reading == {0: [4]}
        flight.finish(("completed",))
        await scene.quiet()

    stage(body, count=2)


def test_without_another_replica_the_stream_fails_in_time() -> None:
    async def body(scene: Stage) -> None:
        flight = await scene.client.generate("q", request())
        scene.engine.token(0, 1)
        scene.caller.kill(scene.replicas[0])
        with pytest.raises(Unavailable):
            await tokens(flight)
        flight.finish(("failed",))
        assert scene.client.flying == 0

    stage(body, resubmit_patience=0.2)


def test_scores_are_told_once() -> None:
    entries = tuple(PositionScore(number, -1.0, 1) for number in range(8))

    async def body(scene: Stage) -> None:
        first, second = scene.replicas
        scored = prompt(0, output=OutputOptions(prompt_logprobs=1))
        flight = await scene.client.generate("q", request(scored))
        first.engine.tell(Update(0, scores=PromptScores(0, entries[:5])))
        await until(lambda: flight._scored == [5])
        scene.caller.kill(first)
        batches = asyncio.create_task(collect(flight))
        await until(lambda: second.engine.children)
        for start in (0, 3, 6):
            second.engine.tell(Update(0, scores=PromptScores(start, entries[start : start + 3])))
        second.engine.end(0, "limit")
        told = [update.scores for update in await batches if update.scores is not None]
        assert [entry for scores in told for entry in scores.entries] == list(entries)
        assert [scores.start for scores in told] == [0, 5, 6]
        flight.finish(("completed",))

    async def collect(flight: Flight) -> list[Update]:
        return [update async for batch in flight for update in batch]

    stage(body, count=2)


@pytest.mark.parametrize("moment", ["mid", "pre", "buffered"])
def test_leaving_frees_everything(moment: str) -> None:
    """The ingress task of a reader that left: between tokens, before the first one, or with an answer undelivered."""

    async def body(scene: Stage) -> None:
        for _ in range(20):
            flight = await scene.client.generate("q", request())
            if moment != "pre":
                scene.engine.token(0, 1)
            if moment == "buffered":
                scene.engine.end(0)
            reader = asyncio.create_task(tokens(flight))
            await asyncio.sleep(0)
            reader.cancel()
            flight.finish(("cancelled",))
        await scene.quiet()
        assert len(scene.engine.cancelled) == (0 if moment == "buffered" else 20)
        assert (scene.groups.completed, scene.groups.failed, scene.groups.orphans) == (0, 0, 0)

    stage(body)


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.03])
def test_leaving_while_the_call_is_on_its_way(delay: float) -> None:
    async def body(scene: Stage) -> None:
        warm = await scene.client.generate("w", request())
        warm.finish(("cancelled",))
        scene.caller.delay = 0.01
        for _ in range(20):
            task = asyncio.create_task(scene.client.generate("q", request()))
            await asyncio.sleep(delay)
            if task.done():
                task.result().finish(("cancelled",))
            else:
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
        await scene.quiet()

    stage(body)


def test_a_cancel_that_overtakes_its_call_leaves_nothing() -> None:
    async def body(scene: Stage) -> None:
        warm = await scene.client.generate("w", request())
        scene.client._listener.broadcast(["finished", 99, []])
        await until(lambda: scene.groups._tombstones)
        sink = scene.client._listener.issue("d")
        reply = await scene.groups.generate(GroupCall(99, "late", (prompt(),), sink))
        assert (reply["state"], reply["reason"]) == ("refused", "cancelled")
        warm.finish(("cancelled",))
        scene.client._listener.revoke(sink)
        await scene.quiet()

    stage(body)


def test_an_orphan_is_swept() -> None:
    async def body(scene: Stage) -> None:
        flight = await scene.client.generate("q", request())
        assert flight.attempt is not None
        scene.client._forget(flight.attempt)  # an ingress that lost track of it
        await until(lambda: scene.groups.orphans == 1)
        await scene.quiet()
        assert len(scene.engine.cancelled) == 1

    stage(body, beat=0.1)


def test_a_running_group_is_never_an_orphan() -> None:
    async def body(scene: Stage) -> None:
        flight = await scene.client.generate("q", request())
        await asyncio.sleep(1.0)
        assert scene.groups.orphans == 0
        flight.finish(("cancelled",))

    stage(body, beat=0.25)


def test_an_ingress_that_dies_frees_its_slots() -> None:
    async def body(scene: Stage) -> None:
        await scene.client.generate("q", request(prompt(), prompt()))
        await scene.client.generate("q", request())
        assert scene.groups.held == 3
        await scene.client.close()
        await until(lambda: scene.groups.held == 0)
        assert len(scene.engine.cancelled) == 2

    stage(body)


def test_many_requests_one_link_and_nothing_leaks() -> None:
    async def body(scene: Stage) -> None:
        async def one(number: int) -> None:
            flight = await scene.client.generate(str(number), request())
            reading = asyncio.create_task(tokens(flight))
            assert flight.attempt is not None
            group = f"{scene.client._listener.peer}/{flight.attempt.number}"
            for step in range(20):
                scene.engine.token(0, number * 100 + step, group=group)
                await asyncio.sleep(0)
            scene.engine.end(0, group=group)
            assert await reading == {0: [number * 100 + step for step in range(20)]}
            flight.finish(("completed",))

        await asyncio.gather(*(one(number) for number in range(50)))
        await scene.quiet()
        assert len(scene.client._listener.links) == 1
        assert scene.groups.completed == 50

    stage(body, replica={"slots": 64})


def test_the_prompt_is_untouched_by_resubmission() -> None:
    original = prompt()
    assert replace(original, committed=(TokenRecord(1),)).sampling is original.sampling


# --- a request of several groups keeps its slot


async def ended(scene: Stage, after: Flight | None = None) -> Flight:
    flight = await scene.client.generate("q", request(), after)
    scene.engine.token(0, 1, cached=0)
    scene.engine.end(0, "limit")
    await tokens(flight)
    return flight


def test_the_next_group_takes_over_the_slot_of_a_full_server() -> None:
    async def body(scene: Stage) -> None:
        flight = await ended(scene)
        for _ in range(5):
            with pytest.raises(SlotsExhausted):
                await scene.client.generate("other", request())
            following = await ended(scene, flight)
            assert scene.groups.held == 1
            flight.finish(("completed",))
            await until(lambda: len(scene.groups._groups) == 1)
            assert scene.groups.held == 1, "the slot belongs to the new group"
            flight = following
        flight.finish(("completed",))
        await scene.quiet()
        assert scene.groups.completed == 6
        assert scene.engine.admitted == [False, *[True] * 5]

    stage(body, replica={"slots": 1})


def test_a_pause_does_not_stop_a_request_that_was_let_in() -> None:
    async def body(scene: Stage) -> None:
        flight = await ended(scene)
        scene.groups.paused = True
        following = await ended(scene, flight)
        flight.finish(("completed",))
        following.finish(("completed",))
        await scene.quiet()

    stage(body, replica={"slots": 1})


def test_a_refused_or_cancelled_group_leaves_the_slot_with_its_predecessor() -> None:
    async def body(scene: Stage) -> None:
        flight = await ended(scene)
        scene.engine.refuse = RequestError("no")
        with pytest.raises(InvalidRequest):
            await scene.client.generate("q", request(), flight)
        assert scene.groups.held == 1
        scene.caller.delay = 0.2
        task = asyncio.ensure_future(scene.client.generate("q", request(), flight))
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.sleep(0.3)
        assert scene.groups.held == 1
        flight.finish(("completed",))
        await scene.quiet()

    stage(body, replica={"slots": 1})


def test_leaving_during_the_second_group_frees_the_one_slot() -> None:
    async def body(scene: Stage) -> None:
        flight = await ended(scene)
        following = await scene.client.generate("q", request(), flight)
        flight.finish(("completed",))
        following.finish(("cancelled",))
        await scene.quiet()
        assert len(scene.engine.cancelled) == 1

    stage(body, replica={"slots": 1})


def test_the_next_group_stays_on_its_replica_and_moves_when_that_dies() -> None:
    async def body(scene: Stage) -> None:
        first, second = scene.replicas
        scene.caller.live.reverse()
        flight = await scene.client.generate("q", request())
        second.engine.end(0, "limit")
        await tokens(flight)
        scene.caller.live.reverse()
        following = await scene.client.generate("q", request(), flight)
        assert (first.groups.held, second.groups.held) == (0, 1)
        flight.finish(("completed",))
        second.engine.end(0, "limit")
        await tokens(following)
        scene.caller.kill(second)
        last = await scene.client.generate("q", request(), following)
        assert first.groups.held == 1
        following.finish(("completed",))
        last.finish(("completed",))
        await scene.quiet()

    stage(body, 2, replica={"slots": 1})
