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


def passed(scope: dict[str, Any]) -> dict[str, Any]:
    """What the application behind the middleware is called with."""
    seen: list[Any] = []

    async def app(*given: Any) -> None:
        seen.extend(given)

    (middleware,) = middlewares()
    guard = middleware.cls(app)
    assert isinstance(guard, HeaderGuard)
    asyncio.run(guard(scope, 1, 2))
    assert seen[1:] == [1, 2]
    return dict(seen[0])


@pytest.mark.parametrize(
    "scope",
    [
        {"type": "http", "method": "POST", "path": "/x", "headers": [(b"x-request-id", b"mine")]},
        {"type": "websocket", "path": "/x", "headers": [(b"x-request-id", b"mine")]},
        {"type": "lifespan"},
    ],
)
def test_the_middleware_changes_nothing_else(scope: dict[str, Any]) -> None:
    assert passed(scope) == scope


def test_no_two_unknown_methods_are_told_apart() -> None:
    methods = {passed({"type": "http", "method": name, "headers": []})["method"] for name in ("BREW", "get", "X" * 99)}
    assert methods == {"UNKNOWN"}
