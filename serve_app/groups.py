"""Request groups at an Engine replica: HTTP slots, enqueue, the way of updates to their peer, and every way to end.

Owns which groups exist and what each holds. Leaves scheduling to the engine, sockets to `token_channel`, and what a
finished answer is to the ingress, which says so with `finished`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, Protocol, TypedDict

from engine.engine import QueueFull
from engine.types.events import Update
from engine.types.request import PreparedPrompt, RequestError
from serve_app.pacing import Pacer, Stream
from serve_app.token_channel import ChannelClosed, Dialler, Message, Peer, Sink

Refusal = Literal["slots", "oversized", "queue", "paused", "settings", "channel", "cancelled", "invalid", "unavailable"]
QUEUE_REASONS: dict[str, Refusal] = {"full": "queue", "paused": "paused", "down": "unavailable"}
TOMBSTONE_SECONDS = 120.0
TOMBSTONES = 8192


class Reply(TypedDict, total=False):
    """What a held call answers: `done` once every child has ended, `refused` before anything was enqueued, `dropped`
    when the peer left or cancelled. `field` and `code` belong to an "invalid" refusal."""

    state: Literal["done", "refused", "dropped"]
    reason: Refusal
    message: str
    field: str | None
    code: str | None
    replica: str


@dataclass(frozen=True, slots=True)
class GroupCall:
    """The argument of a held call. `number` is unique within the peer's life. `after`: a group of the same peer that
    has ended and isn't finished; its slots pass to this one, so that a request of several groups never lets go."""

    number: int
    request_id: str
    children: tuple[PreparedPrompt, ...]
    sink: Sink
    after: int | None = None


class Engine(Protocol):
    """What groups need of engine.engine.Engine."""

    def submit(self, group_id: str, children: Sequence[PreparedPrompt], *, admitted: bool = False) -> None: ...

    def stop(self, group_id: str, child: int, tokens: int) -> None: ...

    def cancel(self, group_id: str) -> None: ...


class Refused(Exception):
    """This replica doesn't take the group. Nothing was enqueued and no slot is held."""

    def __init__(self, reason: Refusal, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.reason, self.message, self.field, self.code = reason, message, field, code


class Group:
    """One request group from enqueue until its slots are free. `running`: children the engine hasn't ended. `slots`:
    those it holds; none once a successor has them."""

    __slots__ = ("born", "done", "id", "number", "peer", "running", "slots", "stream")

    def __init__(self, ident: str, number: int, peer: Peer, size: int) -> None:
        self.id, self.number, self.peer, self.slots = ident, number, peer, size
        self.stream = Stream(number, peer, size)
        self.running = size
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.born = time.monotonic()


class Groups:
    """All groups of one Engine replica. Lives on one event loop; only `on_step` is called from the engine's thread.
    `pace`: seconds between two departures of a stream's tokens, see `pacing`."""

    def __init__(
        self, engine: Engine, *, slots: int, digest: str, replica: str, node: str, beat: float, pace: float = 0.0
    ) -> None:
        self._engine, self._digest, self._replica = engine, digest, replica
        self._pacer = Pacer(pace)
        self._loop = asyncio.get_running_loop()
        self._dialler = Dialler(self._message, self._peer_closed, name=replica, node=node, beat=beat)
        self._groups: dict[tuple[str, int], Group] = {}
        self._by_id: dict[str, Group] = {}
        self._tombstones: dict[tuple[str, int], float] = {}
        self._suspects: set[tuple[str, int]] = set()
        self.paused = False
        self.slots, self.held = slots, 0
        self.completed, self.failed, self.orphans = 0, 0, 0

    async def generate(self, call: GroupCall) -> Reply:
        """The held call: enqueues the group, acknowledges over the channel and returns once every child has ended.
        A cancelled call cancels the group."""
        key = (call.sink.peer, call.number)
        try:
            group = await self._enqueue(key, call)
        except Refused as refusal:
            return {
                "state": "refused",
                "reason": refusal.reason,
                "message": refusal.message,
                "field": refusal.field,
                "code": refusal.code,
                "replica": self._replica,
            }
        try:
            whole = await group.done
        except asyncio.CancelledError:
            self._drop(key)
            raise
        return {"state": "done" if whole else "dropped", "replica": self._replica}

    async def _enqueue(self, key: tuple[str, int], call: GroupCall) -> Group:
        size = len(call.children)
        before = self._ended(call)
        given = 0 if before is None else before.slots
        self._check(key, call.sink, size, given)
        self.held += size - given
        if before is not None:
            before.slots = 0
        try:
            peer = await self._dialler.peer(call.sink)
            if key in self._tombstones:
                raise Refused("cancelled", "the request was cancelled")
            group = Group(f"{key[0]}/{key[1]}", key[1], peer, size)
            self._groups[key] = self._by_id[group.id] = group
            self._submit(group, call, admitted=given > 0)
            peer.post(["ack", group.number])
        except BaseException as error:
            self.held -= size
            if before is not None and self._groups.get((key[0], before.number)) is before:
                before.slots = given
                self.held += given
            self._forget(key)
            if isinstance(error, ChannelClosed):
                raise Refused("channel", str(error)) from None
            raise
        return group

    def _ended(self, call: GroupCall) -> Group | None:
        """The group whose slots the call takes over."""
        if call.after is None:
            return None
        group = self._groups.get((call.sink.peer, call.after))
        return group if group is not None and group.running <= 0 else None

    def _check(self, key: tuple[str, int], sink: Sink, size: int, given: int) -> None:
        """`given`: slots that it has already; a request that was let in is not stopped by a pause."""
        if key in self._tombstones:
            raise Refused("cancelled", "the request was cancelled")
        if self.paused and not given:
            raise Refused("paused", "admission is paused")
        if sink.digest != self._digest:
            raise Refused("settings", "this engine runs with other settings than the ingress")
        if size > self.slots:
            raise Refused(
                "oversized", f"the request has {size} choices, more than the {self.slots} request slots of this server"
            )
        if size > given and self.held + size - given > self.slots:
            raise Refused("slots", f"all {self.slots} request slots are in use; retry shortly")

    def _submit(self, group: Group, call: GroupCall, *, admitted: bool) -> None:
        try:
            self._engine.submit(group.id, call.children, admitted=admitted)
        except QueueFull as error:
            raise Refused(QUEUE_REASONS[error.reason], error.message) from None
        except RequestError as error:
            raise Refused("invalid", error.message, error.field, error.code) from None

    def on_step(self, news: Sequence[tuple[str, list[Update]]], expected: float = inf) -> float:
        """Everything one step brought, from the engine's thread, which writes a frame itself to each peer for which
        it is time; see engine.engine.OnStep."""
        for ident, updates in news:
            group = self._by_id.get(ident)
            if group is None:  # dropped meanwhile
                continue
            self._pacer.gather(group.stream, updates)
            ended = sum(update.end is not None for update in updates)
            if ended:
                # Before the end is sent, so that it is counted before any answer to it is read.
                with contextlib.suppress(RuntimeError):  # the loop has ended: the process is going down
                    self._loop.call_soon_threadsafe(self._ends, group, ended)
        for peer, messages in self._pacer.departures(expected):
            peer.send(messages)
        return self._pacer.wait()

    def _ends(self, group: Group, children: int) -> None:
        group.running -= children
        if group.running <= 0:
            _resolve(group.done, True)

    def _message(self, peer: Peer, message: Message) -> None:
        if message[0] == "beat":
            self._sweep(peer, set(message[1]))
            return
        key = (peer.name, message[1])
        group = self._groups.get(key)
        if message[0] == "stop":
            if group is not None:
                self._engine.stop(group.id, message[2], message[3])
            return
        # finished
        outcomes = message[2]
        self.completed += outcomes.count("completed")
        self.failed += outcomes.count("failed")
        self._drop(key)

    def _drop(self, key: tuple[str, int]) -> None:
        """Ends a group whatever its state: cancels what runs and frees its slots. An unknown group leaves a tombstone,
        since its call may still be on the way."""
        group = self._forget(key)
        if group is None:
            self._tombstones[key] = time.monotonic()
            self._bury()
            return
        self.held -= group.slots
        if group.running > 0:
            self._engine.cancel(group.id)
        _resolve(group.done, False)

    def _forget(self, key: tuple[str, int]) -> Group | None:
        group = self._groups.pop(key, None)
        if group is not None:
            del self._by_id[group.id]
        return group

    def _bury(self) -> None:
        oldest = time.monotonic() - TOMBSTONE_SECONDS
        for key in list(self._tombstones):
            if len(self._tombstones) <= TOMBSTONES and self._tombstones[key] >= oldest:
                break
            del self._tombstones[key]

    def _sweep(self, peer: Peer, live: set[int]) -> None:
        """A group that its peer doesn't name in two beats in a row is an orphan."""
        missing = {key for key in self._groups if key[0] == peer.name and key[1] not in live}
        for key in missing & self._suspects:
            self.orphans += 1
            self._drop(key)
        self._suspects = {key for key in self._suspects if key[0] != peer.name} | missing

    def _peer_closed(self, peer: Peer) -> None:
        """The ingress is gone, and with it every reader of its groups."""
        for key in [key for key in self._groups if key[0] == peer.name]:
            self._drop(key)
        for key in [key for key in self._tombstones if key[0] == peer.name]:
            del self._tombstones[key]
        self._suspects = {key for key in self._suspects if key[0] != peer.name}

    def close(self) -> None:
        """Closes every link; peers see their end and submit elsewhere."""
        self._dialler.close()


def _resolve(done: asyncio.Future[bool], whole: bool) -> None:
    if not done.done():
        done.set_result(whole)
