"""Malformed and hostile requests at a running server: undeclared answers, and memory before and after.

    python -m benchmarks.hostile [--warmup 5000] [--requests 5000] [--seed 1] [key=value ...]

Starts `python -m serve_app` as `benchmarks.serving` does, with a serving key that half of the requests don't have.
Memory is the proportional set size of every server process after the warm-up (allocators keep what their first rush
needed), after half of the requests and after all: a leak grows as much in the second half. Exit status 1 on an
undeclared status, a server that is not healthy afterwards, or growth above 5 %.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import json
import random
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from benchmarks.connections import Connection
from benchmarks.machine import describe, session
from benchmarks.serving import Server, role_of, start, stop

DECLARED = {200, 400, 401, 404, 405, 408, 413, 415, 422, 429, 431, 501}
"""What the API document has, and what the proxy in front says of requests that are no HTTP."""
GROWTH = 0.05
CLIENTS = 4
SETTLE_SECONDS = 6.0
PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
    "/v1/systemone",
    "/v1/decisions",
    "/api/show",
)
GOOD = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}).encode()
BOMB = gzip.compress(bytes(64 * 2**20))
NESTED = b'{"messages":' + b'[{"role":"user","content":' * 300 + b"1" + b"}]" * 300 + b"}"


def requests(rng: random.Random, key: str) -> Iterator[bytes]:
    """Raw requests that no honest client sends, endlessly."""
    while True:
        headers = ["Host: x", "anthropic-version: 2023-06-01"]
        headers.append(f"Authorization: Bearer {rng.choice([key, key, 'wrong', 'z' * rng.randrange(2000)])}")
        path, body = rng.choice(PATHS), GOOD
        match rng.randrange(10):
            case 0:
                body = rng.randbytes(rng.randrange(400))
            case 1:
                body = GOOD[: rng.randrange(len(GOOD))]
            case 2:
                body = BOMB
                headers.append("Content-Encoding: gzip")
            case 3:
                body = zlib.compress(GOOD)[: rng.randrange(10, 40)]
                headers.append("Content-Encoding: deflate")
            case 4:
                headers.append(f"Content-Encoding: {rng.choice(['lzma', 'gzip, gzip', '', 'br', '*'])}")
            case 5:
                body = b"[" * rng.randrange(1, 5000)
            case 6:
                headers += [f"X-Flood-{index}: {'y' * rng.randrange(40)}" for index in range(90)]
            case 7:
                path = "/" + "".join(rng.choice("abc/%2e..~") for _ in range(rng.randrange(1, 80)))
            case 8:
                body = NESTED
            case _:
                yield f"{rng.choice(['PUT', 'BREW', 'TRACE'])} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
                continue
        headers.append(f"Content-Length: {len(body)}")
        yield "\r\n".join([f"POST {path} HTTP/1.1", *headers, "", ""]).encode("latin-1") + body


async def send(port: int, raw: bytes) -> int:
    """The status of one request on a connection of its own; 0 when the server closed it without an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(raw)
        line = await asyncio.wait_for(reader.readline(), 60)
        return int(line.split()[1]) if line else 0
    except ConnectionError:
        return 0
    finally:
        writer.transport.abort()  # also in the middle of an answer


async def attack(server: Server, count: int, seed: int, key: str, seen: Counter[int]) -> None:
    """`count` requests over a few clients at once; a tenth are cut in the middle."""

    async def client(number: int) -> None:
        rng = random.Random(seed * CLIENTS + number)
        source = requests(rng, key)
        for _ in range(count // CLIENTS):
            raw = next(source)
            if rng.random() < 0.1:
                _, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.write(raw[: rng.randrange(len(raw))])
                with contextlib.suppress(ConnectionError):
                    await writer.drain()
                writer.transport.abort()
                continue
            seen[await send(server.port, raw)] += 1

    await asyncio.gather(*(client(number) for number in range(CLIENTS)))


async def memory(server: Server) -> dict[str, float]:
    """MiB by role, once everything has come to rest."""
    await asyncio.sleep(SETTLE_SECONDS)
    found: dict[str, float] = {}
    for process in session(server.mark):
        role = role_of(process.name)
        found[role] = found.get(role, 0.0) + process.pss / 2**20
    return {role: round(size, 1) for role, size in sorted(found.items())}


def growth(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Percent, of all processes together and of the ingress that grew most."""
    ingresses = [after[role] / before[role] for role in after if "ngress" in role]
    ratios = {"all": sum(after.values()) / sum(before.values()), "ingress": max(ingresses)}
    return {name: round(100 * (ratio - 1), 1) for name, ratio in ratios.items()}


async def measure(server: Server, warmup: int, count: int, seed: int, key: str) -> dict[str, Any]:
    seen: Counter[int] = Counter()
    fresh = await memory(server)
    await attack(server, warmup, seed, key, seen)
    before = await memory(server)
    await attack(server, count // 2, seed + 1, key, seen)
    halfway = await memory(server)
    await attack(server, count - count // 2, seed + 2, key, seen)
    after = await memory(server)
    probe = await Connection.open(server.port)
    await probe.get("/health")
    probe.close()
    return {
        "machine": describe(),
        "requests": count,
        "answers": {str(status): number for status, number in sorted(seen.items())},
        "undeclared": sorted(status for status in seen if status and status not in DECLARED),
        "memory_mib": {"fresh": fresh, "before": before, "halfway": halfway, "after": after},
        "growth_percent": growth(before, after),
        "second_half_growth_percent": growth(halfway, after),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warmup", type=int, default=5000)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("settings", nargs="*", help="key=value settings of the server")
    args = parser.parse_args()
    key = "benchmark-key"
    server = start([f"api_key={key}", *args.settings])
    try:
        result = asyncio.run(measure(server, args.warmup, args.requests, args.seed, key))
    finally:
        stop(server)
    print(json.dumps(result, indent=2))
    limit = 100 * GROWTH
    grew = max(result["growth_percent"].values()) > limit
    return 1 if grew or result["undeclared"] else 0


if __name__ == "__main__":
    sys.exit(main())
