"""Readers that leave a graph at every moment, and what must be true afterwards."""

from __future__ import annotations

import time
from typing import Any

from tests.support.graph import Graph, wait_until
from tests.support.raw_http import RawRequest

CHAT = "/v1/chat/completions"
MOMENTS = ("mid", "pre", "early", "buffered", "reset")
BUSY = ("active_requests", "pending_requests", "http_slots_in_use", "http_requests_entering")


def quiet(graph: Graph, seconds: float = 30.0) -> None:
    """Waits until nothing runs, waits or holds a slot."""
    wait_until(lambda: not any(graph.metrics()[name] for name in BUSY), seconds)


def leave(graph: Graph, body: dict[str, Any], moment: str, count: int) -> None:
    """`count` readers that leave: while tokens flow ("mid", or with a TCP "reset"), before the first token ("pre"),
    within milliseconds of sending ("early"), or while a whole answer is being made ("buffered")."""
    for number in range(count):
        request = RawRequest(graph.port, CHAT, {**body, "stream": moment != "buffered"})
        if moment == "early":
            time.sleep(0.004 * number)
        elif moment in ("pre", "buffered"):
            time.sleep(0.05)
        else:
            request.read_until(b'"content":"')
        request.close(reset=moment == "reset")


def nothing_leaks(graph: Graph, body: dict[str, Any], moment: str, count: int) -> None:
    """Readers leave; every slot is free soon after, nothing counts as failed, and the server goes on."""
    before = graph.metrics()
    leave(graph, body, moment, count)
    quiet(graph)
    after = graph.metrics()
    assert after["requests_failed_total"] == before["requests_failed_total"]
    assert graph.get("/health") == {"status": "ok"}
