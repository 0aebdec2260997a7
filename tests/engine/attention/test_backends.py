"""Every backend equals the oracle on mixed steps; capabilities refuse what a backend can't do."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.attention import choose
from engine.attention.compiled import CompiledAttention
from engine.attention.flash import FlashAttention, installed
from engine.attention.protocol import AttentionUnavailable, Batch, KvPool, Needs, Query
from engine.attention.reference import ReferenceAttention
from engine.kernels import team

NEEDS = Needs("cpu", torch.float32, heads=6, kv_heads=2, head_dim=16, layers=2, page_tokens=16, invariant=False)
CPU = torch.device("cpu")


def filled(needs: Needs, pages: int = 200) -> KvPool:
    pool = KvPool(pages, needs, CPU)
    generator = torch.Generator().manual_seed(4)
    pool.keys[:, :pages].normal_(generator=generator)
    pool.values[:, :pages].normal_(generator=generator)
    return pool


def batch(parts: list[tuple[int, int]], pool: KvPool, padding: int = 0) -> Batch:
    """`parts`: (start, count) of slots 0, 1, …, with pages scattered over the pool."""
    pages = np.random.default_rng(2).permutation(pool.pages)[: len(parts) * 40]
    tables: NDArray[np.int32] = pages.reshape(len(parts), 40).astype(np.int32)
    queries, writes, offset = [], [], 0
    for slot, (start, count) in enumerate(parts):
        queries.append(Query(slot, start, count, offset))
        places = np.arange(start, start + count)
        writes.append(tables[slot, places // 16].astype(np.int64) * 16 + places % 16)
        offset += count
    writes.append(np.full(padding, pool.pages * 16))
    flat = torch.from_numpy(np.concatenate(writes))
    return Batch(queries, offset + padding, tables, torch.from_numpy(tables), flat)


def needed(name: str, needs: Needs) -> Needs:
    """`needs` as the backend `name` can serve them. Skips where it can't run at all."""
    if name != "compiled":
        return needs
    if team.missing():
        pytest.skip(team.missing())
    return replace(needs, dtype=torch.bfloat16, head_dim=-(-needs.head_dim // 32) * 32)


@pytest.mark.parametrize(("name", "invariant"), [("cpu", False), ("cpu", True), ("compiled", True)])
@pytest.mark.parametrize(
    "parts",
    [
        [(0, 1)],
        [(40, 1), (3, 1), (99, 1)],
        [(600, 1), (20, 1), (511, 1), (512, 1)],
        [(17, 1), (130, 1), (0, 33), (64, 21)],
        [(0, 130)],
        [(500, 30)],
    ],
)
def test_cpu_equals_the_oracle(parts: list[tuple[int, int]], name: str, invariant: bool) -> None:
    needs = needed(name, replace(NEEDS, invariant=invariant))
    first, second = filled(needs), filled(needs)
    step = batch(parts, first, padding=3)
    generator = torch.Generator().manual_seed(9)
    query = torch.randn(step.rows, 6, needs.head_dim, generator=generator)
    kv = torch.randn(step.rows, 4, needs.head_dim, generator=generator)
    backend, oracle = choose(name, needs, first), ReferenceAttention(second)
    real = step.rows - 3
    prepared, known = backend.prepare(step), oracle.prepare(step)
    for layer in (0, 1):
        found = backend.forward(query, kv, layer, prepared)
        wanted = oracle.forward(query, kv, layer, known)
        assert torch.allclose(found[:real], wanted[:real], atol=2e-6)
        assert torch.isfinite(found).all()
    assert torch.equal(first.data, second.data)


@pytest.mark.parametrize(
    ("name", "dtype"), [("cpu", torch.float32), ("cpu", torch.bfloat16), ("compiled", torch.bfloat16)]
)
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_invariant_rows_depend_on_no_cut(name: str, dtype: torch.dtype, head_dim: int) -> None:
    """A position's result is the same bits in one chunk, in any chunks and decoded beside longer neighbours."""
    needs = needed(name, replace(NEEDS, invariant=True, dtype=dtype, head_dim=head_dim))
    head_dim = needs.head_dim
    generator = torch.Generator().manual_seed(4)
    length = 560
    query = torch.randn(length, 6, head_dim, generator=generator).to(dtype)
    kv = torch.randn(length, 4, head_dim, generator=generator).to(dtype)

    def cut(borders: list[int]) -> torch.Tensor:
        pool = filled(needs)
        backend = choose(name, needs, pool)
        parts = []
        for start, end in pairwise([0, *borders, length]):
            step = batch([(start, end - start)], pool)
            parts.append(backend.forward(query[start:end], kv[start:end], 0, backend.prepare(step)))
        return torch.cat(parts)

    whole = cut([])
    for borders in ([1, 2], [16, 272, 273], [255, 256, 257], [100, 512, 513], [length - 3, length - 2, length - 1]):
        assert torch.equal(cut(borders), whole), borders
    pool = filled(needs)
    backend = choose(name, needs, pool)
    starts = [254, 255, 256, 300, 30]
    for slot, start in enumerate(starts):
        whole_step = batch([(0, 1)] * slot + [(0, start)], pool)
        alone = Batch([Query(slot, 0, start, 0)], start, *_tables(whole_step), whole_step.writes[slot:])
        backend.forward(query[:start], kv[:start], 0, backend.prepare(alone))
    together = batch([(start, 1) for start in starts], pool)
    found = backend.forward(query[starts], kv[starts], 0, backend.prepare(together))
    assert torch.equal(found, whole[starts])


def _tables(step: Batch) -> tuple[NDArray[np.int32], torch.Tensor]:
    return step.tables, step.device_tables


@pytest.mark.parametrize("name", ["cpu", "compiled"])
def test_consecutive_steps_see_what_was_written(name: str) -> None:
    """Backends may remember what they gathered: it must stay true while pages are written, moved and reused."""
    needs = needed(name, NEEDS)
    first, second = filled(needs), filled(needs)
    backend, oracle = choose(name, needs, first), ReferenceAttention(second)
    generator = torch.Generator().manual_seed(1)
    rng = np.random.default_rng(3)
    tables = rng.permutation(200)[:120].reshape(3, 40).astype(np.int32)
    lengths = [5, 60, 130]
    for number in range(40):
        if number == 15:  # slot 1 changes hands: other pages, a shorter context
            backend.forget(1)
            tables[1], lengths[1] = np.setdiff1d(np.arange(200), tables)[:40], 9
        if number == 25:  # the same length, yet other pages
            backend.forget(2)
            tables[2, :8] = np.setdiff1d(np.arange(200), tables)[:8]
        active = [slot for slot in range(3) if rng.random() < 0.8]
        queries = [Query(slot, lengths[slot], 1, row) for row, slot in enumerate(active)]
        writes = [int(tables[q.slot, q.start // 16]) * 16 + q.start % 16 for q in queries]
        step = Batch(queries, len(active), tables, torch.from_numpy(tables), torch.tensor(writes, dtype=torch.int64))
        if not active:
            continue
        query = torch.randn(len(active), 6, needs.head_dim, generator=generator)
        kv = torch.randn(len(active), 4, needs.head_dim, generator=generator)
        prepared, known = backend.prepare(step), oracle.prepare(step)
        for layer in (0, 1):
            found = backend.forward(query, kv, layer, prepared)
            wanted = oracle.forward(query, kv, layer, known)
            assert torch.allclose(found, wanted, atol=2e-6), number
        for slot in active:
            lengths[slot] += 1


def test_explicit_choices_never_fall_back() -> None:
    pool = filled(NEEDS, 4)
    assert choose("auto", NEEDS, pool).name == "cpu"
    with pytest.raises(AttentionUnavailable, match=r"'reference' .* missing: invariant numerics"):
        choose("reference", replace(NEEDS, invariant=True), pool)
    with pytest.raises(AttentionUnavailable, match=r"'flash' .* missing: device cpu \(has cuda\)"):
        choose("flash", NEEDS, pool)
    with pytest.raises(AttentionUnavailable, match="'triton_paged'"):
        choose("triton_paged", NEEDS, pool)


def test_flash_names_each_thing_that_is_missing() -> None:
    odd = replace(NEEDS, dtype=torch.float32, head_dim=40, page_tokens=20)
    found = "; ".join(FlashAttention.missing(odd))
    for words in ("device cpu", "torch.float32", "head size 40", "pages of 20 tokens"):
        assert words in found
    assert ("a package" in found) == (installed() is None)


def test_the_compiled_backend_names_each_thing_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    if not team.missing():
        odd = replace(NEEDS, heads=99, kv_heads=3, head_dim=40, page_tokens=20)
        found = "; ".join(CompiledAttention.missing(odd))
        for words in ("torch.float32", "head size 40", "pages of 20 tokens", "33 heads a key head"):
            assert words in found
        fine = replace(NEEDS, dtype=torch.bfloat16, head_dim=64)
        assert choose("auto", fine, filled(fine, 4)).name == "compiled"
    monkeypatch.setattr(team, "missing", lambda: "this processor is another one")
    with pytest.raises(AttentionUnavailable, match=r"'compiled' .* missing: this processor is another one"):
        choose("compiled", NEEDS, filled(NEEDS, 4))
    assert choose("auto", replace(NEEDS, dtype=torch.bfloat16, head_dim=64), filled(NEEDS, 4)).name == "cpu"


@pytest.mark.parametrize("name", ["cpu", "compiled"])
def test_what_pages_held_before_is_never_seen_and_what_is_broken_is(name: str) -> None:
    """A former owner's NaN beyond the slot's positions changes nothing; one's own shows."""
    needs = needed(name, NEEDS)
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(21, 6, needs.head_dim, generator=generator)
    kv = torch.randn(21, 4, needs.head_dim, generator=generator)
    results = []
    for stale in (0.0, torch.nan):
        pool = KvPool(200, needs, CPU)
        pool.data[:, :200] = stale
        backend = choose(name, needs, pool)
        step = batch([(0, 21)], pool)
        results.append(backend.forward(query, kv, 0, backend.prepare(step)))
    assert torch.equal(*results)
    kv[7] = torch.nan
    broken = backend.forward(query, kv, 0, backend.prepare(step))
    assert torch.isnan(broken[7:]).all()


def test_nothing_is_written_outside_the_pool() -> None:
    needs = needed("compiled", NEEDS)
    pool = filled(needs)
    backend = choose("compiled", needs, pool)
    step = batch([(0, 21)], pool)
    for place in (-1, 201 * 16):
        step.writes[4] = place
        with pytest.raises(IndexError, match=f"{place}.* of 3216"):
            backend.prepare(step)
    step.writes[4] = 201 * 16 - 1
    backend.prepare(step)


def test_compiled_attention_is_the_same_on_any_threads_and_with_every_group() -> None:
    """Heads a key head: tiles of every size, and pieces of chunks that no tile divides."""
    for heads, kv_heads, head_dim in ((6, 6, 32), (6, 3, 96), (9, 3, 64), (5, 1, 128), (32, 1, 256)):
        needs = needed("compiled", replace(NEEDS, heads=heads, kv_heads=kv_heads, head_dim=head_dim, layers=1))
        generator = torch.Generator().manual_seed(heads)
        first, second = KvPool(200, needs, CPU), KvPool(200, needs, CPU)
        query = torch.randn(77, heads, head_dim, generator=generator)
        kv = torch.randn(77, 2 * kv_heads, head_dim, generator=generator)
        backend, oracle = choose("compiled", needs, first), ReferenceAttention(second)
        step = batch([(0, 77)], first)
        wanted = oracle.forward(query, kv, 0, oracle.prepare(step))
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(backend.forward(query, kv, 0, backend.prepare(step)))
        torch.set_num_threads(1)
        assert torch.allclose(found[0], wanted, atol=4e-6), heads
        assert torch.equal(found[0], found[1]), heads
        assert torch.equal(found[0], found[2]), heads
