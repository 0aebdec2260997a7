"""How one step's prefill budget is shared.

First come, first served, with a cap a request, except that a quarter goes first to prompts that can be finished with
it, shortest first. So a short prompt never waits for a long one, and a long one is slowed by a third at most.
"""

from __future__ import annotations

from collections.abc import Sequence

LANE = 4
"""Short prompts have a fourth of the budget for themselves."""


def share(remaining: Sequence[int], budget: int, cap: int) -> list[int]:
    """Tokens for each prompt, oldest first. `remaining`: tokens each still needs; `cap`: the most that one gets."""
    chunks = [0] * len(remaining)
    if budget <= 0:
        return chunks
    if len(remaining) > 1 and sum(min(left, cap) for left in remaining) > budget:
        lane = budget // LANE
        for place in sorted(range(1, len(remaining)), key=lambda place: remaining[place]):
            if remaining[place] > min(lane, cap):
                break
            chunks[place] = remaining[place]
            lane -= remaining[place]
        budget -= sum(chunks)
    for place, left in enumerate(remaining):
        if budget <= 0:
            break
        if not chunks[place]:
            chunks[place] = min(left, cap, budget)
            budget -= chunks[place]
    return chunks
