"""Log probabilities of rows of logits in a few compiled passes where torch takes many.

One thread takes a row, in a fixed order, so that a row depends on nothing but itself. `execution.logprobs` says what is
observed, and does the same with torch on other machines. Import only where `team.missing()` is empty: compiles at
import (seconds once, then from a cache).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import carray, njit, types
from torch import Tensor

from engine.kernels.memory import address, compiled, pointer, take
from engine.kernels.ranking import (
    BLOCK,
    LOGITS,
    MOST_FOUND,
    OWN,
    ROWS,
    STEP,
    WIDTH,
    deal,
    dense,
    look,
    nth,
    peak_of,
    room_of,
    row_of,
    sort,
    up_to,
    weigh_and_rank,
)

_ASKED, _PICKS, _NATURAL, _SCORES, _TOP, _PLACES, _BROKEN = range(OWN, OWN + 7)
"""Own arguments, see `observe`: addresses, but for the numbers of ids picked and of natural ones. No address of places:
they aren't asked for."""


@njit  # type: ignore[untyped-decorator]
def _best(row: Any, number: Any) -> None:
    """Makes the keys of the best `number` ids the row's first ones."""
    width, _, ranks, _, blocks, keys_at = row
    held = -(-width // BLOCK)
    count = look(row, nth(blocks, held, number)) if number <= held else MOST_FOUND + 1
    if count > MOST_FOUND:  # few blocks, or many equals: of these the lowest ids
        limit = nth(ranks, width, number)
        count = look(row, np.int32(limit - 1))
        found, keys = carray(pointer(ranks), (width,), np.int32), carray(pointer(keys_at), (number,), np.int64)
        for index in range(width):
            if found[index] == limit and count < number:
                keys[count] = (np.int64(limit) << 32) | index
                count += 1
    sort(row, count)


@compiled(types.void(types.voidptr))
def _observe(raw: Any) -> None:
    a = carray(raw, (OWN + 7,), np.int64)
    room, width, picks, natural = room_of(raw, a), a[WIDTH], a[_PICKS], a[_NATURAL]
    columns = picks + natural
    while True:
        number = take(address(raw), 1)
        if number >= a[ROWS]:
            return
        asked = carray(pointer(a[_ASKED] + 8 * number * (1 + picks)), (1 + picks,), np.int64)
        row = row_of(width, a[LOGITS] + asked[0] * a[STEP], room)
        logits = carray(pointer(row[1]), (width,), np.float32)
        peak = peak_of(row[1], width)
        if not np.isfinite(peak):
            carray(pointer(a[_BROKEN]), (1,), np.int64)[0] = 1
            continue
        spread = math.log(weigh_and_rank(row, peak))
        scores = carray(pointer(a[_SCORES] + 8 * number * columns), (columns,), np.float64)
        for index in range(picks):
            scores[index] = np.float64(logits[asked[1 + index]]) - np.float64(peak) - spread
        if a[_PLACES]:
            rank, place = carray(pointer(row[2]), (width,), np.int32), carray(pointer(a[_PLACES]), (a[ROWS],), np.int64)
            place[number] = 1 + up_to(row[2], width, np.int32(rank[asked[1]] - 1))
        if natural == 0:
            continue
        _best(row, natural)
        keys = carray(pointer(row[5]), (natural,), np.int64)
        top = carray(pointer(a[_TOP] + 8 * number * natural), (natural,), np.int64)
        for index in range(natural):
            top[index] = keys[index] & 0xFFFFFFFF
            scores[picks + index] = np.float64(logits[top[index]]) - np.float64(peak) - spread


@dataclass(frozen=True, slots=True)
class Seen:
    """Log probabilities, float64, of the ids picked [n, ids] and of the greatest logits [n, natural]; the latter's ids,
    int64; and one plus how many logits are greater than that of the first id picked, int64 [n], if that was asked."""

    picked: Tensor
    top: Tensor
    top_ids: Tensor
    rank: Tensor | None


def observe(logits: Tensor, asked: Tensor, natural: int, *, ranked: bool) -> Seen | None:
    """Log probabilities under float32 `logits` [rows, vocab]. `asked` int64 [n, 1 + ids]: the row's number, and ids to
    pick, one or more; `natural`: how many of the greatest; `ranked`: whether the first id's rank is asked. None if
    those are too many for a room, or a row's greatest logit isn't finite. Raises IndexError for unknown ids."""
    count, picks, width = len(asked), asked.shape[1] - 1, logits.shape[1]
    if natural > min(MOST_FOUND, width):
        return None
    ids = asked[:, 1:].numpy()
    if ids.min() < 0 or ids.max() >= width:
        raise IndexError(f"ids from {ids.min()} to {ids.max()} in a vocabulary of {width}")
    asked = asked.contiguous()
    scores = torch.empty(count, picks + natural, dtype=torch.float64)
    top, broken = torch.empty(count, natural, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    places = torch.empty(count, dtype=torch.int64) if ranked else None
    own = [asked.data_ptr(), picks, natural, scores.data_ptr(), top.data_ptr()]
    own += [0 if places is None else places.data_ptr(), broken.data_ptr()]
    deal(_observe.address, torch.get_num_threads(), count, dense(logits), own)
    return None if broken.item() else Seen(scores[:, :picks], scores[:, picks:], top, places)
