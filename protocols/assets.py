"""Image assets of System One: multipart parts, and placeholders in a request's strings.

Owns which part belongs to which asset, and where an image stands for a placeholder. Leaves reading a multipart body to
`serve_app`, image formats to `images`.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from engine.types.conversation import Image
from protocols.errors import InvalidRequest
from protocols.fields import DecodeLimits, Fields, refuse
from protocols.images import encoded_image
from protocols.questions import Content, joined

HEADER: Final = "TypeSafe-Danger-Zone-Images"
REQUEST_PART: Final = "request"
_TYPES: Final = ("image/png", "image/jpeg")


class AssetFields(Fields):
    """`format` is what the client believes; the bytes decide."""

    type: Literal["image"] | None = None
    format: Literal["png", "jpg", "jpeg"] | None = None
    data_base64: str | None = None
    part: str | None = None


@dataclass(frozen=True, slots=True)
class MultipartPart:
    """One part of a multipart/form-data body. `content_type` as sent, empty when absent."""

    name: str
    content_type: str
    data: bytes


def split_parts(parts: Sequence[MultipartPart]) -> tuple[bytes, dict[str, bytes]]:
    """The JSON text of the request, and the image parts by name. Raises InvalidRequest unless the request comes first
    and every other part has a name of its own."""
    if not parts or parts[0].name != REQUEST_PART:
        raise InvalidRequest(f"the first part of a multipart body must be named {REQUEST_PART!r}")
    media_type = parts[0].content_type.split(";")[0].strip().lower()
    if media_type != "application/json":
        raise InvalidRequest(f"the part {REQUEST_PART!r} must be application/json, not {media_type or 'untyped'}")
    images: dict[str, bytes] = {}
    for part in parts[1:]:
        if not part.name:
            raise InvalidRequest("every image part needs a name")
        if part.name == REQUEST_PART or part.name in images:
            raise InvalidRequest(f"the part {part.name!r} appears twice")
        images[part.name] = part.data
    return parts[0].data, images


class Assets:
    """The images of one request, by placeholder."""

    def __init__(self, images: Mapping[str, Image]) -> None:
        self._images = images
        self._used: set[str] = set()
        longest_first = sorted(images, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if images else None

    def content(self, value: Any) -> Content:
        """A string as it is, anything else as JSON text, with an image wherever a string value holds a placeholder.
        Keys stay text."""
        if isinstance(value, str):
            return self._split(value, lambda text: text)
        if self._pattern is None:
            return (json.dumps(value, ensure_ascii=False),)
        return joined(*self._pieces(value))

    def check_used(self) -> None:
        """Raises InvalidRequest when a placeholder stood nowhere."""
        for name in self._images:
            if name not in self._used:
                raise refuse(f"assets[{name!r}]", "is not used in state, instructions or criteria")

    def _pieces(self, value: Any) -> list[str | Image | Content]:
        if isinstance(value, str):
            return ['"', self._split(value, lambda text: json.dumps(text, ensure_ascii=False)[1:-1]), '"']
        if isinstance(value, dict):
            pieces: list[str | Image | Content] = ["{"]
            for index, (key, item) in enumerate(value.items()):
                pieces += [", " if index else "", json.dumps(key, ensure_ascii=False), ": ", *self._pieces(item)]
            return [*pieces, "}"]
        if isinstance(value, list):
            pieces = ["["]
            for index, item in enumerate(value):
                pieces += [", " if index else "", *self._pieces(item)]
            return [*pieces, "]"]
        return [json.dumps(value, ensure_ascii=False)]

    def _split(self, text: str, spelled: Any) -> Content:
        if text in self._images:
            self._used.add(text)
            return (self._images[text],)
        if self._pattern is None:
            return joined(text)
        pieces: list[str | Image] = []
        position = 0
        for match in self._pattern.finditer(text):
            self._used.add(match[0])
            pieces += [spelled(text[position : match.start()]), self._images[match[0]]]
            position = match.end()
        return joined(*pieces, spelled(text[position:]))


def bind_assets(
    assets: Mapping[str, AssetFields] | None,
    parts: Mapping[str, bytes] | None,
    limits: DecodeLimits,
    *,
    allowed: bool,
) -> Assets:
    """The images of a request. `parts`: image parts of a multipart body, None for a JSON body. `allowed`: the images
    header is there. Raises InvalidRequest for what can't be bound and for parts without an asset."""
    if assets and not allowed:
        raise refuse("assets", f"images are experimental: send the header {HEADER}: true to use them")
    if assets and not limits.vision:
        raise refuse("assets", "the loaded model does not take images")
    unclaimed = dict(parts or {})
    images: dict[str, Image] = {}
    for name, asset in (assets or {}).items():
        at = f"assets[{name!r}]"
        if not name:
            raise refuse(at, "an asset needs a placeholder of at least one character")
        images[name] = _image(_data(asset, parts, unclaimed, at), at)
    if unclaimed:
        raise InvalidRequest(f"the part {next(iter(unclaimed))!r} belongs to no asset")
    return Assets(images)


def _data(asset: AssetFields, parts: Mapping[str, bytes] | None, unclaimed: dict[str, bytes], at: str) -> bytes:
    if asset.part is not None:
        if asset.part in unclaimed:
            return unclaimed.pop(asset.part)
        problem = "is claimed by another asset" if asset.part in (parts or {}) else "is not in the request"
        raise refuse(f"{at}.part", f"the part {asset.part!r} {problem}")
    if not asset.data_base64:
        raise refuse(at, "needs data_base64 or part")
    try:
        return base64.b64decode(asset.data_base64, validate=True)
    except (binascii.Error, ValueError):
        raise refuse(f"{at}.data_base64", "is not valid base64") from None


def _image(data: bytes, at: str) -> Image:
    image = encoded_image(data, at)
    if image.media_type not in _TYPES:
        raise refuse(at, "must be a PNG or JPEG image")
    return image
