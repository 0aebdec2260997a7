"""The real ingress over an engine in this process, without Ray: decoders, lowering, scheduler, one rank, pipeline and
encoders.

A Site runs its application on a loop of its own thread. `post` and `stream` call it without sockets; `url` serves it
on a free port of the loopback, for SDKs and other HTTP clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import uvicorn

from engine.engine import QueueFull
from engine.inline import Inline
from engine.prepare import default_cache_dir, prepare
from engine.text.lowering import Lowering
from engine.types.events import Update
from engine.types.request import GenerationRequest, PreparedRequest
from protocols.errors import ProtocolError, SlotsExhausted, Unavailable
from serve_app.ingress.families import application
from serve_app.ingress.ports import Generation, Outcome
from serve_app.ingress.service import IngressSettings, Service
from serve_app.settings import load
from serve_app.startup import Startup
from tests.support.ingress import Call, FakeCluster, Reply

Result = TypeVar("Result")
SMALL = {"threads": 1, "max_requests": 16, "kv_bytes": 64 << 20, "context": 2048}
"""Engine settings that keep a test's server small."""


class InlineGeneration:
    """A group of the inline engine, read on an event loop."""

    def __init__(self, inline: Inline, group: str, children: int) -> None:
        self._engine, self._group = inline.engine, group
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[tuple[Update, ...]] = asyncio.Queue()
        self._live = children
        self.outcomes: tuple[Outcome, ...] | None = None

    def deliver(self, updates: list[Update]) -> None:
        """The group's sink, on the engine's thread."""
        self._loop.call_soon_threadsafe(self._news.put_nowait, tuple(updates))

    async def __aiter__(self) -> AsyncIterator[tuple[Update, ...]]:
        while self._live:
            batch = await self._news.get()
            self._live -= sum(update.end is not None for update in batch)
            yield batch

    def stop(self, child: int, tokens: int) -> None:
        self._engine.stop(self._group, child, tokens)

    def finish(self, outcomes: Sequence[Outcome]) -> None:
        assert self.outcomes is None, "finish was called twice"
        self.outcomes = tuple(outcomes)
        if self._live:
            self._engine.cancel(self._group)


class InlineEngine:
    """EnginePort over an inline engine. `generations`: every group so far, in order."""

    def __init__(self, inline: Inline) -> None:
        self._inline = inline
        self.generations: list[InlineGeneration] = []
        self.prepared: list[PreparedRequest] = []

    async def generate(
        self, request_id: str, request: PreparedRequest, after: Generation | None = None
    ) -> InlineGeneration:
        generation = InlineGeneration(self._inline, request_id, len(request.children))
        try:
            self._inline.engine.submit(request_id, request.children, generation.deliver)
        except QueueFull as full:
            raise _refusal(full) from None
        self.generations.append(generation)
        self.prepared.append(request)
        return generation


def _refusal(full: QueueFull) -> ProtocolError:
    return SlotsExhausted(full.message) if full.reason == "full" else Unavailable(full.message)


class InlinePreprocessor:
    """PreprocessorPort on one thread of this process."""

    def __init__(self, lowering: Lowering) -> None:
        self.lowering = lowering
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="lowering")

    async def prepare(self, request: GenerationRequest) -> PreparedRequest:
        return await self._run(self.lowering.prepare, request)

    async def count(self, request: GenerationRequest) -> int:
        return await self._run(self.lowering.count, request)

    async def label_ids(self, request: GenerationRequest, labels: Sequence[str]) -> tuple[int | None, ...]:
        return await self._run(self.lowering.label_ids, request, labels)

    async def _run(self, work: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)

    def close(self) -> None:
        self._pool.shutdown(wait=True)


@dataclass
class Stream:
    """An event stream. `frames`: the JSON of each data line; `done`: whether it ended with [DONE]."""

    reply: Reply
    frames: list[Any] = field(default_factory=list)
    done: bool = False

    def __post_init__(self) -> None:
        for block in self.reply.frames:
            data = "".join(line.removeprefix("data: ") for line in block.split("\n") if line.startswith("data: "))
            if data == "[DONE]":
                self.done = True
            elif data:
                self.frames.append(json.loads(data))

    def choices(self, index: int = 0) -> list[Any]:
        """The chunks of one choice."""
        return [choice for frame in self.frames for choice in frame.get("choices", ()) if choice["index"] == index]


class Site:
    """A served model. A context manager; `settings` are those of the product, dotted or flat."""

    def __init__(self, source: str, *, cache: Path | None = None, **settings: Any) -> None:
        prepared = prepare(source, cache or default_cache_dir())
        tree = load({"model": source, "engine": {**SMALL, **settings.pop("engine", {})}, **settings})
        self.startup = Startup(tree, prepared, "cpu", "inline")
        self.inline = Inline(self.startup.engine_config, model=self.startup.model)
        self.model = self.startup.model
        self.preprocessor = InlinePreprocessor(self.startup.lowering())
        self.engine = InlineEngine(self.inline)
        cluster = FakeCluster()
        cluster.answer["processes"][0]["facts"]["context"] = str(self.inline.engine.context)
        self.service = Service(
            settings=IngressSettings(
                api_key=tree.server.api_key, max_body_bytes=tree.server.max_body_bytes, under_serve=False
            ),
            facts=self.startup.facts,
            limits=self.startup.decode_limits,
            preprocessor=self.preprocessor,
            engine=self.engine,
            cluster=cluster,
            open_pipeline=self.startup.open_pipeline,
            token_bytes=self.model.tokens.bytes,
        )
        self.app = application(self.service)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="site", daemon=True)
        self._server: _Server | None = None
        self._serving: Any = None
        self._listener: socket.socket | None = None

    def __enter__(self) -> Self:
        self.inline.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._server is not None and self._listener is not None:
            self._server.should_exit = True
            self._serving.result(20)
            self._listener.close()
        self.run(self.service.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()
        self.preprocessor.close()
        self.inline.__exit__(None, None, None)

    # ---- calls without sockets ----

    def run(self, work: Coroutine[Any, Any, Result], seconds: float = 240.0) -> Result:
        """The result of `work` on the site's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)

    def send(
        self, method: str, path: str, body: Mapping[str, Any] | bytes = b"", headers: Sequence[tuple[str, str]] = ()
    ) -> Reply:
        """One request from beginning to end."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()

        async def call() -> Reply:
            return await Call(self.app, method, path, data, headers).done()

        return self.run(call())

    def together(
        self, requests: Sequence[tuple[str, Mapping[str, Any]]], headers: Sequence[tuple[str, str]] = ()
    ) -> list[Reply]:
        """The replies to posts of (path, body), in order; as many at a time as a small engine runs at once. A path may
        have a query."""

        async def one(places: asyncio.Semaphore, path: str, body: Mapping[str, Any]) -> Reply:
            path, _, query = path.partition("?")
            async with places:
                call = Call(self.app, "POST", path, json.dumps(body).encode(), headers, query=query)
                await call.task  # `run` bounds all of them together
                return call.reply

        async def all_of() -> list[Reply]:
            places = asyncio.Semaphore(SMALL["max_requests"])
            return await asyncio.gather(*(one(places, path, body) for path, body in requests))

        return self.run(all_of())

    def post(self, path: str, body: Mapping[str, Any], headers: Sequence[tuple[str, str]] = ()) -> Any:
        """The JSON of a 200."""
        reply = self.send("POST", path, body, headers)
        assert reply.status == 200, reply.body.decode()
        return reply.json

    def refused(self, path: str, body: Mapping[str, Any], status: int = 400) -> str:
        """The message of a refusal with `status`, in the Chat format."""
        reply = self.send("POST", path, body)
        assert reply.status == status, reply.body.decode()
        message: str = reply.json["error"]["message"]
        return message

    def stream(self, path: str, body: Mapping[str, Any]) -> Stream:
        """The whole event stream of a request."""
        reply = self.send("POST", path, {**body, "stream": True})
        assert reply.status == 200, reply.body.decode()
        return Stream(reply)

    def completion(self, prompt: Any, **fields: Any) -> Any:
        """POST /v1/completions."""
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    def chat(self, text: str, **fields: Any) -> Any:
        """POST /v1/chat/completions with one user message."""
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields})

    # ---- over HTTP ----

    @property
    def url(self) -> str:
        """The site on a free port of the loopback, which is opened when first asked for."""
        if self._listener is None:
            listener = socket.socket(proto=socket.IPPROTO_TCP)
            listener.bind(("127.0.0.1", 0))
            server = _Server(
                uvicorn.Config(self.app, lifespan="off", log_level="critical", timeout_graceful_shutdown=1)
            )
            self._listener, self._server = listener, server
            self._serving = asyncio.run_coroutine_threadsafe(server.serve([listener]), self._loop)
            self.run(_until_started(server))
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals stay pytest's."""
        yield


async def _until_started(server: uvicorn.Server) -> None:
    async with asyncio.timeout(20):
        while not server.started:
            await asyncio.sleep(0.005)
