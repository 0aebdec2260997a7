"""The official SDKs over a transport that answers every request with given bytes, and an SSE reader of our own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import anthropic
import httpx2
import openai

BASE_URL = "http://127.0.0.1:1"


def _transport(body: bytes, content_type: str) -> httpx2.MockTransport:
    return httpx2.MockTransport(lambda _: httpx2.Response(200, headers={"content-type": content_type}, content=body))


def anthropic_client(frames: Sequence[bytes]) -> anthropic.Anthropic:
    client = httpx2.Client(transport=_transport(b"".join(frames), "text/event-stream"))
    return anthropic.Anthropic(api_key="key", base_url=BASE_URL, http_client=client, max_retries=0)


def openai_client(frames: Sequence[bytes]) -> openai.OpenAI:
    client = httpx2.Client(transport=_transport(b"".join(frames), "text/event-stream"))
    return openai.OpenAI(api_key="key", base_url=f"{BASE_URL}/v1", http_client=client, max_retries=0)


def events(frames: Sequence[bytes]) -> list[tuple[str | None, Any]]:
    """(event name, JSON data) of each frame; asserts the form of server-sent events."""
    found: list[tuple[str | None, Any]] = []
    stream = b"".join(frames)
    assert not stream or stream.endswith(b"\n\n")
    for frame in stream.split(b"\n\n")[:-1]:
        lines = frame.decode().split("\n")
        name = lines.pop(0).removeprefix("event: ") if lines[0].startswith("event: ") else None
        assert len(lines) == 1 and lines[0].startswith("data: ")
        found.append((name, json.loads(lines[0].removeprefix("data: "))))
    return found
