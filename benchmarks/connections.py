"""Many clients at once: idle keep-alive connections, concurrent streams, and how fast discovery and health answer.

    python -m benchmarks.connections [--idle 1000] [--streams 256] [--tokens 64] [--out FILE] [key=value ...]

Starts `python -m serve_app` as `benchmarks.serving` does, opens the idle connections, starts all streams together and
asks for /health, /v1/models and /api/tags meanwhile. Afterwards every idle connection must still answer. Exit status 1
when anything failed. The server gets 300 HTTP slots unless told otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import describe, session
from benchmarks.serving import Server, start, stop, stream

PROBED = ("/health", "/v1/models", "/api/tags")
PROBE_PAUSE = 0.1
DEFAULTS = ("max_http_requests=300",)


class Connection:
    """One keep-alive connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> Connection:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def get(self, path: str) -> float:
        """Seconds until the whole answer. Raises OSError, EOFError and ValueError (another status than 200)."""
        began = time.perf_counter()
        self._writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        if not head.startswith(b"http/1.1 200"):
            raise ValueError(head.split(b"\r\n")[0].decode())
        length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
        await self._reader.readexactly(length)
        return time.perf_counter() - began

    def close(self) -> None:
        self._writer.close()


async def probe(port: int, path: str, found: list[float], errors: list[str]) -> None:
    """Asks until cancelled."""
    connection = await Connection.open(port)
    try:
        while True:
            try:
                found.append(await connection.get(path))
            except (OSError, EOFError, ValueError) as error:
                errors.append(f"{path}: {error}")
                connection.close()
                connection = await Connection.open(port)
            await asyncio.sleep(PROBE_PAUSE)
    finally:
        connection.close()


async def measure(server: Server, idle: int, streams: int, tokens: int) -> dict[str, Any]:
    errors: list[str] = []
    connections = [await Connection.open(server.port) for _ in range(idle)]
    for connection in connections:
        await connection.get("/health")
    latencies: dict[str, list[float]] = {path: [] for path in PROBED}
    quiet: list[float] = []
    for _ in range(50):
        quiet.append(await connections[0].get("/health"))
    probes = [asyncio.create_task(probe(server.port, path, latencies[path], errors)) for path in PROBED]
    began = time.monotonic()
    work = (stream(server.port, tokens, seed) for seed in range(streams))
    done = await asyncio.gather(*work, return_exceptions=True)
    wall = time.monotonic() - began
    for task in probes:
        task.cancel()
    await asyncio.wait(probes)
    errors += [f"stream: {result}" for result in done if isinstance(result, BaseException)]
    for connection in connections:
        try:
            await connection.get("/health")
        except (OSError, EOFError, ValueError) as error:
            errors.append(f"idle connection: {type(error).__name__} {error}")
        connection.close()
    return {
        "machine": describe(),
        "idle_connections": idle,
        "streams": streams,
        "tokens_each": tokens,
        "seconds": round(wall, 1),
        "tokens_per_second": round(streams * tokens / wall, 1),
        "health_ms_before": percentiles(quiet),
        **{f"{path}_ms": percentiles(found) for path, found in latencies.items()},
        "memory_pss_mib": round(sum(process.pss for process in session(server.mark)) / 2**20),
        "errors": len(errors),
        "first_errors": errors[:5],
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Milliseconds, and how many there were."""
    cuts = statistics.quantiles(seconds, n=100) if len(seconds) > 1 else [0.0] * 99
    return {
        "count": len(seconds),
        "p50": round(1000 * cuts[49], 1),
        "p95": round(1000 * cuts[94], 1),
        "p99": round(1000 * cuts[98], 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idle", type=int, default=1000, help="idle keep-alive connections")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64, help="of each stream")
    parser.add_argument("--out", type=Path)
    parser.add_argument("settings", nargs="*", help="key=value settings of the server")
    args = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the server inherits it
    settings = [*DEFAULTS, *args.settings]
    server = start(settings)
    try:
        result = asyncio.run(measure(server, args.idle, args.streams, args.tokens))
    finally:
        stop(server)
    text = json.dumps({"settings": settings, **result}, indent=2)
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")
    return 1 if result["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
