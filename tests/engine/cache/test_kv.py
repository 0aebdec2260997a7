"""Pool and index as one."""

from __future__ import annotations

from engine.cache.checkpoints import NOTHING
from engine.cache.kv import KVCache


def test_a_hit_leaves_a_token_to_compute() -> None:
    kv = KVCache(8, 4)
    pages = kv.open(NOTHING, 3)
    for key, page in zip((b"a", b"b", b"c"), pages, strict=True):
        kv.publish(key, page)
    assert kv.find([b"a", b"b", b"c"], 13).length == 12
    assert kv.find([b"a", b"b", b"c"], 12).length == 8
    assert kv.find([b"a"], 1) is NOTHING


def test_evicted_pages_lose_their_names() -> None:
    kv = KVCache(2, 4)
    pages = kv.open(NOTHING, 2)
    kv.publish(b"a", pages[0])
    kv.close(pages, [b"a"], fence=0)
    assert kv.find([b"a"], 9).length == 4
    kv.open(NOTHING, 2)
    assert kv.find([b"a"], 9) is NOTHING


def test_held_pages_are_no_room() -> None:
    kv = KVCache(3, 4)
    pages = kv.open(NOTHING, 2)
    for key, page in zip((b"a", b"b"), pages, strict=True):
        kv.publish(key, page)
    kv.close(pages, [b"a", b"b"], fence=0)
    found = kv.find([b"a", b"b"], 9)
    assert kv.pool.available == 3 and kv.room(found) == 1
    table = kv.open(found, 3)
    assert table[:2] == pages and kv.pool.available == 0


def test_a_private_duplicate_mends_a_broken_chain() -> None:
    """Two requests compute the same page; the known copy is evicted while the other still runs."""
    kv = KVCache(4, 4)
    first, second = kv.open(NOTHING, 1), kv.open(NOTHING, 2)
    kv.publish(b"a", first[0])
    kv.publish(b"a", second[0])
    kv.publish(b"b", second[1])
    kv.close(first, [b"a"], fence=0)
    kv.pool.take(2)
    assert kv.find([b"a", b"b"], 9) is NOTHING
    kv.close(second, [b"a", b"b"], fence=0)
    assert kv.find([b"a", b"b"], 9).pages == tuple(second)
    kv.pool.check()


def test_distrusted_pages_are_gone() -> None:
    kv = KVCache(2, 4)
    pages = kv.open(NOTHING, 1)
    kv.publish(b"a", pages[0])
    kv.distrust(pages)
    kv.close(pages, (), fence=0)
    assert kv.find([b"a"], 9) is NOTHING
    assert kv.pool.free == 2 and kv.pool.cached == 0


def test_promises_are_counted() -> None:
    kv = KVCache(4, 4)
    kv.promise([b"a", b"b"])
    kv.promise([b"a"])
    kv.withdraw([b"a"])
    assert kv.promised(b"a") and kv.promised(b"b")
    assert kv.awaited([b"a", b"b"], NOTHING, 9) == b"a"
    assert kv.awaited([b"a"], NOTHING, 4) is None, "a whole prompt can't be restored, so there is nothing to wait for"
    kv.withdraw([b"a", b"b"])
    assert not kv.promised(b"a") and kv.awaited([b"a"], NOTHING, 9) is None


def test_without_reuse_nothing_is_known() -> None:
    kv = KVCache(2, 4, reuse=False)
    pages = kv.open(NOTHING, 1)
    kv.publish(b"a", pages[0])
    kv.promise([b"a"])
    assert kv.find([b"a"], 9) is NOTHING and kv.pool.cached == 0 and not kv.promised(b"a")
    kv.withdraw([b"a"])
    kv.close(pages, [b"a"], fence=0)
    assert kv.pool.free == 2
