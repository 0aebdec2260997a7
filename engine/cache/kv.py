"""KVCache: page pool and prefix index as one, which is all that the scheduler asks of the cache.

Keeps the two in step (an evicted page loses its name) and remembers which keys running requests are about to
compute, so that requests with a common prefix can wait for it instead of computing it twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from engine.cache.checkpoints import NOTHING, Checkpoint
from engine.cache.index import PrefixIndex
from engine.cache.pages import PagePool


class KVCache:
    """`reuse` False: nothing is ever found or published."""

    def __init__(self, pages: int, page_tokens: int, *, dense: bool = True, reuse: bool = True) -> None:
        self.page_tokens = page_tokens
        self.index = PrefixIndex(page_tokens, dense=dense)
        self.pool = PagePool(pages, self.index.forget)
        self.reuse = reuse
        self._promised: Counter[bytes] = Counter()

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` positions."""
        return -(-tokens // self.page_tokens)

    def find(self, keys: Sequence[bytes], length: int) -> Checkpoint:
        """The longest checkpoint along `keys` that leaves at least one of `length` tokens to compute."""
        return self.index.longest(keys, length - 1) if self.reuse else NOTHING

    def awaited(self, keys: Sequence[bytes], found: Checkpoint, length: int) -> bytes | None:
        """The key after `found`, when a running request is about to publish it and it could be used."""
        page = len(found.pages)
        if page < len(keys) and (page + 1) * self.page_tokens < length and keys[page] in self._promised:
            return keys[page]
        return None

    def promised(self, key: bytes) -> bool:
        return key in self._promised

    def promise(self, keys: Sequence[bytes]) -> None:
        """These keys will be published by the request that was just admitted."""
        if self.reuse:
            self._promised.update(keys)

    def withdraw(self, keys: Sequence[bytes]) -> None:
        """These promised keys have been published, or won't be."""
        if not self.reuse:
            return
        for key in keys:
            left = self._promised[key] - 1
            if left > 0:
                self._promised[key] = left
            else:
                del self._promised[key]

    def room(self, found: Checkpoint) -> int:
        """Pages that could be taken after the pages of `found` are held."""
        return self.pool.available - self.pool.idle(found.pages)

    def open(self, found: Checkpoint, pages: int) -> list[int]:
        """A page table of `pages` pages that begins with the held pages of `found`. Raises PagesExhausted."""
        self.pool.hold(found.pages)
        return [*found.pages, *self.pool.take(pages - len(found.pages))]

    def publish(self, key: bytes, page: int) -> None:
        """The held `page` holds what `key` names. A duplicate of a known page stays private."""
        if self.reuse and self.index.add(key, page):
            self.pool.publish(page)

    def close(self, pages: Sequence[int], keys: Sequence[bytes], fence: int) -> None:
        """Releases a page table until step `fence` is done. `keys` name its complete pages: a private duplicate takes
        the place of a page that was evicted meanwhile, so that the chain stays whole."""
        if self.reuse:
            for key, page in zip(keys, pages, strict=False):
                if self.index.page(key) is None and self.index.key(page) is None:
                    self.publish(key, page)
        self.pool.release(pages, fence)

    def distrust(self, pages: Sequence[int]) -> None:
        """Takes the pages of a failed computation out of reuse."""
        for page in pages:
            self.index.forget(page)
            self.pool.forget(page)
