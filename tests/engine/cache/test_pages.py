"""The pool's states: nothing is lost, nothing is reused too early, tails go first."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from engine.cache.pages import PagePool, PagesExhausted


def test_taken_pages_return() -> None:
    pool = PagePool(4)
    pages = pool.take(3)
    assert pool.available == 1
    with pytest.raises(PagesExhausted, match="2 pages wanted, 1 available of 4"):
        pool.take(2)
    assert pool.available == 1, "a refused take changes nothing"
    pool.release(pages, fence=0)
    assert pool.free == 4
    pool.check()


def test_a_page_waits_for_the_steps_that_may_touch_it() -> None:
    pool = PagePool(2)
    first, second = pool.take(1), pool.take(1)
    pool.release(first, fence=5)
    pool.release(second, fence=6)
    assert (pool.available, pool.draining) == (0, 2)
    pool.drained(4)
    assert pool.available == 0
    pool.drained(5)
    assert pool.take(1) == first
    pool.drained(6)
    assert pool.take(1) == second


def test_shared_pages_live_as_long_as_their_last_holder() -> None:
    pool = PagePool(2)
    pages = pool.take(2)
    pool.publish(pages[0])
    pool.hold(pages[:1])
    pool.release(pages, fence=0)
    assert (pool.free, pool.cached, pool.available) == (1, 1, 1)
    pool.release(pages[:1], fence=0)
    assert (pool.free, pool.cached, pool.available) == (1, 1, 2)


def test_a_page_held_again_while_it_drains_stays() -> None:
    pool = PagePool(1)
    pages = pool.take(1)
    pool.publish(pages[0])
    pool.release(pages, fence=3)
    pool.hold(pages)
    pool.drained(3)
    assert pool.available == 0
    pool.release(pages, fence=4)
    pool.forget(pages[0])
    pool.drained(4)
    assert pool.free == 1
    pool.check()


def test_eviction_takes_the_oldest_chain_from_its_tail() -> None:
    evicted: list[int] = []
    pool = PagePool(6, evicted.append)
    old, new = pool.take(3), pool.take(3)
    for page in (*old, *new):
        pool.publish(page)
    pool.release(old, fence=0)
    pool.release(new, fence=0)
    pool.take(6)
    assert evicted == [*reversed(old), *reversed(new)]


def test_reuse_makes_a_chain_young() -> None:
    evicted: list[int] = []
    pool = PagePool(2, evicted.append)
    first, second = pool.take(1), pool.take(1)
    for page in (*first, *second):
        pool.publish(page)
    pool.release(first, fence=0)
    pool.release(second, fence=0)
    pool.hold(first)
    pool.release(first, fence=0)
    pool.take(1)
    assert evicted == second


def test_misuse_is_an_error() -> None:
    pool = PagePool(2)
    pages = pool.take(1)
    with pytest.raises(ValueError, match="no published content"):
        pool.hold(pages)
    pool.release(pages, fence=0)
    with pytest.raises(ValueError, match="released more often"):
        pool.release(pages, fence=0)
    with pytest.raises(ValueError, match="held by nobody"):
        pool.publish(pages[0])


class PoolMachine(RuleBasedStateMachine):
    """Any order of holding, publishing, releasing and draining keeps every page in exactly one state."""

    chains = Bundle("chains")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(8, self.evict)
        self.step = 0
        self.held: dict[int, int] = {}

    def evict(self, page: int) -> None:
        assert not self.held.get(page), "a held page was evicted"

    @rule(target=chains, count=st.integers(1, 4))
    def take(self, count: int) -> list[int]:
        if count > self.pool.available:
            with pytest.raises(PagesExhausted):
                self.pool.take(count)
            return []
        pages = self.pool.take(count)
        for page in pages:
            assert not self.held.get(page)
            self.held[page] = 1
        return pages

    @rule(target=chains, chain=chains, publish=st.integers(0, 4))
    def share(self, chain: list[int], publish: int) -> list[int]:
        if not all(self.held.get(page) for page in chain):
            return []
        head = chain[:publish]
        for page in head:
            self.pool.publish(page)
        self.pool.hold(head)
        for page in head:
            self.held[page] += 1
        return head

    @rule(chain=consumes(chains), ahead=st.integers(0, 2))
    def release(self, chain: list[int], ahead: int) -> None:
        self.pool.release(chain, self.step + ahead)
        for page in chain:
            self.held[page] -= 1

    @rule(chain=chains)
    def forget(self, chain: list[int]) -> None:
        for page in chain:
            self.pool.forget(page)

    @rule()
    def advance(self) -> None:
        self.step += 1
        self.pool.drained(self.step)

    @invariant()
    def sound(self) -> None:
        self.pool.check()

    def teardown(self) -> None:
        self.pool.drained(self.step + 10)
        held = sum(1 for count in self.held.values() if count)
        assert self.pool.available == self.pool.total - held


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
