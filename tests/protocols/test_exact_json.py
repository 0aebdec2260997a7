"""Integers beyond 64 bits survive; everything else is as orjson has it."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.exact_json import dumps, loads

scalars = st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12
)


@settings(max_examples=200, deadline=None)
@given(values.filter(lambda value: "Infinity" not in json.dumps(value)))
def test_what_is_written_is_read_the_same(value: Any) -> None:
    assert loads(dumps(value)) == value
    assert loads(json.dumps(value).encode()) == value


@pytest.mark.parametrize("number", [2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**300])
def test_integers_of_any_length(number: int) -> None:
    read = loads(b'{"a": [%d, 1.5]}' % number)
    assert read == {"a": [number, 1.5]}
    assert type(read["a"][0]) is int
    assert dumps(read) == b'{"a":[%d,1.5]}' % number


@pytest.mark.parametrize(
    "text",
    [
        b"1" * 400,
        b'{"a":NaN,"b":%d}' % 2**64,
        b'["\\ud800",%d]' % 2**64,
        b'["\xff",%d]' % 2**64,
        b"[%d" % 2**64,
        b"[%d]x" % 2**64,
        b"-%d0123" % 0,
    ],
)
def test_what_orjson_refuses_is_refused(text: bytes) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        loads(text)


def test_digits_in_strings_and_fractions_change_nothing() -> None:
    text = json.dumps({"card": "4" * 30, "pi": 3.141592653589793, "deep": [[["1" * 19]]], "é": "\\" * 5}).encode()
    assert loads(text) == orjson.loads(text)
    assert loads(b"0.12345678901234567890123e1") == orjson.loads(b"0.12345678901234567890123e1")


def test_what_is_deeper_than_the_library_reads_is_refused() -> None:
    deep = b"[" * 1020 + b"%d" % 2**64 + b"]" * 1020
    with pytest.raises(orjson.JSONDecodeError, match="depth limit"):
        loads(deep)


def test_what_has_no_json_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        dumps(object())
