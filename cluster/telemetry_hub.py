"""The telemetry hub: one named actor that adds up what every process of a server counted.

Owns the server's instance id and creation time, and totals that survive the death of the processes that counted them
and of the hub itself (Ray's key-value store keeps a copy). Leaves names, and how gauges combine, to
`serve_app.telemetry`. Knows processes only by their reports.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any, cast

import ray
from ray.experimental import internal_kv

from engine.types.telemetry import Report, Snapshot

logger = logging.getLogger("ray.serve")

NAMESPACE = "flare"
SILENT_SECONDS = 15.0
BEAT_SECONDS = 5.0
LOOK_SECONDS = 0.25
GROWING_SECONDS = 1.0
SAVE_SECONDS = 2.0
ABANDONED_SECONDS = 60.0
RETIRED_KEPT = 1024


class Ledger:
    """The hub's arithmetic, without Ray. A process that falls silent leaves its totals behind; should it speak again,
    they are taken back first, so nothing is ever counted twice."""

    def __init__(self, instance: str, created: int) -> None:
        self.instance, self.created = instance, created
        self._live: dict[str, tuple[Report, float]] = {}
        self._retired: dict[str, dict[str, int]] = {}
        self._folded: dict[str, int] = {}

    def report(self, report: Report, now: float) -> None:
        """Takes the latest counts of one process; `now` on any monotonic clock."""
        returning = self._retired.pop(report["process"], None)
        if returning:
            for name, value in returning.items():
                self._folded[name] = self._folded.get(name, 0) - value
        self._live[report["process"]] = (report, now)

    def leave(self, process: str) -> None:
        """The process has ended: keep its totals, forget its gauges."""
        known = self._live.pop(process, None)
        if known is None:
            return
        totals = known[0]["totals"]
        for name, value in totals.items():
            self._folded[name] = self._folded.get(name, 0) + value
        self._retired[process] = dict(totals)
        while len(self._retired) > RETIRED_KEPT:
            del self._retired[next(iter(self._retired))]

    def expire(self, now: float, silent: float = SILENT_SECONDS) -> None:
        for process in [name for name, (_, heard) in self._live.items() if now - heard > silent]:
            self.leave(process)

    def snapshot(self) -> Snapshot:
        totals = dict(self._folded)
        for report, _ in self._live.values():
            for name, value in report["totals"].items():
                totals[name] = totals.get(name, 0) + value
        return {
            "instance": self.instance,
            "created": self.created,
            "totals": totals,
            "processes": [report for report, _ in self._live.values()],
        }

    def dump(self) -> bytes:
        """All that a new hub needs to go on. Samples aren't saved: whoever took them reports them again."""
        live = [{**report, "samples": []} for report, _ in self._live.values()]
        state = {"instance": self.instance, "created": self.created, "live": live}
        return json.dumps({**state, "retired": self._retired, "folded": self._folded}).encode()

    @classmethod
    def restore(cls, data: bytes, now: float) -> Ledger:
        """The ledger that `dump` wrote; its live processes have until `now` + the silence limit to report again."""
        state = json.loads(data)
        ledger = cls(state["instance"], state["created"])
        ledger._folded, ledger._retired = state["folded"], state["retired"]
        for report in state["live"]:
            ledger._live[report["process"]] = (cast(Report, report), now)
        return ledger


class TelemetryHub:
    """The actor. It leaves by itself, with its saved totals, once no process has reported for a while."""

    def __init__(self, name: str) -> None:
        self._key = f"telemetry:{name}".encode()
        saved = internal_kv._internal_kv_get(self._key, namespace=NAMESPACE.encode())
        now = time.monotonic()
        self._ledger = Ledger.restore(saved, now) if saved else Ledger(secrets.token_hex(8), int(time.time()))
        self._heard, self._dirty = now, True
        self._save()
        self._keeper: asyncio.Task[None] | None = None

    async def report(self, report: Report) -> None:
        if self._keeper is None:
            self._keeper = asyncio.get_running_loop().create_task(self._keep(), context=contextvars.Context())
        self._heard = time.monotonic()
        self._ledger.report(report, self._heard)
        self._dirty = True

    async def leave(self, process: str) -> None:
        self._ledger.leave(process)
        self._dirty = True

    async def snapshot(self) -> Snapshot:
        return self._ledger.snapshot()

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(SAVE_SECONDS)
            now = time.monotonic()
            self._ledger.expire(now)
            if now - self._heard > ABANDONED_SECONDS:
                internal_kv._internal_kv_del(self._key, namespace=NAMESPACE.encode())
                ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
                return
            if self._dirty:
                self._save()

    def _save(self) -> None:
        internal_kv._internal_kv_put(self._key, self._ledger.dump(), overwrite=True, namespace=NAMESPACE.encode())
        self._dirty = False


def connect(name: str) -> Any:
    """The hub called `name`, started now if there is none. Blocks for a round trip to Ray's control store."""
    return (
        ray.remote(TelemetryHub)
        .options(
            name=f"telemetry-hub:{name}",
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=2,
        )
        .remote(name)
    )


class Turns:
    """When a process tells its counts: as soon as they changed, but while they keep growing only once a second, since
    a report wakes half a dozen threads; and every five seconds anyway."""

    def __init__(self) -> None:
        self._told: Report | None = None
        self._seen: Report | None = None
        self._at = 0.0

    def due(self, report: Report, now: float) -> bool:
        """Whether `report`, which was looked at now (on any monotonic clock), is to be sent; counts as sent then."""
        growing, self._seen = report != self._seen, report
        silent = now - self._at
        due = silent > BEAT_SECONDS or (report != self._told and (not growing or silent >= GROWING_SECONDS))
        if due or self._told is None:
            self._told, self._at = report, now
            return True
        return False


class Reporter:
    """Sends one process's report when it is its turn, looking four times a second. Create it where an event loop runs;
    close it when the process leaves in good order."""

    def __init__(self, name: str, collect: Callable[[], Report]) -> None:
        self._name, self._collect = name, collect
        self._hub: Any = None
        self._task = asyncio.get_running_loop().create_task(self._run(), context=contextvars.Context())

    async def snapshot(self, timeout: float = 1.0) -> Snapshot:
        """The whole server's counts, this process's included up to now.

        Raises TimeoutError, or ray.exceptions.RayError when the hub is down.
        """
        async with asyncio.timeout(timeout):
            hub = await self._connected()
            await hub.report.remote(self._collect())
            return cast(Snapshot, await hub.snapshot.remote())

    async def _connected(self) -> Any:
        if self._hub is None:
            self._hub = await asyncio.to_thread(connect, self._name)
        return self._hub

    async def _run(self) -> None:
        turns = Turns()
        while True:
            report = self._collect()
            if turns.due(report, time.monotonic()):
                try:
                    await (await self._connected()).report.remote(report)
                except ray.exceptions.RayError as error:
                    logger.warning("telemetry hub %s: %s", self._name, error)
                    self._hub = None
            await asyncio.sleep(LOOK_SECONDS)

    def close(self) -> None:
        self._task.cancel()
        if self._hub is not None:
            report = self._collect()
            self._hub.report.remote(report)
            self._hub.leave.remote(report["process"])
