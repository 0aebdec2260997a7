"""Writing to a socket from another thread: order, a reader that pauses, and ends."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from serve_app.outlet import Outlet


def run(body: Callable[[Outlet, socket.socket], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        outlet = Outlet(asyncio.get_running_loop(), ours.fileno())
        try:
            await body(outlet, theirs)
        finally:
            outlet.close()
            ours.close()
            theirs.close()

    asyncio.run(main())


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def read(reader: socket.socket, size: int) -> bytes:
    found = b""
    async with asyncio.timeout(30):
        while len(found) < size:
            found += await asyncio.get_running_loop().sock_recv(reader, 1 << 16)
    return found


def test_a_write_leaves_before_it_returns() -> None:
    """No turn of the loop lies between."""

    async def body(outlet: Outlet, reader: socket.socket) -> None:
        thread = threading.Thread(target=outlet.write, args=(b"token",))
        thread.start()
        thread.join()
        assert reader.recv(100) == b"token"
        assert outlet.waiting == 0

    run(body)


def test_what_a_paused_reader_leaves_behind_follows_in_order() -> None:
    async def body(outlet: Outlet, reader: socket.socket) -> None:
        parts = [number.to_bytes(4, "little") * 5000 for number in range(100)]

        def write() -> None:
            for part in parts:
                outlet.write(part)

        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
        assert outlet.waiting > 0, "the socket took it all: this tests nothing"
        whole = b"".join(parts)
        assert await read(reader, len(whole)) == whole
        await until(lambda: outlet.waiting == 0)
        outlet.write(b"later")
        assert await read(reader, 5) == b"later"

    run(body)


@pytest.mark.parametrize("full", [False, True], ids=["idle", "with bytes left"])
def test_a_dead_connection_takes_nothing_and_raises_nothing(full: bool) -> None:
    async def body(outlet: Outlet, reader: socket.socket) -> None:
        if full:
            while not outlet.waiting:
                outlet.write(bytes(1 << 16))
        reader.close()
        outlet.write(b"into the void")
        await until(lambda: outlet.waiting == 0)
        outlet.write(b"again")
        assert outlet.waiting == 0

    run(body)


def test_nothing_is_written_after_the_end() -> None:
    async def body(outlet: Outlet, reader: socket.socket) -> None:
        while not outlet.waiting:
            outlet.write(bytes(1 << 16))
        outlet.close()
        outlet.close()
        outlet.write(b"late")
        await asyncio.sleep(0)

    run(body)
