"""Outlet: writes to a connected socket from any thread, at once and without waiting.

The engine's thread has a step's tokens in hand; handing them to the event loop would wake a second thread a step, which
on a small machine takes a core from the model. What the socket doesn't take now goes out from the loop, in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading


class Outlet:
    """The only writer of a connection whose reading an event loop owns. `descriptor` is duplicated, so the loop's own
    transport may close whenever it wants. Create and close it on the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, descriptor: int) -> None:
        self._loop = loop
        self._socket = socket.socket(fileno=os.dup(descriptor))
        self._socket.setblocking(False)
        self._lock = threading.Lock()
        self._rest = bytearray()
        self._open = True

    @property
    def waiting(self) -> int:
        """Bytes that the socket hasn't taken yet."""
        return len(self._rest)

    def write(self, data: bytes) -> None:
        """Any thread. Dropped once the connection has failed, which whoever reads from it is told."""
        with self._lock:
            if not self._open:
                return
            if self._rest:
                self._rest += data
                return
            sent = self._send(data)
            if sent == len(data):
                return
            self._rest += memoryview(data)[sent:]
        with contextlib.suppress(RuntimeError):  # the loop has ended: the process is going down
            self._loop.call_soon_threadsafe(self._watch)

    def close(self) -> None:
        """Closes this end's descriptor; the connection ends when the transport's is closed too."""
        with self._lock:
            self._open = False
            if self._socket.fileno() >= 0:
                self._loop.remove_writer(self._socket.fileno())
                self._socket.close()

    def _send(self, data: bytes | bytearray) -> int:
        """How many bytes the socket took; all of them when it is dead."""
        try:
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self._open = False
            return len(data)

    def _watch(self) -> None:
        with self._lock:
            if self._open:
                self._loop.add_writer(self._socket.fileno(), self._drain)

    def _drain(self) -> None:
        with self._lock:
            if self._open and self._rest:
                del self._rest[: self._send(self._rest)]
            if not self._open or not self._rest:
                self._rest.clear()
                self._loop.remove_writer(self._socket.fileno())
