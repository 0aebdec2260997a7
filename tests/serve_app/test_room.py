"""What is said while a graph waits for room in a cluster that was joined."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
import ray

from serve_app import room
from serve_app.room import RoomWatch
from serve_app.settings import load
from serve_app.startup import Startup


class FakeCluster:
    """Ray's account of a cluster, and what was logged about it."""

    def __init__(self) -> None:
        self.total: dict[str, float] = {}
        self.free: dict[str, float] = {}
        self.up = True
        self.said: list[str] = []


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    cluster = FakeCluster()
    monkeypatch.setattr(ray, "cluster_resources", lambda: cluster.total)
    monkeypatch.setattr(ray, "available_resources", lambda: cluster.free)
    monkeypatch.setattr(ray, "is_initialized", lambda: cluster.up)

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            assert record.levelno == logging.WARNING
            cluster.said.append(record.getMessage())

    handler = Handler()
    room.logger.addHandler(handler)
    yield cluster
    room.logger.removeHandler(handler)


def watch(device: str = "cpu", **given: str) -> RoomWatch:
    settings = load({"layout": "compact", "engines": "2", "rank_cpus": "4", "preprocessors": "0", **given})
    return RoomWatch(cast(Startup, SimpleNamespace(settings=settings, device=device)))


def test_what_is_asked_and_what_there_is_is_said_once_per_change(cluster: FakeCluster) -> None:
    cluster.total, cluster.free = {"CPU": 8.0, "memory": 1e9}, {"CPU": 0.5}
    watching = watch()
    assert watching.lacking
    watching.tell()
    watching.tell()
    (said,) = cluster.said
    assert "the graph asks for 8.3 CPUs, the Ray cluster has 8 CPUs (0.5 free)" in said
    assert "graph.rank_cpus" in said
    cluster.free = {}
    watching.tell()
    assert len(cluster.said) == 2 and "8 CPUs (0 free)" in cluster.said[1]
    cluster.total = {"CPU": 8.3}
    assert not watching.lacking


def test_a_slow_start_in_a_cluster_of_our_own_with_room_is_no_waiting_for_it(cluster: FakeCluster) -> None:
    cluster.total, cluster.free = {"CPU": 16.0}, {"CPU": 7.7}  # the graph's own 8.3 are taken
    assert not watch().waiting
    assert watch(address="auto").waiting
    assert watch("cuda").waiting


def test_gpus_are_asked_for_where_ranks_run_on_them(cluster: FakeCluster) -> None:
    cluster.total = cluster.free = {"CPU": 64.0, "GPU": 3.0}
    watching = watch("cuda", tensor_parallel="2")
    assert watching.lacking
    watching.tell()
    assert "16.3 CPUs and 4 GPUs, the Ray cluster has 64 CPUs (64 free) and 3 GPUs (3 free)" in cluster.said[0]


def test_a_builder_tells_until_there_is_room_or_the_cluster_is_gone(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            cluster.free = {"CPU": 1.0}
        if len(looks) == 5:
            cluster.total = {"CPU": 100.0}

    monkeypatch.setattr("serve_app.room.time", SimpleNamespace(sleep=sleep))
    cluster.total, cluster.free = {"CPU": 8.0}, {"CPU": 2.0}
    watch().start()
    for thread in threading.enumerate():
        if thread.name == "room":
            thread.join(10)
    assert looks == [room.LOOK_SECONDS] * 5
    assert len(cluster.said) == 2 and "(1 free)" in cluster.said[1]
    watch().start()
    assert len(looks) == 5, "where there is room nothing waits"
    cluster.total, cluster.up = {}, False
    watch().start()
    for thread in threading.enumerate():
        if thread.name == "room":
            thread.join(10)
    assert len(looks) == 6
