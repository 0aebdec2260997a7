"""Both ends of the step link over real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine.parallel.ranks import RankGroupFailed, RankLink
from engine.parallel.step_link import LinkClosed, LinkedRanks, SocketLink, StepListener, dial
from engine.scheduler.step import LateInputs, RankReport, Row, SampledRow, Step, StepResult

REPORT = RankReport(10, 1024, 2048, 100, "cpu", "reference", "invariant", "float32")


def echo(link: RankLink, answers: bool) -> None:
    """A rank that answers each step with one row per row, and remembers forced tokens."""
    link.report(REPORT)
    while (message := link.receive()) is not None:
        if isinstance(message, Step) and answers:
            late = link.receive() if any(row.gated for row in message.rows) else None
            forced = late.forced if isinstance(late, LateInputs) else {}
            link.send(
                StepResult(
                    message.number, [SampledRow(row.slot, forced.get(row.slot, row.count)) for row in message.rows]
                )
            )


@contextmanager
def group(size: int, kind: str, send_timeout: float = 5.0) -> Iterator[tuple[LinkedRanks, list[SocketLink]]]:
    with StepListener(size) as listener:
        addresses = [address for address in listener.addresses if address.startswith(kind)]
        links = [dial(addresses, rank, listener.key, 5.0) for rank in range(size)]
        ranks = listener.accept(5.0)
    threads = [threading.Thread(target=echo, args=(link, rank == 0), daemon=True) for rank, link in enumerate(links)]
    for thread in threads:
        thread.start()
    try:
        assert ranks.wait_ready(5.0) == REPORT == ranks.report
        yield ranks, links
    finally:
        ranks.close()
        for thread in threads:
            thread.join(5.0)
            assert not thread.is_alive(), "closing the links must end every rank"
        for link in links:
            link.close()


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("size", [1, 3])
def test_steps_and_results(kind: str, size: int) -> None:
    with group(size, kind) as (ranks, _):
        for number in range(1, 50, 2):
            ranks.send(Step(number, [Row(0, 1)]))
            ranks.send(Step(number + 1, [Row(4, 2, gated=True)]))
            ranks.send_late(LateInputs(number + 1, forced={4: 99}))
            assert ranks.receive(5.0) == StepResult(number, [SampledRow(0, 1)])
            assert ranks.receive(5.0).sampled == [SampledRow(4, 99)]


def test_a_large_step_and_a_large_result_do_not_wait_for_each_other() -> None:
    """Both ends write far more than the sockets hold, at the same time."""
    with StepListener(1) as listener:
        link = dial(listener.addresses, 0, listener.key)
        ranks = listener.accept(5.0)
    big = StepResult(1, failure="x" * (24 << 20))

    def rank() -> None:
        link.report(REPORT)
        link.send(big)
        assert link.receive() is not None

    thread = threading.Thread(target=rank, daemon=True)
    thread.start()
    ranks.wait_ready(5.0)
    ranks.send(Step(1, [Row(0, 1, 0, b"x" * (24 << 20))]))
    assert ranks.receive(20.0) == big
    thread.join(5.0)
    assert not thread.is_alive()
    ranks.close()
    link.close()


def test_no_result_in_time_is_a_timeout() -> None:
    with group(1, "unix") as (ranks, _), pytest.raises(TimeoutError):
        ranks.receive(0.01)


@pytest.mark.parametrize("dead", [0, 1])
def test_a_dead_rank_is_noticed_while_waiting(dead: int) -> None:
    with group(2, "unix") as (ranks, links):
        links[dead]._socket.shutdown(socket.SHUT_RDWR)
        with pytest.raises(RankGroupFailed, match=f"rank {dead}"):
            ranks.receive(5.0)


@pytest.mark.parametrize("dead", [0, 1])
def test_a_dead_rank_is_noticed_while_nothing_runs(dead: int) -> None:
    with group(2, "unix") as (ranks, links):
        ranks.check()
        links[dead]._socket.shutdown(socket.SHUT_RDWR)
        with pytest.raises(RankGroupFailed, match=f"rank {dead}"):
            ranks.check()


def test_a_rank_tells_why_it_failed() -> None:
    with group(2, "unix") as (ranks, links):
        links[1].fail("out of memory")
        with pytest.raises(RankGroupFailed, match="rank 1: out of memory"):
            ranks.receive(5.0)


def test_a_rank_that_takes_nothing_fails_the_group() -> None:
    with StepListener(1) as listener:
        link = dial(listener.addresses, 0, listener.key)
        ranks = listener.accept(5.0)
    link.report(REPORT)
    ranks._timeout = 0.05
    ranks.wait_ready(5.0)
    with pytest.raises(RankGroupFailed, match="took no step"):
        ranks.send(Step(1, [Row(0, 1, 0, b"x" * (64 << 20))]))
    ranks.close()
    link.close()


def test_only_known_ranks_with_the_key_are_let_in() -> None:
    with StepListener(1) as listener:
        strangers = [
            dial(listener.addresses, 0, b"wrong key"),
            dial(listener.addresses, 5, listener.key),
            dial(listener.addresses, -1, listener.key),
        ]
        _, host, port = listener.addresses[1].split(":")
        raw = socket.create_connection((host, int(port)))
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
        link = dial(listener.addresses, 0, listener.key)
        ranks = listener.accept(5.0)
        link.report(REPORT)
        assert ranks.wait_ready(5.0) == REPORT
        for stranger in strangers:
            assert stranger.receive() is None
            stranger.close()
        raw.close()
        ranks.close()
        link.close()


def test_missing_ranks_are_named() -> None:
    with StepListener(3) as listener:
        link = dial(listener.addresses, 1, listener.key)
        with pytest.raises(RankGroupFailed, match=r"\[0, 2\] did not connect"):
            listener.accept(0.1)
        link.close()


def test_dialling_skips_an_address_of_another_machine() -> None:
    with StepListener(1) as listener:
        link = dial(["unix:/nowhere/link", *listener.addresses], 0, listener.key)
        ranks = listener.accept(5.0)
        ranks.close()
        link.close()
    with pytest.raises(LinkClosed, match="/nowhere"):
        dial(["unix:/nowhere/link"], 0, b"")


def test_the_rank_sees_the_scheduler_go() -> None:
    with StepListener(1) as listener:
        link = dial(listener.addresses, 0, listener.key)
        listener.accept(5.0).close()
    assert link.receive() is None
    with pytest.raises(LinkClosed):
        for _ in range(10):
            link.send(StepResult(1))
    link.close()
