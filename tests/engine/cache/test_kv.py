"""Pool and index as one."""

from __future__ import annotations

import numpy as np

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


def ids(*tokens: int) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def test_a_page_to_copy_from_outlives_the_step() -> None:
    kv = KVCache(2, 8)
    (source,) = kv.open(NOTHING, 1)
    kv.publish(b"a", source, b"", ids(*range(8)))
    kv.close([source], [b"a"], fence=0)
    found = kv.begun(NOTHING, b"", ids(0, 1, 2, 9))
    assert found.begun is not None and (found.length, found.restored, found.begun.page) == (0, 3, source)
    assert kv.room(found) == 1 and kv.room(NOTHING) == 2
    table = kv.open(found, 1, fence=5)
    assert table != [source] and kv.pool.available == 0 and kv.pool.draining == 1
    kv.pool.drained(5)
    assert kv.pool.available == 1
    kv.pool.check()


def test_short_beginnings_are_not_worth_a_copy() -> None:
    kv = KVCache(2, 16)
    (page,) = kv.open(NOTHING, 1)
    kv.publish(b"a", page, b"", ids(*range(16)))
    assert kv.begun(NOTHING, b"", ids(0, 9)) is NOTHING
    assert kv.begun(NOTHING, b"", ids(0, 1, 9)).restored == 2
    assert KVCache(2, 16, reuse=False).begun(NOTHING, b"", ids(0, 1)) is NOTHING


def test_a_part_is_kept_unless_another_page_begins_so() -> None:
    kv = KVCache(3, 8)
    first, second, third = kv.open(NOTHING, 3)
    kv.publish_part(b"", ids(1, 2, 3), first)
    kv.publish_part(b"", ids(1, 2), second)
    kv.publish_part(b"", ids(1, 2, 3, 4), third)
    assert kv.pool.cached == 2, "what the first page holds already is no news"
    found = kv.begun(NOTHING, b"", ids(1, 2, 3, 4, 5))
    assert found.begun is not None and (found.begun.page, found.restored) == (third, 4)
    kv.distrust([third])
    assert kv.begun(NOTHING, b"", ids(1, 2, 3, 4, 5)).restored == 3
