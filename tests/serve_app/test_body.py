"""Bodies: every encoding, every bound, and every way an upload can go wrong."""

from __future__ import annotations

import asyncio
import gzip
import os
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import brotli
import pytest
import zstandard

from protocols.errors import BodyTooLarge, InvalidRequest, RequestTimeout, SlotsExhausted, UnsupportedEncoding
from serve_app import body
from serve_app.admission import IngressPool
from tests.support.ingress import asynchronous

LIMIT = 2**20
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": lambda data: brotli.compress(data, quality=1),
    "zstd": zstandard.compress,
}
coded = pytest.mark.parametrize("encoding", COMPRESS)


def sample(size: int) -> bytes:
    return os.urandom(size // 2) + b"a" * (size - size // 2)


def sender(parts: Iterable[bytes], *, disconnect: bool = False) -> body.Receive:
    """Receives `parts`; with `disconnect` the client leaves after them, otherwise the last one ends the body."""
    queue = list(parts)

    async def receive() -> dict[str, Any]:
        if not queue:
            return {"type": "http.disconnect"}
        part = queue.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(queue) or disconnect}

    return receive


@coded
@pytest.mark.parametrize("size", [0, 1, 1000, 65536, 500_000])
def test_round_trip(encoding: str, size: int) -> None:
    data = sample(size)
    assert body.decompress(encoding, COMPRESS[encoding](data), LIMIT) == data


@coded
@pytest.mark.parametrize("size", [1, 1000, 300_000])
def test_truncated_data_is_refused(encoding: str, size: int) -> None:
    packed = COMPRESS[encoding](sample(size))
    for cut in (1, 3, len(packed) // 2, len(packed)):
        with pytest.raises(InvalidRequest, match=encoding):
            body.decompress(encoding, packed[:-cut], LIMIT)


@coded
def test_trailing_and_random_data_are_refused(encoding: str) -> None:
    for data in (COMPRESS[encoding](b"{}") + b"xx", os.urandom(64), b"{}"):
        with pytest.raises(InvalidRequest):
            body.decompress(encoding, data, LIMIT)


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_several_members_are_one_body(encoding: str) -> None:
    pack = COMPRESS[encoding]
    assert body.decompress(encoding, pack(b'{"a"') + pack(b":1}"), LIMIT) == b'{"a":1}'


@coded
def test_bomb_stops_at_the_bound(encoding: str) -> None:
    bomb = COMPRESS[encoding](bytes(100 * 2**20))
    tracemalloc.start()
    try:
        with pytest.raises(BodyTooLarge, match=f"max_body_bytes \\({LIMIT} bytes\\)"):
            body.decompress(encoding, bomb, LIMIT)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 48 * 2**20


@coded
def test_exactly_the_bound_is_allowed(encoding: str) -> None:
    assert len(body.decompress(encoding, COMPRESS[encoding](bytes(LIMIT)), LIMIT)) == LIMIT
    with pytest.raises(BodyTooLarge):
        body.decompress(encoding, COMPRESS[encoding](bytes(LIMIT + 1)), LIMIT)


def test_zstd_window_is_bounded() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=27, compression_level=1)
    packed = zstandard.ZstdCompressor(compression_params=parameters).compressobj().compress(sample(2**20))
    with pytest.raises(InvalidRequest, match="zstd"):
        body.decompress("zstd", packed, 2**25)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], "identity"),
        ([b""], "identity"),
        ([b"identity"], "identity"),
        ([b"GZip"], "gzip"),
        ([b"x-gzip"], "gzip"),
        ([b" zstd "], "zstd"),
        ([b"identity, br"], "br"),
    ],
)
def test_encoding_names(values: list[bytes], expected: str) -> None:
    assert body.content_encoding([(b"content-encoding", value) for value in values]) == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([b"compress"], "not one of"),
        ([b"gzip;q=1"], "not one of"),
        ([b"\xff\xfe"], "not one of"),
        ([b"gzip, br"], "stacked"),
        ([b"gzip", b"gzip"], "stacked"),
    ],
)
def test_unknown_and_stacked_encodings_are_415(values: list[bytes], message: str) -> None:
    with pytest.raises(UnsupportedEncoding, match=message):
        body.content_encoding([(b"content-encoding", value) for value in values])


@asynchronous
async def test_parts_are_joined() -> None:
    assert await body.read(sender([b"ab", b"", b"cd"]), [], limit=4, idle=5) == b"abcd"


@asynchronous
async def test_encoded_bound_is_held_while_reading() -> None:
    taken = 0

    async def endless() -> dict[str, Any]:
        nonlocal taken
        taken += 1000
        return {"type": "http.request", "body": bytes(1000), "more_body": True}

    with pytest.raises(BodyTooLarge):
        await body.read(endless, [], limit=10_000, idle=5)
    assert taken == 11_000


@asynchronous
async def test_stated_length_over_the_bound_is_refused_unread() -> None:
    async def never() -> dict[str, Any]:
        raise AssertionError("the body was read")

    with pytest.raises(BodyTooLarge):
        await body.read(never, [(b"content-length", b"11")], limit=10, idle=5)


@asynchronous
async def test_a_false_length_is_not_trusted() -> None:
    with pytest.raises(BodyTooLarge):
        await body.read(sender([bytes(20)]), [(b"content-length", b"2")], limit=10, idle=5)


@asynchronous
async def test_standing_upload_times_out() -> None:
    async def standing() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(RequestTimeout, match="after 0 bytes"):
        await body.read(standing, [], limit=10, idle=0.01)


@asynchronous
async def test_dripping_upload_times_out_on_its_rate() -> None:
    async def dripping() -> dict[str, Any]:
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b"x", "more_body": True}

    with pytest.raises(RequestTimeout):
        await asyncio.wait_for(body.read(dripping, [], limit=10**6, idle=0.1), 10)


@asynchronous
async def test_cut_upload_has_nobody_to_answer() -> None:
    with pytest.raises(body.ClientGone):
        await body.read(sender([b"{"], disconnect=True), [], limit=10, idle=5)


@asynchronous
async def test_bytes_are_charged_as_they_come() -> None:
    pool = IngressPool(4, 100)
    with pool.place() as first, pool.place() as second:
        await body.read(sender([bytes(80)]), [], limit=1000, idle=5, charge=first.charge)
        with pytest.raises(SlotsExhausted):
            await body.read(sender([bytes(15), bytes(15)]), [], limit=1000, idle=5, charge=second.charge)
    assert (pool.requests, pool.held_bytes) == (0, 0)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"nul",
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":1e999}',
        b'{"a":"\\ud800"}',
        b'{"a":"\xff"}',
        b"\xef\xbb\xbf{}",
        b"{'a':1}",
        b'{"a":1,}',
        b'{"a":1}{}',
        b'{"a":\x00}',
        b"[" * 200,
    ],
)
def test_what_is_not_json_is_400(text: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        body.parse_object(text)


@pytest.mark.parametrize("text", [b"[]", b"1", b"null", b'"a"', b"[" + b"1," * 40_000 + b"1]"])
def test_other_values_than_objects_are_400(text: bytes) -> None:
    with pytest.raises(InvalidRequest, match="must be a JSON object"):
        body.parse_object(text)


def test_last_duplicate_name_counts() -> None:
    assert body.parse_object(b'{"a":1,"a":2}') == {"a": 2}


@asynchronous
async def test_large_bodies_are_decoded_by_workers() -> None:
    workers = body.Workers(1)
    main = threading.get_ident()
    large = b'{"a":"' + b"x" * body.INLINE_BYTES + b'"}'
    try:
        assert await workers.load(b"{}", lambda _: threading.get_ident()) == main
        assert await workers.load(large, lambda _: threading.get_ident()) != main
    finally:
        workers.close()


@asynchronous
async def test_unpacking_charges_what_it_adds() -> None:
    workers = body.Workers(1)
    charged: list[int] = []
    packed = gzip.compress(bytes(10_000))
    try:
        assert await workers.unpack(b"{}", "identity", LIMIT, charged.append) == b"{}"
        assert await workers.unpack(packed, "gzip", LIMIT, charged.append) == bytes(10_000)
    finally:
        workers.close()
    assert charged == [10_000 - len(packed)]


@asynchronous
async def test_workers_are_bounded() -> None:
    workers = body.Workers(2)
    running, most, lock = 0, 0, threading.Lock()

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.005)
        with lock:
            running -= 1

    try:
        await asyncio.gather(*(workers.call(work) for _ in range(20)))
    finally:
        workers.close()
    assert most == 2


def test_a_bomb_leaves_nothing_in_the_errors_traceback() -> None:
    """Whoever keeps the error keeps its frames; what was decoded up to the bound must not stay with them."""
    with pytest.raises(BodyTooLarge) as caught:
        body.decompress("gzip", gzip.compress(bytes(8 * 2**20)), 4 * 2**20)
    kept = 0
    trace = caught.value.__traceback__
    while trace is not None:
        kept += sum(
            sum(map(len, value)) for value in trace.tb_frame.f_locals.values() if isinstance(value, list) and value
        )
        trace = trace.tb_next
    assert kept < 2**20
