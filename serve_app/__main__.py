"""`python -m serve_app [--api-key-file FILE] [--print-config] [key=value ...]`: starts Ray, Serve and the graph, and
runs until SIGINT or SIGTERM.

Owns the life of a server on one machine: clear refusals before anything is started, the ready line, the end. Settings
are `flare.toml` (with `config=FILE`) and `key=value` words; see `serve_app.settings`.
"""

from __future__ import annotations

import argparse
import errno
import json
import logging
import re
import shutil
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from cluster.priority import patient
from serve_app.ray_flags import KEEP_ALIVE_SECONDS, set_flags
from serve_app.settings import Settings, SettingsError, load, parse_arguments
from serve_app.supervision import supervised

if TYPE_CHECKING:
    from serve_app.app import Target
    from serve_app.room import RoomWatch
    from serve_app.startup import Startup

READY_SECONDS = 120.0
FAILED, REFUSED = 1, 2


class StartFailed(Exception):
    """The graph didn't come up; one line for the operator."""


def main(words: Sequence[str] | None = None) -> int:
    """Exit status: 0 after a signal, 2 for a setting that can't be used, 1 when the graph fails."""
    began = time.monotonic()
    options = _options(words)
    try:
        arguments = parse_arguments(options.settings)
        settings = load(arguments, api_key_file=options.api_key_file)
        if options.print_config:
            _print_config(arguments)
            return 0
        if settings.graph.address is None:
            check_port(settings.server.host, settings.server.port)
    except SettingsError as error:
        print(f"flare: {error}", file=sys.stderr)
        return REFUSED
    return supervised(lambda: _run(settings, began))


def _run(settings: Settings, began: float) -> int:
    try:
        return _serve(settings, began)
    except SettingsError as error:
        print(f"flare: {error}", file=sys.stderr)
        return REFUSED
    except StartFailed as error:
        print(f"flare: {error}", file=sys.stderr)
        return FAILED


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m serve_app", description="Serve one language model on Ray.")
    parser.add_argument("--api-key-file", type=Path, help="file with the serving key; overrides [server] api_key")
    parser.add_argument("--print-config", action="store_true", help="print the full layout's Serve config and end")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings, e.g. config=flare.toml port=8001")
    return parser.parse_args(words)


def _print_config(arguments: dict[str, str]) -> None:
    import yaml

    from serve_app.app import serve_config

    print(yaml.safe_dump(serve_config(arguments), sort_keys=False), end="")


def check_port(host: str, port: int) -> None:
    """Raises SettingsError unless this machine can listen on the address."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        key = "server.port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "server.host"
        raise SettingsError(f"{key}: can't listen on {host}:{port}: {error.strerror}") from None


def _serve(settings: Settings, began: float) -> int:
    stop = threading.Event()
    _stop_on_signals(stop)
    from serve_app.startup import start

    startup = start(settings, hub="flare")  # the model is checked before anything of Ray runs
    if stop.is_set():
        return 0
    deployed: list[str] = []
    directory = set_flags(settings) if settings.graph.address is None else None  # before anything imports ray
    patient()  # and so is what Ray starts; whoever serves requests takes it back
    try:
        startup = _start_ray(startup)
        _stop_on_signals(stop)  # ray.init put a handler of its own for SIGTERM
        _deploy(startup, stop, deployed)
        if not stop.is_set():
            url = _wait_until_ready(settings, stop)
            seconds = time.monotonic() - began
            print(f"Flare serves {startup.facts.id} at {url} ({settings.layout}, ready in {seconds:.1f} s)", flush=True)
        stop.wait()
        return 0
    finally:
        _shut_down(deployed)
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)


def _stop_on_signals(stop: threading.Event) -> None:
    """The first signal asks for an orderly end, the second one ends at once."""

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise SystemExit(128 + number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)


def _start_ray(startup: Startup) -> Startup:
    """Starts or joins the cluster, and settles the device now that its GPUs are known."""
    import ray

    from serve_app.app import cluster_device
    from serve_app.room import check_room

    graph = startup.settings.graph
    common: dict[str, Any] = {"namespace": "flare", "logging_level": logging.WARNING, "log_to_driver": False}
    if graph.address is not None:
        ray.init(address=graph.address, **common)
    else:
        ray.init(
            address="local",
            include_dashboard=graph.dashboard,
            object_store_memory=graph.object_store_bytes,
            **common,
        )
        check_room(startup.settings)
    return startup.on(cluster_device(startup.settings))


def _deploy(startup: Startup, stop: threading.Event, deployed: list[str]) -> None:
    """Deploys every application, noting its name in `deployed`, and waits until they run. Raises StartFailed with the
    first failure's own words."""
    from ray import serve

    from serve_app.app import check_address, targets
    from serve_app.room import RoomWatch

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    server = startup.settings.server
    http = {"host": server.host, "port": server.port, "keep_alive_timeout_s": KEEP_ALIVE_SECONDS}
    serve.start(http_options=http, proxy_location="HeadOnly")
    check_address(startup.settings)
    wanted = targets(startup)
    deployed += [target.name for target in wanted]
    serve.run_many(
        [serve.RunTarget(target.application, target.name, target.route_prefix) for target in wanted],
        wait_for_applications_running=False,
    )
    _wait_until_running(wanted, stop, RoomWatch(startup))


def _wait_until_running(wanted: list[Target], stop: threading.Event, room: RoomWatch) -> None:
    """Tells now and then what the graph waits for; at once where it can't ever have that."""
    from ray import serve

    from serve_app.room import LOOK_SECONDS

    look = time.monotonic() + (0.0 if room.lacking else LOOK_SECONDS)
    while not stop.is_set():
        if time.monotonic() >= look:
            if room.waiting:
                room.tell()
            look += LOOK_SECONDS
        status = serve.status().applications
        states = [status[target.name] for target in wanted if target.name in status]
        for state in states:
            if state.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                details = [state.message, *(deployment.message for deployment in state.deployments.values())]
                raise StartFailed(cause(max(details, key=len)))
        if len(states) == len(wanted) and all(state.status == "RUNNING" for state in states):
            return
        stop.wait(0.2)


def cause(message: str) -> str:
    """The error itself out of Serve's account, which is a remote traceback with words around it."""
    found = re.findall(r"^\s*(?:[\w.]+\.)?(\w*(?:Error|Failed|Exception)\w*): (.+)$", message, re.MULTILINE)
    named = [text for kind, text in found if kind not in ("RayTaskError", "RuntimeError")]
    rest = [text for _, text in found] or message.strip().splitlines() or ["the graph failed to start"]
    return str((named or rest)[-1]).strip()


def _wait_until_ready(settings: Settings, stop: threading.Event) -> str:
    """The server's URL once it is healthy through the proxy, and an engine has told what model cards say of it."""
    server = settings.server
    host = "127.0.0.1" if server.host in ("0.0.0.0", "::", "localhost") else server.host
    url = f"http://{host}:{server.port}"
    deadline = time.monotonic() + READY_SECONDS
    problem = "no answer"
    while not stop.is_set():
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                problem = "no engine has reported"
            with urllib.request.urlopen(f"{url}/metrics?format=json", timeout=2) as answer:
                if json.load(answer)["engine_replicas"]:
                    return url
        except urllib.error.HTTPError as error:
            problem = f"{error.code} {error.read(500).decode(errors='replace')}"
        except OSError as error:
            problem = str(error)
        if time.monotonic() > deadline:
            raise StartFailed(f"{url} is not healthy after {READY_SECONDS:.0f} s: {problem}")
        stop.wait(0.1)
    return url


def _shut_down(names: list[str]) -> None:
    """Drains and deletes the applications; a cluster of our own goes with them, another's stays."""
    import ray

    if not ray.is_initialized():
        return
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    if client is not None:
        client.delete_apps(names)
    ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
