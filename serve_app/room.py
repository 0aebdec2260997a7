"""Room for the graph in a Ray cluster: what it asks for, what the cluster has, and saying so while it waits.

Ray places what fits and lets the rest wait without a word, for ever where the cluster doesn't grow. A cluster of our
own that is too small is refused; one that was joined may grow, so it is only told of.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping

import ray

from serve_app.ingress.families import FAMILIES
from serve_app.settings import Settings, SettingsError, cores
from serve_app.startup import Startup

logger = logging.getLogger("ray.serve")

REPLICA_CPUS = 0.1
LOOK_SECONDS = 30.0


def preprocessors(settings: Settings) -> int:
    """Replicas of the Preprocessor; 0: ingresses lower in their own process."""
    if settings.graph.preprocessors is not None:
        return settings.graph.preprocessors
    return 0 if settings.layout == "compact" else max(1, cores() // 16)


def asked(settings: Settings, *, gpus: bool = False) -> dict[str, float]:
    """What all processes of the layout ask of Ray together. `gpus`: each rank has one."""
    graph, compact = settings.graph, settings.layout == "compact"
    ingresses = (graph.ingresses or 1) * (1 if compact else len(FAMILIES))
    replicas = graph.engines + ingresses + max(preprocessors(settings), 0 if compact else 1)
    ranks = graph.engines * settings.engine.tensor_parallel
    return {"CPU": replicas * REPLICA_CPUS + ranks * graph.rank_cpus, "GPU": float(ranks) if gpus else 0.0}


def check_room(settings: Settings) -> None:
    """Raises SettingsError when a cluster that doesn't grow lacks the CPUs for the graph."""
    wanted, has = asked(settings)["CPU"], _total()["CPU"]
    if wanted > has + 1e-6:
        raise SettingsError(
            f"graph.rank_cpus: the graph asks for {wanted:g} CPUs, but Ray has {has:g}; fewer a rank, or fewer of "
            "engine.tensor_parallel, graph.engines, graph.ingresses and graph.preprocessors"
        )


class RoomWatch:
    """Warns while a graph waits for room in a cluster that was joined: at the first look and then every LOOK_SECONDS,
    once for each change."""

    def __init__(self, startup: Startup) -> None:
        self._asked = asked(startup.settings, gpus=startup.device == "cuda")
        self._joined = startup.settings.graph.address is not None
        self._said = ""

    @property
    def lacking(self) -> bool:
        """The cluster as it is can't hold the graph, even when nothing else runs in it."""
        total = _total()
        return any(amount > total[name] + 1e-6 for name, amount in self._asked.items())

    @property
    def waiting(self) -> bool:
        """A graph that takes long to run may be waiting for room: in a cluster of our own, where nothing else runs,
        only if it is lacking; else what takes long is loading."""
        return self._joined or self.lacking

    def tell(self) -> None:
        """Logs what is asked for and what there is, unless that was the last thing said."""
        total, free = _total(), _amounts(ray.available_resources())  # type: ignore[no-untyped-call]
        there = " and ".join(f"{total[name]:g} {name}s ({free[name]:g} free)" for name in self._asked)
        wanted = " and ".join(f"{amount:g} {name}s" for name, amount in self._asked.items() if amount)
        said = f"the graph asks for {wanted}, the Ray cluster has {there}"
        if said != self._said:
            self._said = said
            logger.warning("waiting for room: %s; graph.rank_cpus sets the CPUs of a rank", said)

    def start(self) -> None:
        """Where the cluster lacks something: tells it now, and on a thread of its own until it doesn't."""
        if self.lacking:
            self.tell()
            threading.Thread(target=self._watch, name="room", daemon=True).start()

    def _watch(self) -> None:
        time.sleep(LOOK_SECONDS)
        while ray.is_initialized() and self.lacking:
            self.tell()
            time.sleep(LOOK_SECONDS)


def _total() -> dict[str, float]:
    return _amounts(ray.cluster_resources())  # type: ignore[no-untyped-call]


def _amounts(resources: Mapping[str, float]) -> dict[str, float]:
    return {name: resources.get(name, 0.0) for name in ("CPU", "GPU")}
