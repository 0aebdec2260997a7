"""Images on the wire: base64 data, as a data URL or bare, into neutral Image parts.

Owns the accepted formats, told by the bytes themselves and never by a declared type. Leaves pixels, sizes and costs to
`engine.images`.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Final

from engine.types.conversation import Image
from protocols.fields import DecodeLimits, refuse

_DATA_URL: Final = re.compile(r"data:([^;,]*)((?:;[^;,]*)*?);base64,", re.IGNORECASE)
_PNG: Final = b"\x89PNG\r\n\x1a\n"


def image_url(url: str, field: str, limits: DecodeLimits) -> Image:
    """An image given as a data URL. Raises InvalidRequest for a remote URL and for what isn't an accepted image."""
    match = _DATA_URL.match(url)
    if match is None:
        if url[:5].lower() == "data:":
            raise refuse(field, "must be a base64 data URL")
        raise refuse(field, "remote images are not downloaded: send the image as a base64 data URL")
    return base64_image(url[match.end() :], field, limits)


def base64_image(text: str, field: str, limits: DecodeLimits) -> Image:
    """An image given as base64 text. Raises InvalidRequest when it can't be decoded or the model has no vision."""
    if not limits.vision:
        raise refuse(field, "the loaded model does not take images")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise refuse(field, "is not valid base64") from None
    return encoded_image(data, field)


def encoded_image(data: bytes, field: str) -> Image:
    """A PNG, JPEG or static WebP file. Raises InvalidRequest otherwise."""
    media_type = image_type(data)
    if media_type is None:
        raise refuse(field, "is not a PNG, JPEG or WebP image")
    if is_animated(data):
        raise refuse(field, "animated images are not supported")
    return Image(data, media_type)


def image_type(data: bytes) -> str | None:
    """The media type by the leading bytes."""
    if data.startswith(_PNG):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return None


def is_animated(data: bytes) -> bool:
    """Whether a WebP has its animation flag or a PNG an `acTL` chunk before its pixels (WebP container, APNG)."""
    if data[:4] == b"RIFF":
        return data[12:16] == b"VP8X" and len(data) > 20 and bool(data[20] & 0x02)
    position = len(_PNG)
    while data.startswith(_PNG) and position + 8 <= len(data):
        kind = data[position + 4 : position + 8]
        if kind in (b"acTL", b"IDAT"):
            return kind == b"acTL"
        position += 12 + int.from_bytes(data[position : position + 4], "big")
    return False
