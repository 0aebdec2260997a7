"""The ingress deployment: an ASGI application of some protocol families, wired to the rest of the graph.

Owns the wiring of one ingress process and its end. What the routes do is in `serve_app.ingress`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import ray
from ray import serve

from cluster.priority import prompt_process
from cluster.telemetry_hub import Reporter
from serve_app.engine_client import EngineClient
from serve_app.handles import Cluster, EngineCaller, RemoteHandle
from serve_app.ingress.families import application
from serve_app.ingress.http import Ingress
from serve_app.ingress.ports import PreprocessorPort
from serve_app.ingress.service import IngressSettings, Service
from serve_app.preprocessor import LocalPreprocessor, RemotePreprocessor
from serve_app.ray_metrics import Mirror
from serve_app.startup import Startup
from serve_app.telemetry import Recorder


@serve.ingress()
class IngressReplica:
    """`engine` and `preprocessor`: a bound handle, or (application, deployment) to ask Serve for. Without a
    `preprocessor`, requests are lowered here."""

    async def __init__(self, startup: Startup, families: tuple[str, ...], engine: Any, preprocessor: Any) -> None:  # type: ignore[misc] # Serve awaits it
        prompt_process()
        graph = startup.settings.graph
        engine_handle = _handle(engine)
        self._client = EngineClient(
            EngineCaller(engine_handle),
            digest=startup.digest,
            node=ray.get_runtime_context().get_node_id(),
            host=ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
            beat=graph.heartbeat_seconds,
            resubmit_patience=graph.resubmit_seconds,
            replicas=graph.engines,
        )
        await self._client.start()
        self._lowering: LocalPreprocessor | None = None
        port: PreprocessorPort
        if preprocessor is None:
            lowering = await asyncio.to_thread(startup.lowering, warm=True)
            port = self._lowering = LocalPreprocessor(lowering, graph.workers)
        else:
            port = RemotePreprocessor(_handle(preprocessor))
        recorder = Recorder("ingress")
        self._reporter = Reporter(startup.hub, Mirror(recorder.report))
        model = startup.model
        self._service = Service(
            settings=_settings(startup),
            facts=startup.facts,
            limits=startup.decode_limits,
            preprocessor=port,
            engine=self._client,
            cluster=Cluster(engine_handle, self._reporter, graph.engines),
            open_pipeline=startup.open_pipeline,
            token_bytes=model.tokens.bytes,
            recorder=recorder,
        )
        recorder.gauges = lambda: {
            "http_requests_entering": self._service.pool.requests,
            "http_body_bytes": self._service.pool.held_bytes,
        }
        self._families = families

    def __serve_build_asgi_app__(self) -> Ingress:
        return application(self._service, self._families)

    async def __del__(self) -> None:
        """After the drain, and after the application's own shutdown."""
        if hasattr(self, "_service"):
            self._reporter.close()
            await self._client.close()
            if self._lowering is not None:
                self._lowering.close()


def _handle(source: Any) -> Callable[[], Any]:
    return RemoteHandle(*source) if isinstance(source, tuple) else lambda: source


def _settings(startup: Startup) -> IngressSettings:
    server = startup.settings.server
    return IngressSettings(
        api_key=server.api_key,
        max_body_bytes=server.max_body_bytes,
        keepalive_seconds=server.keepalive_seconds,
        request_pool=server.request_pool,
        workers=startup.settings.graph.workers,
    )
