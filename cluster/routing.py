"""Which Engine replica gets a request group.

The better of two random replicas, by Serve's count of their running calls; a replica that has just refused the group
is passed over while there is another. Runs inside every caller, that is, in the ingress processes.
"""

from __future__ import annotations

import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class EngineRouter(RequestRouter):
    """Reads the call's `avoid` keyword: unique ids of replicas that refused."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        avoid = () if pending_request is None else pending_request.kwargs.get("avoid", ())
        return [pick(candidate_replicas, avoid)]


def pick(candidates: list[RunningReplica], avoid: tuple[str, ...]) -> list[RunningReplica]:
    """Two candidates at random, none of `avoid` where another is left."""
    welcome = [replica for replica in candidates if replica.replica_id.unique_id not in avoid] or candidates
    return random.sample(welcome, min(2, len(welcome)))
