"""StepPace: how long steps take, learned from the steps before.

Two uses: a hung step is noticed (it is far beyond every prediction, so coarse classes of work with slowly forgotten
maxima are enough), and prefill chunks are kept so small that running answers don't stall.
"""

from __future__ import annotations

MULTIPLE = 20.0
"""A step may take this many times its prediction."""
FLOOR = 60.0
"""Seconds that every step may take: a kernel compiled or a graph captured on the way isn't a hang, nor is a crowded
machine."""
LEARNING = 16
"""Steps before predictions count: the first ones load, compile and warm up."""
FORGET = 0.98
SMOOTH = 0.3
"""Weight of the newest step in the measured speed."""


class StepPace:
    """`ceiling`: the longest limit, in force until enough steps were seen."""

    def __init__(self, ceiling: float) -> None:
        self._ceiling = ceiling
        self._slowest: dict[int, float] = {}
        self._steps = 0
        self._speed: float | None = None

    def learn(self, work: float, seconds: float, *, prefill: bool = False) -> None:
        """A step of `work` weighted tokens took `seconds`; `prefill`: chunks made up most of it."""
        kind = max(int(work), 1).bit_length()
        self._slowest[kind] = max(seconds, self._slowest.get(kind, 0.0) * FORGET)
        self._steps += 1
        if prefill and seconds > 0.0:
            speed = work / seconds
            self._speed = speed if self._speed is None else self._speed + SMOOTH * (speed - self._speed)

    def work_within(self, seconds: float) -> float | None:
        """Weighted tokens of a step with prefill that takes about `seconds`; None before one was measured. Repeated
        use converges, whatever a step costs besides its tokens."""
        return None if self._speed is None else self._speed * seconds

    def predict(self, work: float) -> float | None:
        """Seconds that a step of `work` weighted tokens takes at most; None before anything was seen."""
        if not self._slowest:
            return None
        size = max(int(work), 1).bit_length()
        return max(seconds * 2.0 ** max(size - kind, 0) for kind, seconds in self._slowest.items())

    def limit(self, work: float) -> float:
        """Seconds after which a step counts as hung."""
        predicted = self.predict(work)
        if predicted is None or self._steps < LEARNING:
            return self._ceiling
        return min(max(MULTIPLE * predicted, FLOOR), self._ceiling)
