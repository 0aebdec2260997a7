"""System One and Decisions: two schemas over one scorer, each request's questions one after another.

Nothing is streamed. A request never has more than one child at the engine and holds one slot from its first question
until its answer has been delivered: each question takes over the slot of the one before.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from engine.types.request import Api, PreparedRequest
from protocols import decisions, systemone
from protocols.assets import HEADER, split_parts
from protocols.errors import InvalidRequest, SlotsExhausted, Unavailable, UnsupportedEncoding
from protocols.questions import Content, DecisionScorer, Question, Read, Scored, read_one
from serve_app import body, multipart
from serve_app.ingress.generation import read_decoded
from serve_app.ingress.http import Handler, Request, Route, while_connected
from serve_app.ingress.ports import Generation, Outcome
from serve_app.ingress.service import Service

Asked = TypeVar("Asked", systemone.SystemOneRequest, decisions.DecisionRequest)


def systemone_routes(service: Service) -> list[Route]:
    """/v1/systemone."""

    async def read(request: Request, charge: Callable[[int], None]) -> systemone.SystemOneRequest:
        return await _read_systemone(service, request, charge)

    return [Route("POST", "/v1/systemone", _handler(service, "systemone", read, systemone.encode))]


def decisions_routes(service: Service) -> list[Route]:
    """/v1/decisions."""

    async def read(request: Request, charge: Callable[[int], None]) -> decisions.DecisionRequest:
        if multipart.is_multipart(request.header(b"content-type")):
            raise InvalidRequest("Content-Type: this route takes JSON only; multipart is not supported")
        return await read_decoded(service, request, decisions.decode, charge)

    return [Route("POST", "/v1/decisions", _handler(service, "decisions", read, decisions.encode))]


def _handler(
    service: Service,
    api: Api,
    read: Callable[[Request, Callable[[int], None]], Awaitable[Asked]],
    encode: Callable[[Asked, Scored, str], dict[str, Any]],
) -> Handler:
    async def handle(request: Request) -> None:
        with service.pool.place() as ticket:
            decoded = await read(request, ticket.charge)
            with _Reader(service, request.key, ticket.leave) as reader:
                await while_connected(request, answer(request, decoded, reader))

    async def answer(request: Request, decoded: Asked, reader: _Reader) -> None:
        scored = await reader.score(api, decoded.state, decoded.questions)
        extra = ((b"x-typesafe-request-id", request.id.encode("latin-1")),) if api == "systemone" else ()
        await request.json(encode(decoded, scored, service.facts.id), headers=extra)
        await request.delivered()

    return handle


async def _read_systemone(
    service: Service, request: Request, charge: Callable[[int], None]
) -> systemone.SystemOneRequest:
    """A JSON body in any encoding, or a plain multipart body. Raises ProtocolError and ClientGone."""
    settings = service.settings
    limit = settings.max_body_bytes
    encoding = body.content_encoding(request.headers)
    content_type = request.header(b"content-type") or ""
    in_parts = multipart.is_multipart(content_type)
    if in_parts and encoding != "identity":
        raise UnsupportedEncoding("Content-Encoding: multipart bodies must be sent uncompressed")
    allowed = (request.header(HEADER.lower().encode()) or "").lower() == "true"
    data = await body.read(
        request.receive, request.headers, limit=limit, idle=settings.body_idle_seconds, charge=charge
    )

    data = await service.workers.unpack(data, encoding, limit, charge)

    def decode() -> systemone.SystemOneRequest:
        text, parts = data, None
        if in_parts:
            text, parts = split_parts(multipart.parse(content_type, data))
        value = body.parse_value(text)
        return systemone.decode(value, service.limits, max_bytes=limit, images_allowed=allowed, parts=parts)

    return await service.workers.call(decode)


class _Reader:
    """Runs one request's children. Leaving the context frees the slot, and cancels the child that runs."""

    def __init__(self, service: Service, key: str, enqueued: Callable[[], None]) -> None:
        self._service = service
        self._keys = (f"{key}-{number}" for number in itertools.count())
        self._enqueued = enqueued
        self._holder: Generation | None = None
        self._outcome: Outcome = "cancelled"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release(self._outcome)

    async def score(self, api: Api, state: Content, questions: tuple[Question, ...]) -> Scored:
        return await DecisionScorer(self._service.preprocessor, self._read).score(api, state, questions)

    async def _read(self, prepared: PreparedRequest) -> Read:
        generation = await self._generate(prepared)
        self._release("completed")  # the question before; its slot is the new one's already
        self._holder, self._outcome = generation, "cancelled"
        self._enqueued()
        try:
            read = await read_one(generation)
        except asyncio.CancelledError:
            raise
        except Exception:
            self._outcome = "failed"
            raise
        self._outcome = "completed"
        return read

    async def _generate(self, prepared: PreparedRequest) -> Generation:
        try:
            return await self._service.engine.generate(next(self._keys), prepared, self._holder)
        except (SlotsExhausted, Unavailable):
            self._service.recorder.add("requests_failed_total")
            raise

    def _release(self, outcome: Outcome) -> None:
        holder, self._holder = self._holder, None
        if holder is not None:
            holder.finish((outcome,))
