"""Attention on the CPU through torch's fused SDPA, with grouped heads folded into query rows.

Decode rows read their lanes (see `lanes`), neighbours of like length in one call; prefill chunks gather their pages.
Under invariant numerics the shapes that decide rounding are fixed: folded query rows padded to a multiple of 4, keys to
a multiple of 256, an explicit mask always, so that a row's result depends neither on its batch nor on how its context
was cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.attention.lanes import Fill, Lanes
from engine.attention.protocol import Batch, Capabilities, KvPool, Needs, Query, flat_positions

KEY_MULTIPLE = 256
ROW_MULTIPLE = 4
_FAST_KEY_MULTIPLE = 32
_PIECE = 128
"""Chunks are cut into pieces of this many positions, so that less of the causal triangle is wasted."""
_WASTE = 1.5
"""How many times the keys they need neighbouring lanes may read for the sake of one call."""
_LANE_SHARE = 2
"""Lanes may take this fraction of the pool's bytes."""


@dataclass(frozen=True, slots=True)
class LaneCall:
    """Decode rows over lanes [first, first + count), whose step rows are `rows` (a slice, or an index)."""

    first: int
    count: int
    keys: int
    rows: slice | Tensor
    mask: Tensor
    padded: Tensor | None
    """Query buffer [count, kv heads, padded rows, dim] whose padding stays zero."""


@dataclass(frozen=True, slots=True)
class PageCall:
    """`count` positions of one slot whose rows start at `offset`. `flat`: pool positions int64 [keys]."""

    offset: int
    count: int
    flat: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class CpuMetadata:
    """`lane_rows`, `lane_writes`: the step rows of lane calls and the flat lane positions of their new keys."""

    writes: Tensor
    fills: list[tuple[Fill, Tensor]]
    lane_rows: slice | Tensor
    lane_writes: Tensor
    lane_calls: list[LaneCall]
    page_calls: list[PageCall]
    alone: bool
    """One call gives all rows in order."""


class CpuAttention:
    """SDPA over lanes and gathered pages."""

    name = "cpu"
    capabilities = Capabilities(devices=("cpu",), dtypes=(torch.float32, torch.bfloat16), invariant=True)

    def __init__(self, pool: KvPool, needs: Needs) -> None:
        self._pool, self._invariant, self._dtype = pool, needs.invariant, needs.dtype
        self._kv_heads, self._dim = needs.kv_heads, needs.head_dim
        self._group = needs.heads // needs.kv_heads
        self._wide = needs.dtype if self._invariant else torch.float32
        """What chunks compute in: torch's float32 kernel is the faster one without matrix instructions."""
        self._padding = -self._group % ROW_MULTIPLE if self._invariant else 0
        self._lanes = Lanes(pool, pool.data.nbytes // _LANE_SHARE)

    def forget(self, slot: int) -> None:
        self._lanes.forget(slot)

    def prepare(self, batch: Batch) -> CpuMetadata:
        laned: list[tuple[Query, Fill]] = []
        paged: list[Query] = []
        for query in batch.queries:
            length = query.start + query.count
            fill = self._lanes.reserve(query.slot, length, self._padded(length)) if query.count == 1 else None
            if fill is None:
                paged += self._pieces(query)
            else:
                laned.append((query, fill))
        laned.sort(key=lambda pair: pair[1].lane)
        calls = self._lane_calls(laned)
        tokens = self._lanes.tokens
        places = [fill.lane * tokens + query.start for query, fill in laned]
        return CpuMetadata(
            writes=batch.writes,
            fills=[(fill, self._missing(batch, fill)) for _, fill in laned if fill.start < fill.stop],
            lane_rows=_selection([query.offset for query, _ in laned]),
            lane_writes=torch.tensor(places, dtype=torch.int64),
            lane_calls=calls,
            page_calls=[self._page_call(batch, query) for query in paged],
            alone=len(calls) == 1 and not paged and _covers(calls[0].rows, batch.rows),
        )

    def _padded(self, length: int) -> int:
        """Keys of a call that needs `length`."""
        multiple = KEY_MULTIPLE if self._invariant else _FAST_KEY_MULTIPLE
        return -(-length // multiple) * multiple

    def _pieces(self, query: Query) -> list[Query]:
        cuts = range(0, query.count, _PIECE)
        return [Query(query.slot, query.start + at, min(_PIECE, query.count - at), query.offset + at) for at in cuts]

    def _missing(self, batch: Batch, fill: Fill) -> Tensor:
        flat = flat_positions(batch.tables[fill.slot], fill.stop, fill.stop, self._pool)
        return torch.from_numpy(flat[fill.start :])

    def _lane_calls(self, laned: Sequence[tuple[Query, Fill]]) -> list[LaneCall]:
        """Runs of neighbouring lanes, cut where a call would read far more keys than its rows need."""
        calls: list[LaneCall] = []
        run: list[tuple[Query, Fill]] = []
        keys = total = 0
        for query, fill in laned:
            length = self._padded(query.start + 1)
            widest = max(keys, length)
            neighbour = bool(run) and fill.lane == run[-1][1].lane + 1
            if run and not (neighbour and widest * (len(run) + 1) <= _WASTE * (total + length)):
                calls.append(self._lane_call(run, keys))
                run, total, widest = [], 0, length
            run.append((query, fill))
            keys, total = widest, total + length
        if run:
            calls.append(self._lane_call(run, keys))
        return calls

    def _lane_call(self, run: Sequence[tuple[Query, Fill]], keys: int) -> LaneCall:
        starts = torch.tensor([query.start for query, _ in run])
        mask = _mask(starts[:, None, None, None], keys, self._dtype)
        rows = self._group + self._padding
        padded = None
        if self._padding:
            padded = torch.zeros(len(run), self._kv_heads, rows, self._dim, dtype=self._dtype)
        selection = _selection([query.offset for query, _ in run])
        return LaneCall(run[0][1].lane, len(run), keys, selection, mask.expand(-1, -1, rows, -1), padded)

    def _page_call(self, batch: Batch, query: Query) -> PageCall:
        length = query.start + query.count
        keys = self._padded(length)
        flat = flat_positions(batch.tables[query.slot], length, keys, self._pool)
        position = torch.arange(query.start, length)[:, None]
        mask = _mask(position, keys, self._wide).repeat_interleave(self._group, dim=0)
        padding = -mask.shape[0] % ROW_MULTIPLE if self._invariant else 0
        return PageCall(query.offset, query.count, torch.from_numpy(flat), functional.pad(mask, (0, 0, 0, padding)))

    def forward(self, query: Tensor, kv: Tensor, layer: int, metadata: CpuMetadata) -> Tensor:
        self._pool.store(layer, metadata.writes, kv)
        if metadata.lane_calls:
            self._extend_lanes(kv, layer, metadata)
            if metadata.alone:
                return self._lane_attention(query, layer, metadata.lane_calls[0])
        out = query.new_zeros(query.shape[0], query.shape[1] * self._dim)
        for call in metadata.lane_calls:
            out[call.rows] = self._lane_attention(query[call.rows], layer, call)
        for page in metadata.page_calls:
            out[page.offset : page.offset + page.count] = self._page_attention(query, layer, page)
        return out

    def _extend_lanes(self, kv: Tensor, layer: int, metadata: CpuMetadata) -> None:
        for fill, flat in metadata.fills:
            part = self._pool.layers[layer].index_select(0, flat)
            self._lanes.layers[layer][fill.lane, fill.start : fill.stop] = part
        new = kv if metadata.alone else kv[metadata.lane_rows]
        self._lanes.flat[layer].index_copy_(0, metadata.lane_writes, new.to(self._dtype))

    def _lane_attention(self, query: Tensor, layer: int, call: LaneCall) -> Tensor:
        """[count, heads, dim] → [count, heads * dim]."""
        folded = query.to(self._dtype).view(call.count, self._kv_heads, self._group, self._dim)
        if call.padded is not None:
            call.padded[:, :, : self._group] = folded
            folded = call.padded
        lanes = self._lanes.layers[layer][call.first : call.first + call.count, : call.keys].transpose(1, 2)
        keys, values = lanes[:, : self._kv_heads], lanes[:, self._kv_heads :]
        mixed = functional.scaled_dot_product_attention(folded, keys, values, call.mask)
        return mixed[:, :, : self._group].reshape(call.count, -1).to(query.dtype).contiguous()

    def _page_attention(self, query: Tensor, layer: int, call: PageCall) -> Tensor:
        """Rows of one chunk: [count, heads * dim]."""
        rows = query[call.offset : call.offset + call.count].to(self._wide)
        split = rows.view(call.count, self._kv_heads, self._group, self._dim)
        folded = split.transpose(0, 1).reshape(1, self._kv_heads, call.count * self._group, self._dim)
        padding = call.mask.shape[0] - folded.shape[2]
        if padding:
            folded = functional.pad(folded, (0, 0, 0, padding))
        pages = self._pool.layers[layer].index_select(0, call.flat).to(self._wide).transpose(0, 1)[None]
        keys, values = pages[:, : self._kv_heads], pages[:, self._kv_heads :]
        mixed = functional.scaled_dot_product_attention(folded, keys, values, call.mask[None, None])
        real = mixed[0, :, : call.count * self._group]
        return real.reshape(self._kv_heads, call.count, -1).transpose(0, 1).reshape(call.count, -1)


def _mask(position: Tensor, keys: int, dtype: torch.dtype) -> Tensor:
    """0 for keys up to `position` (its last dimension of size 1), minus infinity after."""
    hidden = torch.arange(keys) > position
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)


def _covers(rows: slice | Tensor, count: int) -> bool:
    return isinstance(rows, slice) and (rows.start, rows.stop) == (0, count)


def _selection(rows: list[int]) -> slice | Tensor:
    """`rows` as a slice where they are consecutive, else as an index."""
    if not rows:
        return slice(0, 0)
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return torch.tensor(rows)
