"""Pacing: which news of a step leave at once and which wait a moment for more.

Every frame wakes the ingress, the proxy and the client, and on a small machine each of them takes a core from the
model. So a stream that is faster than eyes leaves in groups. Used by the engine's thread alone; knows no sockets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import inf

from engine.types.events import Update
from serve_app.token_channel import Message, Packed, Peer, pack_update


class Stream:
    """A group's place in the pacing. `left`: when its last news left; `fresh`: children without a token so far."""

    __slots__ = ("fresh", "left", "number", "peer")

    def __init__(self, number: int, peer: Peer, children: int) -> None:
        self.number, self.peer = number, peer
        self.left = -inf
        self.fresh = set(range(children))

    def urgent(self, update: Update) -> bool:
        """Whether it must not wait: a first token (which is noted), prompt scores, an end."""
        first = bool(update.records) and update.child in self.fresh
        if first:
            self.fresh.discard(update.child)
        return first or update.end is not None or update.scores is not None or update.cached_tokens is not None


class _Gathered:
    """News for one peer. `due`: when they must leave."""

    __slots__ = ("due", "streams")

    def __init__(self) -> None:
        self.due = inf
        self.streams: dict[Stream, _Parts] = {}


class _Parts:
    """A stream's packed updates; `plain`: by child, the one that takes the child's next tokens."""

    __slots__ = ("packed", "plain")

    def __init__(self) -> None:
        self.packed: list[Packed] = []
        self.plain: dict[int, Packed] = {}

    def add(self, update: Update) -> None:
        packed = pack_update(update)
        known = self.plain.get(update.child)
        if known is None or update.scores is not None:
            self.packed.append(packed)
            known = packed
        else:
            known[1] += packed[1]
            known += packed[2:]
        if len(known) == 2:
            self.plain[update.child] = known
        else:
            self.plain.pop(update.child, None)


class Pacer:
    """`pause`: seconds between two departures of a stream, unless something urgent comes; 0: nothing ever waits."""

    def __init__(self, pause: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._pause, self._clock = pause, clock
        self._peers: dict[Peer, _Gathered] = {}

    def gather(self, stream: Stream, updates: Sequence[Update]) -> None:
        """Takes a stream's news."""
        gathered = self._peers.get(stream.peer)
        if gathered is None:
            gathered = self._peers[stream.peer] = _Gathered()
        parts = gathered.streams.get(stream)
        if parts is None:
            parts = gathered.streams[stream] = _Parts()
        due = stream.left + self._pause
        for update in updates:
            parts.add(update)
            if stream.urgent(update):
                due = -inf
        gathered.due = min(gathered.due, due)

    def departures(self, expected: float) -> list[tuple[Peer, list[Message]]]:
        """What leaves now: all news of a peer for which some are due, or would be before the next ones come, in
        `expected` seconds."""
        now = self._clock()
        leaving = [peer for peer, gathered in self._peers.items() if now + expected >= gathered.due]
        return [(peer, self._depart(peer, now)) for peer in leaving]

    def wait(self) -> float:
        """Seconds until something must leave; infinite when nothing waits."""
        due = min((gathered.due for gathered in self._peers.values()), default=inf)
        return max(due - self._clock(), 0.0)

    def _depart(self, peer: Peer, now: float) -> list[Message]:
        messages: list[Message] = []
        for stream, parts in self._peers.pop(peer).streams.items():
            stream.left = now
            messages.append([stream.number, parts.packed])
        return messages
