"""What is said of ranks that end; the group itself runs in the graph's tests."""

from __future__ import annotations

from concurrent.futures import Future

from cluster.rank_actors import _first_failure, _words


def ended(error: Exception | None) -> Future[None]:
    call: Future[None] = Future()
    if error is None:
        call.set_result(None)
    else:
        call.set_exception(error)
    return call


def test_the_first_rank_that_ended_is_named() -> None:
    running: Future[None] = Future()
    assert _first_failure([running, running]) == ""
    failure = _first_failure([running, ended(RuntimeError("\x1b[36mray::RankActor\x1b[39m\n  File x\nValueError: no"))])
    assert failure == "rank 1 ended before it was ready: ValueError: no"
    assert _first_failure([ended(None)]).startswith("rank 0 ended before it was ready")


def test_words_of_an_empty_error() -> None:
    assert _words(RuntimeError("")) == "RuntimeError"
