"""The Engine deployment: the scheduler's process, its rank group, its groups and its account of itself.

Imports no torch. Owns the life of one engine replica: start, pause, health, telemetry, end. Leaves scheduling to
`engine.engine`, groups and their channel to `groups`, ranks to `cluster.rank_actors`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve

from cluster.priority import prompt_process
from cluster.rank_actors import RankActors, RankPlacement
from cluster.telemetry_hub import Reporter
from engine.engine import Engine
from engine.scheduler.guide import ModelGuides
from engine.types.telemetry import Report
from serve_app.groups import GroupCall, Groups, Reply
from serve_app.ray_metrics import Mirror
from serve_app.startup import Startup

logger = logging.getLogger("ray.serve")


class EngineReplica:
    """One model copy. Stays healthy for Serve while its ranks are rebuilt, for at most `graph.rebuild_seconds`."""

    async def __init__(self, startup: Startup) -> None:  # type: ignore[misc] # Serve awaits it
        prompt_process()
        graph, server = startup.settings.graph, startup.settings.server
        self._groups: Groups
        self._rebuild_seconds = graph.rebuild_seconds
        config, model = startup.engine_config, startup.model
        placement = RankPlacement(
            ray.util.get_current_placement_group(),
            tuple(range(config.tensor_parallel)),
            cpus=graph.rank_cpus,
            gpus=1.0 if startup.device == "cuda" else 0.0,
        )
        began = time.monotonic()
        guides = ModelGuides(model)
        guides.warm()  # while the ranks load
        # Loading takes seconds to minutes; in single-loop mode this loop also answers Serve.
        self._engine = await asyncio.to_thread(
            Engine,
            config,
            model,
            lambda: RankActors(config, model.manifest, placement),
            on_step=lambda news, expected: self._groups.on_step(news, expected),
            open_guide=guides,
        )
        self._replica = _replica_name()
        self._groups = Groups(
            self._engine,
            slots=server.max_http_requests,
            digest=startup.digest,
            replica=self._replica,
            node=ray.get_runtime_context().get_node_id(),
            beat=graph.heartbeat_seconds,
            pace=server.pace_seconds,
        )
        self.reconfigure({"paused": graph.paused})
        self._engine.start()
        self._process = f"engine-{secrets.token_hex(8)}"
        self._reporter = Reporter(startup.hub, Mirror(self._report))
        logger.info("engine %s is ready after %.1f s: %s", self._replica, time.monotonic() - began, self._facts())

    async def generate(self, call: Any, avoid: tuple[str, ...] = (), prefer: str = "") -> Reply:
        """Holds a group's call until its generation ends. A call too large for a message comes as `[reference]`.
        `avoid` and `prefer` are read by the router alone."""
        if isinstance(call, list):
            call = await call[0]
        assert isinstance(call, GroupCall)
        return await self._groups.generate(call)

    async def health(self, avoid: tuple[str, ...] = ()) -> tuple[str, str | None]:
        """(this replica, what is wrong with it). `avoid` is read by the router alone."""
        return self._replica, self._problem()

    def _problem(self) -> str | None:
        """None while steps can run, else why not. Judged by the age of the last committed step."""
        health = self._engine.health()
        if health.state == "rebuilding":
            return f"the model is being reloaded for {health.rebuilding_for:.0f} s: {health.message}"
        if health.state != "running":
            return f"the model is {health.state}: {health.message}"
        if health.step_age > self._engine.config.step_timeout:
            return f"the model has made no step for {health.step_age:.0f} s"
        return None

    def check_health(self) -> None:
        """Serve's own probe: a replica that rebuilds its ranks in time is left alone, since it loses no stream."""
        health = self._engine.health()
        if health.state == "down":
            raise RuntimeError(f"the engine is down: {health.message}")
        if health.rebuilding_for > self._rebuild_seconds:
            raise RuntimeError(f"the engine did not recover within {self._rebuild_seconds:.0f} s: {health.message}")

    def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Applies a `user_config`: `paused` stops admission while what runs goes on; with `fail_waiting`, what waits
        for its first slot fails as unavailable. Raises ValueError for another key."""
        unknown = set(user_config) - {"paused", "fail_waiting"}
        if unknown:
            raise ValueError(f"user_config of the engine: unknown key {sorted(unknown)[0]!r}")
        if user_config.get("paused", False):
            self._engine.pause(fail_waiting=bool(user_config.get("fail_waiting", False)))
        else:
            self._engine.resume()
        self._groups.paused = self._engine.paused

    def _facts(self) -> dict[str, str]:
        report = self._engine.report
        return {
            "device": report.device,
            "attention": report.attention,
            "numerics": report.numerics,
            "dtype": report.dtype,
            "kernels": report.kernels,
            "context": str(self._engine.context),
        }

    def _report(self) -> Report:
        stats, groups = self._engine.stats(), self._groups
        return {
            "process": self._process,
            "kind": "engine",
            "totals": {
                "prefill_tokens_total": stats.prefill_tokens,
                "generated_tokens_total": stats.generated_tokens,
                "speculative_rounds_total": stats.verify_steps,
                "verification_draft_tokens_total": stats.verification_drafts,
                "verification_request_rounds_total": stats.verification_rounds,
                "cache_reused_tokens_total": stats.reused_tokens,
                "reasoning_budget_cuts_total": stats.reasoning_budget_cuts,
                "engine_steps_total": stats.steps,
                "engine_rebuilds_total": stats.rebuilds,
                "preempted_requests_total": stats.preemptions,
                "requests_completed_total": groups.completed,
                "requests_failed_total": groups.failed,
            },
            "gauges": {
                "active_requests": stats.active,
                "pending_requests": stats.pending,
                "cached_kv_pages": stats.cached_pages,
                "free_kv_pages": stats.free_pages,
                "total_kv_pages": stats.total_pages,
                "kv_page_tokens": stats.page_tokens,
                "decode_weight_bytes": stats.decode_weight_bytes,
                "http_slots_in_use": groups.held,
                "http_slots": groups.slots,
                "http_admission_paused": int(groups.paused),
            },
            "samples": [],
            "truncated": False,
            "facts": self._facts(),
        }

    async def __del__(self) -> None:
        """Runs after Serve has drained the replica: peers see their links end, ranks go with the engine."""
        if hasattr(self, "_reporter"):
            self._reporter.close()
            self._groups.close()
        if hasattr(self, "_engine"):
            await asyncio.to_thread(self._engine.close)


def _replica_name() -> str:
    """The id under which Serve's routers know this replica."""
    return serve.get_replica_context().replica_id.unique_id
