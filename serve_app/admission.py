"""Who may come in before a body is read: the serving key and the bounded pool of an ingress process.

The pool bounds requests that are being read, decoded or lowered, and the bytes of their bodies; choices in flight are
counted where all ingresses meet, at the Engine replica. Discovery, health and token counts never enter the pool.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from protocols.errors import SlotsExhausted, Unauthorized

Headers = Sequence[tuple[bytes, bytes]]


class KeyCheck:
    """Compares keys in constant time. An empty key disables authentication."""

    def __init__(self, key: str) -> None:
        self._key = key.encode("utf-8")

    def check(self, headers: Headers, *, x_api_key: bool = False) -> None:
        """Raises Unauthorized unless every credential given matches and at least one is given. `x_api_key`: the route
        also takes the `x-api-key` header; elsewhere that header means nothing."""
        if not self._key:
            return
        given = [_bearer(value) for name, value in headers if name == b"authorization"]
        if x_api_key:
            given += [value.strip() for name, value in headers if name == b"x-api-key"]
        if not given:
            raise Unauthorized("missing API key: send it as 'Authorization: Bearer KEY'" + _or_x_api_key(x_api_key))
        # Every credential is compared, whatever the first one said.
        matches = [hmac.compare_digest(value, self._key) for value in given]
        if not all(matches):
            raise Unauthorized("invalid API key")


def _or_x_api_key(x_api_key: bool) -> str:
    return " or as 'x-api-key: KEY'" if x_api_key else ""


def _bearer(value: bytes) -> bytes:
    scheme, _, credentials = value.strip().partition(b" ")
    return credentials.strip() if scheme.lower() == b"bearer" else b""


class Ticket:
    """A place in the pool (`places` 0: none, for what is never refused for load), with the body bytes it holds."""

    __slots__ = ("_bytes", "_left", "_places", "_pool")

    def __init__(self, pool: IngressPool, places: int = 1) -> None:
        self._pool = pool
        self._places = places
        self._bytes = 0
        self._left = False

    def charge(self, count: int) -> None:
        """Counts `count` more bytes of this request's body. Raises SlotsExhausted when the pool is full of them."""
        pool = self._pool
        if pool.held_bytes + count > pool.max_bytes and pool.held_bytes > self._bytes:
            if self._places:
                pool.refused()
            raise SlotsExhausted("the server is reading too many large requests; retry shortly")
        pool.held_bytes += count
        self._bytes += count

    def leave(self) -> None:
        if self._left:
            return
        self._left = True
        self._pool.requests -= self._places
        self._pool.held_bytes -= self._bytes


class IngressPool:
    """`requests` in progress before enqueue, at most `max_requests`, holding at most `max_bytes` of bodies together.
    One request alone may always hold its whole body. `refused` is told of each request that finds no room."""

    def __init__(
        self, max_requests: int, max_bytes: int, refused: Callable[[], None] = lambda: None, *, waiting: int = 8
    ) -> None:
        self.max_requests = max_requests
        self.max_bytes = max_bytes
        self.refused = refused
        self.requests = 0
        self.held_bytes = 0
        self._counts = asyncio.Semaphore(waiting)

    def enter(self) -> Ticket:
        """A place in the pool. Raises SlotsExhausted when all are taken."""
        if self.requests >= self.max_requests:
            self.refused()
            raise SlotsExhausted(f"all {self.max_requests} request slots of this ingress are in use; retry shortly")
        self.requests += 1
        return Ticket(self)

    @contextmanager
    def place(self) -> Iterator[Ticket]:
        """`enter` as a context."""
        ticket = self.enter()
        try:
            yield ticket
        finally:
            ticket.leave()

    @contextmanager
    def holding(self) -> Iterator[Ticket]:
        """Counts the body bytes of a request that takes no place."""
        ticket = Ticket(self, 0)
        try:
            yield ticket
        finally:
            ticket.leave()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """A bounded place for work that is never refused (token counts): waits instead."""
        async with self._counts:
            yield
