"""The shape of every generation route: read, decode, prepare, enqueue, deliver.

A family brings its decoder and its encoder; everything between is here, so that all families share one admission, one
delivery and one way to fail.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from engine.types.conversation import Conversation
from engine.types.events import EngineEnd, Update
from engine.types.request import PreparedRequest
from protocols.encoder import Encoder, ResponseContext
from protocols.errors import ProtocolError, SlotsExhausted, Unavailable
from protocols.fields import Decoded, DecodeLimits
from protocols.tools import ToolRules
from serve_app import body, delivery
from serve_app.delivery import Choice, Response
from serve_app.ingress.http import Handler, Request, while_connected
from serve_app.ingress.ports import Generation, Outcome
from serve_app.ingress.service import Service

Decode = Callable[[Mapping[str, Any], DecodeLimits], Decoded]
Result = TypeVar("Result")
MakeEncoder = Callable[[ResponseContext, Decoded], Encoder]


@dataclass(frozen=True, slots=True)
class Protocol:
    """One generation protocol. `call_prefix`: what its tool call ids begin with. `check`: looks at the headers before
    the body is read."""

    decode: Decode
    encoder: MakeEncoder
    call_prefix: str = "call_"
    check: Callable[[Request], None] | None = None


def handler(service: Service, protocol: Protocol) -> Handler:
    """The handler of a generation route."""

    async def handle(request: Request) -> None:
        if protocol.check is not None:
            protocol.check(request)
        with service.pool.place() as ticket:
            decoded = await read_decoded(service, request, protocol.decode, ticket.charge)
            work = _generate(service, protocol, request, decoded, ticket.leave)
            await while_connected(request, work)

    return handle


async def read_decoded(
    service: Service,
    request: Request,
    decode: Callable[[dict[str, Any], DecodeLimits], Result],
    charge: Callable[[int], None] | None = None,
) -> Result:
    """The request's body, bounded and decoded. Raises ProtocolError and ClientGone."""
    settings = service.settings
    encoding = body.content_encoding(request.headers)
    limit = settings.max_body_bytes
    data = await body.read(
        request.receive, request.headers, limit=limit, idle=settings.body_idle_seconds, charge=charge
    )
    text = await service.workers.unpack(data, encoding, limit, charge)
    return await service.workers.load(text, lambda value: decode(value, service.limits))


async def _generate(
    service: Service, protocol: Protocol, request: Request, decoded: Decoded, enqueued: Callable[[], None]
) -> None:
    prepared = await service.preprocessor.prepare(decoded.request)
    generation = await _enqueue(service, request, prepared)
    response: Response | None = None
    try:
        enqueued()
        response = _response(service, protocol, request, decoded, prepared, generation)
    finally:
        if response is None:
            generation.finish(tuple("failed" for _ in prepared.children))
    if decoded.request.stream:
        keepalive = service.settings.keepalive_seconds
        await delivery.stream(response, request.send_started, request.extra, keepalive, request.delivered)
    else:
        output = decoded.request.output
        large = output.logprobs is not None or output.prompt_logprobs is not None
        await _buffered(service, request, response, large=large)


async def _buffered(service: Service, request: Request, response: Response, *, large: bool) -> None:
    """Sends the whole result, or the error; an answer on its way to its reader still holds its slots. `large`: a result
    of many observations takes long to put together, which a worker does."""
    with delivery.finishing(response):
        try:
            await delivery.buffer(response)
            text = await service.workers.call(response.whole) if large else response.whole()
        except ProtocolError as error:
            await request.error(error)
            return
        await request.answer(200, text)
        await request.delivered()


async def _enqueue(service: Service, request: Request, prepared: PreparedRequest) -> Generation:
    """Submits the group whole; one that needs nothing of the model never reaches it. Raises ProtocolError."""
    children = prepared.children
    if all(child.max_tokens == 0 and child.output.prompt_logprobs is None for child in children):
        return Empty(len(children))
    try:
        return await service.engine.generate(request.key, prepared)
    except (SlotsExhausted, Unavailable):
        service.recorder.add("requests_failed_total", len(children))
        raise


def _response(
    service: Service,
    protocol: Protocol,
    request: Request,
    decoded: Decoded,
    prepared: PreparedRequest,
    generation: Generation,
) -> Response:
    asked = decoded.request
    prompts = asked.prompts
    choices = []
    for index, child in enumerate(prepared.children):
        prompt = prompts[index // asked.n]
        rules = ToolRules(prompt) if isinstance(prompt, Conversation) else None
        choices.append(Choice(service.open_pipeline(child, asked, _call_ids(protocol.call_prefix)), rules))
    firsts = prepared.children[:: asked.n]
    context = ResponseContext(
        request_id=request.key,
        model=service.facts.id,
        created=int(time.time()),
        token_bytes=service.token_bytes,
        prompt_tokens=tuple(len(child.token_ids) for child in firsts),
        prompt_ids=tuple(tuple(child.token_ids.tolist()) for child in firsts) if decoded.prompt_ids else (),
        echo_texts=prepared.echo_texts,
        image_tokens=sum(image.length for image in firsts[0].images),
        sampling=firsts[0].sampling,
    )
    seconds = service.recorder.first_response
    arrived = request.arrived
    return Response(
        generation, choices, protocol.encoder(context, decoded), lambda: seconds(time.monotonic() - arrived)
    )


def _call_ids(prefix: str) -> Callable[[], str]:
    """Ids that are unique everywhere: drawn once a choice, numbered after that."""
    drawn, numbers = uuid.uuid4().hex[:20], itertools.count()
    return lambda: f"{prefix}{drawn}{next(numbers):04x}"


class Empty:
    """The generation of a group that wants no tokens: ends at once, without the engine."""

    def __init__(self, children: int) -> None:
        self._children = children

    async def __aiter__(self) -> AsyncIterator[tuple[Update, ...]]:
        end = EngineEnd("limit")
        yield tuple(Update(child, cached_tokens=0, end=end) for child in range(self._children))

    def stop(self, child: int, tokens: int) -> None: ...

    def finish(self, outcomes: Sequence[Outcome]) -> None: ...
