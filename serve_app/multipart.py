"""multipart/form-data bodies (RFC 7578, RFC 2046 5.1), whole and within bounds.

Owns where parts begin and end and what they are called. Which parts a request may have is the protocol's business.
"""

from __future__ import annotations

import re
from typing import Final

from protocols.assets import MultipartPart
from protocols.errors import InvalidRequest

MAX_PARTS: Final = 1024
MAX_HEADER_BYTES: Final = 8 * 1024
_BOUNDARY: Final = re.compile(rb"[0-9A-Za-z'()+_,\-./:=? ]{0,69}[0-9A-Za-z'()+_,\-./:=?]")
_PARAMETER: Final = re.compile(rb';[ \t]*([!#$%&\'*+\-.^_`|~0-9A-Za-z]+)=(?:"((?:[^"\\]|\\.)*)"|([^\s;"]*))[ \t]*')


def is_multipart(content_type: str | None) -> bool:
    return (content_type or "").split(";")[0].strip().lower().startswith("multipart/")


def parse(content_type: str, body: bytes) -> list[MultipartPart]:
    """The parts in order. Raises InvalidRequest for anything that isn't exactly multipart/form-data."""
    kind, parameters = _split(content_type.encode("latin-1"))
    if kind != b"multipart/form-data":
        raise InvalidRequest("Content-Type: only multipart/form-data is supported")
    boundary = parameters.get(b"boundary", b"")
    if not _BOUNDARY.fullmatch(boundary):
        raise InvalidRequest("Content-Type: the multipart boundary is missing or malformed")
    parts: list[MultipartPart] = []
    delimiter = b"\r\n--" + boundary
    # A first delimiter needs no line break in front of it.
    at = len(delimiter) - 2 if body.startswith(delimiter[2:]) else _after(body, delimiter, 0)
    while True:
        if body.startswith(b"--", at):
            return parts
        start = _line_end(body, at)
        if len(parts) == MAX_PARTS:
            raise InvalidRequest(f"a multipart body may have at most {MAX_PARTS} parts")
        following = _after(body, delimiter, start - 2)
        parts.append(_part(body, start, following - len(delimiter)))
        at = following


def _after(body: bytes, delimiter: bytes, at: int) -> int:
    found = body.find(delimiter, at)
    if found < 0:
        raise InvalidRequest("the multipart body has no closing boundary")
    return found + len(delimiter)


def _line_end(body: bytes, at: int) -> int:
    """After a delimiter only spaces may stand before the line break."""
    end = body.find(b"\r\n", at, at + 80)
    if end < 0 or body[at:end].strip(b" \t"):
        raise InvalidRequest("the multipart body has a malformed boundary line")
    return end + 2


def _part(body: bytes, start: int, end: int) -> MultipartPart:
    """`end` is where the delimiter begins; a part without headers begins with an empty line."""
    if body.startswith(b"\r\n", start):
        raise InvalidRequest("every multipart part needs a Content-Disposition")
    close = body.find(b"\r\n\r\n", start, min(end + 2, start + MAX_HEADER_BYTES))
    if close < 0:
        raise InvalidRequest("a multipart part has malformed or too large headers")
    headers: dict[bytes, bytes] = {}
    for line in body[start:close].split(b"\r\n"):
        name, colon, value = line.partition(b":")
        if not colon or not name.strip() or name.strip().lower() in headers:
            raise InvalidRequest("a multipart part has malformed headers")
        headers[name.strip().lower()] = value.strip()
    if headers.get(b"content-transfer-encoding", b"binary").lower() not in (b"binary", b"7bit", b"8bit"):
        raise InvalidRequest("multipart parts must be sent as they are, without a Content-Transfer-Encoding")
    kind, parameters = _split(headers.get(b"content-disposition", b""))
    if kind != b"form-data" or b"name" not in parameters:
        raise InvalidRequest('every multipart part needs Content-Disposition: form-data; name="..."')
    try:
        called = parameters[b"name"].decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest("a multipart part's name is not valid UTF-8") from None
    return MultipartPart(called, headers.get(b"content-type", b"").decode("latin-1"), body[close + 4 : end])


def _split(value: bytes) -> tuple[bytes, dict[bytes, bytes]]:
    """The value in front of the parameters, lower case, and the parameters. Raises InvalidRequest."""
    kind, semicolon, rest = value.partition(b";")
    parameters: dict[bytes, bytes] = {}
    text = semicolon + rest
    at = 0
    while at < len(text):
        match = _PARAMETER.match(text, at)
        if match is None:
            if text[at:].strip(b"; \t"):
                raise InvalidRequest("a header of the multipart body has malformed parameters")
            break
        name, quoted, plain = match.groups()
        if name.lower() in parameters:
            raise InvalidRequest("a header of the multipart body has a parameter twice")
        parameters[name.lower()] = plain if quoted is None else re.sub(rb"\\(.)", rb"\1", quoted)
        at = match.end()
    return kind.strip().lower(), parameters
