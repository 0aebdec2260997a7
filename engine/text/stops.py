"""Stops in a growing output: strings in text, sequences in tokens.

Of all occurrences of all stops the one that ends first wins, and of those that end together the longest. Only what
could still begin a stop is held back. Linear in the length of the output, whatever the stops are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Stop:
    """A completed stop: `end`, counted in the part just fed, and which of the stops, counted from 0."""

    end: int
    index: int


class StopMatcher:
    """Matches `stops`, strings or tuples of ids, against an output fed in parts (Knuth, Morris and Pratt's automaton
    for each stop). `held`: how many items at the end of what was fed could begin a stop."""

    def __init__(self, stops: Sequence[Sequence[Any]]) -> None:
        self._stops = stops
        self._links = [_links(stop) for stop in stops]
        self._states = [0] * len(stops)
        self._firsts = re.compile("|".join(sorted(re.escape(stop[0]) for stop in stops))) if _strings(stops) else None
        self.held = 0

    def feed(self, part: Sequence[Any], *, armed: bool = True) -> Stop | None:
        """The stop that `part` completes first. Not `armed`, completed stops are passed over."""
        states, at, size = self._states, 0, len(part)
        while at < size:
            if not self.held and self._firsts is not None:
                found = self._firsts.search(part, at)  # type: ignore[call-overload]
                if found is None:
                    return None
                at = found.start()
            item = part[at]
            at += 1
            best = -1
            for index, (stop, links) in enumerate(zip(self._stops, self._links, strict=True)):
                state = states[index]
                while state and (state == len(stop) or stop[state] != item):
                    state = links[state - 1]
                if stop[state] == item:
                    state += 1
                states[index] = state
                if state == len(stop) and (best < 0 or state > len(self._stops[best])):
                    best = index
            if best >= 0 and armed:
                self.held = max(states)
                return Stop(at, best)
            # A stop that completed unarmed holds back only what could begin another.
            self.held = max(
                state if state < len(stop) else links[state - 1]
                for state, stop, links in zip(states, self._stops, self._links, strict=True)
            )
        return None


def _strings(stops: Sequence[Sequence[Any]]) -> bool:
    return all(isinstance(stop, str) for stop in stops)


def _links(stop: Sequence[Any]) -> list[int]:
    """For each prefix, the length of the longest proper prefix that is also its suffix."""
    links = [0] * len(stop)
    length = 0
    for at in range(1, len(stop)):
        while length and stop[at] != stop[length]:
            length = links[length - 1]
        if stop[at] == stop[length]:
            length += 1
        links[at] = length
    return links
