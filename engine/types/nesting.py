"""How deep JSON values may be nested, so that whatever walks one level a call can walk them all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

MAX_DEPTH: Final = 256
"""Levels of one field of a request."""
MAX_ARGUMENT_DEPTH: Final = 200
"""Levels of a tool call's JSON as a model writes it: a client's next request repeats it some levels down."""


def deeper_than(value: Any, levels: int) -> bool:
    """Whether containers of a JSON value are nested deeper than `levels`. Walks it a level at a time, so that no depth
    is too much."""
    level = [value] if isinstance(value, (dict, list)) and value else []
    for _ in range(levels):
        if not level:
            return False
        level = [inner for item in level for inner in _values(item) if isinstance(inner, (dict, list)) and inner]
    return bool(level)


def _values(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container
