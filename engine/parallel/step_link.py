"""The step link: framed sockets (unix or TCP) between the scheduler and its ranks.

Owns both ends: `StepListener` and `LinkedRanks` in the scheduler's process, `SocketLink` in a rank's. A frame is four
bytes of length (little-endian) and one message of `engine.parallel.step_codec`. The scheduler's end never blocks on a
write without reading, so a large step and a large result can't wait for each other. A closed socket means death, of
either side. Only rank 0 answers steps; the others only tell that they are ready or why they failed.
"""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import shutil
import socket
import struct
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import msgpack

from engine.parallel.ranks import RankGroupFailed
from engine.parallel.step_codec import Message, decode, encode
from engine.scheduler.step import LateInputs, RankReport, Step, StepResult

FRAME_LIMIT = 1 << 30
_HEADER = struct.Struct("<I")
_BUFFER = 4 << 20
_FAILURE = b"\xff"
_READY = b"\xfe"


class LinkClosed(ConnectionError):
    """The other end is gone."""


class _Frames:
    """Bytes in, whole frames out."""

    def __init__(self, limit: int = FRAME_LIMIT) -> None:
        self._data = bytearray()
        self._limit = limit

    def feed(self, data: bytes) -> None:
        self._data += data

    def next(self) -> bytes | None:
        data = self._data
        if len(data) < 4:
            return None
        (size,) = _HEADER.unpack_from(data)
        if size > self._limit:
            raise LinkClosed(f"a frame of {size} bytes exceeds the limit of {self._limit}")
        if len(data) < 4 + size:
            return None
        frame = bytes(data[4 : 4 + size])
        del data[: 4 + size]
        return frame


def _frame(payload: bytes) -> bytes:
    return _HEADER.pack(len(payload)) + payload


def _tune(sock: socket.socket) -> None:
    """No Nagle delay, and buffers that take a whole step or result without a wait."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER)


class SocketLink:
    """A rank's end. Blocking; one thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._frames = _Frames()

    def report(self, report: RankReport) -> None:
        """Tells that the rank is loaded. Rank 0's report is the group's."""
        self._write(encode(report))

    def receive(self) -> Step | LateInputs | None:
        """The next message, in the order in which the scheduler sent them; blocks. None: the scheduler is gone, or
        wants no more."""
        while True:
            frame = self._frames.next()
            if frame is not None:
                message = decode(frame)
                if not isinstance(message, Step | LateInputs):
                    raise LinkClosed(f"unexpected {type(message).__name__} from the scheduler")
                return message
            try:
                data = self._socket.recv(1 << 18)
            except (ConnectionError, OSError):
                return None
            if not data:
                return None
            self._frames.feed(data)

    def send(self, result: StepResult) -> None:
        """Answers a step (rank 0 only). Raises LinkClosed when the scheduler is gone."""
        self._write(encode(result))

    def fail(self, message: str) -> None:
        """Tells why this rank can't go on. The scheduler rebuilds the group."""
        self._write(_FAILURE + message.encode())

    def close(self) -> None:
        self._socket.close()

    def _write(self, payload: bytes) -> None:
        try:
            self._socket.sendall(_frame(payload))
        except OSError as error:
            raise LinkClosed("the scheduler closed the step link") from error


def dial(addresses: Sequence[str], rank: int, key: bytes, timeout: float = 30.0) -> SocketLink:
    """Connects a rank to its scheduler: `addresses` ("unix:/path", "tcp:host:port") and `key` are the listener's.
    The first address that answers is taken, so a unix path of another machine is skipped. Raises LinkClosed."""
    errors = []
    for address in addresses:
        kind, _, rest = address.partition(":")
        sock = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
        try:
            sock.settimeout(timeout)
            if kind == "unix":
                sock.connect(rest)
            else:
                host, _, port = rest.rpartition(":")
                sock.connect((host, int(port)))
            _tune(sock)
            sock.sendall(_frame(msgpack.packb([rank, key])))
            sock.settimeout(None)
        except OSError as error:
            sock.close()
            errors.append(f"{address}: {error}")
            continue
        return SocketLink(sock)
    raise LinkClosed("no scheduler at " + "; ".join(errors))


class StepListener:
    """Where ranks dial in. `addresses` and `key` go to every rank; `accept` gives the group once all have come."""

    def __init__(self, size: int, host: str = "127.0.0.1") -> None:
        self.size = size
        self.key = secrets.token_bytes(16)
        self._directory = Path(tempfile.mkdtemp(prefix="flare-steps-"))
        path = self._directory / "link"
        self._unix = socket.socket(socket.AF_UNIX)
        self._unix.bind(str(path))
        os.chmod(path, 0o600)
        self._tcp = socket.create_server((host, 0))
        self._unix.listen(size)
        self.addresses = [f"unix:{path}", f"tcp:{host}:{self._tcp.getsockname()[1]}"]

    def __enter__(self) -> StepListener:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def accept(self, timeout: float, died: Callable[[], str] = str) -> LinkedRanks:
        """Waits until every rank has dialled in. `died` is asked several times a second why a rank can't come, ""
        while all may. Raises RankGroupFailed naming the missing ranks."""
        deadline = time.monotonic() + timeout
        found: dict[int, socket.socket] = {}
        with selectors.DefaultSelector() as selector:
            for server in (self._unix, self._tcp):
                selector.register(server, selectors.EVENT_READ)
            while len(found) < self.size:
                left = deadline - time.monotonic()
                ready = selector.select(min(max(left, 0.0), 0.2))
                reason = died()
                if reason or (not ready and left <= 0):
                    for sock in found.values():
                        sock.close()
                    missing = sorted(set(range(self.size)) - set(found))
                    raise RankGroupFailed(reason or f"ranks {missing} did not connect within {timeout:g} s")
                for key, _ in ready:
                    server_socket = key.fileobj
                    assert isinstance(server_socket, socket.socket)
                    sock, _ = server_socket.accept()
                    rank = self._hello(sock, min(max(left, 0.1), 5.0))
                    if rank is None or rank in found:
                        sock.close()
                    else:
                        found[rank] = sock
        return LinkedRanks([found[rank] for rank in range(self.size)])

    def _hello(self, sock: socket.socket, timeout: float) -> int | None:
        """The rank that a new connection claims, or None when it doesn't know the key."""
        sock.settimeout(timeout)
        frames = _Frames(limit=64)
        try:
            while (frame := frames.next()) is None:
                data = sock.recv(68)
                if not data:
                    return None
                frames.feed(data)
            rank, key = msgpack.unpackb(frame)
        except (OSError, ValueError, TypeError, LinkClosed, msgpack.UnpackException):
            return None
        if not isinstance(rank, int) or not isinstance(key, bytes) or not hmac.compare_digest(key, self.key):
            return None
        return rank if 0 <= rank < self.size else None

    def close(self) -> None:
        """Stops listening. Accepted groups stay connected."""
        self._unix.close()
        self._tcp.close()
        shutil.rmtree(self._directory, ignore_errors=True)


class _Peer:
    """One rank as the scheduler sees it: a non-blocking socket and what was read from it."""

    def __init__(self, rank: int, sock: socket.socket) -> None:
        self.rank = rank
        self.socket = sock
        self.inbox: deque[Message] = deque()
        self.reported = False
        self._frames = _Frames()
        _tune(sock)
        sock.setblocking(False)

    def read(self) -> None:
        """Takes what has arrived. Raises RankGroupFailed at the end of the stream or a rank's own failure."""
        try:
            data = self.socket.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError as error:
            raise RankGroupFailed(f"rank {self.rank}: {error}") from error
        if not data:
            raise RankGroupFailed(f"rank {self.rank} closed its step link")
        self._frames.feed(data)
        try:
            while (frame := self._frames.next()) is not None:
                if frame[:1] == _FAILURE:
                    raise RankGroupFailed(f"rank {self.rank}: {frame[1:].decode(errors='replace')}")
                self.inbox.append(decode(frame))
        except (ValueError, LinkClosed) as error:
            raise RankGroupFailed(f"rank {self.rank}: {error}") from error


class LinkedRanks:
    """A RankGroup over step links. `wait_ready` must succeed before the first step. For one thread.

    `send` raises RankGroupFailed when a rank takes nothing for `send_timeout` seconds.
    """

    def __init__(self, sockets: Sequence[socket.socket], send_timeout: float = 30.0) -> None:
        self._peers = [_Peer(rank, sock) for rank, sock in enumerate(sockets)]
        self._timeout = send_timeout
        self._report: RankReport | None = None
        self._selector = selectors.DefaultSelector()
        for peer in self._peers:
            self._selector.register(peer.socket, selectors.EVENT_READ, peer)

    @property
    def report(self) -> RankReport:
        if self._report is None:
            raise RankGroupFailed("the ranks have not reported yet")
        return self._report

    def wait_ready(self, timeout: float) -> RankReport:
        """Blocks until every rank has reported. Raises RankGroupFailed, also at the deadline."""
        deadline = time.monotonic() + timeout
        waiting = set(range(len(self._peers)))
        while waiting:
            for peer in self._peers:
                if peer.rank in waiting and peer.inbox:
                    report = peer.inbox.popleft()
                    if not isinstance(report, RankReport):
                        raise RankGroupFailed(f"rank {peer.rank} answered before it reported")
                    waiting.discard(peer.rank)
                    if peer.rank == 0:
                        self._report = report
            if waiting and not self._wait(deadline - time.monotonic()):
                raise RankGroupFailed(f"ranks {sorted(waiting)} were not ready within {timeout:g} s")
        return self.report

    def send(self, step: Step) -> None:
        self._broadcast(encode(step))

    def send_late(self, late: LateInputs) -> None:
        self._broadcast(encode(late))

    def receive(self, timeout: float) -> StepResult:
        """The oldest unread result. Raises RankGroupFailed, or TimeoutError after `timeout` seconds."""
        first = self._peers[0]
        deadline = time.monotonic() + timeout
        while not first.inbox:
            if not self._wait(deadline - time.monotonic()):
                raise TimeoutError(f"no step result within {timeout:g} s")
        result = first.inbox.popleft()
        if not isinstance(result, StepResult):
            raise RankGroupFailed(f"rank 0 sent {type(result).__name__} instead of a result")
        return result

    def check(self) -> None:
        """Raises RankGroupFailed when a rank has closed its link."""
        self._wait(0.0)

    def close(self) -> None:
        """Closes the links; the ranks end at the end of their stream."""
        self._selector.close()
        for peer in self._peers:
            peer.socket.close()

    def _wait(self, timeout: float) -> bool:
        """Reads from every link that has something. False when nothing came in time."""
        ready = self._selector.select(max(timeout, 0.0))
        for key, _ in ready:
            key.data.read()
        return bool(ready)

    def _broadcast(self, payload: bytes) -> None:
        frame = _frame(payload)
        for peer in self._peers:
            self._write(peer, frame)

    def _write(self, peer: _Peer, frame: bytes) -> None:
        """Writes a frame, reading meanwhile whatever the ranks have to say, so that both sides make progress."""
        rest = memoryview(frame)
        deadline = time.monotonic() + self._timeout
        while len(rest):
            try:
                rest = rest[peer.socket.send(rest) :]
                continue
            except BlockingIOError:
                pass
            except OSError as error:
                raise RankGroupFailed(f"rank {peer.rank}: {error}") from error
            left = deadline - time.monotonic()
            if left <= 0:
                raise RankGroupFailed(f"rank {peer.rank} took no step for {self._timeout:g} s")
            self._selector.modify(peer.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, peer)
            try:
                for key, events in self._selector.select(left):
                    if events & selectors.EVENT_READ:
                        key.data.read()
            finally:
                self._selector.modify(peer.socket, selectors.EVENT_READ, peer)
