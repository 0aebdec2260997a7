"""Delivery of one response: updates in, bytes out, streamed or buffered.

Both deliveries run the same Response, so they can't disagree. Encoding never waits for the reader: frames pile up
here while a reader pauses (bounded by what the request may generate), and text stops are noticed meanwhile. Whoever
calls `stream` or `buffer` cancels the call when the client disconnects.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol

from engine.types.events import ReasoningDelta, SemanticEvent, Terminated, TextDelta, Update
from protocols.accumulator import failure
from protocols.encoder import Encoder
from protocols.errors import ExecutionFailed, ProtocolError
from protocols.exact_json import dumps
from serve_app.ingress.ports import Generation, Outcome

logger = logging.getLogger("ray.serve")

KEEPALIVE: Final = b": keep-alive\n\n"
STREAM_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
PIECE_BYTES: Final = 64 * 1024
"""A server waits for a slow reader in front of a write, not behind it: large bodies go out in pieces, so that what is
not yet read is still waited for, and counts, up to the last piece."""
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Pipeline(Protocol):
    """engine.text.output.OutputPipeline, as far as delivery knows it."""

    @property
    def stop_at(self) -> int | None: ...

    def push(self, update: Update) -> list[SemanticEvent]: ...


class Rules(Protocol):
    """protocols.tools.ToolRules, as far as delivery knows it."""

    def apply(self, events: Sequence[SemanticEvent]) -> list[SemanticEvent]: ...


class Choice:
    """One choice on its way through pipeline and rules."""

    __slots__ = ("end", "pipeline", "rules", "stopped")

    def __init__(self, pipeline: Pipeline, rules: Rules | None) -> None:
        self.pipeline = pipeline
        self.rules = rules
        self.stopped = False
        self.end: Terminated | None = None

    def outcome(self) -> Outcome:
        """What came of it, for the counts: a choice that ended well stays completed when its reader leaves."""
        if self.end is None:
            return "cancelled"
        return "failed" if self.end.cause == "failed" else "completed"


class Response:
    """One response being produced. `frames`: encoded and not yet taken. `error`: why it failed, if it did.
    `on_text` is called once, when the first answer or reasoning text is offered."""

    def __init__(
        self,
        generation: Generation,
        choices: Sequence[Choice],
        encoder: Encoder,
        on_text: Callable[[], None] | None = None,
    ) -> None:
        self.generation = generation
        self.choices = choices
        self.encoder = encoder
        self.frames: list[bytes] = []
        self.error: ProtocolError | None = None
        self._on_text = on_text
        self._open = len(choices)

    @property
    def done(self) -> bool:
        """Every choice has ended, or one has failed: a failed choice fails its response."""
        return self._open == 0 or self.error is not None

    async def run(self, wake: Callable[[], None] | None = None) -> None:
        """Consumes the generation until the response is done. Failures end up in `error`, never as an exception.
        `wake` is called when there are new frames."""
        try:
            async for updates in self.generation:
                for update in updates:
                    self._take(update)
                    if self.error is not None:
                        return
                if wake is not None and self.frames:
                    wake()
                if self._open == 0:
                    return
        except ProtocolError as error:
            self.error = error
        except Exception:
            logger.exception("delivery failed")
            self.error = ExecutionFailed("internal error while producing the response")
        else:
            self.error = ExecutionFailed("generation ended without a result")

    def last_frames(self) -> list[bytes]:
        """What ends the stream."""
        if self.error is None:
            try:
                return self.encoder.finish()
            except Exception:
                logger.exception("the last frames can't be encoded")
                self.error = ExecutionFailed("internal error while producing the response")
        return self.encoder.fail(self.error)

    def whole(self) -> bytes:
        """The buffered answer's JSON. Raises ProtocolError."""
        return dumps(self.encoder.result())

    def outcomes(self) -> tuple[Outcome, ...]:
        """Per choice; those that a failure took down with it failed too."""
        if self.error is None:
            return tuple(choice.outcome() for choice in self.choices)
        return tuple("failed" if choice.end is None else choice.outcome() for choice in self.choices)

    def _take(self, update: Update) -> None:
        choice = self.choices[update.child]
        if choice.end is not None:
            return
        events = choice.pipeline.push(update)
        if events and choice.rules is not None:
            events = choice.rules.apply(events)
        if events:
            if self._on_text is not None and any(isinstance(event, TextDelta | ReasoningDelta) for event in events):
                self._on_text()
                self._on_text = None
            self.frames += self.encoder.feed(update.child, events)
            last = events[-1]
            if isinstance(last, Terminated):
                choice.end = last
                self._open -= 1
                if last.cause == "failed":
                    self.error = failure(last)
        if not choice.stopped and choice.pipeline.stop_at is not None:
            choice.stopped = True
            self.generation.stop(update.child, choice.pipeline.stop_at)


class _Finish:
    """Calls `generation.finish` exactly once."""

    def __init__(self, response: Response) -> None:
        self._response = response

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None:
        self._response.generation.finish(self._response.outcomes())


async def buffer(response: Response) -> None:
    """Waits for the whole response. Raises ProtocolError when a choice failed. The caller finishes the generation after
    delivery, with `finishing`."""
    await response.run()
    if response.error is not None:
        raise response.error


def finishing(response: Response) -> contextlib.AbstractContextManager[None]:
    """Finishes the generation when the context ends, whatever happened inside."""
    return _Finish(response)


async def stream(
    response: Response,
    send: Send,
    headers: Sequence[tuple[bytes, bytes]],
    keepalive: float,
    delivered: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Sends status 200, headers and every frame, waits for `delivered`, then finishes the generation. `keepalive`:
    seconds of silence after which a comment is sent."""
    with finishing(response):
        await send({"type": "http.response.start", "status": 200, "headers": [*STREAM_HEADERS, *headers]})
        await _Stream(response, send, keepalive).run()
        if delivered is not None:
            await delivered()


async def send_body(send: Send, body: bytes, *, more: bool) -> None:
    """Sends `body`, in pieces when it is large. `more`: further writes follow."""
    at = 0
    while len(body) - at > PIECE_BYTES:
        await send({"type": "http.response.body", "body": body[at : at + PIECE_BYTES], "more_body": True})
        at += PIECE_BYTES
    await send({"type": "http.response.body", "body": body[at:] if at else body, "more_body": more})


class _Stream:
    """The sending half: takes whatever frames there are, so that a burst becomes one write and a lone token goes out at
    once."""

    def __init__(self, response: Response, send: Send, keepalive: float) -> None:
        self._response = response
        self._send = send
        self._keepalive = keepalive
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._written = self._loop.time()

    async def run(self) -> None:
        producer = self._loop.create_task(self._response.run(self._wake))
        producer.add_done_callback(lambda _: self._wake())
        self._timer = self._loop.call_later(self._keepalive, self._tick)
        try:
            while not producer.done():
                if self._response.frames:
                    await self._flush(more=True)
                else:
                    self._waiter = self._loop.create_future()
                    await self._waiter
                    self._waiter = None
            self._response.frames += self._response.last_frames()
            await self._flush(more=False)
        finally:
            self._timer.cancel()
            if not producer.done():
                producer.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await producer

    async def _flush(self, *, more: bool) -> None:
        frames = self._response.frames
        body = frames[0] if len(frames) == 1 else b"".join(frames)
        frames.clear()
        self._written = float("inf")
        await send_body(self._send, body, more=more)
        self._written = self._loop.time()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _tick(self) -> None:
        """Silence is counted from the last write; while a write waits for its reader there is nothing to keep alive."""
        silent = self._loop.time() - self._written
        due = self._keepalive - silent
        if due <= 0 and not self._response.frames:
            self._response.frames.append(KEEPALIVE)
            self._wake()
        self._timer = self._loop.call_later(due if 0 < due < self._keepalive else self._keepalive, self._tick)
