"""The longest restorable checkpoint, in both kinds of layout."""

from __future__ import annotations

import numpy as np
import pytest

from engine.cache.checkpoints import NOTHING, Beginning
from engine.cache.index import CANDIDATES, PrefixIndex

KEYS = [b"a", b"b", b"c", b"d"]


def filled(*, dense: bool) -> PrefixIndex:
    index = PrefixIndex(4, dense=dense)
    for page, key in enumerate(KEYS, start=10):
        assert index.add(key, page)
    return index


def test_dense_layouts_restore_at_every_page_end() -> None:
    index = filled(dense=True)
    assert index.longest([*KEYS, b"unknown"], 100).pages == (10, 11, 12, 13)
    assert index.longest([b"a", b"b", b"other", b"d"], 100).length == 8
    assert index.longest([b"other"], 100) is NOTHING
    assert index.longest([], 100) is NOTHING


@pytest.mark.parametrize(("limit", "length"), [(16, 16), (15, 12), (4, 4), (3, 0), (0, 0)])
def test_the_limit_counts_positions(limit: int, length: int) -> None:
    assert filled(dense=True).longest(KEYS, limit).length == length


def test_other_layouts_restore_only_at_marks_with_whole_chains() -> None:
    index = filled(dense=False)
    assert index.longest(KEYS, 100) is NOTHING
    index.mark(b"b", "message", state=(3,), window=(7,))
    index.mark(b"d", "endpoint", state=(4,))
    found = index.longest(KEYS, 100)
    assert (found.length, found.role, found.state) == (16, "endpoint", (4,))
    index.forget(12)
    found = index.longest(KEYS, 100)
    assert (found.length, found.pages, found.window, found.role) == (8, (10, 11), (7,), "message")
    with pytest.raises(ValueError, match="known page"):
        index.mark(b"nowhere", "anchor")


def test_a_forgotten_page_breaks_the_chain_until_its_key_is_known_again() -> None:
    index = filled(dense=True)
    index.forget(11)
    assert index.longest(KEYS, 100).pages == (10,)
    assert index.key(11) is None and index.page(b"b") is None
    assert index.add(b"b", 20)
    assert index.longest(KEYS, 100).pages == (10, 20, 12, 13)
    index.forget(99)
    assert len(index) == 4


def test_one_page_a_key_and_one_key_a_page() -> None:
    index = filled(dense=True)
    assert not index.add(b"a", 50)
    assert index.page(b"a") == 10
    with pytest.raises(ValueError, match="already has a name"):
        index.add(b"new", 10)


def ids(*tokens: int) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def test_the_beginning_that_shares_the_most_tokens() -> None:
    index = PrefixIndex(4)
    for page, tokens in enumerate(((1, 2, 3, 4), (1, 2, 9, 9), (1, 2, 3, 9), (5,), (1, 7))):
        index.add(b"%d" % page, page, b"parent", ids(*tokens))
    index.add(b"other", 9, b"elsewhere", ids(8, 8, 8, 8))
    index.add(b"silent", 10)
    assert index.beginning(b"parent", ids(1, 2, 9)) == Beginning(1, 3)
    assert index.beginning(b"parent", ids(1, 2, 3, 9)) == Beginning(2, 4)
    assert index.beginning(b"parent", ids(1, 2)) == Beginning(2, 2), "the latest of equals"
    assert index.beginning(b"parent", ids(5, 6)) == Beginning(3, 1), "a part of a page has its own length"
    assert index.beginning(b"parent", ids(8, 8)) is None
    index.forget(2)
    assert index.beginning(b"parent", ids(1, 2, 3, 9)) == Beginning(0, 3)
    for page in (0, 1, 3, 4, 9, 10):
        index.forget(page)
    assert not index._after and not index._contents


def test_few_beginnings_are_compared_and_none_in_other_layouts() -> None:
    index = PrefixIndex(4)
    for page in range(CANDIDATES + 1):
        index.add(b"%d" % page, page, b"", ids(1, page))
    assert index.beginning(b"", ids(1, 0)) == Beginning(CANDIDATES, 1), "the oldest isn't looked at"
    sparse = PrefixIndex(4, dense=False)
    sparse.add(b"a", 0, b"", ids(1, 2))
    assert sparse.beginning(b"", ids(1, 2)) is None
