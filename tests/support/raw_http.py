"""Raw sockets to a server, for readers that leave early, stall or watch bytes arrive."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from typing import Any


class RawRequest:
    """One POST over a socket of its own, sent when constructed. `received` holds every byte read so far."""

    def __init__(
        self, port: int, path: str, body: dict[str, Any], timeout: float = 60.0, receive_buffer: int = 0
    ) -> None:
        self.socket = socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(timeout)
        self.socket.connect(("127.0.0.1", port))
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        self.received = b""
        self.socket.sendall(head.encode() + data)

    def read_until(self, mark: bytes) -> bytes:
        """Reads until `mark` has arrived. Raises AssertionError when the server closes before that."""
        while mark not in self.received:
            data = self.socket.recv(65536)
            assert data, f"the server closed: {self.received[-2000:]!r}"
            self.received += data
        return self.received

    def read_all(self) -> bytes:
        """Everything until the server closes."""
        parts = [self.received]
        while data := self.socket.recv(1 << 20):
            parts.append(data)
        self.socket.close()
        self.received = b"".join(parts)
        return self.received

    def close(self, *, reset: bool = False) -> None:
        """Leaves; with `reset`, by a TCP reset."""
        if reset:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with contextlib.suppress(OSError):
            self.socket.close()


def chat(text: str, **fields: Any) -> dict[str, Any]:
    """A Chat Completions body with one user message."""
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


def sse_events(data: bytes) -> list[dict[str, Any]]:
    """The JSON of every `data:` line of a response, `[DONE]` left out. Chunked framing lines are skipped."""
    lines = [line.strip() for line in data.split(b"\n")]
    payloads = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]
    return [json.loads(payload) for payload in payloads if payload != b"[DONE]"]


def streamed_text(data: bytes) -> str:
    """The concatenated content deltas of a Chat stream's only choice."""
    deltas = [choice["delta"] for event in sse_events(data) for choice in event.get("choices", ())]
    return "".join(delta.get("content") or "" for delta in deltas)


def answered(answer: dict[str, Any]) -> str:
    """The text of a buffered Chat answer."""
    assert "choices" in answer, answer
    text: str = answer["choices"][0]["message"]["content"]
    return text
