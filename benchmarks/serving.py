"""The serving path: start, idle cost, memory, CPU per token through HTTP at many streams, and one stream beside the
engine alone.

    python -m benchmarks.serving [--streams 32] [--tokens 128] [--out FILE] [key=value ...]

Starts `python -m serve_app` with the given settings, drives it with raw sockets from this process and reads every
server process's CPU time from /proc. "Path" is all processes but the ranks: (busy − idle) CPU over generated tokens.
Afterwards the same engine runs inline, without Ray and HTTP, over the same prompt and seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import Process, describe, session
from cluster.rank_actors import SPINS

PROMPT = "Write a long story about a lighthouse keeper who learns to sail."
SINGLE_TOKENS = 256
"""At least so many tokens of one stream, where a token takes milliseconds."""
SINGLE_SEEDS = (99, 100, 101)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True, slots=True)
class Server:
    process: subprocess.Popen[bytes]
    url: str
    port: int
    mark: str
    ready_after: float


def start(settings: list[str], deadline: float = 180.0) -> Server:
    """Starts the server and waits until /health is ok. Raises RuntimeError when it ends or never gets ready."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that `finally` stops the server
    port, mark = free_port(), f"FLARE_BENCHMARK={uuid.uuid4().hex}"
    name, value = mark.split("=")
    env = {**os.environ, name: value, "RAY_AUTH_MODE": "disabled"}
    began = time.monotonic()
    command = [sys.executable, "-m", "serve_app", f"port={port}", *settings]
    process = subprocess.Popen(command, env=env, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    while time.monotonic() - began < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
                if answer.status == 200:
                    return Server(process, url, port, mark, time.monotonic() - began)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass
        time.sleep(0.2)
    process.kill()
    raise RuntimeError(f"not ready after {deadline:.0f} s")


def stop(server: Server) -> None:
    server.process.send_signal(signal.SIGINT)
    try:
        server.process.wait(60)
    except subprocess.TimeoutExpired:
        server.process.kill()


def request(tokens: int, seed: int) -> dict[str, Any]:
    """The body of a streamed completion of exactly `tokens` tokens."""
    return {
        "model": "m",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "seed": seed,
        "stream": True,
    }


async def stream(port: int, tokens: int, seed: int) -> tuple[float, float, list[float]]:
    """One streamed completion of exactly `tokens` tokens: (first token s, total s, arrival times of writes)."""
    body = json.dumps(request(tokens, seed)).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}"
    began = time.perf_counter()
    writer.write(head.encode() + b"\r\nConnection: close\r\n\r\n" + body)
    arrivals: list[float] = []
    data = b""
    while chunk := await reader.read(65536):
        data += chunk
        if b'"content":' in chunk or b'"reasoning"' in chunk:
            arrivals.append(time.perf_counter() - began)
    writer.close()
    if b"data: [DONE]" not in data:
        raise RuntimeError(f"incomplete stream: {data[:400]!r} … {data[-400:]!r}")
    return arrivals[0], time.perf_counter() - began, arrivals


def split(before: list[Process], after: list[Process]) -> dict[str, float]:
    """CPU seconds used between two readings, by role."""
    earlier = {process.pid: process.cpu for process in before}
    used: dict[str, float] = {}
    for process in after:
        role = role_of(process.name)
        used[role] = used.get(role, 0.0) + process.cpu - earlier.get(process.pid, 0.0)
    return used


def role_of(command: str) -> str:
    for mark, role in (
        ("Rank", "rank"),
        ("ServeReplica:", "replica"),
        ("haproxy", "haproxy"),
        ("Proxy", "proxy"),
        ("ServeController", "controller"),
        ("TelemetryHub", "hub"),
        ("raylet", "raylet"),
        ("gcs_server", "gcs"),
        ("dashboard", "dashboard"),
    ):
        if mark in command:
            if role == "replica":
                return command.split("ServeReplica:")[1].split(":")[-1].split(".")[0].split()[0]
            return role
    return "other"


async def measure(server: Server, streams: int, tokens: int, idle_seconds: float) -> dict[str, Any]:
    first, _total, _ = await stream(server.port, 16, 0)
    to_first = server.ready_after + first
    await asyncio.sleep(3)
    before = session(server.mark)
    await asyncio.sleep(idle_seconds)
    after = session(server.mark)
    idle = split(before, after)
    idle_rate = {role: seconds / idle_seconds for role, seconds in idle.items()}
    began = time.monotonic()
    done = await asyncio.gather(*(stream(server.port, tokens, seed) for seed in range(streams)))
    wall = time.monotonic() - began
    busy = split(after, session(server.mark))
    made = streams * tokens
    path = sum(seconds - idle_rate.get(role, 0.0) * wall for role, seconds in busy.items() if role != "rank")
    alone = max(tokens, SINGLE_TOKENS)
    singles = [await stream(server.port, alone, seed) for seed in SINGLE_SEEDS]
    rates = [(alone - 1) / (total - first) for first, total, _ in singles]
    return {
        "machine": describe(),
        "ready_s": round(server.ready_after, 1),
        "start_to_first_token_s": round(to_first, 1),
        "idle_cpu_percent": round(100 * sum(idle_rate.values()), 1),
        "idle_by_role_percent": {role: round(100 * rate, 1) for role, rate in sorted(idle_rate.items())},
        "memory_pss_mib": round(sum(process.pss for process in after) / 2**20),
        "streams": streams,
        "tokens_each": tokens,
        "tokens_per_second": round(made / wall, 1),
        "first_token_ms_p50": round(1000 * statistics.median(row[0] for row in done), 1),
        "path_us_per_token": round(1e6 * path / made, 1),
        "cpu_us_per_token_by_role": {role: round(1e6 * seconds / made, 1) for role, seconds in sorted(busy.items())},
        "single_stream_tokens_each": alone,
        "single_stream_tokens_per_second": round(statistics.median(rates), 1),
    }


def engine_alone(settings: list[str], tokens: int) -> float | None:
    """Tokens a second of the engine inline with one stream: what `measure` asked the server for, lowered by the same
    code. Median over the same seeds; None for several ranks, which don't run inline. Call it once the server is gone.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # as a rank does, before torch loads libgomp
    import torch

    from engine.inline import Inline
    from protocols.chat.decode import decode
    from serve_app.settings import load, parse_arguments
    from serve_app.startup import start as start_up

    startup = start_up(load(parse_arguments(settings)), hub="")
    if startup.engine_config.tensor_parallel > 1:
        return None
    if torch.cuda.is_available() and startup.settings.engine.device != "cpu":
        startup = startup.on("cuda")
    lowering = startup.lowering()
    rates = []
    with Inline(startup.engine_config, model=startup.model) as engine:
        for seed in (0, *SINGLE_SEEDS):
            body = {key: value for key, value in request(tokens, seed).items() if key != "stream"}
            prepared = lowering.prepare(decode(body, startup.decode_limits).request)
            arrivals = [time.perf_counter() for update in engine.stream(prepared.children) if update.records]
            if len(arrivals) != tokens:
                raise RuntimeError(f"the engine made {len(arrivals)} tokens of {tokens}")
            rates.append((tokens - 1) / (arrivals[-1] - arrivals[0]))
    return statistics.median(rates[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--idle", type=float, default=20.0, help="seconds of idle measurement")
    parser.add_argument("--out", type=Path)
    parser.add_argument("settings", nargs="*", help="key=value settings of the server")
    args = parser.parse_args()
    os.environ.pop("OMP_WAIT_POLICY", None)  # it would slow the ranks, and nobody serves with it
    server = start(args.settings)
    try:
        result = asyncio.run(measure(server, args.streams, args.tokens, args.idle))
    finally:
        stop(server)
    engine = engine_alone(args.settings, result["single_stream_tokens_each"])
    if engine is not None:
        result["engine_single_stream_tokens_per_second"] = round(engine, 1)
        result["single_stream_of_engine"] = round(result["single_stream_tokens_per_second"] / engine, 3)
    text = json.dumps({"settings": args.settings, **result}, indent=2)
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
