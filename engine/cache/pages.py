"""PagePool: the pages of KV, and the only place that counts references to them.

A page is free, held (referenced by requests), idle (cached for reuse by nobody right now) or draining: given up while
steps in flight may still touch it. Draining pages become free or idle once those steps are done (the fence). Idle
pages are evicted least recently used first, and of one chain its tail first. Knows nothing of keys.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence


class PagesExhausted(RuntimeError):
    """More pages were asked for than `PagePool.available`."""


class PagePool:
    """Pages 0 .. total-1. `on_evict(page)` is told when an idle page loses its content to a new owner."""

    def __init__(self, total: int, on_evict: Callable[[int], None] = lambda page: None) -> None:
        self.total = total
        self._on_evict = on_evict
        self._references = [0] * total
        self._published = bytearray(total)
        self._cached = 0
        self._free = list(range(total - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._draining: OrderedDict[int, int] = OrderedDict()
        self._drained = 0

    @property
    def available(self) -> int:
        """Pages that `take` could give now."""
        return len(self._free) + len(self._idle)

    @property
    def free(self) -> int:
        """Pages without content that nobody holds and no step in flight touches."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Pages with published content, whether held or not."""
        return self._cached

    @property
    def draining(self) -> int:
        """Pages that become available when steps in flight are done, and no sooner."""
        return len(self._draining)

    def take(self, count: int) -> list[int]:
        """`count` pages with one reference each and no content, evicting idle ones. Raises PagesExhausted, and then
        nothing has changed."""
        if count > self.available:
            raise PagesExhausted(f"{count} pages wanted, {self.available} available of {self.total}")
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                self._unpublish(page)
                self._on_evict(page)
            self._references[page] = 1
            pages.append(page)
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """One more reference to pages with published content."""
        for page in pages:
            if not self._published[page]:
                raise ValueError(f"page {page} has no published content to share")
            self._references[page] += 1
            self._idle.pop(page, None)
            self._draining.pop(page, None)

    def idle(self, pages: Sequence[int]) -> int:
        """How many of `pages` count as available now, and would no longer once held."""
        return sum(1 for page in pages if page in self._idle)

    def publish(self, page: int) -> None:
        """Marks the content of a held page as reusable: when its last reference goes, it becomes idle, not free."""
        if not self._references[page]:
            raise ValueError(f"page {page} is held by nobody")
        self._cached += not self._published[page]
        self._published[page] = 1

    def forget(self, page: int) -> None:
        """Takes the content of `page` out of reuse."""
        self._unpublish(page)
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)

    def release(self, pages: Sequence[int], fence: int) -> None:
        """Drops one reference to each of `pages`, in the order of a chain. A page that loses its last one drains until
        step `fence` is done; pass the last step sent."""
        for page in reversed(pages):
            left = self._references[page] - 1
            if left < 0:
                raise ValueError(f"page {page} was released more often than held")
            self._references[page] = left
            if left:
                continue
            if fence <= self._drained:
                self._rest(page)
            else:
                self._draining[page] = fence

    def drained(self, step: int) -> None:
        """Steps up to `step` are done."""
        self._drained = max(self._drained, step)
        while self._draining:
            page, fence = next(iter(self._draining.items()))
            if fence > self._drained:
                return
            del self._draining[page]
            self._rest(page)

    def _rest(self, page: int) -> None:
        if self._published[page]:
            self._idle[page] = None
        else:
            self._free.append(page)

    def _unpublish(self, page: int) -> None:
        self._cached -= self._published[page]
        self._published[page] = 0

    def check(self) -> None:
        """Every page is in exactly one state. Raises AssertionError; for tests."""
        free, idle, draining = set(self._free), set(self._idle), set(self._draining)
        held = {page for page in range(self.total) if self._references[page]}
        assert len(free) == len(self._free), "a page is free twice"
        assert len(free) + len(idle) + len(draining) + len(held) == self.total, "a page is lost or in two states"
        assert free | idle | draining | held == set(range(self.total)), "a page is lost"
        assert all(self._published[page] for page in idle), "an idle page without content"
        assert not any(self._published[page] for page in free), "a free page with content"
        assert self._cached == sum(self._published), "cached pages are miscounted"
