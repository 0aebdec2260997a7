"""The ingress side of an engine: the held call, following its tokens, cancelling, and resubmission after a death.

Implements EnginePort. Owns what an ingress process knows of its running groups; leaves routing to Serve, sockets to
`token_channel` and the meaning of tokens to the output pipeline.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from engine.types.events import EngineEnd, PromptScores, TokenRecord, Update
from engine.types.request import PreparedPrompt, PreparedRequest
from protocols.errors import InvalidRequest, ProtocolError, SlotsExhausted, Unavailable
from serve_app.groups import GroupCall, Reply
from serve_app.ingress.ports import Generation, Outcome
from serve_app.token_channel import Link, Listener, Message, Sink, unpack_update

logger = logging.getLogger("ray.serve")

OTHER_REPLICA = ("slots", "queue", "paused", "settings", "channel", "unavailable")
PAUSE_BETWEEN_TRIES = 0.25


class HeldCall(Protocol):
    """A call that an engine keeps open until its group has ended. Fails when the replica dies."""

    def __await__(self) -> Generator[Any, None, Reply]: ...

    def cancel(self) -> None: ...


class Caller(Protocol):
    """Makes held calls. Raises Unavailable when there is no engine application yet."""

    def call(self, call: GroupCall, avoid: tuple[str, ...], prefer: str = "") -> HeldCall:
        """Starts a call on some replica: `prefer` while it lives, not one of `avoid` where there is another."""
        ...


class EngineLost(Exception):
    """The replica of an attempt died, or its link did."""


class Attempt:
    """One held call of a flight. `children`: which of the flight's children it generates, in the call's order."""

    def __init__(self, number: int, sink: Sink, children: tuple[int, ...]) -> None:
        self.number, self.sink, self.children = number, sink, children
        self.link: Link | None = None
        self.acknowledged: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lost = False
        self.over = False
        self.watcher: asyncio.Task[Reply] | None = None
        self.held: HeldCall | None = None


class Flight:
    """A group being generated: the Generation of `ingress.ports`. Survives the death of its replica. `before`: the call
    whose slots it takes over."""

    def __init__(self, client: EngineClient, request_id: str, children: Sequence[PreparedPrompt]) -> None:
        self._client, self.request_id, self._children = client, request_id, tuple(children)
        self._records: list[list[TokenRecord]] = [[] for _ in children]
        self._cached: list[int | None] = [None for _ in children]
        self._ended = [False for _ in children]
        self._stopped: list[int | None] = [None for _ in children]
        self._scored = [0 for _ in children]
        self._queue: deque[Update] = deque()
        self._news: asyncio.Future[None] | None = None
        self._finished = False
        self.attempt: Attempt | None = None
        self.before: Attempt | None = None

    # --- what the ingress uses ---

    def __aiter__(self) -> Flight:
        return self

    async def __anext__(self) -> tuple[Update, ...]:
        while not self._queue:
            if all(self._ended):
                raise StopAsyncIteration
            if self.attempt is not None and self.attempt.lost:
                await self._client.resubmit(self)
                continue
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        batch = tuple(self._queue)
        self._queue.clear()
        return batch

    def stop(self, child: int, tokens: int) -> None:
        self._stopped[child] = tokens
        attempt = self.attempt
        if attempt is not None and attempt.link is not None and child in attempt.children and not self._ended[child]:
            attempt.link.send([["stop", attempt.number, attempt.children.index(child), tokens]])

    def finish(self, outcomes: tuple[Outcome, ...]) -> None:
        if not self._finished:
            self._finished = True
            self._client.finish(self, outcomes)

    # --- what the client does with it ---

    def remaining(self) -> tuple[int, ...]:
        """Children that an engine still has to generate. A stopped child needs no engine: it ends here."""
        for child, tokens in enumerate(self._stopped):
            if tokens is not None and not self._ended[child]:
                self.push(Update(child, end=EngineEnd("cancelled")))
        return tuple(child for child, ended in enumerate(self._ended) if not ended)

    def prepared(self, child: int) -> PreparedPrompt:
        """The child as it is submitted: with what an earlier replica generated already."""
        prompt, records = self._children[child], tuple(self._records[child])
        if not records and self._cached[child] is None:
            return prompt
        output = replace(prompt.output, prompt_logprobs=None) if records else prompt.output  # scored already
        return replace(prompt, output=output, committed=records, first_cached=self._cached[child])

    def push(self, update: Update) -> None:
        """Takes an update whose `child` is the flight's own index."""
        child = update.child
        if self._ended[child]:
            return
        self._records[child].extend(update.records)
        if update.cached_tokens is not None:
            if self._cached[child] is None:
                self._cached[child] = update.cached_tokens
            else:  # told already, by the replica that is gone
                update = replace(update, cached_tokens=None)
        if update.scores is not None:
            update = replace(update, scores=self._new_scores(child, update.scores))
        if update.end is not None:
            self._ended[child] = True
        self._queue.append(update)
        self.wake()

    def _new_scores(self, child: int, scores: PromptScores) -> PromptScores | None:
        """The part of a chunk that no earlier replica has told."""
        start, end = max(scores.start, self._scored[child]), scores.start + len(scores.entries)
        if start >= end:
            return None
        self._scored[child] = end
        return scores if start == scores.start else PromptScores(start, scores.entries[start - scores.start :])

    def wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


class EngineClient:
    """One ingress process's way to the engines. `start` it on the loop that serves requests.

    `patience`: seconds a new request waits for a replica; `resubmit_patience`: seconds a running one does.
    `replicas`: whether there is another replica to try when one refuses.
    """

    def __init__(
        self,
        caller: Caller,
        *,
        digest: str,
        node: str,
        host: str,
        beat: float = 5.0,
        patience: float = 10.0,
        resubmit_patience: float = 60.0,
        replicas: int = 1,
    ) -> None:
        self._caller, self._digest = caller, digest
        self._patience, self._resubmit_patience, self._replicas = patience, resubmit_patience, replicas
        self._listener = Listener(self._message, self._closed, self._live, node=node, host=host, beat=beat)
        self._flights: dict[int, tuple[Flight, Attempt]] = {}
        self._numbers = itertools.count(1)
        self.resubmitted = 0

    async def start(self) -> None:
        await self._listener.start()

    async def close(self) -> None:
        await self._listener.close()

    @property
    def flying(self) -> int:
        """Groups between enqueue and `finish`."""
        return len(self._flights)

    async def generate(self, request_id: str, request: PreparedRequest, after: Generation | None = None) -> Flight:
        """EnginePort.generate. Children without anything to generate or score end at once, without an engine."""
        flight = Flight(self, request_id, request.children)
        flight.before = after.attempt if isinstance(after, Flight) else None
        for index, child in enumerate(request.children):
            if child.max_tokens == 0 and child.output.prompt_logprobs is None:
                flight.push(Update(index, cached_tokens=0, end=EngineEnd("limit")))
        if flight.remaining():
            going_on = flight.before is not None
            patience = self._resubmit_patience if going_on else self._patience
            await self._submit(flight, time.monotonic() + patience, persistent=going_on)
        return flight

    async def resubmit(self, flight: Flight) -> None:
        """Continues a flight whose replica is gone on another one. Raises ProtocolError when none takes it in time."""
        assert flight.attempt is not None
        self._forget(flight.attempt)
        if not flight.remaining():
            flight.attempt.lost = False
            return
        self.resubmitted += 1
        logger.warning("request %s: its engine is gone; resubmitting", flight.request_id)
        await self._submit(flight, time.monotonic() + self._resubmit_patience, persistent=True)

    async def _submit(self, flight: Flight, deadline: float, *, persistent: bool = False) -> None:
        """Tries until a replica has acknowledged the group. `persistent`: refusals for want of room don't count as
        an answer until the deadline, since the group has been admitted once."""
        avoid: tuple[str, ...] = ()
        while True:
            try:
                reply = await self._try(flight, avoid, deadline)
            except EngineLost:
                if time.monotonic() >= deadline:
                    raise Unavailable("no engine is available") from None
                await asyncio.sleep(PAUSE_BETWEEN_TRIES)
                continue
            if reply is None:
                return
            reason, replica = reply.get("reason", "unavailable"), reply.get("replica", "")
            movable = reason in OTHER_REPLICA
            if movable and not avoid and self._replicas > 1:
                avoid = (replica,)
                continue
            if movable and persistent and time.monotonic() < deadline:
                avoid = ()
                await asyncio.sleep(PAUSE_BETWEEN_TRIES)
                continue
            raise _error(reply)

    async def _try(self, flight: Flight, avoid: tuple[str, ...], deadline: float) -> Reply | None:
        """One held call. None once it is acknowledged, else the refusal. Raises EngineLost, or Unavailable at the
        deadline."""
        children = flight.remaining()
        attempt = Attempt(next(self._numbers), self._listener.issue(self._digest), children)
        self._flights[attempt.number] = (flight, attempt)
        flight.attempt = attempt
        before = flight.before
        call = GroupCall(
            attempt.number,
            flight.request_id,
            tuple(map(flight.prepared, children)),
            attempt.sink,
            None if before is None else before.number,
        )
        prefer = "" if before is None or before.link is None else before.link.name
        try:
            attempt.held = held = self._caller.call(call, avoid, prefer)
            attempt.watcher = asyncio.ensure_future(self._watch(flight, attempt, held))
            await asyncio.wait(
                (attempt.acknowledged, attempt.watcher),
                timeout=max(0.0, deadline - time.monotonic()),
                return_when=asyncio.FIRST_COMPLETED,
            )
        except BaseException:
            self._abandon(attempt)
            raise
        if attempt.acknowledged.done():
            return None
        if not attempt.watcher.done():
            self._abandon(attempt)
            raise Unavailable("no engine is available")
        self._forget(attempt)
        reply = attempt.watcher.result()
        if reply["state"] != "refused" or reply["reason"] == "cancelled":
            raise EngineLost
        return reply

    async def _watch(self, flight: Flight, attempt: Attempt, held: HeldCall) -> Reply:
        """Waits for the held call. Its failure means a dead replica; its success says nothing the channel doesn't."""
        try:
            reply = await held
        except asyncio.CancelledError:
            reply = Reply(state="dropped")
        except Exception as error:  # whatever Ray or Serve reports of a replica it lost
            if not attempt.over:
                logger.warning("request %s: %s: %s", flight.request_id, type(error).__name__, error)
            reply = Reply(state="dropped")
        if reply["state"] == "dropped" and not attempt.over:
            attempt.lost = True
            flight.wake()
        return reply

    def finish(self, flight: Flight, outcomes: tuple[Outcome, ...]) -> None:
        """Tells the engine that delivery is over and forgets the flight."""
        attempt = flight.attempt
        if attempt is None or attempt.over:
            return
        if attempt.link is None:
            self._abandon(attempt)
            return
        # This also ends the held call; cancelling that too would only cost.
        attempt.link.send([["finished", attempt.number, list(outcomes)]])
        self._forget(attempt)

    def _abandon(self, attempt: Attempt) -> None:
        """Gives up a call that nobody has acknowledged: it may be on its way to any replica, so all are told."""
        self._forget(attempt)
        if attempt.held is not None and (attempt.watcher is None or not attempt.watcher.done()):
            attempt.held.cancel()
        self._listener.broadcast(["finished", attempt.number, []])

    def _forget(self, attempt: Attempt) -> None:
        attempt.over = True
        self._flights.pop(attempt.number, None)
        self._listener.revoke(attempt.sink)

    # --- the channel ---

    def _message(self, link: Link, message: Message) -> None:
        kind = message[0]
        number = kind if type(kind) is int else message[1]
        found = self._flights.get(number)
        if found is None:
            return
        flight, attempt = found
        if attempt.link is None:  # the acknowledgement, or a token that was faster
            attempt.link = link
            self._listener.revoke(attempt.sink)
            if not attempt.acknowledged.done():
                attempt.acknowledged.set_result(None)
        if kind != "ack" and not attempt.lost:
            for packed in message[1]:
                packed[0] = attempt.children[packed[0]]
                flight.push(unpack_update(packed))

    def _closed(self, link: Link) -> None:
        """The engine's process is gone, or can't be heard: every flight on this link is lost at once."""
        for flight, attempt in list(self._flights.values()):
            if attempt.link is link:
                attempt.lost = True
                flight.wake()

    def _live(self, link: Link) -> list[int]:
        return [number for number, (_, attempt) in self._flights.items() if attempt.link in (link, None)]


def _error(reply: Reply) -> ProtocolError:
    """What a refusal is to the client."""
    message = reply.get("message", "no engine is available")
    match reply.get("reason"):
        case "slots":
            return SlotsExhausted(message)
        case "oversized":
            return InvalidRequest(message)
        case "invalid":
            return InvalidRequest(message, field=reply.get("field"), code=reply.get("code"))
    return Unavailable(message)
