"""The token channel: what engine and ingress processes say to each other beside the held call.

An ingress process listens on a unix socket and a TCP port; an engine replica dials at the first call of a peer and
keeps the link. A frame is four bytes of length and a msgpack list of messages, for all requests of the peer. Owns
framing, dialling, keys and liveness; what messages mean is decided by `groups` and `engine_client`, when they leave
by `pacing`.

Engine to ingress: `[group, [update, …]]` · `["ack", group]` · `["beat"]`.
Ingress to engine: `["stop", group, child, tokens]` · `["finished", group, [outcome, …]]` · `["beat", [live group, …]]`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hmac
import logging
import secrets
import struct
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgpack

from engine.types.events import EngineEnd, PositionScore, PromptScores, TokenRecord, Update
from serve_app.outlet import Outlet

logger = logging.getLogger("ray.serve")

HEAD = struct.Struct("<I")
MAX_FRAME = 256 * 2**20
MAX_HELLO = 4096
HELLO_SECONDS = 10.0
SILENT_BEATS = 4
Message = list[Any]
Packed = list[Any]


@dataclass(frozen=True, slots=True)
class Sink:
    """Where a call's tokens go. `peer` is unique to one life of one ingress process, `key` opens one link, `digest`
    names the settings and the model that the ingress expects the engine to run."""

    peer: str
    node: str
    unix: str
    host: str
    port: int
    key: bytes = field(repr=False)
    digest: str


class ChannelClosed(ConnectionError):
    """The link to a peer could not be opened, or is gone."""


def detached(coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """A task in a context of its own: one started inside a request would inherit its Serve context and die with it."""
    return asyncio.get_running_loop().create_task(coroutine, name=name, context=contextvars.Context())


# --- updates as plain lists ---------------------------------------------------------------------------------------


def _pack_record(record: TokenRecord) -> Any:
    if record.logprob is None and not record.forced and not record.time and not record.alternatives:
        return record.id
    pairs = [value for pair in record.alternatives for value in pair]
    return [record.id, record.logprob, pairs, record.forced, record.time]


def _unpack_record(packed: Any) -> TokenRecord:
    if type(packed) is int:
        return TokenRecord(packed)
    ident, logprob, pairs, forced, at = packed
    return TokenRecord(ident, logprob, tuple(zip(pairs[::2], pairs[1::2], strict=True)), forced, at)


def _pack_scores(scores: PromptScores) -> Packed:
    return [
        scores.start,
        [
            None if entry is None else [entry.id, entry.logprob, entry.rank, [list(row) for row in entry.alternatives]]
            for entry in scores.entries
        ],
    ]


def _unpack_score(ident: int, logprob: float, rank: int, rows: list[list[Any]]) -> PositionScore:
    return PositionScore(ident, logprob, rank, tuple((row[0], row[1], row[2]) for row in rows))


def _unpack_scores(packed: Packed) -> PromptScores:
    start, entries = packed
    return PromptScores(
        start,
        tuple(None if entry is None else _unpack_score(*entry) for entry in entries),
    )


def pack_update(update: Update) -> Packed:
    """An update as a list whose empty tail is left out: one plain token of child 0 is `[0, [id]]`."""
    packed: Packed = [update.child, [_pack_record(record) for record in update.records]]
    end, scores = update.end, update.scores
    if end is None and scores is None and update.cached_tokens is None:
        return packed
    packed.append(update.cached_tokens)
    if end is not None or scores is not None:
        packed.append(None if end is None else [end.cause, end.kind, end.message, end.budget_cut])
    if scores is not None:
        packed.append(_pack_scores(scores))
    return packed


def unpack_update(packed: Packed) -> Update:
    """The inverse of `pack_update`."""
    records = tuple([_unpack_record(record) for record in packed[1]])
    if len(packed) == 2:
        return Update(packed[0], records)
    end = packed[3] if len(packed) > 3 else None
    return Update(
        packed[0],
        records,
        scores=_unpack_scores(packed[4]) if len(packed) > 4 else None,
        cached_tokens=packed[2],
        end=None if end is None else EngineEnd(*end),
    )


# --- frames -------------------------------------------------------------------------------------------------------


def frame_of(messages: list[Message]) -> bytes:
    """One frame, as it goes over the wire."""
    body: bytes = msgpack.packb(messages)
    return HEAD.pack(len(body)) + body


class Link(asyncio.Protocol):
    """One open connection, either side. `on_frame` gets each frame's messages, `on_close` is called once."""

    def __init__(
        self, on_frame: Callable[[Link, list[Message]], None], on_close: Callable[[Link], None], limit: int = MAX_FRAME
    ) -> None:
        self._on_frame, self._on_close = on_frame, on_close
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self.limit = limit
        self.name = ""
        self.heard = time.monotonic()

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # Never hold the engine back: what waits here is bounded by the outputs that were asked for.
        self._transport.set_write_buffer_limits(high=2**30)

    def data_received(self, data: bytes) -> None:
        self.heard = time.monotonic()
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= HEAD.size:
            (size,) = HEAD.unpack_from(buffer, start)
            if size > self.limit:
                logger.error("token channel: a frame of %d bytes from %r exceeds %d", size, self.name, self.limit)
                self.close()
                return
            end = start + HEAD.size + size
            if len(buffer) < end:
                break
            with memoryview(buffer) as view:
                frame = msgpack.unpackb(view[start + HEAD.size : end], use_list=True)
            start = end
            self._on_frame(self, frame)
            if not self.open:
                return
        if start:
            del buffer[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_close(self)

    def send(self, messages: list[Message]) -> None:
        """Queues one frame; dropped when the link is closing, since its end is reported by `on_close`."""
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(frame_of(messages))

    def outlet(self) -> Outlet:
        """Another way to write to the connection, which must be used alone from now on."""
        assert self._transport is not None
        return Outlet(asyncio.get_running_loop(), self._transport.get_extra_info("socket").fileno())

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


# --- ingress side: listen -----------------------------------------------------------------------------------------


class Listener:
    """The listening side. Keys are good for one link each; a connection that shows none is closed.

    `on_message(link, message)`; `on_close(link)` once per accepted link; `live()` gives the groups to name in beats.
    """

    def __init__(
        self,
        on_message: Callable[[Link, Message], None],
        on_close: Callable[[Link], None],
        live: Callable[[Link], list[int]],
        *,
        node: str,
        host: str,
        beat: float = 5.0,
    ) -> None:
        self._on_message, self._on_close, self._live = on_message, on_close, live
        self._node, self._host, self._beat = node, host, beat
        self._keys: set[bytes] = set()
        self._servers: list[asyncio.Server] = []
        self._beater: asyncio.Task[None] | None = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self.links: set[Link] = set()
        self.peer = secrets.token_hex(8)
        self.unix, self.port = "", 0

    async def start(self) -> None:
        """Opens both sockets and the heartbeat, in a context of their own."""
        await asyncio.get_running_loop().create_task(self._open(), context=contextvars.Context())
        self._beater = detached(self._beat_forever(), "token-channel-beat")

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        if sys.platform == "linux":  # an abstract name leaves no file behind when the process is killed
            self.unix = f"\0flare-{self.peer}"
        else:
            self._directory = tempfile.TemporaryDirectory(prefix="flare-")
            self.unix = str(Path(self._directory.name) / "tokens")
        self._servers.append(await loop.create_unix_server(self._accept, self.unix))
        server = await loop.create_server(self._accept, self._host, 0)
        self._servers.append(server)
        self.port = server.sockets[0].getsockname()[1]

    def issue(self, digest: str) -> Sink:
        """A sink with a fresh key. Give the key back with `revoke` when the call is over."""
        key = secrets.token_bytes(16)
        self._keys.add(key)
        return Sink(self.peer, self._node, self.unix, self._host, self.port, key, digest)

    def revoke(self, sink: Sink) -> None:
        self._keys.discard(sink.key)

    def broadcast(self, message: Message) -> None:
        for link in self.links:
            link.send([message])

    async def close(self) -> None:
        if self._beater:
            self._beater.cancel()
        for server in self._servers:
            server.close()
        for link in list(self.links):
            link.close()
        if self._directory:
            self._directory.cleanup()

    def _accept(self) -> Link:
        link = Link(self._hello, lambda link: None, limit=MAX_HELLO)
        asyncio.get_running_loop().call_later(HELLO_SECONDS, self._expire, link)
        return link

    def _expire(self, link: Link) -> None:
        if link not in self.links:
            link.close()

    def _hello(self, link: Link, frame: list[Message]) -> None:
        key = frame[0][1] if len(frame) == 1 and len(frame[0]) == 3 and frame[0][0] == "hello" else b""
        known = next((held for held in self._keys if isinstance(key, bytes) and hmac.compare_digest(held, key)), None)
        if known is None:
            logger.warning("token channel: refused a connection without a valid key")
            link.close()
            return
        self._keys.discard(known)
        link.name, link.limit = str(frame[0][2]), MAX_FRAME
        link._on_frame, link._on_close = self._frame, self._closed
        self.links.add(link)
        link.send([["welcome", self.peer]])

    def _frame(self, link: Link, frame: list[Message]) -> None:
        for message in frame:
            if message[0] != "beat":
                self._on_message(link, message)

    def _closed(self, link: Link) -> None:
        self.links.discard(link)
        self._on_close(link)

    async def _beat_forever(self) -> None:
        while True:
            await asyncio.sleep(self._beat)
            for link in list(self.links):
                if time.monotonic() - link.heard > SILENT_BEATS * self._beat:
                    logger.warning("token channel: engine %s fell silent", link.name)
                    link.close()
                else:
                    link.send([["beat", self._live(link)]])


# --- engine side: dial --------------------------------------------------------------------------------------------


class Peer:
    """One ingress process as the engine sees it. `post` and `send` may be called from any thread: what is posted
    between two turns of the event loop leaves in one frame, what is sent leaves now. Both are dropped when the link is
    closing, since its end is reported by `on_close`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self._loop = loop
        self._outbox: deque[Message] = deque()
        self._scheduled = False
        self._outlet: Outlet | None = None
        self.name = name
        self.link: Link | None = None

    def connected(self, link: Link) -> None:
        self.link, self._outlet = link, link.outlet()

    def disconnected(self) -> None:
        self.link = None
        if self._outlet is not None:
            self._outlet.close()

    def post(self, message: Message) -> None:
        self._outbox.append(message)
        if not self._scheduled:
            self._scheduled = True
            with contextlib.suppress(RuntimeError):  # the loop has ended: the process is going down
                self._loop.call_soon_threadsafe(self.flush)

    def flush(self) -> None:
        """Sends what was posted; on the loop's thread."""
        self._scheduled = False
        messages: list[Message] = []
        while self._outbox:
            messages.append(self._outbox.popleft())
        if messages:
            self.send(messages)

    def send(self, messages: list[Message]) -> None:
        """Sends one frame."""
        if self._outlet is not None:
            self._outlet.write(frame_of(messages))


class Dialler:
    """The engine's links, one a peer. `on_message(peer, message)` and `on_close(peer)` run on the loop."""

    def __init__(
        self,
        on_message: Callable[[Peer, Message], None],
        on_close: Callable[[Peer], None],
        *,
        name: str,
        node: str,
        beat: float = 5.0,
    ) -> None:
        self._on_message, self._on_close = on_message, on_close
        self._name, self._node, self._beat = name, node, beat
        self._peers: dict[str, Peer] = {}
        self._dialling: dict[str, asyncio.Task[Peer]] = {}
        self._loop = asyncio.get_running_loop()
        self._beater = detached(self._beat_forever(), "token-channel-beat")

    async def peer(self, sink: Sink) -> Peer:
        """The open link to the sink's process, dialled now if there is none. Raises ChannelClosed."""
        while True:
            known = self._peers.get(sink.peer)
            if known is not None:
                return known
            task = self._dialling.get(sink.peer)
            if task is None:
                break
            with contextlib.suppress(ChannelClosed):  # that call's key may have ended with it: use our own
                return await asyncio.shield(task)
        task = self._loop.create_task(self._dial(sink), context=contextvars.Context())
        self._dialling[sink.peer] = task
        task.add_done_callback(lambda done: self._dialled(sink.peer, done))
        return await asyncio.shield(task)  # other calls of the peer wait for the same dial

    def _dialled(self, name: str, task: asyncio.Task[Peer]) -> None:
        self._dialling.pop(name, None)
        if not task.cancelled():
            task.exception()  # every waiter has it already, or was cancelled

    async def _dial(self, sink: Sink) -> Peer:
        peer = Peer(self._loop, sink.peer)
        welcome: asyncio.Future[None] = self._loop.create_future()

        def first(link: Link, frame: list[Message]) -> None:
            if frame[0] == ["welcome", sink.peer] and not welcome.done():
                link._on_frame = lambda _, later: self._frame(peer, later)
                welcome.set_result(None)
                self._frame(peer, frame[1:])

        def lost(link: Link) -> None:
            if not welcome.done():
                welcome.set_exception(ChannelClosed(f"ingress {sink.peer} closed the link"))
            self._closed(peer)

        link = await self._connect(sink, lambda: Link(first, lost))
        link.name = sink.peer
        link.send([["hello", sink.key, self._name]])
        try:
            await asyncio.wait_for(welcome, HELLO_SECONDS)
        except TimeoutError:
            link.close()
            raise ChannelClosed(f"ingress {sink.peer} didn't answer within {HELLO_SECONDS:.0f} s") from None
        peer.connected(link)  # what the link wrote itself has been answered, so nothing of it is left
        self._peers[sink.peer] = peer
        return peer

    async def _connect(self, sink: Sink, protocol: Callable[[], Link]) -> Link:
        if sink.node == self._node:
            with contextlib.suppress(OSError):  # another network namespace of the same node: TCP below
                return (await self._loop.create_unix_connection(protocol, sink.unix))[1]
        try:
            return (await self._loop.create_connection(protocol, sink.host, sink.port))[1]
        except OSError as error:
            raise ChannelClosed(f"can't reach ingress {sink.peer} at {sink.host}:{sink.port}: {error}") from None

    def _frame(self, peer: Peer, frame: list[Message]) -> None:
        for message in frame:
            self._on_message(peer, message)

    def _closed(self, peer: Peer) -> None:
        peer.disconnected()
        if self._peers.pop(peer.name, None) is not None:
            self._on_close(peer)

    async def _beat_forever(self) -> None:
        while True:
            await asyncio.sleep(self._beat)
            for peer in list(self._peers.values()):
                link = peer.link
                if link is None:
                    continue
                if time.monotonic() - link.heard > SILENT_BEATS * self._beat:
                    logger.warning("token channel: ingress %s fell silent", peer.name)
                    link.close()
                else:
                    peer.send([["beat"]])

    def close(self) -> None:
        self._beater.cancel()
        for peer in list(self._peers.values()):
            link = peer.link
            if link is not None:
                peer.flush()
                peer.disconnected()
                link.close()
