"""Who waits: requests without a slot, and group ids that were cancelled before they came.

Requests that ran before go first, in the order of their arrival; the others follow in theirs.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator

from engine.scheduler.request import Request


class Waiting:
    """Requests without a slot. Every operation is cheap with thousands waiting."""

    def __init__(self) -> None:
        self._resumed: list[Request] = []
        self._fresh: dict[Request, None] = {}

    def __len__(self) -> int:
        return len(self._resumed) + len(self._fresh)

    def __iter__(self) -> Iterator[Request]:
        yield from self._resumed
        yield from self._fresh

    def add(self, request: Request) -> None:
        self._fresh[request] = None

    def resume(self, request: Request) -> None:
        """Puts back a request that had a slot, before all that never had one."""
        insort(self._resumed, request, key=lambda other: other.arrival)

    def remove(self, request: Request) -> None:
        if request in self._fresh:
            del self._fresh[request]
        else:
            self._resumed.remove(request)

    @property
    def fresh(self) -> list[Request]:
        """Requests that never had a slot."""
        return list(self._fresh)


class Tombstones:
    """Ids of groups that were cancelled while unknown, so that a submit which was overtaken dies on arrival; and ids
    of groups that ended, whose late cancels mean nothing. Both remember a bounded number."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._cancelled: OrderedDict[str, None] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()

    def cancel(self, group: str) -> None:
        """A cancel of an unknown group."""
        if group not in self._ended:
            self._remember(self._cancelled, group)

    def ended(self, group: str) -> None:
        self._remember(self._ended, group)

    def claim(self, group: str) -> bool:
        """Whether the group that now arrives was cancelled before. Forgets it either way."""
        self._ended.pop(group, None)
        return self._cancelled.pop(group, 0) is None

    def _remember(self, ids: OrderedDict[str, None], group: str) -> None:
        ids[group] = None
        ids.move_to_end(group)
        if len(ids) > self._capacity:
            ids.popitem(last=False)
