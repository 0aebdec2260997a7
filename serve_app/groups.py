"""Request groups at an Engine replica: HTTP slots, enqueue, the way of updates to their peer, and every way to end.

Owns which groups exist and what each holds. Leaves scheduling to the engine, sockets to `token_channel`, and what a
finished answer is to the ingress, which says so with `finished`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypedDict

from engine.types.events import Update
from engine.types.request import PreparedPrompt, RequestError
from serve_app.token_channel import ChannelClosed, Dialler, Message, Peer, Sink, pack_update

Refusal = Literal["slots", "oversized", "queue", "paused", "settings", "channel", "cancelled", "invalid", "unavailable"]
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
    """The argument of a held call. `number` is unique within the peer's life."""

    number: int
    request_id: str
    children: tuple[PreparedPrompt, ...]
    sink: Sink


class Engine(Protocol):
    """What groups need of engine.engine.Engine; its sinks are called on its own thread."""

    def submit(
        self, group_id: str, children: Sequence[PreparedPrompt], sink: Callable[[list[Update]], None]
    ) -> None: ...

    def stop(self, group_id: str, child: int, tokens: int) -> None: ...

    def cancel(self, group_id: str) -> None: ...


class Refused(Exception):
    """This replica doesn't take the group. Nothing was enqueued and no slot is held."""

    def __init__(self, reason: Refusal, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.reason, self.message, self.field, self.code = reason, message, field, code


class Group:
    """One request group from enqueue until its slots are free. `running`: children the engine hasn't ended."""

    __slots__ = ("born", "done", "id", "number", "peer", "running", "size")

    def __init__(self, ident: str, number: int, peer: Peer, size: int) -> None:
        self.id, self.number, self.peer, self.size = ident, number, peer, size
        self.running = size
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.born = time.monotonic()


class Groups:
    """All groups of one Engine replica. `queue_full` is the engine's own error for a full queue. Lives on one event
    loop; only the sinks given to the engine run elsewhere."""

    def __init__(
        self,
        engine: Engine,
        *,
        slots: int,
        digest: str,
        replica: str,
        node: str,
        beat: float,
        queue_full: type[Exception],
    ) -> None:
        self._engine, self._digest, self._replica, self._queue_full = engine, digest, replica, queue_full
        self._loop = asyncio.get_running_loop()
        self._dialler = Dialler(self._message, self._peer_closed, name=replica, node=node, beat=beat)
        self._groups: dict[tuple[str, int], Group] = {}
        self._tombstones: dict[tuple[str, int], float] = {}
        self._suspects: set[tuple[str, int]] = set()
        self.paused = False
        self.slots, self.held = slots, 0
        self.completed, self.failed, self.refused, self.orphans = 0, 0, 0, 0

    async def generate(self, call: GroupCall) -> Reply:
        """The held call: enqueues the group, acknowledges over the channel and returns once every child has ended.
        A cancelled call cancels the group."""
        key = (call.sink.peer, call.number)
        try:
            group = await self._enqueue(key, call)
        except Refused as refusal:
            self.refused += 1
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
        self._check(key, call.sink, size)
        self.held += size
        try:
            peer = await self._dialler.peer(call.sink)
            if key in self._tombstones:
                raise Refused("cancelled", "the request was cancelled")
            group = Group(f"{key[0]}/{key[1]}", key[1], peer, size)
            self._groups[key] = group
            self._submit(group, call)
            peer.post(["ack", group.number])
        except BaseException as error:
            self.held -= size
            self._groups.pop(key, None)
            if isinstance(error, ChannelClosed):
                raise Refused("channel", str(error)) from None
            raise
        return group

    def _check(self, key: tuple[str, int], sink: Sink, size: int) -> None:
        if key in self._tombstones:
            raise Refused("cancelled", "the request was cancelled")
        if self.paused:
            raise Refused("paused", "admission is paused")
        if sink.digest != self._digest:
            raise Refused("settings", "this engine runs with other settings than the ingress")
        if size > self.slots:
            raise Refused(
                "oversized", f"the request has {size} choices, more than the {self.slots} request slots of this server"
            )
        if self.held + size > self.slots:
            raise Refused("slots", f"all {self.slots} request slots are in use; retry shortly")

    def _submit(self, group: Group, call: GroupCall) -> None:
        try:
            self._engine.submit(group.id, call.children, self._sink(group))
        except self._queue_full as error:
            raise Refused("queue", str(error) or "the model's request queue is full") from None
        except RequestError as error:
            raise Refused("invalid", error.message, error.field, error.code) from None

    def _sink(self, group: Group) -> Callable[[list[Update]], None]:
        """Called by the engine, on its thread, once a step with news of the group."""
        peer, number, loop = group.peer, group.number, self._loop

        def sink(updates: list[Update]) -> None:
            peer.post([number, [pack_update(update) for update in updates]])
            ends = sum(update.end is not None for update in updates)
            if ends:
                group.running -= ends
                if group.running <= 0:
                    loop.call_soon_threadsafe(_resolve, group.done, True)

        return sink

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
        group = self._groups.pop(key, None)
        if group is None:
            self._tombstones[key] = time.monotonic()
            self._bury()
            return
        self.held -= group.size
        if group.running > 0:
            self._engine.cancel(group.id)
        _resolve(group.done, False)

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
