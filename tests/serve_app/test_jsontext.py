"""Sliced parsing: the same values and the same refusals as parsing at once, whatever the slices and blocks."""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import orjson
import pytest

from serve_app import jsontext

STRINGS = ["", "a,b", '[\\"{', 'q"\\', "\\\\", "é", "\\", '"']


def some_value(rng: random.Random, depth: int) -> Any:
    kind = rng.random()
    if depth > 4 or kind < 0.3:
        return rng.choice([1, 2.5, None, True, *STRINGS])
    if kind < 0.65:
        return [some_value(rng, depth + 1) for _ in range(rng.randint(0, 5))]
    return {f"{rng.choice(STRINGS)}{index}": some_value(rng, depth + 1) for index in range(rng.randint(0, 5))}


def damaged(rng: random.Random, text: bytes) -> bytes:
    changed = bytearray(text)
    for _ in range(rng.randint(1, 2)):
        at = rng.randrange(len(changed))
        match rng.randrange(3):
            case 0 if len(changed) > 1:
                del changed[at]
            case 1:
                changed[at:at] = rng.choice([b",", b'"', b"[", b"]", b"}", b"{", b"\\", b":", b"1"])
            case _:
                changed[at] = rng.choice(b',"[]{}\\:1 ')
    return bytes(changed)


def outcome(parse: Callable[[bytes], Any], text: bytes) -> Any:
    try:
        return ("value", parse(text))
    except ValueError:
        return "refused"


@pytest.mark.parametrize(("values", "block"), [(3, 2**20), (4, 8), (7, 3), (3, 5)])
def test_slices_agree_with_parsing_at_once(values: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsontext, "SLICE_VALUES", values)
    monkeypatch.setattr(jsontext, "_BLOCK", block)
    rng = random.Random(values * block)
    refused = 0
    for _ in range(250):
        value = some_value(rng, 0)
        text = json.dumps(value, indent=rng.choice([None, 1]), ensure_ascii=rng.random() < 0.5).encode()
        assert jsontext.parse_sliced(text) == value
        broken = damaged(rng, text)
        expected = outcome(orjson.loads, broken)
        assert outcome(jsontext.parse_sliced, broken) == expected, broken
        refused += expected == "refused"
    assert refused > 50


def test_large_array_is_the_same_value() -> None:
    numbers = list(range(100_000))
    text = json.dumps({"prompt": numbers, "tail": [[1] * 30_000, {"a": [2] * 30_000}]}).encode()
    assert jsontext.parse_sliced(text) == {"prompt": numbers, "tail": [[1] * 30_000, {"a": [2] * 30_000}]}


def test_last_of_duplicate_names_wins_over_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsontext, "SLICE_VALUES", 3)
    assert jsontext.parse_sliced(b'{"a":1,"b":[1,2,3,4],"a":2,"b":5,"c":[[],[],[]]}') == {
        "a": 2,
        "b": 5,
        "c": [[], [], []],
    }


def test_too_many_values_are_refused_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsontext, "MAX_VALUES", 50_000)
    with pytest.raises(jsontext.JsonError, match="more than 50000 values"):
        jsontext.parse_sliced(b"[" + b"1," * 50_000 + b"1]")
    assert len(jsontext.parse_sliced(b"[" + b"1," * 49_990 + b"1]")) == 49_991


def test_depth_is_bounded() -> None:
    filler = b"[" + b"1," * 25_000 + b"1]"
    for levels, deep in ((256, False), (257, True), (2000, True)):
        text = b'{"a":' + b"[" * levels + b"]" * levels + b',"b":' + filler + b"}"
        assert jsontext.too_deep(text) == deep == jsontext.too_deep(text.replace(b":", b""))
        with pytest.raises(jsontext.TooDeep) if deep else nullcontext():
            assert jsontext.parse_sliced(text)["b"][-1] == 1


def test_commas_inside_strings_are_not_values() -> None:
    text = "," * 3_000_000
    assert jsontext.parse_sliced(json.dumps({"text": text}).encode()) == {"text": text}


def test_long_runs_of_backslashes_over_block_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsontext, "SLICE_VALUES", 3)
    monkeypatch.setattr(jsontext, "_BLOCK", 16)
    for length in range(40):
        value = ["\\" * length + '",', [1, 2, 3], '"' + "\\" * length]
        assert jsontext.parse_sliced(json.dumps(value).encode()) == value


def test_the_collector_is_paused_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    real = orjson.loads

    def loads(text: bytes) -> Any:
        seen.append(gc.isenabled())
        return real(text)

    monkeypatch.setattr(orjson, "loads", loads)
    jsontext.parse_sliced(b"[" + b"1," * 50_000 + b"1]")
    assert seen and not any(seen)
    assert gc.isenabled()
