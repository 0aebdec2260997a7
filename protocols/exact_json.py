"""JSON whose integers keep their value, however long they are.

orjson reads an integer beyond 64 bits as a float, and writes none. Clients send them (ids, bounds in schemas, sampling
values far out of range) and models write them into tool arguments, so such a text is read, or written, by the standard
library instead.
"""

from __future__ import annotations

import json
from typing import Any, Final

import orjson

_DIGITS: Final = bytes(ord("0") if chr(byte) in "0123456789" else ord(" ") for byte in range(256))
_LONG: Final = b"0" * 19
"""As many digits as the shortest integer beyond 64 bits has, -9223372036854775809."""


def loads(text: bytes) -> Any:
    """The value of a JSON text, refused where orjson refuses it. Raises orjson.JSONDecodeError."""
    value = orjson.loads(text)
    if _LONG not in text.translate(_DIGITS):
        return value
    try:
        return json.loads(text)
    except RecursionError:
        raise orjson.JSONDecodeError("depth limit exceeded", "", 0) from None


def dumps(value: Any) -> bytes:
    """The JSON text of `value`. Raises TypeError for what has none."""
    try:
        return orjson.dumps(value)
    except TypeError:  # an integer beyond 64 bits, or no JSON at all, which the standard library says too
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
