"""An ingress application behind a real HTTP server on the loopback, and raw sockets to talk to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from tests.support.ingress import World


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals stay pytest's."""
        yield


@contextlib.asynccontextmanager
async def served(world: World) -> AsyncIterator[Site]:
    """Runs the application in this loop."""
    listener = socket.socket(proto=socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 * 1024)  # inherited: readers are felt early
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(world.app, lifespan="on", log_level="critical", timeout_graceful_shutdown=1)
    server = _Server(config)
    task = asyncio.create_task(server.serve([listener]))
    async with asyncio.timeout(10):
        while not server.started:
            await asyncio.sleep(0.005)
    site = Site(int(listener.getsockname()[1]))
    try:
        yield site
    finally:
        await site.close_clients()
        server.should_exit = True
        await task
        listener.close()


@dataclass
class Answer:
    """A parsed HTTP response."""

    status: int
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """One raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def post(self, path: str, body: Any, *headers: str) -> None:
        """Sends a whole request."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(data)}", *headers, "", ""]
        self.send("\r\n".join(lines).encode() + data)

    def get(self, path: str, method: str = "GET") -> None:
        self.send(f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())

    async def head(self) -> Answer:
        """The status line and headers of the next response."""
        async with asyncio.timeout(20):
            raw = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = raw.split("\r\n")
        pairs = [line.partition(":") for line in lines if line]
        return Answer(int(first.split()[1]), [(name.lower(), value.strip()) for name, _, value in pairs])

    async def chunk(self) -> bytes:
        """The next chunk of a chunked body, empty at its end."""
        async with asyncio.timeout(20):
            size = int((await self.reader.readline()).strip(), 16)
            data = await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        return data

    async def rest(self, answer: Answer) -> Answer:
        """Reads the body that follows `answer`'s headers."""
        lengths = answer.values("content-length")
        if lengths:
            async with asyncio.timeout(20):
                answer.body = await self.reader.readexactly(int(lengths[0]))
            return answer
        parts = []
        while part := await self.chunk():
            parts.append(part)
        answer.body = b"".join(parts)
        return answer

    async def answer(self) -> Answer:
        return await self.rest(await self.head())

    def reset(self) -> None:
        """Closes with RST instead of FIN."""
        plain = self.writer.get_extra_info("socket")
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def half_close(self) -> None:
        self.writer.write_eof()

    def close(self) -> None:
        self.writer.close()


@dataclass
class Site:
    """A running application. Its clients are closed with it."""

    port: int
    clients: list[Client] = field(default_factory=list)

    async def connect(self, *, receive_buffer: int | None = None) -> Client:
        """`receive_buffer`: a small one makes a reader that doesn't read felt early."""
        plain = socket.socket(proto=socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY only then
        if receive_buffer is not None:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        plain.setblocking(False)
        await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=plain, limit=2**16)
        client = Client(reader, writer)
        self.clients.append(client)
        return client

    async def close_clients(self) -> None:
        """Closes every client, and waits until their sockets are gone."""
        for client in self.clients:
            client.close()
        for client in self.clients:
            with contextlib.suppress(ConnectionError):
                await client.writer.wait_closed()
        self.clients.clear()
