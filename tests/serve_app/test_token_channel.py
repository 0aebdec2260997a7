"""Framing, keys, liveness and order of the token channel, over real sockets in one process."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.types.events import EngineEnd, PositionScore, PromptScores, TokenRecord, Update
from serve_app.token_channel import (
    HEAD,
    ChannelClosed,
    Dialler,
    Link,
    Listener,
    Message,
    Peer,
    Sink,
    detached,
    pack_update,
    unpack_update,
)

ids = st.integers(0, 2**31 - 1)
floats = st.floats(allow_nan=False, width=64)
records = st.builds(
    TokenRecord,
    ids,
    st.none() | floats,
    st.lists(st.tuples(ids, floats), max_size=3).map(tuple),
    st.booleans(),
    st.just(0.0) | st.floats(1, 2e9),
)
entries = st.none() | st.builds(
    PositionScore, ids, floats, st.integers(1, 9), st.lists(st.tuples(ids, floats, ids), max_size=2).map(tuple)
)
ends = st.builds(
    EngineEnd,
    st.sampled_from(["eos", "token_stop", "limit", "cancelled", "failed"]),
    st.sampled_from(["unavailable", "execution", "output"]),
    st.text(max_size=5),
    st.booleans(),
)
updates = st.builds(
    Update,
    st.integers(0, 200),
    st.lists(records, max_size=4).map(tuple),
    st.none() | st.builds(PromptScores, ids, st.lists(entries, max_size=3).map(tuple)),
    st.none() | ids,
    st.none() | ends,
)


@settings(max_examples=60, deadline=None)
@given(updates)
def test_updates_survive_packing(update: Update) -> None:
    import msgpack

    packed = pack_update(update)
    assert unpack_update(packed) == update
    assert unpack_update(msgpack.unpackb(msgpack.packb(packed))) == update


def test_a_plain_token_is_small() -> None:
    assert pack_update(Update(0, (TokenRecord(17),))) == [0, [17]]


class Ends:
    """Both sides in one loop, with everything that arrives written down."""

    def __init__(self, beat: float = 5.0) -> None:
        self.at_ingress: list[tuple[str, Message]] = []
        self.at_engine: list[tuple[str, Message]] = []
        self.lost_links: list[str] = []
        self.lost_peers: list[str] = []
        self.changed = asyncio.Event()
        self.listener = Listener(
            self._ingress, self._link_lost, lambda link: [1, 2], node="n1", host="127.0.0.1", beat=beat
        )
        self.dialler = Dialler(self._engine, self._peer_lost, name="replica-1", node="n1", beat=beat)

    def _ingress(self, link: Link, message: Message) -> None:
        self.at_ingress.append((link.name, message))
        self.changed.set()

    def _engine(self, peer: Peer, message: Message) -> None:
        self.at_engine.append((peer.name, message))
        self.changed.set()

    def _link_lost(self, link: Link) -> None:
        self.lost_links.append(link.name)
        self.changed.set()

    def _peer_lost(self, peer: Peer) -> None:
        self.lost_peers.append(peer.name)
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


def run(body: Callable[[Ends], Coroutine[Any, Any, None]], beat: float = 5.0) -> None:
    async def main() -> None:
        ends = Ends(beat)
        await ends.listener.start()
        try:
            await body(ends)
        finally:
            ends.dialler.close()
            await ends.listener.close()

    asyncio.run(main())


@pytest.mark.parametrize("node", ["n1", "n2"], ids=["unix", "tcp"])
def test_both_directions(node: str) -> None:
    async def body(ends: Ends) -> None:
        ends.dialler._node = node
        peer = await ends.dialler.peer(ends.listener.issue("d"))
        peer.post(["ack", 1])
        peer.post([1, [[0, [5]]]])
        await ends.until(lambda: len(ends.at_ingress) == 2)
        assert ends.at_ingress == [("replica-1", ["ack", 1]), ("replica-1", [1, [[0, [5]]]])]
        ends.listener.broadcast(["finished", 1, ["completed"]])
        await ends.until(lambda: bool(ends.at_engine))
        assert ends.at_engine == [(ends.listener.peer, ["finished", 1, ["completed"]])]

    run(body)


def test_one_link_for_many_calls_and_one_frame_for_one_turn() -> None:
    async def body(ends: Ends) -> None:
        sinks = [ends.listener.issue("d") for _ in range(20)]
        peers = await asyncio.gather(*(ends.dialler.peer(sink) for sink in sinks))
        assert len({id(peer) for peer in peers}) == 1
        assert len(ends.listener.links) == 1
        frames: list[int] = []
        (link,) = ends.listener.links
        inner = link._on_frame

        def counted(at: Link, frame: list[Message]) -> None:
            frames.append(len(frame))
            inner(at, frame)

        link._on_frame = counted
        for group in range(32):
            peers[0].post([group, [[0, [group]]]])
        await ends.until(lambda: len(ends.at_ingress) == 32)
        assert frames == [32]

    run(body)


def test_posts_from_another_thread_keep_their_order_and_none_is_lost() -> None:
    async def body(ends: Ends) -> None:
        peer = await ends.dialler.peer(ends.listener.issue("d"))

        def produce() -> None:
            for number in range(5000):
                peer.post([1, [[0, [number]]]])

        thread = threading.Thread(target=produce)
        thread.start()
        await ends.until(lambda: len(ends.at_ingress) == 5000)
        thread.join()
        assert [message[1][0][1][0] for _, message in ends.at_ingress] == list(range(5000))

    run(body)


def test_a_key_opens_one_link_only() -> None:
    async def body(ends: Ends) -> None:
        sink = ends.listener.issue("d")
        await ends.dialler.peer(sink)
        other = Dialler(lambda peer, message: None, lambda peer: None, name="other", node="n1")
        with pytest.raises(ChannelClosed):
            await other.peer(sink)
        revoked = ends.listener.issue("d")
        ends.listener.revoke(revoked)
        with pytest.raises(ChannelClosed):
            await other.peer(revoked)
        assert len(ends.listener.links) == 1
        other.close()

    run(body)


def test_a_stranger_gets_nothing() -> None:
    async def body(ends: Ends) -> None:
        for greeting in (b"GET / HTTP/1.1\r\n\r\n", HEAD.pack(2) + b"\x91\x90", HEAD.pack(2**31) + b"x"):
            reader, writer = await asyncio.open_connection("127.0.0.1", ends.listener.port)
            writer.write(greeting)
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await reader.readexactly(1)
            writer.close()
        assert not ends.listener.links
        await ends.dialler.peer(ends.listener.issue("d"))

    run(body)


def test_the_dial_survives_the_call_that_started_it() -> None:
    async def body(ends: Ends) -> None:
        first = asyncio.create_task(ends.dialler.peer(ends.listener.issue("d")))
        second = asyncio.create_task(ends.dialler.peer(ends.listener.issue("d")))
        await asyncio.sleep(0)
        first.cancel()
        assert (await second).name == ends.listener.peer

    run(body)


def test_a_second_call_dials_with_its_own_key_when_the_first_key_is_gone() -> None:
    async def body(ends: Ends) -> None:
        stale = ends.listener.issue("d")
        ends.listener.revoke(stale)
        first = asyncio.create_task(ends.dialler.peer(stale))
        await asyncio.sleep(0)
        assert (await ends.dialler.peer(ends.listener.issue("d"))).name == ends.listener.peer
        with pytest.raises(ChannelClosed):
            await first

    run(body)


def test_the_end_of_a_link_is_told_to_both_sides_once() -> None:
    async def body(ends: Ends) -> None:
        peer = await ends.dialler.peer(ends.listener.issue("d"))
        assert peer.link is not None
        peer.link.close()
        await ends.until(lambda: bool(ends.lost_links and ends.lost_peers))
        peer.post([1, []])
        await asyncio.sleep(0.05)
        assert (ends.lost_links, ends.lost_peers) == (["replica-1"], [ends.listener.peer])
        again = await ends.dialler.peer(ends.listener.issue("d"))
        assert again is not peer

    run(body)


def test_beats_name_the_live_groups_and_silence_ends_a_link() -> None:
    async def body(ends: Ends) -> None:
        peer = await ends.dialler.peer(ends.listener.issue("d"))
        await ends.until(lambda: bool(ends.at_engine))
        assert ends.at_engine[0][1] == ["beat", [1, 2]]
        ends.dialler._beater.cancel()  # this engine hangs: its beats stop, its socket stays open
        ends.listener._frame = lambda link, frame: None  # type: ignore[method-assign]
        await ends.until(lambda: bool(ends.lost_links and ends.lost_peers))
        assert peer.link is None

    run(body, beat=0.05)


def test_a_large_frame_arrives_in_pieces() -> None:
    async def body(ends: Ends) -> None:
        peer = await ends.dialler.peer(ends.listener.issue("d"))
        big = list(range(400_000))
        peer.post([1, [[0, big]]])
        peer.post(["ack", 2])
        await ends.until(lambda: len(ends.at_ingress) == 2)
        assert ends.at_ingress[0][1] == [1, [[0, big]]]

    run(body)


def test_background_tasks_leave_the_request_context() -> None:
    request = contextvars.ContextVar("request", default="none")
    seen: list[str] = []

    async def note() -> None:
        seen.append(request.get())

    async def main() -> None:
        request.set("a request")
        await detached(note(), "note")

    asyncio.run(main())
    assert seen == ["none"]


def test_the_key_is_not_shown() -> None:
    assert "secret" not in repr(Sink("p", "n", "u", "h", 1, b"secret", "d"))
