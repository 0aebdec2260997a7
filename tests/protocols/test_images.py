"""Accepted image data, and everything that isn't."""

from __future__ import annotations

import base64
import io

import pytest
from PIL import Image as Pillow

from protocols.errors import InvalidRequest
from protocols.fields import DecodeLimits
from protocols.images import base64_image, encoded_image, image_type, image_url

LIMITS = DecodeLimits(10, vision=True)


def encoded(kind: str, frames: int = 1) -> bytes:
    pictures = [Pillow.new("RGB", (4, 4), (80 * i, 0, 0)) for i in range(frames)]
    out = io.BytesIO()
    pictures[0].save(out, kind, **({"save_all": True, "append_images": pictures[1:]} if frames > 1 else {}))
    return out.getvalue()


def url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_formats_are_told_by_their_bytes(kind: str) -> None:
    data = encoded(kind)
    image = image_url(url(data, "application/octet-stream"), "url", LIMITS)
    assert image.data == data and image.media_type == f"image/{kind}"


def test_data_urls_may_carry_parameters() -> None:
    text = url(encoded("png")).replace("image/png;", "image/png;charset=utf-8;")
    assert image_url(text, "url", LIMITS).media_type == "image/png"


@pytest.mark.parametrize("kind", ["png", "webp"])
def test_animations_are_refused(kind: str) -> None:
    with pytest.raises(InvalidRequest, match="animated"):
        encoded_image(encoded(kind, frames=3), "image")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("https://example.org/cat.png", "not downloaded"),
        ("file:///etc/passwd", "not downloaded"),
        ("data:image/png,abc", "base64 data URL"),
        ("data:image/png;base64,@@@", "not valid base64"),
        ("data:image/png;base64,QUJD\n", "not valid base64"),
        ("data:image/gif;base64," + base64.b64encode(b"GIF89a....").decode(), "not a PNG"),
        ("data:image/png;base64,", "not a PNG"),
        ("", "not downloaded"),
    ],
)
def test_refusals(text: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem) as caught:
        image_url(text, "messages[0].content[1].image_url.url", LIMITS)
    assert caught.value.field == "messages[0].content[1].image_url.url"


def test_a_text_model_takes_no_images() -> None:
    with pytest.raises(InvalidRequest, match="does not take images"):
        base64_image(base64.b64encode(encoded("png")).decode(), "image", DecodeLimits(10))


def test_short_data_has_no_type() -> None:
    assert image_type(b"") is None and image_type(b"RIFF") is None
