"""What of a client's words gets past the server's edge: request ids, and nothing that Ray Serve obeys or keeps.

Serve repeats any `x-request-id` in its response, at any length, and obeys headers of its own (a timeout that answers in
plain text, no watch for disconnects, sessions, multiplexed models), which would break what the API promises; and its
metrics remember every method that ever came. The middleware stands in front of Serve, which calls `middlewares` where
RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names it.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Final

Headers = Sequence[tuple[bytes, bytes]]
Scope = MutableMapping[str, Any]
Application = Callable[[Scope, Any, Any], Awaitable[None]]

IMPORT_PATH: Final = "serve_app.headers:middlewares"
MAX_REQUEST_ID: Final = 128
REQUEST_ID: Final = b"x-request-id"
METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"))
OTHER_METHOD: Final = "UNKNOWN"
_OBEYED: Final = frozenset(
    (
        b"x-request-timeout-seconds",
        b"x-request-disconnect-disabled",
        b"x-session-id",
        b"serve-multiplexed-model-id",
    )
)


def request_id(headers: Headers) -> str:
    """The client's id, if it is one to 128 visible ASCII characters; else a fresh one."""
    given = next((value.strip() for name, value in headers if name == REQUEST_ID), b"")
    if 0 < len(given) <= MAX_REQUEST_ID and all(0x21 <= byte <= 0x7E for byte in given):
        return given.decode()
    return uuid.uuid4().hex


def cleaned(headers: Headers) -> list[tuple[bytes, bytes]]:
    """The headers with one valid request id, without those that Serve obeys and those whose name isn't ASCII."""
    kept = [
        (name, value)
        for name, value in headers
        if name != REQUEST_ID and name.isascii() and name.lower().replace(b"_", b"-") not in _OBEYED
    ]
    return [*kept, (REQUEST_ID, request_id(headers).encode())]


class HeaderGuard:
    """The middleware."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if "headers" in scope:
            scope = {**scope, "headers": cleaned(scope["headers"])}
            if scope.get("method", "GET") not in METHODS:
                scope["method"] = OTHER_METHOD
        await self._app(scope, receive, send)


def middlewares() -> list[Any]:
    """What Serve puts in front of its own."""
    from starlette.middleware import Middleware

    return [Middleware(HeaderGuard)]
