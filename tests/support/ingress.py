"""An ingress without the rest of the graph: ports that a test plays by hand, and raw ways to call the application."""

from __future__ import annotations

import asyncio
import functools
import json
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec

import numpy as np

from engine.types.conversation import Conversation
from engine.types.events import (
    Cause,
    EngineEnd,
    FirstToken,
    ObservedToken,
    SemanticEvent,
    Terminated,
    TextDelta,
    TokenRecord,
    TokensObserved,
    Update,
    Usage,
)
from engine.types.request import GenerationRequest, PreparedPrompt, PreparedRequest, SamplingParams, TextPrompt
from engine.types.telemetry import Report, Snapshot
from protocols.fields import DecodeLimits
from serve_app.discovery import ModelFacts
from serve_app.ingress.families import FAMILIES, application
from serve_app.ingress.http import Ingress
from serve_app.ingress.ports import Generation, Outcome
from serve_app.ingress.service import IngressSettings, Service

FACTS = ModelFacts(identifier="org/tiny-model", context=4096, vocab_size=256, max_top_logprobs=20)
SAMPLING = SamplingParams(1.0, 1.0, -1, 0.0, 1.0, 0.0, 0.0, 1)
CHAT = {"model": "any", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}


Scenario = ParamSpec("Scenario")


def asynchronous(test: Callable[Scenario, Coroutine[Any, Any, None]]) -> Callable[Scenario, None]:
    """Runs an async test in a loop of its own."""

    @functools.wraps(test)
    def run(*args: Scenario.args, **kwargs: Scenario.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def token_bytes(id: int) -> bytes:
    return bytes([id % 256])


class Letters:
    """A pipeline over tokens that are bytes: each becomes its letter. Strings in `stops` end the text."""

    def __init__(self, prompt: PreparedPrompt, request: GenerationRequest, call_id: Callable[[], str]) -> None:
        self._prompt = len(prompt.token_ids)
        self._stops = request.stops.strings
        self._text = ""
        self._cached = 0
        self.count = 0
        self.stop_at: int | None = None

    def push(self, update: Update) -> list[SemanticEvent]:
        events: list[SemanticEvent] = []
        self._cached = update.cached_tokens or self._cached
        for record in update.records:
            self.count += 1
            if self.count == 1:
                events.append(FirstToken(self._cached))
            letter = chr(record.id)
            observed = ObservedToken(record, letter.encode(), len(self._text), "text")
            events += [TextDelta(letter), TokensObserved((observed,))]
            self._text += letter
            matched = next((stop for stop in self._stops if stop in self._text), None)
            if matched is not None:
                self.stop_at = self.count
                return [*events, Terminated("string_stop", self._usage(), stop=matched)]
        if update.end is not None:
            end = update.end
            cause: Cause = "failed" if end.cause == "cancelled" else end.cause
            events.append(Terminated(cause, self._usage(), failure=end.kind, message=end.message))
        return events

    def _usage(self) -> Usage:
        return Usage(self._prompt, self._cached, self.count)


class FakeGeneration:
    """Plays what the test says. `outcomes` is None until `finish` was called."""

    def __init__(self, request_id: str, request: PreparedRequest, after: Generation | None = None) -> None:
        self.request_id = request_id
        self.request = request
        self.after = after
        self.queue: deque[tuple[Update, ...] | Exception] = deque()
        self.stops: list[tuple[int, int]] = []
        self.outcomes: tuple[Outcome, ...] | None = None
        self.finished = asyncio.Event()
        self._news = asyncio.Event()
        self._open = set(range(len(request.children)))

    def say(self, *updates: Update) -> None:
        """One batch of updates."""
        self.queue.append(updates)
        self._news.set()

    def text(self, text: str, child: int = 0) -> None:
        self.say(Update(child, tuple(TokenRecord(ord(letter)) for letter in text)))

    def end(self, cause: Any = "eos", child: int = 0, *, kind: Any = "execution", message: str = "") -> None:
        self.say(Update(child, end=EngineEnd(cause, kind, message)))

    def lose(self, error: Exception) -> None:
        """Makes the iteration raise."""
        self.queue.append(error)
        self._news.set()

    def __aiter__(self) -> AsyncIterator[tuple[Update, ...]]:
        return self

    async def __anext__(self) -> tuple[Update, ...]:
        if not self.queue and not self._open:
            raise StopAsyncIteration
        while not self.queue:
            self._news.clear()
            await self._news.wait()
        batch = self.queue.popleft()
        if isinstance(batch, Exception):
            raise batch
        self._open -= {update.child for update in batch if update.end is not None}
        return batch

    def stop(self, child: int, tokens: int) -> None:
        self.stops.append((child, tokens))

    def finish(self, outcomes: tuple[Outcome, ...]) -> None:
        assert self.outcomes is None, "finish was called twice"
        self.outcomes = outcomes
        self.finished.set()


class FakeEngine:
    """`reply`: text that every choice gets at once, None to leave generations to the test. `refuse`: raised instead of
    an acknowledgement. `gate`: acknowledgements wait for it."""

    def __init__(self, reply: str | None = "ok") -> None:
        self.reply = reply
        self.refuse: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.generations: list[FakeGeneration] = []
        self.cancelled = 0
        self._arrivals: asyncio.Queue[FakeGeneration] = asyncio.Queue()

    async def generate(
        self, request_id: str, request: PreparedRequest, after: Generation | None = None
    ) -> FakeGeneration:
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.refuse is not None:
            raise self.refuse
        generation = FakeGeneration(request_id, request, after)
        self.generations.append(generation)
        self._arrivals.put_nowait(generation)
        wanted = request.children[0].output.logprob_token_ids
        if self.reply is not None and wanted:
            generation.say(Update(0, (scores(wanted),), cached_tokens=1))
            generation.end("limit")
        elif self.reply is not None:
            for child in range(len(request.children)):
                generation.text(self.reply, child)
                generation.end("eos", child)
        return generation

    def forget(self) -> None:
        """Drops what was noted of past generations."""
        self.generations.clear()
        self._arrivals = asyncio.Queue()

    async def arrival(self) -> FakeGeneration:
        """The next generation that was enqueued."""
        return await asyncio.wait_for(self._arrivals.get(), 10)


def scores(ids: Sequence[int]) -> TokenRecord:
    """A token with log probabilities of `ids`: 1/2, 1/4, 1/8 and so on."""
    alternatives = tuple((id, -math.log(2) * (place + 1)) for place, id in enumerate(ids))
    return TokenRecord(*alternatives[0], alternatives)


class FakePreprocessor:
    """A token a letter. `gate`: lowering waits for it."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.requests: list[GenerationRequest] = []
        self.cancelled = 0
        self.fail: Exception | None = None

    async def prepare(self, request: GenerationRequest) -> PreparedRequest:
        self.requests.append(request)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.fail is not None:
            raise self.fail
        limit = 4096 if request.max_tokens is None else request.max_tokens
        children = []
        for prompt in request.prompts:
            ids = np.frombuffer(_prompt_text(prompt).encode(), np.uint8).astype(np.int32)
            child = PreparedPrompt(ids, SAMPLING, limit, eos_ids=(0,), output=request.output)
            children += [replace(child) for _ in range(request.n)]
        return PreparedRequest(tuple(children))

    async def count(self, request: GenerationRequest) -> int:
        self.requests.append(request)
        await self.gate.wait()
        return len(_prompt_text(request.prompts[0]))

    async def label_ids(self, request: GenerationRequest, labels: Sequence[str]) -> tuple[int | None, ...]:
        """Tokens are bytes: a label of one ASCII character is its own."""
        return tuple(ord(label) if len(label) == 1 else None for label in labels)


def _prompt_text(prompt: object) -> str:
    if isinstance(prompt, TextPrompt):
        return prompt.text
    if isinstance(prompt, Conversation):
        return "".join(getattr(part, "text", "") for message in prompt.messages for part in message.parts)
    return "?"


class FakeCluster:
    def __init__(self) -> None:
        self.problem: str | None = None
        engine: Report = {
            "process": "engine-0",
            "kind": "engine",
            "totals": {},
            "gauges": {},
            "samples": [],
            "truncated": False,
            "facts": {"device": "cpu", "attention": "cpu", "numerics": "invariant", "dtype": "quantised"},
        }
        self.answer: Snapshot = {"instance": "i0", "created": 1_700_000_000, "totals": {}, "processes": [engine]}
        self.down: Exception | None = None

    async def health(self) -> str | None:
        return self.problem

    async def snapshot(self) -> Snapshot:
        if self.down is not None:
            raise self.down
        return self.answer


@dataclass
class World:
    """An application with everything around it."""

    settings: IngressSettings = field(default_factory=lambda: IngressSettings(under_serve=False))
    facts: ModelFacts = FACTS
    families: Iterable[str] = tuple(FAMILIES)
    limits: DecodeLimits = field(default_factory=lambda: DecodeLimits(vocab_size=256, vision=True))
    engine: FakeEngine = field(default_factory=FakeEngine)
    preprocessor: FakePreprocessor = field(default_factory=FakePreprocessor)
    cluster: FakeCluster = field(default_factory=FakeCluster)

    def __post_init__(self) -> None:
        self.service = Service(
            settings=self.settings,
            facts=self.facts,
            limits=self.limits,
            preprocessor=self.preprocessor,
            engine=self.engine,
            cluster=self.cluster,
            open_pipeline=Letters,
            token_bytes=token_bytes,
        )
        self.app: Ingress = application(self.service, self.families)


@dataclass
class Reply:
    """What the application sent: `messages` are the ASGI messages."""

    messages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def status(self) -> int:
        status: int = self.messages[0]["status"]
        return status

    @property
    def headers(self) -> list[tuple[str, str]]:
        return [(name.decode(), value.decode("latin-1")) for name, value in self.messages[0]["headers"]]

    def header(self, name: str) -> str | None:
        values = [value for key, value in self.headers if key == name]
        assert len(values) < 2, f"{name} was sent {len(values)} times"
        return values[0] if values else None

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def frames(self) -> list[str]:
        """The blocks of an event stream, comments included."""
        text = self.body.decode()
        assert text.endswith("\n\n")
        return text.split("\n\n")[:-1]


class Call:
    """One request in progress. Body parts not given at once are fed with `send`; `leave` disconnects the client."""

    def __init__(
        self,
        app: Ingress,
        method: str,
        path: str,
        body: bytes | Sequence[bytes] | dict[str, Any] | None = b"",
        headers: Sequence[tuple[str, str]] = (),
        *,
        query: str = "",
        scope: dict[str, Any] | None = None,
        slow: asyncio.Event | None = None,
    ) -> None:
        if isinstance(body, dict):
            body = json.dumps(body).encode()
        self._parts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        if body is not None:
            parts = [body] if isinstance(body, bytes) else list(body)
            for index, part in enumerate(parts):
                self.send(part, more=index + 1 < len(parts))
        self.reply = Reply()
        self._slow = slow
        self._started = asyncio.Event()
        self._progress = asyncio.Condition()
        raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
        request = {"type": "http", "method": method, "path": path, "headers": raw, "query_string": query.encode()}
        self.task = asyncio.ensure_future(app({**request, **(scope or {})}, self._receive, self._send))

    def send(self, part: bytes, *, more: bool = True) -> None:
        self._parts.put_nowait({"type": "http.request", "body": part, "more_body": more})

    def leave(self) -> None:
        self._parts.put_nowait({"type": "http.disconnect"})

    async def _receive(self) -> dict[str, Any]:
        return await self._parts.get()

    async def _send(self, message: dict[str, Any]) -> None:
        self.reply.messages.append(message)
        async with self._progress:
            self._progress.notify_all()
        if self._slow is not None and message["type"] == "http.response.body":
            await self._slow.wait()
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.leave()  # as ASGI has it: after a complete response there is nothing but this to receive

    async def until(self, condition: Callable[[Reply], bool]) -> Reply:
        """Waits for what has been sent to satisfy `condition`."""
        async with asyncio.timeout(10), self._progress:
            await self._progress.wait_for(lambda: condition(self.reply))
        return self.reply

    async def done(self) -> Reply:
        await asyncio.wait_for(self.task, 20)
        return self.reply


async def call(
    app: Ingress,
    method: str,
    path: str,
    body: bytes | Sequence[bytes] | dict[str, Any] | None = b"",
    headers: Sequence[tuple[str, str]] = (),
    *,
    query: str = "",
) -> Reply:
    """One request from beginning to end."""
    return await Call(app, method, path, body, headers, query=query).done()
