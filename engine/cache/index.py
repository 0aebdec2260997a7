"""PrefixIndex: the longest restorable checkpoint for a chain of page keys.

Owns the map from keys to pages, not the pages: references are `engine.cache.pages`' affair. In a dense layout every
known chain is a checkpoint at its page end, and a page after it whose first tokens are the wanted ones can be copied.
In others only positions marked by `mark` are, while their whole chain is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from engine.cache.checkpoints import NOTHING, Beginning, Checkpoint, Role

CANDIDATES = 16
"""Pages after one chain, the latest first, that are compared with the tokens that a request wants next."""

_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class _Mark:
    role: Role
    window: tuple[int, ...]
    state: tuple[int, ...]


class PrefixIndex:
    """`dense`: see `engine.cache.layout.CacheLayout.dense`."""

    def __init__(self, page_tokens: int, *, dense: bool = True) -> None:
        self._page_tokens = page_tokens
        self._dense = dense
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._marks: dict[bytes, _Mark] = {}
        # (parent key and first token) → pages, and page → (that, its tokens)
        self._after: dict[bytes, dict[int, None]] = {}
        self._contents: dict[int, tuple[bytes, bytes]] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def page(self, key: bytes) -> int | None:
        """The page that holds the content named `key`."""
        return self._pages.get(key)

    def key(self, page: int) -> bytes | None:
        """The name under which `page` is known."""
        return self._keys.get(page)

    def longest(self, keys: Sequence[bytes], limit: int) -> Checkpoint:
        """The longest checkpoint of at most `limit` positions along `keys`; NOTHING when there is none."""
        pages: list[int] = []
        known = self._pages
        for key in keys[: limit // self._page_tokens]:
            page = known.get(key)
            if page is None:
                break
            pages.append(page)
        if self._dense:
            return Checkpoint(len(pages) * self._page_tokens, tuple(pages)) if pages else NOTHING
        for count in range(len(pages), 0, -1):
            mark = self._marks.get(keys[count - 1])
            if mark is not None:
                length = count * self._page_tokens
                return Checkpoint(length, tuple(pages[:count]), mark.role, mark.window, mark.state)
        return NOTHING

    def beginning(self, parent: bytes, tokens: bytes) -> Beginning | None:
        """The page after the chain `parent` that shares the most first tokens with `tokens` (little-endian int32)."""
        best: Beginning | None = None
        for page in islice(reversed(self._after.get(parent + tokens[:_ID_BYTES], {})), CANDIDATES):
            shared = _shared(self._contents[page][1], tokens)
            if best is None or shared > best.count:
                best = Beginning(page, shared)
        return best

    def add(self, key: bytes, page: int, parent: bytes = b"", tokens: bytes = b"") -> bool:
        """Names `page`, which holds `tokens` after the chain `parent`; without tokens it can't be reused in part. False
        when the key is known already, and the index keeps the page it has."""
        if key in self._pages:
            return False
        if page in self._keys:
            raise ValueError(f"page {page} already has a name")
        self._pages[key] = page
        self._keys[page] = key
        if tokens and self._dense:
            place = parent + tokens[:_ID_BYTES]
            self._after.setdefault(place, {})[page] = None
            self._contents[page] = (place, tokens)
        return True

    def mark(self, key: bytes, role: Role, *, window: tuple[int, ...] = (), state: tuple[int, ...] = ()) -> None:
        """Makes the end of the chain `key` a checkpoint of a layout that isn't dense."""
        if key not in self._pages:
            raise ValueError("only the end of a known page can be a checkpoint")
        self._marks[key] = _Mark(role, window, state)

    def forget(self, page: int) -> None:
        """The page lost its content. Longer chains through it can't be found until the key is known again."""
        key = self._keys.pop(page, None)
        if key is not None:
            del self._pages[key]
            self._marks.pop(key, None)
        place, _ = self._contents.pop(page, (None, b""))
        if place is not None:
            siblings = self._after[place]
            del siblings[page]
            if not siblings:
                del self._after[place]


def _shared(one: bytes, other: bytes) -> int:
    """How many first tokens two runs of little-endian int32 have in common."""
    size = min(len(one), len(other)) // _ID_BYTES
    first, second = (np.frombuffer(run, "<i4", size) for run in (one, other))
    differ = np.flatnonzero(first != second)
    return int(differ[0]) if len(differ) else size
