"""Request bodies: bounded reading, content encodings, JSON, in a bounded pool of workers.

Nothing here trusts a length that a client states. Small plain bodies are parsed where they arrive; everything else
goes through the workers, so that no body stalls a stream. Multipart is in `serve_app.multipart`, the slicing of large
JSON texts in `serve_app.jsontext`.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import brotli
import zstandard

from engine.types.nesting import MAX_DEPTH, deeper_than
from protocols import fields
from protocols.errors import BodyTooLarge, InvalidRequest, RequestTimeout, UnsupportedEncoding
from protocols.exact_json import loads
from serve_app.admission import Headers
from serve_app.jsontext import parse_sliced, too_deep

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Charge = Callable[[int], None]
Result = TypeVar("Result")

ENCODINGS: Final = ("identity", "gzip", "deflate", "br", "zstd")
INLINE_BYTES: Final = 32 * 1024
"""Plain bodies up to this size are parsed on the event loop: about 0.1 ms, less than a hop to a worker costs."""
MIN_RATE: Final = 4096
"""Bytes a second an upload must make on average, beyond the grace of one idle timeout."""
_CHUNK: Final = 64 * 1024
_ZSTD_CHUNK: Final = 1024
_ZSTD_WINDOW: Final = 8 * 2**20
"""The largest window an HTTP client may use (RFC 9659, 3)."""


class ClientGone(Exception):
    """The client disconnected; there is nobody to answer."""


def content_encoding(headers: Headers) -> str:
    """The one content encoding of a request, "identity" when absent. Raises UnsupportedEncoding for an unknown one and
    for stacked ones."""
    names: list[str] = []
    for name, value in headers:
        if name == b"content-encoding":
            names += [part.strip().lower() for part in value.decode("latin-1").split(",")]
    coded = [name for name in names if name not in ("", "identity")]
    if not coded:
        return "identity"
    if len(coded) > 1:
        raise UnsupportedEncoding(f"Content-Encoding: stacked encodings are not supported, got {', '.join(coded)[:80]}")
    encoding = "gzip" if coded[0] == "x-gzip" else coded[0]
    if encoding not in ENCODINGS:
        raise UnsupportedEncoding(f"Content-Encoding: {encoding[:40]!r} is not one of {', '.join(ENCODINGS)}")
    return encoding


def declared_length(headers: Headers) -> int | None:
    """Content-Length when it is a plain number; the server has refused the rest."""
    for name, value in headers:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return None


async def read(receive: Receive, headers: Headers, *, limit: int, idle: float, charge: Charge | None = None) -> bytes:
    """The body as sent, at most `limit` bytes.

    `idle`: seconds without a byte after which the upload has timed out; on the whole it must also make MIN_RATE.
    `charge` is told the bytes as they come and may raise. Raises BodyTooLarge, RequestTimeout, ClientGone.
    """
    length = declared_length(headers)
    if length is not None and length > limit:
        raise too_large(limit)
    loop = asyncio.get_running_loop()
    started = loop.time()
    chunks: list[bytes] = []
    size = 0
    while True:
        allowed = min(idle, started + 2 * idle + size / MIN_RATE - loop.time())
        try:
            async with asyncio.timeout(max(allowed, 0.0)):
                message = await receive()
        except TimeoutError:
            raise RequestTimeout(f"the request body stopped arriving after {size} bytes") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise too_large(limit)
        if chunk:
            if charge is not None:
                charge(len(chunk))
            chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request body is larger than max_body_bytes ({limit} bytes)")


def decompress(encoding: str, data: bytes, limit: int) -> bytes:
    """`data` decoded, at most `limit` bytes; stops as soon as the bound is passed.

    Raises BodyTooLarge, and InvalidRequest for malformed, truncated or trailing data.
    """
    if encoding == "identity":
        return data
    try:
        return _collect(_DECODERS[encoding](data, limit), limit)
    except (zlib.error, brotli.error, zstandard.ZstdError) as error:
        raise InvalidRequest(f"the request body is not valid {encoding}: {str(error)[:120]}") from None


def _collect(pieces: Iterable[bytes], limit: int) -> bytes:
    out: list[bytes] = []
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > limit:
            out.clear()  # the error's traceback may keep this frame for a while
            raise too_large(limit)
        out.append(piece)
    return b"".join(out)


def _inflate(data: bytes, wbits: int, name: str) -> Iterable[bytes]:
    """zlib streams, one or (gzip) several members after each other."""
    rest = data
    while True:
        stream = zlib.decompressobj(wbits)
        while not stream.eof:
            piece = stream.decompress(rest, _CHUNK)
            rest = stream.unconsumed_tail
            if not piece and not rest and not stream.eof:
                raise InvalidRequest(f"the request body is truncated {name}")
            yield piece
        rest = stream.unused_data
        if not rest:
            return
        if name != "gzip":
            raise InvalidRequest(f"the request body has data after its {name} stream")


def _gzip(data: bytes, limit: int) -> Iterable[bytes]:
    return _inflate(data, 31, "gzip")


def _deflate(data: bytes, limit: int) -> Iterable[bytes]:
    return _inflate(data, 15, "deflate")


def _brotli(data: bytes, limit: int) -> Iterable[bytes]:
    stream = brotli.Decompressor()
    yield stream.process(data, output_buffer_limit=_CHUNK)
    while not stream.is_finished():
        piece = stream.process(b"", output_buffer_limit=_CHUNK)
        if not piece and not stream.is_finished():
            raise InvalidRequest("the request body is truncated br")
        yield piece


def _zstd(data: bytes, limit: int) -> Iterable[bytes]:
    """Small input chunks bound what one call may expand to: a block of 128 KiB can be coded in four bytes."""
    context = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    rest = memoryview(data)
    while True:
        stream = context.decompressobj()
        while not stream.eof:
            if not rest:
                raise InvalidRequest("the request body is truncated zstd")
            yield stream.decompress(rest[:_ZSTD_CHUNK])
            rest = rest[min(_ZSTD_CHUNK, len(rest)) - len(stream.unused_data) :]
        if not rest:
            return


_DECODERS: Final[dict[str, Callable[[bytes, int], Iterable[bytes]]]] = {
    "gzip": _gzip,
    "deflate": _deflate,
    "br": _brotli,
    "zstd": _zstd,
}


def parse_value(data: bytes) -> Any:
    """The JSON value that `data` holds. Of duplicate names the last one counts; NaN, infinities, lone surrogates,
    invalid UTF-8 and fields nested deeper than MAX_DEPTH are refused. Raises InvalidRequest."""
    try:
        value = loads(data) if len(data) <= INLINE_BYTES else parse_sliced(data)
    except ValueError as error:
        if too_deep(data):
            raise InvalidRequest(f"the request body is nested deeper than {MAX_DEPTH} levels") from None
        raise InvalidRequest(f"the request body is not valid JSON: {error}") from None
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    """Raises InvalidRequest, naming the field, for what is nested deeper than MAX_DEPTH."""
    for name, field in value.items() if isinstance(value, dict) else (("the request body", value),):
        if deeper_than(field, MAX_DEPTH):
            raise fields.too_deep(name[:80])


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object that `data` holds. Raises InvalidRequest, also for other values."""
    value = parse_value(data)
    if not isinstance(value, dict):
        raise InvalidRequest("the request body must be a JSON object")
    return value


class Workers:
    """The bounded pool of threads shared by decompression, parsing and decoding."""

    def __init__(self, threads: int = 2) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="frontend")

    async def load(self, data: bytes, decode: Callable[[dict[str, Any]], Result]) -> Result:
        """`decode` of the JSON object in `data`. Raises InvalidRequest and what `decode` raises."""
        if len(data) <= INLINE_BYTES:
            return decode(parse_object(data))
        return await self.call(lambda: decode(parse_object(data)))

    async def unpack(self, data: bytes, encoding: str, limit: int, charge: Charge | None = None) -> bytes:
        """`data` decoded; `charge` is told how many bytes more that is. Raises InvalidRequest, BodyTooLarge and what
        `charge` raises."""
        if encoding == "identity":
            return data
        text = await self.call(lambda: decompress(encoding, data, limit))
        if charge is not None:
            charge(max(0, len(text) - len(data)))
        return text

    async def call(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
