"""Deployment handles of the graph: resolved in the background, and the calls that ingresses make over them.

Owns how a call travels (transport, size, patience). Leaves what the answers mean to `engine_client`, and routing to
Serve and `cluster.routing`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from cluster.telemetry_hub import Reporter
from engine.types.telemetry import Snapshot
from protocols.errors import Unavailable
from serve_app.engine_client import HeldCall
from serve_app.groups import GroupCall
from serve_app.token_channel import detached

logger = logging.getLogger("ray.serve")

MESSAGE_BYTES = 2**18
"""Larger arguments travel through the object store: gRPC between replicas takes 4 MiB at most."""
HEALTH_SECONDS = 0.9
HEALTH_KEPT = 0.25
HEALTH_QUESTIONS = 3
NOT_RUNNING = "the model is not running yet"


class RemoteHandle:
    """The handle of another application's deployment; None until that application has been built. Resolving blocks,
    so it runs on a thread, and goes on until it succeeds."""

    def __init__(self, application: str, deployment: str) -> None:
        self._application, self._deployment = application, deployment
        self._handle: Any = None
        self._task = detached(self._resolve(), f"handle-{application}-{deployment}")

    def __call__(self) -> Any:
        return self._handle

    async def _resolve(self) -> None:
        pause = 0.1
        while self._handle is None:
            try:
                self._handle = await asyncio.to_thread(serve.get_deployment_handle, self._deployment, self._application)
            except (RayServeException, RayError) as error:
                logger.debug("%s of %s: %s", self._deployment, self._application, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, 1.0)


class EngineCaller:
    """Makes held calls over the engine's handle, which `handle` gives or None."""

    def __init__(self, handle: Callable[[], Any]) -> None:
        self._handle = handle
        self._known: Any = None
        self._generate: Any = None

    def call(self, call: GroupCall, avoid: tuple[str, ...], prefer: str = "") -> HeldCall:
        handle = self._handle()
        if handle is None:
            raise Unavailable(NOT_RUNNING)
        if handle is not self._known:  # every .options() clone carries a router's state: keep one
            self._known, self._generate = handle, handle.options(method_name="generate")
        argument: Any = call
        if _size(call) > MESSAGE_BYTES:
            argument = [ray.put(call)]
        hints: dict[str, Any] = {"avoid": avoid, "prefer": prefer} if prefer else {"avoid": avoid}
        response: HeldCall = self._generate.remote(argument, **hints)
        return response


def _size(call: GroupCall) -> int:
    """About how many bytes the call takes as a message."""
    distinct = {id(child.token_ids): child.token_ids.nbytes for child in call.children}
    keys = {id(child.page_keys): 24 * len(child.page_keys) for child in call.children}
    committed = sum(64 * len(child.committed) for child in call.children)
    sources = sum(len(child.constraint.source) for child in call.children if child.constraint is not None)
    return sum(distinct.values()) + sum(keys.values()) + committed + sources


class Cluster:
    """ClusterPort over the engine's handle and the telemetry hub. `replicas`: engines that there are to ask."""

    def __init__(self, handle: Callable[[], Any], reporter: Reporter, replicas: int = 1) -> None:
        self._handle, self._reporter, self._replicas = handle, reporter, replicas
        self._asked, self._problem = -1.0, ""
        self._asking: asyncio.Task[None] | None = None

    async def health(self) -> str | None:
        """One question at a time, its answer kept for a moment: probes never add up."""
        if time.monotonic() - self._asked > HEALTH_KEPT:
            if self._asking is None or self._asking.done():
                self._asking = detached(self._ask(), "health")
            await asyncio.shield(self._asking)
        return self._problem or None

    async def _ask(self) -> None:
        """Healthy as long as one engine is: the router's first choice, else another."""
        avoid: tuple[str, ...] = ()
        problem = ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEALTH_SECONDS):
                problem = "no engine answers"
                for _ in range(min(self._replicas, HEALTH_QUESTIONS)):
                    replica, problem = await self._one(avoid)
                    if not problem:
                        break
                    avoid = (*avoid, replica)
        self._problem, self._asked = problem, time.monotonic()

    async def _one(self, avoid: tuple[str, ...]) -> tuple[str, str]:
        handle = self._handle()
        if handle is None:
            return "", NOT_RUNNING
        response = handle.health.remote(avoid=avoid)
        try:
            replica, problem = await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except (RayError, RayServeException) as error:
            return "", f"the engine is unavailable ({type(error).__name__})"
        return replica, problem or ""

    async def snapshot(self) -> Snapshot:
        try:
            return await self._reporter.snapshot()
        except (RayError, TimeoutError) as error:
            raise Unavailable(f"the telemetry hub can't be reached ({type(error).__name__})") from None
