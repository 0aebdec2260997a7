"""Images of System One: parts, placeholders and what may not be left over."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.types.conversation import Image
from protocols.assets import AssetFields, Assets, MultipartPart, bind_assets, split_parts
from protocols.errors import InvalidRequest
from protocols.fields import DecodeLimits

PNG = b"\x89PNG\r\n\x1a\n" + bytes(8)
JPEG = b"\xff\xd8\xff\xe0" + bytes(8)
WEBP = b"RIFF\0\0\0\0WEBPVP8 " + bytes(8)
VISION = DecodeLimits(10, vision=True)
A, B = Image(PNG, "image/png"), Image(JPEG, "image/jpeg")
REQUEST = MultipartPart("request", "application/json", b"{}")


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def bind(assets: dict[str, dict[str, Any]], parts: dict[str, bytes] | None = None, **more: Any) -> Assets:
    fields = {name: AssetFields.model_validate(asset) for name, asset in assets.items()}
    return bind_assets(fields, parts, more.get("limits", VISION), allowed=more.get("allowed", True))


def test_parts_are_split_by_name() -> None:
    parts = [REQUEST, MultipartPart("asset-0", "image/png", PNG), MultipartPart("asset-1", "", JPEG)]
    assert split_parts(parts) == (b"{}", {"asset-0": PNG, "asset-1": JPEG})
    typed = MultipartPart("request", "Application/JSON; charset=utf-8", b"{}")
    assert split_parts([typed]) == (b"{}", {})


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ([], "first part"),
        ([MultipartPart("asset-0", "image/png", PNG), REQUEST], "first part"),
        ([MultipartPart("request", "", b"{}")], "untyped"),
        ([MultipartPart("request", "text/plain", b"{}")], "text/plain"),
        ([REQUEST, REQUEST], "'request' appears twice"),
        ([REQUEST, MultipartPart("a", "", PNG), MultipartPart("a", "", PNG)], "'a' appears twice"),
        ([REQUEST, MultipartPart("", "", PNG)], "needs a name"),
    ],
)
def test_bad_parts(parts: list[MultipartPart], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        split_parts(parts)


def test_inline_data_and_parts() -> None:
    assets = bind(
        {"<a>": {"data_base64": b64(PNG), "format": "jpg"}, "<b>": {"type": "image", "part": "p"}}, {"p": JPEG}
    )
    assert assets.content("<a>") == (A,)
    assert assets.content("x<b>y") == ("x", B, "y")
    assets.check_used()


def test_a_part_beats_inline_data() -> None:
    assert bind({"<a>": {"part": "p", "data_base64": "not base64"}}, {"p": JPEG}).content("<a>") == (B,)


@pytest.mark.parametrize(
    ("assets", "parts", "problem"),
    [
        ({"<a>": {"part": "p"}}, None, "'p' is not in the request"),
        ({"<a>": {"part": "p"}}, {"q": PNG}, "'p' is not in the request"),
        ({"<a>": {"part": "p"}, "<b>": {"part": "p"}}, {"p": PNG}, "claimed by another asset"),
        ({"<a>": {"part": "p"}}, {"p": PNG, "q": PNG}, "'q' belongs to no asset"),
        ({}, {"q": PNG}, "'q' belongs to no asset"),
        ({"<a>": {}}, None, "needs data_base64 or part"),
        ({"<a>": {"data_base64": ""}}, None, "needs data_base64 or part"),
        ({"<a>": {"data_base64": "@@"}}, None, "not valid base64"),
        ({"<a>": {"data_base64": b64(b"GIF89a")}}, None, "not a PNG, JPEG or WebP"),
        ({"<a>": {"data_base64": b64(WEBP)}}, None, "must be a PNG or JPEG"),
        ({"<a>": {"part": "p"}}, {"p": b""}, "not a PNG, JPEG or WebP"),
        ({"": {"data_base64": b64(PNG)}}, None, "at least one character"),
    ],
)
def test_what_cant_be_bound(assets: dict[str, Any], parts: dict[str, bytes] | None, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        bind(assets, parts)


def test_the_header_and_vision_are_needed() -> None:
    one = {"<a>": {"data_base64": b64(PNG)}}
    with pytest.raises(InvalidRequest, match="TypeSafe-Danger-Zone-Images: true"):
        bind(one, allowed=False)
    with pytest.raises(InvalidRequest, match="does not take images"):
        bind(one, limits=DecodeLimits(10))
    bind({}, allowed=False, limits=DecodeLimits(10)).check_used()


def test_unused_assets_are_refused() -> None:
    assets = bind({"<a>": {"data_base64": b64(PNG)}, "<b>": {"data_base64": b64(PNG)}})
    assets.content({"<b>": "a key stays text", "v": "<a>"})
    with pytest.raises(InvalidRequest, match=r"<b>.*is not used"):
        assets.check_used()


def test_nested_values_keep_their_json_around_images() -> None:
    assets = Assets({"<a>": A})
    value = {"k<a>": ['é"<a>', 1, None, {"n": "<a>"}], "e": {}, "l": []}
    assert assets.content(value) == ('{"k<a>": ["é\\"', A, '", 1, null, {"n": "', A, '"}], "e": {}, "l": []}')


def test_whole_values_first_then_longest_from_the_left() -> None:
    assets = Assets({"ab": A, "abc": B, "bc": A, "x abc": A})
    assert assets.content("x abc") == (A,)
    assert assets.content("abcbc ab") == (B, A, " ", A)
    assert assets.content("aabc") == ("a", B)


def test_one_asset_may_stand_often() -> None:
    assert Assets({"<a>": A}).content("<a><a>") == (A, A)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_structure_is_preserved(value: Any) -> None:
    for assets in (Assets({}), Assets({"never there": A})):
        found = assets.content(value)
        text = "".join(piece for piece in found if isinstance(piece, str))
        assert text == value if isinstance(value, str) else json.loads(text) == value
