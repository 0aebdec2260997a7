"""Engine: one scheduler, its ranks, and the thread that drives both.

Any thread submits, stops and cancels; one thread plans, sends, receives and commits, and calls the sinks. A failed
group of ranks is replaced and everything that ran is computed again, so no stream is lost with it. Never imports
torch: the ranks come from a factory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from math import inf
from typing import TYPE_CHECKING, Literal

from engine.cache.keys import cache_seed
from engine.config import EngineConfig, Manifest
from engine.parallel.ranks import RankGroup, RankGroupFailed
from engine.scheduler.counters import EngineStats
from engine.scheduler.flight import StepMismatch
from engine.scheduler.guide import Guide, ModelGuides, OpenGuide
from engine.scheduler.pace import StepPace
from engine.scheduler.queue import Tombstones
from engine.scheduler.request import Group, Request, Sink
from engine.scheduler.scheduler import News, Scheduler
from engine.scheduler.step import RankReport
from engine.types.events import EngineEnd, Update
from engine.types.request import PreparedPrompt, RequestError

if TYPE_CHECKING:
    from engine.inline import Inline
    from engine.prepared import PreparedModel

log = logging.getLogger(__name__)

DEPTH = 2
"""Steps in flight."""

INTERVAL = 0.2
"""Seconds after which a cancel is heard while a step runs."""

IDLE_SECONDS = 1.0
"""Seconds after which ranks that have nothing to do are looked after."""

State = Literal["running", "rebuilding", "down", "closed"]
Refusal = Literal["full", "paused", "down"]
OnStep = Callable[[list[tuple[str, list[Update]]], float], float]
"""Gets all updates of a step by group, and in how many seconds the next ones are expected (infinite when no step is in
flight). It may hold news back: it answers in how many seconds it must be called again, with news or without; infinite
when it holds nothing."""


class QueueFull(RuntimeError):
    """The engine takes no more now. `reason`: the queue is full, admission is paused, or there are no ranks."""

    def __init__(self, message: str, reason: Refusal = "full") -> None:
        super().__init__(message, reason)
        self.message = message
        self.reason = reason

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """`step_age`: seconds since the last progress while there is something to do, else 0. `rebuilding_for`: seconds
    since the ranks were lost, else 0."""

    state: State
    step_age: float
    rebuilding_for: float
    message: str

    def serving(self, limit: float) -> bool:
        """Requests make progress: no step is older than `limit` seconds."""
        return self.state == "running" and self.step_age <= limit


class Engine:
    """`ranks_factory` starts a loaded group; it is called here, and again after each failure, at most `rebuilds` times
    within `rebuild_window` seconds, then requests fail as unavailable. `on_step` gets all updates of a step at once,
    besides the groups' own sinks (see OnStep). `open_guide` replaces the model's syntax and grammars in tests.

    Call `start` for the thread, or drive `step` yourself.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: PreparedModel,
        ranks_factory: Callable[[], RankGroup],
        *,
        on_step: OnStep | None = None,
        open_guide: OpenGuide | None = None,
        rebuilds: int = 3,
        rebuild_window: float = 600.0,
    ) -> None:
        self.config = config
        self._model = model
        self._factory = ranks_factory
        self._on_step = on_step
        self._rebuilds = rebuilds
        self._window = rebuild_window
        self._ranks = ranks_factory()
        self.report: RankReport = self._ranks.report
        manifest = model.manifest
        context = config.context or manifest.context
        self._scheduler = Scheduler(
            config,
            pages=self.report.pages,
            context=context,
            cache_seed=_seed(config, manifest, self.report),
            with_prompt=manifest.format == "scripted",
        )
        if self.context < context:
            log.warning(
                "the context is cut from %d tokens to the %d that the KV pool holds (engine.kv_bytes)",
                context,
                self.context,
            )
        self._guides = _Guides(model, open_guide, self._poke)
        self._pace = StepPace(config.step_timeout)
        self._tombstones = Tombstones()
        self._groups: dict[str, Group] = {}
        self._losses: list[float] = []
        self._lost_at = 0.0
        self._rebuilt = 0
        self._progress = time.monotonic()
        self._step_seconds = 0.0
        self._due = inf
        self._state: State = "running"
        self._message = ""
        # Shared with other threads, under the lock:
        self._lock = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._poked = False
        self._paused = False
        self._resting = False
        self._live = 0
        self._ids: set[str] = set()
        self._thread: threading.Thread | None = None
        self._rebuilder: threading.Thread | None = None

    @staticmethod
    def inline(config: EngineConfig) -> Inline:
        """Scheduler and one rank in this process, as a context manager: for tests, notebooks and benchmarks."""
        from engine.inline import Inline

        return Inline(config)

    # ---- for any thread ----

    @property
    def context(self) -> int:
        """Prompt plus output tokens in force: what was configured, or what the KV pool holds if that is less."""
        return self._scheduler.context

    def start(self) -> None:
        """Runs the engine on a thread of its own until `close`."""
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._thread.start()

    def submit(
        self, group_id: str, children: Sequence[PreparedPrompt], sink: Sink | None = None, *, admitted: bool = False
    ) -> None:
        """Enqueues a group, all children or none; returns before any is admitted. `sink` is called on the engine's
        thread with the group's updates, once a step. `admitted`: it goes on with a request that has been let in, so
        that neither a pause nor a full queue refuses it; the caller bounds these. Raises QueueFull for now and
        RequestError for good; ValueError when the id is in use."""
        count = len(children)
        capacity = self.config.max_requests + self.config.queue
        if count > capacity:
            raise RequestError(f"the request has {count} choices, more than the {capacity} this engine holds")
        with self._lock:
            if self._state in ("down", "closed"):
                raise QueueFull(f"the model is unavailable: {self._message or 'the engine is closed'}", "down")
            if self._paused and not admitted:
                raise QueueFull("admission is paused", "paused")
            if self._live + count > capacity and not admitted:
                raise QueueFull(f"the model's request queue is full: {self._live} of {capacity} requests", "full")
            if group_id in self._ids:
                raise ValueError(f"group {group_id!r} is already running")
            self._live += count
            self._ids.add(group_id)
        group = Group(group_id, sink)
        try:
            requests = self._scheduler.prepare(group, children)
            for request in requests:
                self._guides.open(request)
        except BaseException:
            self._forget(group_id, count)
            raise
        self._post(lambda: self._add(group, requests))

    def stop(self, group_id: str, child: int, tokens: int) -> None:
        """The text of a child ended after `tokens` tokens; what was generated beyond is ignored by who asked."""
        self._post(lambda: self._stop(group_id, child))

    def cancel(self, group_id: str) -> None:
        """Ends all children, whatever their state. A cancel of an unknown id kills the submit that it overtook."""
        self._post(lambda: self._cancel(group_id))

    def pause(self, *, fail_waiting: bool = False) -> None:
        """Refuses new groups. What runs goes on; what waits for its first slot goes on too, or fails as unavailable."""
        with self._lock:
            self._paused = True
        if fail_waiting:
            self._post(lambda: self._fail(self._scheduler.waiting.fresh, "admission is paused"))

    def resume(self) -> None:
        with self._lock:
            self._paused = False

    @property
    def paused(self) -> bool:
        return self._paused

    def drain(self, timeout: float) -> bool:
        """Pauses, then waits until every request has ended and the ranks are done with all they were sent. False when
        that took longer."""
        self.pause()
        with self._lock:
            return self._lock.wait_for(lambda: self._live == 0 and (self._resting or self._state == "down"), timeout)

    def close(self, patience: float = 0.0) -> None:
        """Ends every request as unavailable, the thread and the ranks. `patience`: seconds to wait for ranks that are
        just being started, whose start can't be interrupted; they are closed as soon as they are there."""
        with self._lock:
            self._state = "closed"
            self._lock.notify_all()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(self.config.step_timeout)
        if thread is None or not thread.is_alive():
            self._shut("the engine is closed")
        self._ranks.close()
        self._guides.close()
        if self._rebuilder is not None:
            self._rebuilder.join(patience)

    def stats(self) -> EngineStats:
        """Totals and gauges now. Cheap enough for every scrape."""
        scheduler = self._scheduler
        pool = scheduler.kv.pool
        return EngineStats(
            **asdict(scheduler.counters),
            rebuilds=self._rebuilt,
            active=len(scheduler.active),
            pending=max(self._live - len(scheduler.active), 0),
            cached_pages=pool.cached,
            free_pages=pool.free,
            total_pages=pool.total,
            page_tokens=self.config.page_tokens,
            decode_weight_bytes=self.report.weight_bytes,
            step_age=self.health().step_age,
        )

    def health(self) -> EngineHealth:
        """Tells a working engine from a hung, a rebuilding and a broken one."""
        now = time.monotonic()
        busy = bool(self._scheduler.flights) or bool(self._inbox)
        age = now - self._progress if busy or self._state == "rebuilding" else 0.0
        lost = now - self._lost_at if self._state == "rebuilding" else 0.0
        return EngineHealth(self._state, age, lost, self._message)

    # ---- the loop ----

    def step(self) -> bool:
        """One round: takes in what came, keeps the pipeline full, delivers news, commits one result. False when there
        was nothing to do."""
        came = self._take_inbox()
        try:
            self._fill()
            told = self._deliver()
            if not self._scheduler.flights:
                self._check_progress()
                return came or told
            self._receive()
        except (RankGroupFailed, TimeoutError, StepMismatch) as error:
            self._replace_ranks(error)
        return True

    def _run(self) -> None:
        try:
            while self._state != "closed":
                if not self.step():
                    self._rest()
        except Exception as error:
            log.exception("the scheduler failed")
            self._down(f"the scheduler failed: {type(error).__name__}: {error}")

    def _rest(self) -> None:
        """Sleeps until another thread has something, looking after the ranks now and then: one that dies while nothing
        runs is replaced before the next request comes."""
        with self._lock:
            self._resting = True
            self._lock.notify_all()
            woken = self._lock.wait_for(lambda: self._inbox or self._poked or self._state == "closed", IDLE_SECONDS)
            self._poked = self._resting = False
        self._progress = time.monotonic()
        if not woken and self._state == "running":
            try:
                self._ranks.check()
            except RankGroupFailed as error:
                self._replace_ranks(error)

    def _fill(self) -> None:
        scheduler = self._scheduler
        while len(scheduler.flights) < DEPTH:
            if not scheduler.flights:
                self._progress = time.monotonic()
            step = scheduler.plan()
            if step is None:
                return
            self._ranks.send(step)
            self._send_late()

    def _receive(self) -> None:
        """Commits the oldest step in flight. Serves the inbox while a long step runs."""
        limit = self._pace.limit(self._scheduler.flights[0].work)
        began = time.monotonic()
        while True:
            now = time.monotonic()
            left = began + limit - now
            pause = min(left, INTERVAL, self._due - now)
            try:
                result = self._ranks.receive(max(pause, 0.0))
                break
            except TimeoutError:
                if self._state == "closed":
                    return
                if pause >= left:
                    raise TimeoutError(f"a step took longer than {limit:g} s") from None
            self._take_inbox()
            self._deliver()
        if result.failure:
            raise RankGroupFailed(result.failure)
        flight = self._scheduler.commit(result, time.time())
        self._send_late()
        now = time.monotonic()
        self._step_seconds, self._progress = now - self._progress, now
        self._pace.learn(flight.work, result.seconds, prefill=flight.prefill > flight.work / 2)
        self._scheduler.allowance = self._pace.work_within(self.config.decode_stall)

    def _send_late(self) -> None:
        late = self._scheduler.late()
        if late is not None:
            self._ranks.send_late(late)

    def _check_progress(self) -> None:
        """Nothing is in flight after planning, so nothing may be running: a bug is better loud than a hang."""
        if self._scheduler.active:
            raise RuntimeError(f"{len(self._scheduler.active)} requests are running and no step can be planned")

    def _deliver(self) -> bool:
        """Passes on what there is to tell. Whether there was any."""
        news = self._scheduler.take_news()
        for group, updates in news:
            if group.sink is not None:
                self._call(group, lambda sink=group.sink, updates=updates: sink(updates))  # type: ignore[misc]
        if self._on_step is not None:
            self._call(None, lambda: self._pass_on(news))
        if news:
            self._settle(news)
        return bool(news)

    def _pass_on(self, news: News) -> None:
        """Calls `on_step` when there are news or it is time; without a step to wait for, nothing is held back."""
        held, expected = self._due < inf, self._step_seconds if self._scheduler.flights else inf
        now = time.monotonic()
        if self._on_step is not None and (news or (held and (expected == inf or now >= self._due))):
            self._due = inf
            self._due = now + self._on_step([(group.id, updates) for group, updates in news], expected)

    def _call(self, group: Group | None, call: Callable[[], None]) -> None:
        """A sink's failure is its group's alone."""
        try:
            call()
        except Exception:
            log.exception("a sink failed")
            for request in group.children if group is not None else ():
                self._scheduler.end(request, EngineEnd("cancelled"))

    def _settle(self, news: News) -> None:
        """Counts out what has ended."""
        ended = sum(update.end is not None for _, updates in news for update in updates)
        if not ended:
            return
        over = [group.id for group, _ in news if group.live == 0]
        for group_id in over:
            if self._groups.pop(group_id, None) is not None:
                self._tombstones.ended(group_id)
        with self._lock:
            self._live -= ended
            self._ids.difference_update(over)
            self._lock.notify_all()

    # ---- what came from other threads ----

    def _post(self, action: Callable[[], None]) -> None:
        with self._lock:
            self._inbox.append(action)
            self._lock.notify_all()

    def _poke(self) -> None:
        with self._lock:
            self._poked = True
            self._lock.notify_all()

    def _take_inbox(self) -> bool:
        with self._lock:
            actions, self._inbox = self._inbox, deque()
            self._poked = False
        for action in actions:
            action()
        return bool(actions)

    def _forget(self, group_id: str, count: int) -> None:
        with self._lock:
            self._live -= count
            self._ids.discard(group_id)

    def _add(self, group: Group, requests: list[Request]) -> None:
        self._groups[group.id] = group
        self._scheduler.add(group, requests)
        if self._tombstones.claim(group.id):
            self._cancel(group.id)
        elif self._state == "down":
            self._fail(requests, self._message)

    def _stop(self, group_id: str, child: int) -> None:
        group = self._groups.get(group_id)
        if group is not None and 0 <= child < len(group.children):
            self._scheduler.end(group.children[child], EngineEnd("cancelled"))

    def _cancel(self, group_id: str) -> None:
        group = self._groups.get(group_id)
        if group is None:
            self._tombstones.cancel(group_id)
            return
        for request in group.children:
            self._scheduler.end(request, EngineEnd("cancelled"))

    def _fail(self, requests: Sequence[Request], message: str) -> None:
        for request in requests:
            self._scheduler.end(request, EngineEnd("failed", "unavailable", message))

    # ---- life and death of ranks ----

    def _replace_ranks(self, error: Exception) -> None:
        """Starts a new group in place of a failed one. Meanwhile groups are taken in and cancels work."""
        log.error("the ranks failed: %s", error)
        self._lost_at = self._progress = time.monotonic()
        self._state = "rebuilding"
        failure = error
        while self._state == "rebuilding":
            now = time.monotonic()
            self._losses = [at for at in self._losses if now - at < self._window] + [now]
            self._message = f"the ranks failed: {failure}"
            self._ranks.close()
            if len(self._losses) > self._rebuilds:
                self._down(f"{self._message} ({len(self._losses)} failures within {self._window:g} s)")
                return
            self._scheduler.lose(str(failure))
            self._deliver()
            started: Future[RankGroup] = Future()
            self._rebuilder = threading.Thread(target=self._start_ranks, args=(started,), name="rebuild", daemon=True)
            self._rebuilder.start()
            self._wait_for(started)
            if not started.done():
                return
            raised = started.exception()
            if raised is None:
                self._adopt(started.result())
                return
            failure = raised if isinstance(raised, Exception) else RankGroupFailed(repr(raised))
            log.error("new ranks could not be started: %s", failure)

    def _start_ranks(self, started: Future[RankGroup]) -> None:
        try:
            ranks = self._factory()
        except BaseException as error:
            started.set_exception(error)
        else:
            started.set_result(ranks)
            if self._state == "closed":
                ranks.close()
        self._poke()

    def _wait_for(self, started: Future[RankGroup]) -> None:
        """Serves the inbox until `started` is done or the engine is closed."""
        while not started.done() and self._state == "rebuilding":
            with self._lock:
                self._lock.wait_for(lambda: self._inbox or self._poked or self._state == "closed", 1.0)
            self._take_inbox()
            self._deliver()

    def _adopt(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._rebuilt += 1
        self.report = ranks.report
        self._scheduler.reset(self.report.pages)
        self._pace = StepPace(self.config.step_timeout)
        with self._lock:
            if self._state == "rebuilding":
                self._state, self._message = "running", ""
        log.warning("new ranks run after %.1f s", time.monotonic() - self._lost_at)

    def _down(self, message: str) -> None:
        """No ranks, no hope: every request fails, and so does every new one."""
        log.error("the engine is down: %s", message)
        with self._lock:
            if self._state != "closed":
                self._state = "down"
            self._message = message
        self._scheduler.reset(self._scheduler.kv.pool.total)
        self._shut(message)

    def _shut(self, message: str) -> None:
        self._take_inbox()
        for group in list(self._groups.values()):
            self._fail(group.children, message)
        self._deliver()


def _seed(config: EngineConfig, manifest: Manifest, report: RankReport) -> bytes:
    """The start of this engine's page keys: KV of another device, backend, kernels or rank count is other KV."""
    return cache_seed(
        manifest,
        dtype=config.dtype,
        numerics=report.numerics,
        page_tokens=config.page_tokens,
        computation=(report.device, report.attention, report.kernels, str(config.tensor_parallel)),
    )


class _Guides:
    """Opens guides for the requests that need one, in a pool: a constraint must be compiled and a long output replayed,
    and neither the loop nor the caller should wait for that."""

    def __init__(self, model: PreparedModel, open_guide: OpenGuide | None, poke: Callable[[], None]) -> None:
        self._model = model
        self._open = open_guide
        self._poke = poke
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def open(self, request: Request) -> None:
        """Gives `request` the promise of its guide, if it needs one. Any thread."""
        prompt = request.prompt
        if prompt.constraint is None and (prompt.reasoning_budget is None or prompt.opening != "reasoning"):
            return
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(4, thread_name_prefix="guides")
            pool = self._pool
        request.opening = pool.submit(self._opened, prompt)
        request.opening.add_done_callback(lambda _: self._poke())

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _opened(self, prompt: PreparedPrompt) -> Guide:
        with self._lock:
            if self._open is None:
                self._open = ModelGuides(self._model)
        guide = self._open(prompt)
        for record in prompt.committed:
            guide.commit(record.id, forced=record.forced)
        return guide
