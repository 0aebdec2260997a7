"""JSON texts of many values, parsed in slices.

A JSON parser written in C holds the interpreter lock for the whole text: half a second for 32 MiB of short objects.
Here numpy finds the structure without the lock, and the text is parsed in slices of a bounded number of values, so
that other threads run in between. The result is the same as parsing at once.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from engine.types.nesting import MAX_DEPTH
from protocols.exact_json import loads

MAX_VALUES: Final = 2_000_000
"""Bound on the values of one body: what they cost in memory is a hundred times their text."""
MAX_LEVELS: Final = MAX_DEPTH + 1
SLICE_VALUES: Final = 20_000
"""About 2 ms of parsing."""
_BLOCK: Final = 2**20
_QUOTE, _BACKSLASH, _COMMA = b'"'[0], b"\\"[0], b","[0]
_STEP: Final = np.zeros(256, np.int8)
_STEP[list(b"[{")] = 1
_STEP[list(b"]}")] = -1
_STRUCTURAL: Final = _STEP != 0
_STRUCTURAL[_COMMA] = True


class JsonError(ValueError):
    """The text isn't JSON, or is beyond a bound."""


class TooDeep(JsonError):
    """Brackets are nested deeper than MAX_LEVELS."""


class _GcPause:
    """Keeps the cycle collector from walking a growing tree of millions of values again and again, with the
    interpreter lock held. Reentrant over threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._enabled = False

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._enabled = gc.isenabled()
                gc.disable()

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._enabled:
                gc.enable()


_GC_PAUSE: Final = _GcPause()


def parse_sliced(data: bytes) -> Any:
    """The value of a JSON text. Raises JsonError and orjson.JSONDecodeError."""
    if data.count(b",") + data.count(b"[") + data.count(b"{") <= SLICE_VALUES:
        return loads(data)
    structure = _Structure(data)
    if structure.values <= SLICE_VALUES:
        return loads(data)
    start, end = _strip(data, 0, len(data))
    with _GC_PAUSE:
        return _parse(structure, start, end, 0)


def too_deep(data: bytes) -> bool:
    """Whether brackets of a text, JSON or not, are nested deeper than MAX_LEVELS."""
    try:
        _Structure(data or b" ")
    except TooDeep:
        return True
    except JsonError:
        return False
    return False


class _Structure:
    """Brackets and commas outside strings: their positions in the text, and the depth in front of each.

    Raises JsonError for mismatched brackets and beyond the bounds, as soon as they are passed.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.values = 1
        self._depth = 0
        self._in_string = False
        found = [self._scan(low, high) for low, high in _blocks(data)]
        if self._depth != 0:
            raise JsonError("brackets don't match")
        self.at, self.commas, self.comma_depths = (np.concatenate(parts) for parts in zip(*found, strict=True))

    def _scan(self, low: int, high: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
        """The structure of one block, which doesn't begin inside an escape."""
        text = np.frombuffer(self.data, np.uint8, high - low, low)
        quotes = _string_quotes(text)
        at = np.flatnonzero(_STRUCTURAL[text])
        # A position with an odd number of quotes before it is inside a string, if the block begins outside one.
        at = at[(np.searchsorted(quotes, at) % 2 == 1) == self._in_string]
        kind = text[at]
        steps = _STEP[kind]
        depths = np.cumsum(steps, dtype=np.int32) + np.int32(self._depth)
        if quotes.size % 2:
            self._in_string = not self._in_string
        commas = kind == _COMMA
        if at.size:
            self._depth = int(depths[-1])
            self.values += int((steps == 1).sum()) + int(commas.sum())
            if int(depths.min()) < 0:
                raise JsonError("brackets don't match")
            if int(depths.max()) > MAX_LEVELS:
                raise TooDeep("depth limit exceeded")
            if self.values > MAX_VALUES:
                raise JsonError(f"more than {MAX_VALUES} values")
        at = at + low
        return at, at[commas], depths[commas]

    def count(self, start: int, end: int) -> int:
        """A bound on the values in [start, end)."""
        low, high = np.searchsorted(self.at, (start, end))
        return int(high - low) + 1

    def splits(self, start: int, end: int, depth: int) -> NDArray[np.int64]:
        """Commas in [start, end) that separate the elements of the container at `depth`."""
        low, high = np.searchsorted(self.commas, (start, end))
        here: NDArray[np.int64] = self.commas[low:high][self.comma_depths[low:high] == depth]
        return here


def _blocks(data: bytes) -> Iterator[tuple[int, int]]:
    """Blocks of about _BLOCK bytes, none of which ends in a backslash."""
    low = 0
    while low < len(data):
        high = min(low + _BLOCK, len(data))
        if data[high - 1] == _BACKSLASH:
            rest = data[high:]
            high = min(high + len(rest) - len(rest.lstrip(b"\\")) + 1, len(data))
        yield low, high
        low = high


def _string_quotes(text: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Positions of quotes that open or close a string: those not escaped by an odd run of backslashes."""
    quotes = np.flatnonzero(text == _QUOTE)
    slashes = np.flatnonzero(text == _BACKSLASH)
    if not slashes.size or not quotes.size:
        return quotes
    first = np.ones(slashes.size, bool)
    first[1:] = np.diff(slashes) != 1
    starts = slashes[first][np.cumsum(first) - 1]
    odd_ends = slashes[(slashes - starts) % 2 == 0]
    before = quotes - 1
    found = np.searchsorted(odd_ends, before)
    escaped = (found < odd_ends.size) & (odd_ends[np.minimum(found, odd_ends.size - 1)] == before)
    plain: NDArray[np.int64] = quotes[~escaped]
    return plain


_SPACE: Final = b" \t\n\r"


def _strip(data: bytes, start: int, end: int) -> tuple[int, int]:
    while start < end and data[start] in _SPACE:
        start += 1
    while end > start and data[end - 1] in _SPACE:
        end -= 1
    return start, end


def _parse(structure: _Structure, start: int, end: int, depth: int) -> Any:
    """The value in [start, end), which has no space around it, inside `depth` containers."""
    data = structure.data
    if structure.count(start, end) <= SLICE_VALUES:
        return loads(data[start:end])
    pair = data[start : start + 1] + data[end - 1 : end]
    if pair == b"[]":
        items: list[Any] = []
        for low, high in _groups(structure, start + 1, end - 1, depth + 1):
            if structure.count(low, high) <= SLICE_VALUES:
                items += loads(b"[" + data[low:high] + b"]")
            else:
                items.append(_parse(structure, low, high, depth + 1))
        return items
    if pair == b"{}":
        members: dict[str, Any] = {}
        for low, high in _groups(structure, start + 1, end - 1, depth + 1):
            if structure.count(low, high) <= SLICE_VALUES:
                members.update(loads(b"{" + data[low:high] + b"}"))
            else:
                name, value = _member(data, low, high)
                members[name] = _parse(structure, value, high, depth + 1)
        return members
    raise JsonError("brackets don't match")


def _groups(structure: _Structure, start: int, end: int, depth: int) -> Iterator[tuple[int, int]]:
    """Cuts the inside of a container into runs of whole elements, each of at most SLICE_VALUES values or a single
    element; each without the space around it."""
    cuts = structure.splits(start, end, depth)
    ranks = np.searchsorted(structure.at, cuts)
    low, rank, index = start, int(np.searchsorted(structure.at, start)), 0
    while index < cuts.size:
        # The last cut whose run is still small enough, else the very next one.
        index = max(index, int(np.searchsorted(ranks, rank + SLICE_VALUES)) - 1)
        cut = int(cuts[index])
        yield _checked(structure.data, low, cut)
        low, rank, index = cut + 1, int(ranks[index]) + 1, index + 1
    yield _checked(structure.data, low, end)


def _checked(data: bytes, start: int, end: int) -> tuple[int, int]:
    start, end = _strip(data, start, end)
    if start == end:
        raise JsonError(f"a value is missing at byte {start}")
    return start, end


def _member(data: bytes, start: int, end: int) -> tuple[str, int]:
    """The name of an object member too large for one slice, and where its value begins."""
    close = start
    while True:
        close = data.find(b'"', close + 1, end)
        if close < 0 or data[start] != _QUOTE:
            raise JsonError(f"a name is missing at byte {start}")
        run = close - 1
        while data[run] == _BACKSLASH:
            run -= 1
        if (close - run) % 2 == 1:
            break
    colon, _ = _strip(data, close + 1, end)
    if data[colon : colon + 1] != b":":
        raise JsonError(f"a colon is missing at byte {colon}")
    value, _ = _strip(data, colon + 1, end)
    if value == end:
        raise JsonError(f"a value is missing at byte {value}")
    name: str = loads(data[start : close + 1])
    return name, value
