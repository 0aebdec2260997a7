"""The builders: one application a protocol family, one for the model, and `build` for the compact layout.

Every builder takes the same arguments (`config=flare.toml` and any `key=value`), so that one settings file gives the
same server through `serve run`, `serve deploy` and `python -m serve_app`. Owns names, routes and resources of
deployments; what they do is elsewhere.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from serve_app.engine_replica import EngineReplica
from serve_app.ingress.families import FAMILIES, PREFIXES
from serve_app.ingress_replica import IngressReplica
from serve_app.preprocessor import PreprocessorReplica
from serve_app.ray_flags import KEEP_ALIVE_SECONDS
from serve_app.room import REPLICA_CPUS, RoomWatch, preprocessors
from serve_app.settings import Settings, SettingsError, load
from serve_app.startup import ResolvedDevice, Startup, start

MODEL: Final = "engine"
ENGINE: Final = "Engine"
PREPROCESSOR: Final = "Preprocessor"
FULL_HUB: Final = "flare"
WIDE: Final = 1_000_000
"""Serve's own queues never answer first: admission is the Engine replica's."""


@dataclass(frozen=True, slots=True)
class Target:
    """One application: its name, its route prefix (None: reachable by handle alone) and what it is made of."""

    name: str
    route_prefix: str | None
    application: Application


def build(args: dict[str, Any]) -> Application:
    """The compact layout: one application, one ingress for all families, engine and preprocessor bound below it."""
    startup = _start(load(args), hub=f"flare-{secrets.token_hex(4)}")
    RoomWatch(startup).start()
    return _compact(startup)


def build_engine(args: dict[str, Any]) -> Application:
    """Preprocessor and Engine, reachable by handle alone."""
    startup = _full(args)
    RoomWatch(startup).start()
    return _model(startup)


def build_openai(args: dict[str, Any]) -> Application:
    """Chat Completions, Completions, discovery, health, metrics, and every JSON 404."""
    return _family(_full(args), ("openai",))


def build_messages(args: dict[str, Any]) -> Application:
    return _family(_full(args), ("messages",))


def build_responses(args: dict[str, Any]) -> Application:
    return _family(_full(args), ("responses",))


def build_systemone(args: dict[str, Any]) -> Application:
    return _family(_full(args), ("systemone",))


def build_decisions(args: dict[str, Any]) -> Application:
    return _family(_full(args), ("decisions",))


def targets(startup: Startup) -> list[Target]:
    """The applications of the settings' layout."""
    if startup.settings.layout == "compact":
        return [Target("flare", "/", _compact(startup))]
    families = [Target(name, PREFIXES[name], _family(startup, (name,))) for name in FAMILIES]
    return [Target(MODEL, None, _model(startup)), *families]


def serve_config(args: Mapping[str, Any]) -> dict[str, Any]:
    """The full layout as a Serve config: what `serve deploy` and KubeRay's `serveConfigV2` take. `args` go to every
    application; host and port come from the settings they give."""
    settings = load({**args, "graph.layout": "full"})
    applications = [
        {
            "name": name,
            "route_prefix": PREFIXES.get(name),
            "import_path": f"serve_app.app:build_{name}",
            "args": dict(args),
        }
        for name in (MODEL, *FAMILIES)
    ]
    http = {
        "host": settings.server.host,
        "port": settings.server.port,
        "keep_alive_timeout_s": KEEP_ALIVE_SECONDS,
    }
    return {"proxy_location": "EveryNode", "http_options": http, "applications": applications}


def cluster_device(settings: Settings) -> ResolvedDevice:
    """The device for "auto": CUDA when the Ray cluster has a GPU for every rank."""
    asked = settings.engine.device
    needed = settings.engine.tensor_parallel * settings.graph.engines
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    has = resources.get("GPU", 0.0) >= needed
    return "cuda" if has and asked != "cpu" else "cpu"


def _full(args: Mapping[str, Any]) -> Startup:
    """One application of the full layout, whatever the machine would choose."""
    return _start(load({**args, "graph.layout": "full"}))


def _start(settings: Settings, hub: str = FULL_HUB) -> Startup:
    check_address(settings)
    return start(settings, hub=hub).on(cluster_device(settings))


def _compact(startup: Startup) -> Application:
    preprocessor = _preprocessor(startup, None) if preprocessors(startup.settings) else None
    return _ingress(startup, tuple(FAMILIES), _engine(startup), preprocessor)


def _model(startup: Startup) -> Application:
    """The Preprocessor stands at the application's head: with HAProxy, Serve gives a head no router of its own choice,
    and the Engine needs one."""
    return _preprocessor(startup, _engine(startup))


def _family(startup: Startup, families: tuple[str, ...]) -> Application:
    preprocessor = (MODEL, PREPROCESSOR) if preprocessors(startup.settings) else None
    return _ingress(startup, families, (MODEL, ENGINE), preprocessor)


def _engine(startup: Startup) -> Application:
    settings = startup.settings
    graph, config = settings.graph, startup.engine_config
    rank: dict[str, float] = {"CPU": graph.rank_cpus}
    if startup.device == "cuda":
        rank["GPU"] = 1.0
    bundles = [dict(rank) for _ in range(config.tensor_parallel)]
    bundles[0]["CPU"] += REPLICA_CPUS  # the replica itself sits in bundle 0
    options: dict[str, Any] = {}
    if graph.engines > 1:
        options["request_router_config"] = RequestRouterConfig(
            request_router_class="cluster.routing:EngineRouter"  # type: ignore[arg-type] # Serve takes import paths
        )
    deployment = serve.deployment(
        name=ENGINE,
        num_replicas=graph.engines,
        max_ongoing_requests=WIDE,
        ray_actor_options={"num_cpus": REPLICA_CPUS},
        placement_group_bundles=bundles,
        placement_group_strategy="STRICT_PACK",
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_timeout_s=max(graph.drain_seconds, 0.1),
        graceful_shutdown_wait_loop_s=0.1,
        max_constructor_retry_count=1,
        user_config={"paused": graph.paused},
        **options,
    )
    return deployment(EngineReplica).bind(startup)


def _preprocessor(startup: Startup, engine: Application | None) -> Application:
    """`engine`: bound below it, so that Serve deploys it too."""
    deployment = serve.deployment(
        name=PREPROCESSOR,
        num_replicas=max(1, preprocessors(startup.settings)),
        max_ongoing_requests=WIDE,
        ray_actor_options={"num_cpus": REPLICA_CPUS},
        graceful_shutdown_wait_loop_s=0.1,
        max_constructor_retry_count=1,
    )
    return deployment(PreprocessorReplica).bind(startup, engine)


def _ingress(startup: Startup, families: tuple[str, ...], engine: Any, preprocessor: Any) -> Application:
    graph = startup.settings.graph
    name = "Ingress" if len(families) > 1 else f"{families[0].title()}Ingress"
    deployment = serve.deployment(
        name=name,
        num_replicas=graph.ingresses or 1,
        max_ongoing_requests=WIDE,
        ray_actor_options={"num_cpus": REPLICA_CPUS},
        graceful_shutdown_timeout_s=max(graph.drain_seconds, 0.1),
        graceful_shutdown_wait_loop_s=0.1,
        max_constructor_retry_count=1,
    )
    return deployment(IngressReplica).bind(startup, families, engine, preprocessor)


def check_address(settings: Settings) -> None:
    """Where Serve runs already, the HTTP address is Serve's; one of ours that disagrees must not be ignored. Raises
    SettingsError."""
    http = _serve_http()
    if http is None:
        return
    for name in settings.server.model_fields_set & {"host", "port"}:
        asked, actual = getattr(settings.server, name), getattr(http, name)
        if asked != actual:
            raise SettingsError(f"server.{name}: {asked} was asked for, but Ray Serve already listens on {actual}")


def _serve_http() -> Any:
    """The HTTP options of the Serve instance this process is a client of, None when there is none."""
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    return None if client is None else client.http_config
