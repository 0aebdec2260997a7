"""Readers that leave a graph at every moment, and what must be true afterwards."""

from __future__ import annotations

import time
from typing import Any

from tests.support.graph import Graph, ready, wait_until
from tests.support.raw_http import RawRequest

CHAT = "/v1/chat/completions"
MOMENTS = ("mid", "pre", "early", "buffered", "reset")
UNREAD = 4000
"""Tokens that, with 100 log probabilities each (6 KiB), are about twice what the sockets and proxies on the way to a
reader that reads nothing take in."""
BUSY = ("active_requests", "pending_requests", "http_slots_in_use", "http_requests_entering")


def idle(graph: Graph) -> bool:
    """Nothing runs, waits or holds a slot."""
    seen = graph.metrics()
    return not any(seen[name] for name in BUSY)


def quiet(graph: Graph) -> None:
    """Waits until nothing runs, waits or holds a slot. A process that died is forgotten after fifteen seconds."""
    wait_until(lambda: idle(graph))


def settled(graph: Graph) -> dict[str, float]:
    """The metrics once nothing runs and no process has older counts to report: readings a second apart agree."""
    readings = [graph.metrics()]

    def agree() -> bool:
        time.sleep(1.0)
        readings.append(graph.metrics())
        earlier, seen = readings[-2:]
        resting = not any(seen[name] for name in BUSY)
        return resting and all(seen[name] == earlier.get(name) for name in seen if name.endswith("_total"))

    quiet(graph)
    wait_until(agree)
    return readings[-1]


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
    before = settled(graph)
    leave(graph, body, moment, count)
    after = settled(graph)
    assert after["requests_failed_total"] == before["requests_failed_total"]
    wait_until(lambda: ready(graph))
