"""KVCache: page pool and prefix index as one, which is all that the scheduler asks of the cache.

Keeps the two in step (an evicted page loses its name) and remembers which keys running requests are about to
compute, so that requests with a common prefix can wait for it instead of computing it twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from engine.cache.checkpoints import NOTHING, Checkpoint
from engine.cache.index import PrefixIndex
from engine.cache.keys import next_key
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

    def begun(self, found: Checkpoint, parent: bytes, tokens: bytes) -> Checkpoint:
        """`found` with the beginning of a page after it, when one shares enough of the `tokens` that follow (less than
        an eighth of a page isn't worth a copy). `parent`: the key at the end of `found`."""
        if not self.reuse:
            return found
        beginning = self.index.beginning(parent, tokens)
        if beginning is None or 8 * beginning.count < self.page_tokens:
            return found
        return replace(found, begun=beginning)

    def room(self, found: Checkpoint) -> int:
        """Pages that could be taken after the pages of `found` are held."""
        held = found.pages if found.begun is None else (*found.pages, found.begun.page)
        return self.pool.available - self.pool.idle(held)

    def open(self, found: Checkpoint, pages: int, fence: int = 0) -> list[int]:
        """A page table of `pages` pages that begins with the held pages of `found`. The page to copy from keeps its
        content until step `fence` is done. Raises PagesExhausted."""
        source = [found.begun.page] if found.begun is not None else []
        self.pool.hold([*found.pages, *source])
        own = self.pool.take(pages - len(found.pages))
        self.pool.release(source, fence)
        return [*found.pages, *own]

    def publish(self, key: bytes, page: int, parent: bytes = b"", tokens: bytes = b"") -> None:
        """The held `page` holds what `key` names: `tokens` after the chain `parent`, given where a part of it may be
        reused. A duplicate of a known page stays private."""
        if self.reuse and self.index.add(key, page, parent, tokens):
            self.pool.publish(page)

    def publish_part(self, parent: bytes, tokens: bytes, page: int) -> None:
        """The held `page` begins with `tokens` after the chain `parent`, worth keeping if they are enough and no other
        page begins so."""
        if not self.reuse or 8 * len(tokens) < 4 * self.page_tokens:
            return
        known = self.index.beginning(parent, tokens)
        if (known is None or 4 * known.count < len(tokens)) and self.index.key(page) is None:
            self.publish(next_key(parent, tokens), page, parent, tokens)

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
