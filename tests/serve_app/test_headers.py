"""Request ids are bounded, and no client header steers Serve."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from serve_app.headers import HeaderGuard, cleaned, middlewares, request_id


@pytest.mark.parametrize("given", [b"a", b"mine-1", b"x" * 128, b"a,b;c", b" padded "])
def test_valid_ids_are_kept(given: bytes) -> None:
    assert request_id([(b"x-request-id", given)]) == given.strip().decode()


@pytest.mark.parametrize("given", [b"", b" ", b"x" * 129, b"a b", b"a\tb", b"\xff", "é".encode(), b"\x7f", b"a\x00"])
def test_others_are_replaced(given: bytes) -> None:
    first, second = (request_id([(b"x-request-id", given)]) for _ in range(2))
    assert first != second and len(first) == 32


def test_one_id_and_none_of_serves_headers_is_left() -> None:
    given = [
        (b"host", b"x"),
        (b"x-request-id", b"one"),
        (b"x-request-id", b"two"),
        (b"x-request-timeout-seconds", b"0.001"),
        (b"x-request-disconnect-disabled", b"?1"),
        (b"X_Session_Id", b"\xff"),
        (b"serve_multiplexed_model_id", b"m"),
        (b"serve-multiplexed-model-id", b"m"),
        (b"\xff", b"1"),
        (b"authorization", b"Bearer \xe9"),
    ]
    assert cleaned(given) == [(b"host", b"x"), (b"authorization", b"Bearer \xe9"), (b"x-request-id", b"one")]


def test_the_middleware_changes_nothing_else() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope, receive, send))

    (middleware,) = middlewares()
    guard = middleware.cls(app)
    assert isinstance(guard, HeaderGuard)
    given = {"type": "http", "path": "/x", "headers": [(b"x-request-id", b"mine")]}
    asyncio.run(guard(given, 1, 2))
    asyncio.run(guard({"type": "lifespan"}, 1, 2))
    assert seen == [(given, 1, 2), ({"type": "lifespan"}, 1, 2)]
