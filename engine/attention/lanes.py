"""Lanes: contiguous copies of decoding slots' keys and values, so that a decode step gathers nothing anew.

The pool stays the truth: a lane is filled from its slot's pages when the slot first decodes, then grows by the new
position alone. Lanes lie without holes, so that neighbours go through one call. Bounded in bytes: slots that don't
fit are gathered from their pages each step by the backend.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.attention.protocol import KvPool, zeros

_GROW_TOKENS = 512


@dataclass(slots=True)
class _Lane:
    """`valid`: leading positions that equal the slot's pages. `dirty`: positions that may hold anything."""

    slot: int
    valid: int = 0
    dirty: int = 0


@dataclass(frozen=True, slots=True)
class Fill:
    """Positions [start, stop) of `lane` to copy from the pool."""

    lane: int
    slot: int
    start: int
    stop: int


class Lanes:
    """Per layer one tensor [lanes, tokens, 2 * kv heads, head dim] of at most `limit` bytes over all layers."""

    def __init__(self, pool: KvPool, limit: int) -> None:
        self._pool, self._limit = pool, limit
        self._lanes: list[_Lane] = []
        self._by_slot: dict[int, int] = {}
        self.layers: list[Tensor] = []
        self.flat: list[Tensor] = []
        """The same tensors with lanes and tokens flattened."""
        self._resize(0, 0)

    @property
    def tokens(self) -> int:
        """Positions that every lane has room for."""
        return int(self.layers[0].shape[1])

    def reserve(self, slot: int, length: int, padded: int) -> Fill | None:
        """A lane that will hold `length` positions of `slot` (the last of them written by this step) in room for
        `padded`, and what it still lacks; None when the limit forbids it."""
        lane = self._by_slot.get(slot)
        count = len(self._lanes) + (lane is None)
        if not self._room(count, padded):
            return None
        if lane is None:
            lane = self._by_slot[slot] = len(self._lanes)
            self._lanes.append(_Lane(slot))
        entry = self._lanes[lane]
        fill = Fill(lane, slot, min(entry.valid, length - 1), length - 1)
        entry.valid = length
        entry.dirty = max(entry.dirty, length)
        return fill

    def forget(self, slot: int) -> None:
        """Frees the slot's lane; the last lane moves into the hole. What is left behind is zeroed, since a masked NaN
        would still spoil a sum."""
        hole = self._by_slot.pop(slot, None)
        if hole is None:
            return
        last = len(self._lanes) - 1
        gone, moved = self._lanes[hole], self._lanes.pop()
        for layer in self.layers:
            layer[hole, : gone.dirty].zero_()
            if hole != last:
                layer[hole, : moved.valid] = layer[last, : moved.valid]
                layer[last, : moved.dirty].zero_()
        if hole != last:
            self._lanes[hole] = _Lane(moved.slot, moved.valid, moved.valid)
            self._by_slot[moved.slot] = hole

    def _room(self, count: int, length: int) -> bool:
        """Whether `count` lanes of `length` positions fit, after growing if need be."""
        lanes, tokens = int(self.layers[0].shape[0]), self.tokens
        if count <= lanes and length <= tokens:
            return True
        least = max(lanes, count), -(-max(tokens, length) // _GROW_TOKENS) * _GROW_TOKENS
        ample = (
            lanes if count <= lanes else max(least[0], 2 * lanes),
            tokens if length <= tokens else max(least[1], 2 * tokens),
        )
        one = self._pool.layers[0][0].nbytes * len(self._pool.layers)
        for size in (ample, least):
            if size[0] * size[1] * one <= self._limit:
                self._resize(*size)
                return True
        return False

    def _resize(self, lanes: int, tokens: int) -> None:
        old = self.layers
        row = tuple(self._pool.layers[0].shape[1:])
        self.layers = [zeros((lanes, tokens, *row), layer.dtype, layer.device) for layer in self._pool.layers]
        self.flat = [layer.flatten(0, 1) for layer in self.layers]
        for index, entry in enumerate(self._lanes):
            for before, after in zip(old, self.layers, strict=True):
                after[index, : entry.valid] = before[index, : entry.valid]
