"""Which Engine replica gets a request group.

The better of two random replicas, by Serve's count of their running calls; a replica that has just refused the group
is passed over while there is another, and a request that goes on stays where it is. Runs inside every caller, that is,
in the ingress processes.
"""

from __future__ import annotations

import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class EngineRouter(RequestRouter):
    """Reads the call's keywords `avoid`, unique ids of replicas that refused, and `prefer`, the one to stay with."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        hints = {} if pending_request is None else pending_request.kwargs
        return [pick(candidate_replicas, hints.get("avoid", ()), hints.get("prefer", ""))]


def pick(candidates: list[RunningReplica], avoid: tuple[str, ...], prefer: str = "") -> list[RunningReplica]:
    """`prefer` where it is a candidate, else two at random; none of `avoid` where another is left."""
    if prefer and prefer not in avoid:
        for replica in candidates:
            if replica.replica_id.unique_id == prefer:
                return [replica]
    welcome = [replica for replica in candidates if replica.replica_id.unique_id not in avoid] or candidates
    return random.sample(welcome, min(2, len(welcome)))
