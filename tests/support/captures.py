"""Requests that real coding agents sent (prose replaced), and every single change of their fields."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "protocols" / "captures"
_VALUES: tuple[Any, ...] = (None, True, 0, -1, 2**70, 1.5, "", "x", [], [None], {}, {"type": "x"})


def names(path: str) -> list[str]:
    """The captures sent to a route: `/v1/messages`, `/v1/messages/count_tokens`, `/v1/responses`, …"""
    return sorted(file.stem for file in FOLDER.glob("*.json") if _load(file)["path"].split("?")[0] == path)


def all_names() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.json"))


def path(name: str) -> str:
    found: str = _load(FOLDER / f"{name}.json")["path"]
    return found


def body(name: str) -> dict[str, Any]:
    found: dict[str, Any] = _load(FOLDER / f"{name}.json")["body"]
    return found


def _load(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def mutations(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """(what changed, changed copy): each field removed, nulled, retyped and duplicated, at every depth."""
    if isinstance(value, dict):
        for key, inner in value.items():
            at = f"{where}.{key}"
            yield f"{at} removed", {k: v for k, v in value.items() if k != key}
            yield from ((f"{at} = {other!r}", {**value, key: other}) for other in _VALUES)
            yield from ((change, {**value, key: changed}) for change, changed in mutations(inner, at))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            at = f"{where}[{index}]"
            yield f"{at} removed", value[:index] + value[index + 1 :]
            yield f"{at} duplicated", [*value[: index + 1], *value[index:]]
            yield from ((f"{at} = {other!r}", [*value[:index], other, *value[index + 1 :]]) for other in _VALUES)
            yield from (
                (change, [*value[:index], changed, *value[index + 1 :]]) for change, changed in mutations(inner, at)
            )


def trimmed(value: Any, length: int = 80) -> Any:
    """`value` with long prose cut, so that it is quick to serve; what must stay whole does."""
    if isinstance(value, dict):
        return {key: inner if key in _WHOLE else trimmed(inner, length) for key, inner in value.items()}
    if isinstance(value, list):
        return [trimmed(inner, length) for inner in value]
    return value[:length] if isinstance(value, str) else value


_WHOLE = ("definition", "arguments", "signature", "encrypted_content")
_TWICE = "\x00twice"


def broken(value: Any, rng: random.Random, where: str = "") -> tuple[str, Any]:
    """(what changed, changed copy): one random field, at any depth, is removed, nulled, retyped or there twice. See
    `text` for how the copy is written."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = rng.choice(keys)
    at = f"{where}.{key}"
    inner = value[key]
    if isinstance(inner, dict | list) and inner and rng.random() < 0.7:
        what, changed = broken(inner, rng, at)
        return what, _with(value, key, changed)
    other = rng.choice(_VALUES)
    match rng.randrange(4):
        case 0 if isinstance(value, dict):
            return f"{at} removed", {k: v for k, v in value.items() if k != key}
        case 0:
            return f"{at} removed", value[:key] + value[key + 1 :]
        case 1 if isinstance(value, dict):
            return f"{at} twice, then {other!r}", {**value, f"{key}{_TWICE}": other}
        case 1:
            return f"{at} twice", [*value[: key + 1], *value[key:]]
        case _:
            return f"{at} = {other!r}", _with(value, key, other)


def _with(value: Any, key: Any, inner: Any) -> Any:
    if isinstance(value, dict):
        return {**value, key: inner}
    return [*value[:key], inner, *value[key + 1 :]]


def text(body: Any) -> bytes:
    """`body` as JSON; a field that `broken` made twice stands there twice."""
    return json.dumps(body).replace('\\u0000twice"', '"').encode()
