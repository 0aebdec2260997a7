"""Checkpoint: an immutable position from which a request can go on.

Owns the value and its roles; `engine.cache.index` finds them. A checkpoint is complete or absent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["page", "anchor", "message", "endpoint"]
"""Why a checkpoint exists. "page": models whose layers keep every position have one at each page end for free. The
others get theirs at chosen positions: a shared prefix, the end of a message, the end of a generation."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """The first `count` positions of `page`, to be copied into a page of the request's own."""

    page: int
    count: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`length` positions are restored by mapping `pages`, and for models that need it `window` pages and the state
    rows `state`; then those of `begun` by copying."""

    length: int
    pages: tuple[int, ...]
    role: Role = "page"
    window: tuple[int, ...] = ()
    state: tuple[int, ...] = ()
    begun: Beginning | None = None

    @property
    def restored(self) -> int:
        """All positions that needn't be computed."""
        return self.length + (self.begun.count if self.begun is not None else 0)


NOTHING = Checkpoint(0, ())
"""The start of every sequence."""
