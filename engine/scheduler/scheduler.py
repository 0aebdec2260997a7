"""Scheduler: which tokens the next step computes, and what a step's result means.

Counters chase each other: a request's computed positions chase the tokens that are known or in flight. Planning
advances the counters and results only fill in what was planned, so a step can be planned while the one before it
runs. One token budget a step: decodes first, then prefill chunks. Pure bookkeeping, without threads, clocks or I/O;
`engine.engine` drives it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from engine.cache.checkpoints import NOTHING, Checkpoint
from engine.cache.keys import image_part, next_key, page_keys
from engine.cache.kv import KVCache
from engine.config import EngineConfig
from engine.scheduler.chunks import LANE, share
from engine.scheduler.counters import Counters
from engine.scheduler.flight import CONTEXT_UNIT, Flight, Planned, StepMismatch
from engine.scheduler.guide import GuideFailed
from engine.scheduler.queue import Waiting
from engine.scheduler.request import Group, Request
from engine.scheduler.scores import chunk_scores
from engine.scheduler.step import LateInputs, SampledRow, ScoredRow, Step, StepResult
from engine.types.events import EngineEnd, PromptScores, TokenRecord, Update
from engine.types.request import PreparedPrompt, RequestError

LOOKAHEAD = 64
"""Waiting requests that one plan looks at."""

PREFILLING = 8
"""Prefills that may be under way at once, unless one step has room for more."""

STRIKES = 3
"""Failed groups of ranks after which a request that each was computing is given up: it may be what kills them."""

News = list[tuple[Group, list[Update]]]


class Scheduler:
    """`context`: prompt plus output tokens; a smaller pool of pages cuts it. `cache_seed`: see
    `engine.cache.keys.cache_seed`. `with_prompt`: slots get their prompt even when sampling doesn't need it (scripted
    models)."""

    def __init__(
        self, config: EngineConfig, *, pages: int, context: int, cache_seed: bytes, with_prompt: bool = False
    ) -> None:
        if config.step_tokens < config.max_requests:
            raise ValueError(
                f"step_tokens {config.step_tokens} is below max_requests {config.max_requests}: "
                "one step must hold a token of every running request"
            )
        self.config = config
        self._context = context
        self.counters = Counters()
        self.waiting = Waiting()
        self.active: dict[int, Request] = {}
        self.flights: deque[Flight] = deque()
        self._seed = cache_seed
        self._with_prompt = with_prompt
        self._number = 0
        self._arrivals = 0
        self._news: dict[Group, list[Update]] = {}
        self.allowance: float | None = None
        """Weighted tokens of prefill that a step with decodes may hold; None for no limit but the budget."""
        self.reset(pages)

    # ---- what comes in ----

    def reset(self, pages: int) -> None:
        """A new group of ranks with `pages` pages: nothing is computed any more, and whoever ran waits to be computed
        again."""
        for request in self.active.values():
            request.leave()
            self.waiting.resume(request)
        for request in self.waiting:
            request.inflight = 0
            request.awaits = None
        self.active.clear()
        self.flights.clear()
        self.context = min(self._context, pages * self.config.page_tokens)
        self.kv = KVCache(pages, self.config.page_tokens, reuse=self.config.prefix_cache)
        self.kv.pool.drained(self._number)
        self._slots = list(range(self.config.max_requests - 1, -1, -1))
        self._released: list[int] = []
        self._late_sent = self._number

    def lose(self, message: str) -> None:
        """The ranks are gone, with the steps in flight. Whoever ran waits to be computed again, but for requests that
        were being computed at too many such failures."""
        for request in dict.fromkeys(row.request for flight in self.flights for row in flight.rows):
            request.strikes += 1
            if request.strikes >= STRIKES:
                self.end(request, EngineEnd("failed", "execution", f"computing it failed {STRIKES} times: {message}"))
        self.reset(self.kv.pool.total)

    def prepare(self, group: Group, children: Sequence[PreparedPrompt]) -> list[Request]:
        """Requests for a group's children, all or none. Changes nothing, so any thread may call it. Raises
        RequestError for what can never be served."""
        requests = []
        for child, prompt in enumerate(children):
            length = len(prompt.token_ids)
            if length == 0:
                raise RequestError("the prompt is empty", field="prompt")
            limit = self.context if prompt.max_tokens == 0 else self.context - 1  # room for one generated token
            if length > limit:
                message = f"prompt is too long: {length} tokens > {limit} maximum"
                raise RequestError(message, code="context_length_exceeded")
            request = Request(group, child, prompt, self.context)
            self._name_prompt(request)
            requests.append(request)
        return requests

    def add(self, group: Group, requests: Sequence[Request]) -> None:
        """Enqueues a group whole. Children that have nothing left to do end at once."""
        group.children = list(requests)
        group.live = len(requests)
        for request in requests:
            self._arrivals += 1
            request.arrival = self._arrivals
            self.waiting.add(request)
            cause = request.verdict()
            if cause is not None and not request.scoring:
                self.end(request, EngineEnd(cause))

    def end(self, request: Request, end: EngineEnd, records: tuple[TokenRecord, ...] = ()) -> None:
        """Ends a request, whatever its state; nothing happens when it has ended. Rows of it that are in flight are
        dropped when their results come."""
        if request.ended:
            return
        request.ended = True
        if request.slot >= 0:
            self._vacate(request, trusted=end.cause != "failed")
        else:
            self.waiting.remove(request)
        request.group.live -= 1
        cut = request.guide is not None and request.guide.cut
        self._tell(request, records, end=EngineEnd(end.cause, end.kind, end.message, cut))

    def take_news(self) -> News:
        """Updates since the last call, by group, in order."""
        news = list(self._news.items())
        self._news = {}
        return news

    @property
    def idle(self) -> bool:
        """Nobody runs, nobody waits, nothing is in flight."""
        return not self.active and not self.flights and not len(self.waiting)

    # ---- planning ----

    def plan(self) -> Step | None:
        """The next step, to be sent at once; None when nothing can be computed before something else happens."""
        flight = Flight(Step(self._number + 1))
        self._plan_decodes(flight)
        self._admit(flight)
        self._plan_prefills(flight)
        if not flight.rows:
            return None
        self._number += 1
        flight.step.release, self._released = self._released, []
        self.flights.append(flight)
        return flight.step

    def late(self) -> LateInputs | None:
        """The late inputs that are due, once: those of the oldest step in flight, as every step before it is
        committed. None when it has no gated rows."""
        if not self.flights or self.flights[0].step.number <= self._late_sent:
            return None
        flight = self.flights[0]
        self._late_sent = flight.step.number
        if not flight.gated:
            return None
        late = LateInputs(flight.step.number, forced=flight.forced)
        for row in flight.rows:
            guide = row.request.guide
            if not row.gated or guide is None or row.request.ended:
                continue
            forced = guide.forced()
            mask = guide.mask() if forced is None else None
            if forced is not None:
                flight.forced[row.slot] = forced
            elif mask is not None:
                late.masks[row.slot] = mask
        return late

    def _plan_decodes(self, flight: Flight) -> None:
        """A token for every request whose prefill is scheduled, oldest first, so that who must give up its pages has
        no row yet."""
        for request in sorted(self.active.values(), key=_arrival):
            if request.slot < 0 or not request.decoding or not request.wants_more:
                continue
            if not self._grow(request, flight.step):
                continue
            guide = request.guide
            gated = guide is not None and guide.gated(request.generated + request.inflight)
            flight.add(Planned(request, request.slot, request.computed, 1, True, False, False, gated))
            request.computed += 1
            request.inflight += 1

    def _grow(self, request: Request, step: Step) -> bool:
        """Makes room for the position that the request computes next. When pages have run out, waits for those that
        drain, else takes those of the youngest request; a request alone in the pool ends with its limit."""
        page = request.computed // self.config.page_tokens
        pool = self.kv.pool
        while page >= len(request.pages):
            if pool.available:
                request.pages += pool.take(1)
                step.tables.append((request.slot, page, request.pages[page:]))
            elif pool.draining:
                return False
            elif len(self.active) == 1:
                if not request.inflight:
                    self.end(request, EngineEnd("limit"))
                return False
            else:
                youngest = max(self.active.values(), key=_arrival)
                self._preempt(youngest)
                if youngest is request:
                    return False
        return True

    def _admit(self, flight: Flight) -> None:
        """Gives slots and the pages of their whole prompts to waiting requests, in order. Those that wait for a grammar
        or for a prefix that another computes are passed by, and so are long prompts while many are under way; one that
        lacks pages is not."""
        if not self._slots or not len(self.waiting):
            return
        lengths = [request.prefill_end - request.computed for request in self.active.values() if not request.decoding]
        prefills, backlog = len(lengths), sum(lengths)
        budget = self.config.step_tokens - len(flight.rows)
        for request in list(islice(self.waiting, LOOKAHEAD)):
            if not self._slots:
                return
            crowded = prefills >= PREFILLING and backlog >= budget
            if not self._ready(request):
                continue
            length = len(request.tokens)
            pages = self.kv.pages_for(length)
            if pages > self.kv.pool.total:
                self.end(request, EngineEnd("limit"))
                continue
            found = self._find(request, length)
            if found is None or (crowded and length - found.length > budget // LANE):
                continue
            if self.kv.room(found) < pages - len(found.pages) + len(self.active):
                return
            found = self._begun(request, found, pages)
            self._occupy(request, found, pages, flight.step)
            prefills += 1
            backlog += length - found.restored

    def _ready(self, request: Request) -> bool:
        """Whether a waiting request could start, but for slots and pages."""
        if request.inflight or request.ended:
            return False
        opening = request.opening
        if opening is not None:
            if not opening.done():
                return False
            request.opening = None
            error = opening.exception()
            if error is not None:
                self.end(request, EngineEnd("failed", "execution", f"the output constraint can't be used: {error}"))
                return False
            request.guide = opening.result()
        if request.awaits is not None:
            if self.kv.promised(request.awaits):
                return False
            request.awaits = None
        return True

    def _find(self, request: Request, length: int) -> Checkpoint | None:
        """What can be restored for a request; None when it had better wait for what another is computing."""
        self._name_pages(request)
        if request.unscored:
            return NOTHING
        found = self.kv.find(request.keys, length)
        request.awaits = self.kv.awaited(request.keys, found, length)
        return found if request.awaits is None else None

    def _begun(self, request: Request, found: Checkpoint, pages: int) -> Checkpoint:
        """`found` with the beginning of a page after it, where there is one and room for the copy."""
        start = found.length
        end = min(start + self.config.page_tokens, len(request.tokens) - 1)
        if end <= start or request.unscored or image_part(start, end, request.prompt.images):
            return found
        begun = self.kv.begun(found, self._parent(request, len(found.pages)), request.tokens[start:end].tobytes())
        enough = self.kv.room(begun) >= pages - len(found.pages) + len(self.active)
        return begun if enough else found

    def _occupy(self, request: Request, found: Checkpoint, pages: int, step: Step) -> None:
        """Moves a waiting request onto a slot."""
        self.waiting.remove(request)
        request.slot = self._slots.pop()
        self.active[request.slot] = request
        request.pages = self.kv.open(found, pages, fence=step.number)
        if found.begun is not None:
            step.copies.append((found.begun.page, request.pages[len(found.pages)]))
        request.computed = found.restored
        request.prefill_end = len(request.tokens)
        request.published = len(found.pages)
        request.promised = request.prefill_end // self.config.page_tokens if request.keys else 0
        self.kv.promise(request.keys[request.published : request.promised])
        if request.cached_tokens is None:
            request.cached_tokens = min(found.restored, request.prompt_length)
        self.counters.reused_tokens += found.restored
        step.setups.append(request.setup(found.restored, with_prompt=self._with_prompt))
        step.tables.append((request.slot, 0, list(request.pages)))

    def _plan_prefills(self, flight: Flight) -> None:
        requests = sorted((request for request in self.active.values() if not request.decoding), key=_arrival)
        if not requests:
            return
        remaining = [request.prefill_end - request.computed for request in requests]
        budget = self.config.step_tokens - len(flight.rows)
        if flight.rows and self.allowance is not None:
            allowed = int(self.allowance / (1.0 + requests[0].computed / CONTEXT_UNIT))
            budget = min(budget, max(allowed, self.config.page_tokens))
        for request, count in zip(requests, share(remaining, budget, self.config.prefill_chunk), strict=True):
            if count:
                self._plan_chunk(flight, request, count)

    def _plan_chunk(self, flight: Flight, request: Request, count: int) -> None:
        start = request.computed
        end = start + count
        sample = end == request.prefill_end and request.wants_more
        score = request.unscored
        guide = request.guide
        gated = sample and guide is not None and guide.gated(request.generated)
        flight.add(
            Planned(request, request.slot, start, count, sample, True, score, gated),
            tokens=request.tokens[start:end].tobytes(),
            alternatives=request.prompt.output.prompt_logprobs if score else None,
        )
        request.computed = end
        request.inflight += sample
        # Ranks run steps in order, so what this step computes can be read by any later one.
        self._publish(request, end // self.config.page_tokens)

    # ---- results ----

    def commit(self, result: StepResult, now: float = 0.0) -> Flight:
        """Takes the result of the oldest step in flight; `now`: seconds since the epoch. Raises StepMismatch, after
        which only `reset` helps."""
        if not self.flights:
            raise StepMismatch(f"a result of step {result.number} came, and none is in flight")
        flight = self.flights[0]
        decodes = 0
        for row, answer, scored in flight.answers(result):
            request = row.request
            request.inflight -= row.sample
            if row.prefill:
                self.counters.prefill_tokens += row.count
            if request.ended:
                self.counters.dropped_rows += 1
                continue
            if row.score:
                self._take_scores(row, scored)
            if answer is not None:
                decodes += self._take_token(row, answer, forced=row.slot in flight.forced, now=now)
            elif row.start + row.count == len(request.tokens) and not request.wants_more:
                self.end(request, EngineEnd("limit"))
        self.flights.popleft()
        self.kv.pool.drained(result.number)
        self.counters.steps += 1
        self.counters.verify_steps += decodes > 0
        self.counters.verification_rounds += decodes
        return flight

    def _take_token(self, row: Planned, answer: SampledRow, *, forced: bool, now: float) -> bool:
        """Commits a sampled token. Whether it is a decode's progress."""
        request = row.request
        if answer.failure:
            self.kv.distrust(request.pages)
            self.end(request, EngineEnd("failed", "execution", answer.failure))
            return False
        request.tokens.append(answer.id)
        self.counters.generated_tokens += 1
        time = now if request.prompt.output.timestamps else 0.0
        if forced:
            record = TokenRecord(answer.id, forced=True, time=time)
        else:
            record = TokenRecord(answer.id, answer.logprob, tuple(answer.alternatives), False, time)
        cause = request.verdict()
        end = EngineEnd(cause) if cause is not None else None
        if request.guide is not None and (end is None or forced):
            self.counters.reasoning_budget_cuts += forced
            try:
                request.guide.commit(answer.id, forced=forced)
            except GuideFailed as error:
                end = EngineEnd("failed", "execution", str(error))
        if not row.prefill and request.slot == row.slot and (row.start + 1) % self.config.page_tokens == 0:
            self._name_pages(request)
            self._publish(request, (row.start + 1) // self.config.page_tokens)
        if end is not None:
            self.end(request, end, (record,))
        else:
            self._tell(request, (record,))
        return not row.prefill

    def _take_scores(self, row: Planned, scored: ScoredRow | None) -> None:
        request, end = row.request, row.start + row.count
        scores = chunk_scores(row.start, end, scored, request.prompt.images, delivered=request.scored)
        request.scored = max(request.scored, end)
        if scores is not None:
            self._tell(request, scores=scores)

    # ---- pages, slots, news ----

    def _preempt(self, request: Request) -> None:
        """Takes slot and pages back; the request is computed again later, which changes none of its tokens."""
        self.counters.preemptions += 1
        self._vacate(request)
        self.waiting.resume(request)

    def _vacate(self, request: Request, *, trusted: bool = True) -> None:
        if trusted:
            self._publish_rest(request)
        self.kv.withdraw(request.keys[request.published : request.promised])
        self.kv.close(request.pages, request.keys[: request.published] if trusted else (), fence=self._number)
        del self.active[request.slot]
        self._slots.append(request.slot)
        self._released.append(request.slot)
        request.leave()

    def _name_prompt(self, request: Request) -> None:
        """Page keys of a new request: those that came with it when they are this engine's, else computed here."""
        if not self.config.prefix_cache:
            request.keys = []
            return
        size, prompt = self.config.page_tokens, request.prompt
        if request.keys:
            first = page_keys(prompt.token_ids[:size], size, self._seed, prompt.images)
            if len(request.keys) != request.prompt_length // size or first != (request.keys[0],):
                request.keys = []
        if not request.keys:
            request.keys = list(page_keys(prompt.token_ids, size, self._seed, prompt.images))
        self._name_pages(request)

    def _name_pages(self, request: Request) -> None:
        """Extends the keys to all complete pages of the committed tokens."""
        if not self.config.prefix_cache:
            return
        size, images = self.config.page_tokens, request.prompt.images
        for page in range(len(request.keys), len(request.tokens) // size):
            start, end = page * size, (page + 1) * size
            parent = request.keys[-1] if request.keys else self._seed
            part = image_part(start, end, images) if images else b""
            request.keys.append(next_key(parent, request.tokens[start:end].tobytes(), part))

    def _publish(self, request: Request, complete: int) -> None:
        """The first `complete` pages of a running request can be reused from the next step on."""
        complete = min(complete, len(request.keys))
        size = self.config.page_tokens
        for page in range(request.published, complete):
            tokens = self._content(request, page * size, (page + 1) * size)
            self.kv.publish(request.keys[page], request.pages[page], self._parent(request, page), tokens)
        self.kv.withdraw(request.keys[request.published : min(complete, request.promised)])
        request.published = max(request.published, complete)

    def _publish_rest(self, request: Request) -> None:
        """What a leaving request computed of its last page can be copied by others."""
        end = min(request.computed, len(request.tokens))
        page = end // self.config.page_tokens
        tokens = self._content(request, page * self.config.page_tokens, end)
        if tokens and page == request.published:
            self.kv.publish_part(self._parent(request, page), tokens, request.pages[page])

    def _parent(self, request: Request, page: int) -> bytes:
        """The key of the page before `page`."""
        return request.keys[page - 1] if page else self._seed

    def _content(self, request: Request, start: int, end: int) -> bytes:
        """The tokens of positions [start, end); nothing where an image lies, whose placeholders are all alike."""
        return b"" if image_part(start, end, request.prompt.images) else request.tokens[start:end].tobytes()

    def _tell(
        self,
        request: Request,
        records: tuple[TokenRecord, ...] = (),
        *,
        scores: PromptScores | None = None,
        end: EngineEnd | None = None,
    ) -> None:
        cached = None
        if not request.announced:
            request.announced = True
            cached = request.cached_tokens or 0
        self._news.setdefault(request.group, []).append(Update(request.child, records, scores, cached, end))


def _arrival(request: Request) -> int:
    return request.arrival
