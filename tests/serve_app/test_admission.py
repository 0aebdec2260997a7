"""Keys and the bounded pool of an ingress."""

from __future__ import annotations

import asyncio

import pytest

from protocols.errors import SlotsExhausted, Unauthorized
from serve_app.admission import IngressPool, KeyCheck
from tests.support.ingress import asynchronous

Given = list[tuple[bytes, bytes]]
GOOD, BAD = b"Bearer secret", b"Bearer wrong"


def bearer(value: bytes) -> tuple[bytes, bytes]:
    return (b"authorization", value)


def x_key(value: bytes) -> tuple[bytes, bytes]:
    return (b"x-api-key", value)


@pytest.mark.parametrize(
    ("headers", "x_api_key"),
    [
        ([bearer(GOOD)], False),
        ([bearer(b"bearer   secret ")], False),
        ([bearer(GOOD), x_key(b"wrong")], False),
        ([bearer(GOOD)], True),
        ([x_key(b"secret")], True),
        ([bearer(GOOD), x_key(b"secret")], True),
    ],
)
def test_accepted(headers: Given, x_api_key: bool) -> None:
    KeyCheck("secret").check(headers, x_api_key=x_api_key)


@pytest.mark.parametrize(
    ("headers", "x_api_key"),
    [
        ([], False),
        ([], True),
        ([bearer(BAD)], False),
        ([bearer(b"Basic secret")], False),
        ([bearer(b"secret")], False),
        ([bearer(b"Bearer ")], False),
        ([x_key(b"secret")], False),
        ([bearer(GOOD), bearer(BAD)], False),
        ([bearer(GOOD), x_key(b"wrong")], True),
        ([bearer(BAD), x_key(b"secret")], True),
        ([x_key(b"secret"), x_key(b"")], True),
        ([bearer(b"Bearer \xff\xfe")], False),
    ],
)
def test_refused(headers: Given, x_api_key: bool) -> None:
    with pytest.raises(Unauthorized) as caught:
        KeyCheck("secret").check(headers, x_api_key=x_api_key)
    assert "secret" not in caught.value.message


def test_empty_key_disables_authentication() -> None:
    KeyCheck("").check([])
    KeyCheck("").check([bearer(BAD), x_key(b"x")], x_api_key=True)


def test_key_beyond_ascii() -> None:
    KeyCheck("schlüssel").check([bearer("Bearer schlüssel".encode())])


def test_pool_is_bounded_and_returns_places() -> None:
    pool = IngressPool(2, 1000)
    first, second = pool.enter(), pool.enter()
    with pytest.raises(SlotsExhausted) as caught:
        pool.enter()
    assert caught.value.retry_after is not None
    first.leave()
    first.leave()
    third = pool.enter()
    second.leave()
    third.leave()
    assert (pool.requests, pool.held_bytes) == (0, 0)


def test_one_request_may_hold_more_than_the_byte_bound() -> None:
    pool = IngressPool(2, 100)
    with pool.place() as alone:
        alone.charge(60)
        alone.charge(60)
        with pool.place() as other, pytest.raises(SlotsExhausted):
            other.charge(1)
    assert pool.held_bytes == 0


def test_holding_counts_bytes_but_no_place() -> None:
    pool = IngressPool(1, 100)
    with pool.place(), pool.holding() as ticket:
        ticket.charge(60)
        assert (pool.requests, pool.held_bytes) == (1, 60)
    assert (pool.requests, pool.held_bytes) == (0, 0)


def test_place_is_left_when_the_request_fails() -> None:
    pool = IngressPool(1, 100)
    with pytest.raises(ZeroDivisionError), pool.place() as ticket:
        ticket.charge(10)
        raise ZeroDivisionError
    assert (pool.requests, pool.held_bytes) == (0, 0)


@asynchronous
async def test_turns_wait_instead_of_refusing() -> None:
    pool = IngressPool(1, 100, waiting=2)
    pool.enter()
    running, most = 0, 0

    async def count() -> None:
        nonlocal running, most
        async with pool.turn():
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1

    await asyncio.gather(*(count() for _ in range(24)))
    assert most == 2
