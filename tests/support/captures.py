"""Requests that real coding agents sent (prose replaced), and every single change of their fields."""

from __future__ import annotations

import json
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
