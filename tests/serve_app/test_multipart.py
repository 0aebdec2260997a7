"""multipart/form-data: what the SDK sends, and everything that isn't that."""

from __future__ import annotations

import random

import pytest

from protocols.errors import InvalidRequest
from serve_app import multipart

TYPE = "multipart/form-data; boundary=xyz"
REQUEST = b'--xyz\r\nContent-Disposition: form-data; name="request"\r\nContent-Type: application/json\r\n\r\n{"a":1}'
IMAGE = b'\r\n--xyz\r\nContent-Disposition: form-data; name="asset-0"; filename="asset-0"\r\n\r\n'
END = b"\r\n--xyz--\r\n"


def test_as_the_sdk_writes_it() -> None:
    data = bytes(range(256)) + b"\r\n--xy\r\n--"
    first, second = multipart.parse(TYPE, REQUEST + IMAGE + data + END)
    assert (first.name, first.content_type, first.data) == ("request", "application/json", b'{"a":1}')
    assert (second.name, second.content_type, second.data) == ("asset-0", "", data)


@pytest.mark.parametrize(
    "content_type",
    [
        'multipart/form-data; boundary="xyz"',
        "Multipart/Form-Data;boundary=xyz",
        "multipart/form-data; charset=utf-8; boundary=xyz",
    ],
)
def test_ways_to_name_the_boundary(content_type: str) -> None:
    assert len(multipart.parse(content_type, REQUEST + END)) == 1


def test_preamble_epilogue_padding_and_empty_parts() -> None:
    body = b"before\r\n" + REQUEST + b"\r\n--xyz \t\r\nContent-Disposition: form-data; name=b\r\n\r\n" + END + b"after"
    assert [part.data for part in multipart.parse(TYPE, body)] == [b'{"a":1}', b""]


def test_names_are_unescaped_and_utf8() -> None:
    head = '--xyz\r\nContent-Disposition: form-data; name="a\\"é;b"\r\n\r\nx'.encode()
    assert multipart.parse(TYPE, head + END)[0].name == 'a"é;b'


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("multipart/form-data", REQUEST + END),
        ("multipart/form-data; boundary=", REQUEST + END),
        ("multipart/form-data; boundary=" + "x" * 71, REQUEST + END),
        ('multipart/form-data; boundary="a\nb"', REQUEST + END),
        ("multipart/form-data; boundary=xyz; boundary=abc", REQUEST + END),
        ("multipart/mixed; boundary=xyz", REQUEST + END),
        (TYPE, b""),
        (TYPE, b"junk"),
        (TYPE, REQUEST),
        (TYPE, REQUEST + b"\r\n--xyz"),
        (TYPE, REQUEST + b"\r\n--xyzjunk\r\n" + END),
        (TYPE, b"--xyz\r\n\r\nno headers" + END),
        (TYPE, b"--xyz\r\nContent-Type: a/b\r\n\r\nx" + END),
        (TYPE, b"--xyz\r\nContent-Disposition: attachment; name=a\r\n\r\nx" + END),
        (TYPE, b"--xyz\r\nContent-Disposition: form-data\r\n\r\nx" + END),
        (TYPE, b"--xyz\r\nContent-Disposition: form-data; name=a; name=b\r\n\r\nx" + END),
        (TYPE, b"--xyz\r\nContent-Disposition: form-data; name=\xff\r\n\r\nx" + END),
        (TYPE, b"--xyz\r\nContent-Disposition: form-data; name=a\r\nno colon\r\n\r\nx" + END),
        (TYPE, b"--xyz\r\nContent-Disposition: form-data; name=a\r\nX: " + b"y" * 9000 + b"\r\n\r\nx" + END),
        (TYPE, b"--xyz\r\nContent-Disposition: form-data; name=a\r\nContent-Transfer-Encoding: base64\r\n\r\nx" + END),
    ],
)
def test_refused(content_type: str, body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        multipart.parse(content_type, body)


def test_part_count_is_bounded() -> None:
    part = b"--xyz\r\nContent-Disposition: form-data; name=a\r\n\r\nx\r\n"
    assert len(multipart.parse(TYPE, part * 1024 + b"--xyz--")) == 1024
    with pytest.raises(InvalidRequest, match="1024 parts"):
        multipart.parse(TYPE, part * 1025 + b"--xyz--")


def test_damage_is_refused_or_read_but_never_breaks() -> None:
    rng = random.Random(1)
    whole = REQUEST + IMAGE + b"data" * 10 + END
    for _ in range(3000):
        broken = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(broken))
            if rng.random() < 0.5:
                del broken[at]
            else:
                broken[at] = rng.choice(b'\r\n-xyz";:= \x00\xff')
        try:
            multipart.parse(TYPE, bytes(broken))
        except InvalidRequest:
            continue


@pytest.mark.parametrize(
    ("content_type", "expected"),
    [(None, False), ("application/json", False), ("multipart/form-data; x", True), (" Multipart/mixed", True)],
)
def test_is_multipart(content_type: str | None, expected: bool) -> None:
    assert multipart.is_multipart(content_type) is expected
