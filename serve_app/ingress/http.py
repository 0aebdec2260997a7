"""The ASGI application that all ingresses are: routes, request ids, keys, and errors in each family's shape.

Owns what is the same for every route. Generation routes are built by `serve_app.ingress.generation`, the routes of
each family by the module of its name.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import orjson

from engine.types.request import RequestError
from protocols.errors import (
    ExecutionFailed,
    Family,
    MethodNotAllowed,
    NotFound,
    ProtocolError,
    Unauthorized,
    body,
    from_request_error,
)
from protocols.exact_json import dumps
from serve_app.admission import Headers, KeyCheck
from serve_app.body import ClientGone
from serve_app.delivery import send_body
from serve_app.headers import REQUEST_ID, request_id

logger = logging.getLogger("ray.serve")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Result = TypeVar("Result")
JSON: Final = b"application/json"
PREFIXES: Final[tuple[tuple[str, Family], ...]] = (
    ("/v1/messages", "messages"),
    ("/v1/systemone", "systemone"),
    ("/api", "ollama"),
)


@dataclass(slots=True)
class Request:
    """One HTTP request. `id`: what the client sees as x-request-id. `key`: unique here, for groups and object ids.
    `tail`: what followed the prefix of a prefix route. `started`, `ended`: the first, the last message of the response
    was given to the server."""

    scope: Scope
    receive: Receive
    send: Send
    id: str
    family: Family
    path: str
    extra: tuple[tuple[bytes, bytes], ...] = ()
    tail: str = ""
    started: bool = False
    ended: bool = False
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    arrived: float = field(default_factory=time.monotonic)

    @property
    def method(self) -> str:
        method: str = self.scope["method"]
        return method

    @property
    def headers(self) -> Headers:
        """Lower-case names and raw values, in order."""
        headers: Headers = self.scope["headers"]
        return headers

    def header(self, name: bytes) -> str | None:
        """The first value of `name`, stripped."""
        for key, value in self.headers:
            if key == name:
                return value.decode("latin-1").strip()
        return None

    async def send_started(self, message: dict[str, Any]) -> None:
        """The ASGI send, remembering how far the response is."""
        self.started = True
        await self.send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.ended = True

    async def delivered(self) -> None:
        """Waits until the reader has been given the whole response, for work inside `while_connected`.

        A `send` that returns says so only where this process holds the connection. Behind Serve's Python proxy, and
        where Serve runs this code on a thread of its own, `send` queues without bound; but ASGI's `receive` gives
        "http.disconnect" once the response is complete, and both relay that from the server that has the connection,
        which waits for its reader before it takes the last piece.
        """
        await self.taken.wait()

    async def answer(
        self,
        status: int,
        content: bytes,
        content_type: bytes = JSON,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        """A whole response; HEAD gets the headers alone."""
        length = (b"content-length", b"%d" % len(content))
        start = [(b"content-type", content_type), length, *headers, *self.extra]
        await self.send_started({"type": "http.response.start", "status": status, "headers": start})
        await send_body(self.send_started, b"" if self.method == "HEAD" else content, more=False)

    async def json(self, value: Any, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        await self.answer(status, dumps(value), JSON, headers)

    async def error(self, error: ProtocolError) -> None:
        """The family's body for `error`, with the headers that belong to its status."""
        headers: list[tuple[bytes, bytes]] = []
        if error.retry_after is not None:
            headers.append((b"retry-after", str(error.retry_after).encode()))
        if isinstance(error, Unauthorized):
            headers.append((b"www-authenticate", b"Bearer"))
        if isinstance(error, MethodNotAllowed) and error.allowed:
            headers.append((b"allow", ", ".join(error.allowed).encode()))
        await self.json(body(error, self.family), error.status, headers)


Handler = Callable[[Request], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Route:
    """`path` is whole; with `prefix` also everything below it. `open`: needs no key. `x_api_key`: takes that header
    too. What the API document says of it is in `serve_app.openapi`."""

    method: str
    path: str
    handler: Handler
    prefix: bool = False
    open: bool = False
    x_api_key: bool = False


def family_of(path: str) -> Family:
    """The error shape of a path, also of one that doesn't exist."""
    for prefix, family in PREFIXES:
        if path == prefix or path.startswith(prefix + "/"):
            return family
    return "openai"


class Ingress:
    """The ASGI application. `own_request_id`: add the x-request-id header, which Ray Serve does itself.
    `on_startup` and `on_shutdown` run with the server."""

    def __init__(
        self,
        routes: Iterable[Route],
        keys: KeyCheck,
        *,
        own_request_id: bool,
        on_startup: Callable[[], None] | None = None,
        on_shutdown: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.routes = tuple(routes)
        self._exact: dict[str, dict[str, Route]] = {}
        self._prefixes: list[Route] = []
        for route in self.routes:
            if route.prefix:
                self._prefixes.append(route)
            else:
                self._exact.setdefault(route.path, {})[route.method] = route
        self._keys = keys
        self._own_request_id = own_request_id
        self._on_startup = on_startup
        self._on_shutdown = on_shutdown

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "websocket":
            await refuse_websocket(scope, receive, send)
        else:
            await self._http(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = self._request(scope, receive, send)
        try:
            await self._dispatch(request)
        except ClientGone:
            return
        except RequestError as error:
            await self._fail(request, from_request_error(error))
        except ProtocolError as error:
            await self._fail(request, error)
        except Exception:
            logger.exception("%s %s failed", request.method, request.path)
            await self._fail(request, ExecutionFailed("internal error"))

    def _request(self, scope: Scope, receive: Receive, send: Send) -> Request:
        path = scope["path"]
        id = request_id(scope["headers"])
        extra = ((REQUEST_ID, id.encode()),) if self._own_request_id else ()
        return Request(scope, receive, send, id, family_of(path), path, extra)

    async def _dispatch(self, request: Request) -> None:
        route = self._find(request)
        if not route.open:
            self._keys.check(request.headers, x_api_key=route.x_api_key)
        await route.handler(request)

    def _find(self, request: Request) -> Route:
        path, method = request.path, request.method
        if len(path) > 1:
            path = path.rstrip("/") or "/"
        methods = self._exact.get(path)
        if methods is None:
            methods = self._below(request)
        if not methods:
            raise NotFound(f"no such route: {request.path[:200]}", code="unknown_url")
        found = methods.get("GET" if method == "HEAD" else method)
        if found is None:
            allowed = sorted({*methods, *(("HEAD",) if "GET" in methods else ())})
            raise MethodNotAllowed(f"{method} is not allowed here; use {' or '.join(allowed)}", allowed=allowed)
        return found

    def _below(self, request: Request) -> dict[str, Route]:
        """The prefix routes that hold the path."""
        found = {}
        for route in self._prefixes:
            if request.path.startswith(route.path + "/"):
                request.tail = request.path[len(route.path) + 1 :]
                found[route.method] = route
        return found

    async def _fail(self, request: Request, error: ProtocolError) -> None:
        """Answers with `error`, unless a response has begun: then nothing truthful can follow."""
        if request.started:
            logger.error("%s %s failed after its response began: %s", request.method, request.path, error)
            return
        await request.error(error)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                if self._on_startup is not None:
                    self._on_startup()
                await send({"type": "lifespan.startup.complete"})
            elif message["type"] == "lifespan.shutdown":
                if self._on_shutdown is not None:
                    await self._on_shutdown()
                await send({"type": "lifespan.shutdown.complete"})
                return


async def refuse_websocket(scope: Scope, receive: Receive, send: Send) -> None:
    """Refuses a WebSocket handshake in the family's JSON where the server can, else by closing it."""
    await receive()
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008})
        return
    path = scope["path"]
    error = NotFound("WebSockets are not supported; send HTTP requests", code="unknown_url")
    content = orjson.dumps(body(error, family_of(path)))
    headers = [(b"content-type", JSON), (b"content-length", b"%d" % len(content))]
    await send({"type": "websocket.http.response.start", "status": error.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": content})


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled when the client disconnects (raises ClientGone) and when the caller is.

    Call it after the body has been read: from then on the client can only leave, or have everything (then `work` goes
    on, see `Request.delivered`). Nothing is awaited after a cancellation, since the caller may itself be dying; `work`
    must clean up without waiting.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and request.ended:
            request.taken.set()
            await asyncio.wait((task,))
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        watch.cancel()
        if not task.done():
            task.add_done_callback(_retrieve)
            task.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _retrieve(task: asyncio.Future[Any]) -> None:
    """Looks at a cancelled task's outcome: what failed on its way down concerns nobody but the log."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.debug("cancelled request failed: %r", error)
