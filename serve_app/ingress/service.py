"""What an ingress process is made of: its ports, its model, its settings, and the bounded places it shares.

Built once by `serve_app.app`; the routes of every family close over it.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from engine.types.request import GenerationRequest, PreparedPrompt
from protocols.errors import Unavailable
from protocols.fields import DecodeLimits
from serve_app.admission import IngressPool, KeyCheck
from serve_app.body import Workers
from serve_app.delivery import Pipeline
from serve_app.discovery import ModelFacts
from serve_app.ingress.ports import ClusterPort, EnginePort, PreprocessorPort
from serve_app.telemetry import Recorder


@dataclass(frozen=True, slots=True)
class Identity:
    """What the server is, the same in every ingress: its id, its creation (Unix seconds), its model as it is served."""

    instance: str
    created: int
    facts: ModelFacts


OpenPipeline = Callable[[PreparedPrompt, GenerationRequest, Callable[[], str]], Pipeline]
"""Makes the output pipeline of one choice; the last argument draws call ids."""


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """The part of the settings that an ingress needs. `under_serve`: Ray Serve adds the x-request-id header.
    `body_idle_seconds`: how long an upload may stand still. `pool_bytes`: bodies held at the same time, in bytes."""

    api_key: str = field(default="", repr=False)
    max_body_bytes: int = 32 * 2**20
    keepalive_seconds: float = 15.0
    body_idle_seconds: float = 30.0
    request_pool: int = 256
    pool_bytes: int = 512 * 2**20
    workers: int = 2
    under_serve: bool = True


class Service:
    """Everything the routes of one ingress process share."""

    def __init__(
        self,
        *,
        settings: IngressSettings,
        facts: ModelFacts,
        limits: DecodeLimits,
        preprocessor: PreprocessorPort,
        engine: EnginePort,
        cluster: ClusterPort,
        open_pipeline: OpenPipeline,
        token_bytes: Callable[[int], bytes],
        recorder: Recorder | None = None,
    ) -> None:
        self.settings = settings
        self.facts = facts
        self.limits = limits
        self.preprocessor = preprocessor
        self.engine = engine
        self.cluster = cluster
        self.open_pipeline = open_pipeline
        self.token_bytes: Any = token_bytes
        self.recorder = recorder or Recorder("ingress")
        self.keys = KeyCheck(settings.api_key)
        refused = partial(self.recorder.add, "requests_failed_total")  # by admission, as those that find no slot
        self.pool = IngressPool(settings.request_pool, settings.pool_bytes, refused)
        self.workers = Workers(settings.workers)
        self._identity: Identity | None = None
        self._asking: asyncio.Task[None] | None = None

    async def identity(self) -> Identity:
        """Asked once, when an engine has told what it runs with; from then on it stays. Raises Unavailable."""
        if self._identity is None:
            snapshot = await self.cluster.snapshot()
            reports = (report for report in snapshot["processes"] if report["kind"] == "engine")
            engines = [report["facts"] for report in sorted(reports, key=lambda report: report["process"])]
            if not engines:
                raise Unavailable("the model is not running yet")
            self._identity = Identity(snapshot["instance"], snapshot["created"], self.facts.in_force(engines))
        return self._identity

    def open(self) -> None:
        """Asks for the server's identity ahead, so that discovery answers from memory. In a context of its own: a task
        of Serve's would end with the request that began it."""
        self._asking = asyncio.get_running_loop().create_task(self._ask(), context=contextvars.Context())

    async def _ask(self) -> None:
        while self._identity is None:
            try:
                await self.identity()
            except Unavailable:
                await asyncio.sleep(0.5)

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        self.workers.close()
