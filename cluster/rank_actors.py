"""A RankGroup over Ray actors: one a rank, pinned to its bundle of the replica's placement group.

Owns starting, watching and killing the group; a new group is a new RankActors. Leaves what a rank does to
`engine.execution.rank`, and the messages to `engine.parallel.step_link`: Ray carries no step and no token.
"""

from __future__ import annotations

import logging
import os
import socket
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.priority import prompt
from engine.config import EngineConfig, Manifest
from engine.parallel.ranks import RankGroupFailed
from engine.parallel.step_link import LinkedRanks, StepListener, dial
from engine.scheduler.step import LateInputs, RankReport, Step, StepResult

logger = logging.getLogger("ray.serve")

DIAL_SECONDS = 120.0
LOAD_SECONDS = 1800.0
SPINS = "10000"
"""Turns an OpenMP thread spins before it sleeps (libgomp's default is 300,000: a rank then burns the core that an
ingress needs, and two ranks on one core are 20 times slower than with this)."""


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """Where ranks run. `bundles`: the bundle of each rank in `group` (the replica itself sits in bundle 0), None
    outside a placement group. `cpus` is what Ray accounts, not what a rank's threads may use; `gpus` per rank."""

    group: PlacementGroup | None
    bundles: tuple[int, ...]
    cpus: float
    gpus: float = 0.0


class RankActor:
    """One rank's process: a single long call that ends with the step link."""

    def run(
        self,
        config: EngineConfig,
        manifest: Manifest,
        rank: int,
        size: int,
        addresses: list[str],
        key: bytes,
        rendezvous: str | None,
    ) -> None:
        prompt()  # before torch starts its threads
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # read when torch loads libgomp, which the next line does
        from engine.execution.rank import rank_main

        link = dial(addresses, rank, key)
        try:
            rank_main(config, manifest, rank, size, link, rendezvous)
        finally:
            link.close()


class RankActors:
    """The group, loaded and ready once constructed; blocks meanwhile. Raises RankGroupFailed with a rank's own words
    when one can't load, and when one dies.

    A death reaches `receive` as the end of that rank's link, about as fast as the kernel closes a socket; the pending
    call of the actor adds Ray's account of it.
    """

    def __init__(self, config: EngineConfig, manifest: Manifest, placement: RankPlacement) -> None:
        size = config.tensor_parallel
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        rendezvous = f"tcp://{host}:{_free_port(host)}" if size > 1 else None
        self._actors: list[Any] = []
        self._ranks: LinkedRanks | None = None
        with StepListener(size, host) as listener:
            try:
                calls = [
                    self._start(config, manifest, rank, size, listener, rendezvous, placement) for rank in range(size)
                ]
                self._ranks = listener.accept(DIAL_SECONDS, lambda: _first_failure(calls))
                self._ranks.wait_ready(LOAD_SECONDS)
            except BaseException:
                self.close()
                raise
        self._calls = calls

    def _start(
        self,
        config: EngineConfig,
        manifest: Manifest,
        rank: int,
        size: int,
        listener: StepListener,
        rendezvous: str | None,
        placement: RankPlacement,
    ) -> Future[None]:
        strategy: Any = "DEFAULT"
        if placement.group is not None:
            strategy = PlacementGroupSchedulingStrategy(
                placement.group, placement_group_bundle_index=placement.bundles[rank]
            )
        actor = (
            ray.remote(RankActor)
            .options(
                num_cpus=placement.cpus,
                num_gpus=placement.gpus,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=strategy,
            )
            .remote()
        )
        self._actors.append(actor)
        call: Future[None] = actor.run.remote(  # type: ignore[attr-defined] # Ray adds it
            config, manifest, rank, size, listener.addresses, listener.key, rendezvous
        ).future()
        call.add_done_callback(lambda done: _log_end(rank, done))
        return call

    @property
    def report(self) -> RankReport:
        return self._linked.report

    def send(self, step: Step) -> None:
        self._linked.send(step)

    def send_late(self, late: LateInputs) -> None:
        self._linked.send_late(late)

    def receive(self, timeout: float) -> StepResult:
        return self._linked.receive(timeout)

    def check(self) -> None:
        self._linked.check()

    def close(self) -> None:
        """Kills every rank: a survivor of a dead peer is stuck in its collective and would never read its link."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors.clear()

    @property
    def _linked(self) -> LinkedRanks:
        if self._ranks is None:
            raise RankGroupFailed("the rank group is closed")
        return self._ranks


def _first_failure(calls: list[Future[None]]) -> str:
    """Why a rank's call has ended, "" while all run."""
    for rank, call in enumerate(calls):
        if call.done():
            error = call.exception()
            return f"rank {rank} ended before it was ready: {_words(error)}"
    return ""


def _log_end(rank: int, call: Future[None]) -> None:
    error = call.exception()
    if error is not None:
        logger.warning("rank %d ended: %s", rank, _words(error))


def _words(error: BaseException | None) -> str:
    """The last line of Ray's account: its first ones are a remote traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _free_port(host: str) -> int:
    """A port that is free now on this node, where rank 0 runs too (bundle 0 of a strictly packed group)."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
