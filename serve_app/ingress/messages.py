"""The Messages family: generation and exact token counts."""

from __future__ import annotations

from protocols.messages.decode import check_version, decode, decode_count
from protocols.messages.encode import MessagesEncoder
from serve_app.ingress.generation import Protocol, handler, read_decoded
from serve_app.ingress.http import Request, Route, while_connected
from serve_app.ingress.service import Service


def _check(request: Request) -> None:
    check_version(request.header(b"anthropic-version"))


MESSAGES = Protocol(decode, MessagesEncoder, call_prefix="toolu_", check=_check)


def routes(service: Service) -> list[Route]:
    """/v1/messages and its token count, which takes no slot and waits its turn instead of being refused."""

    async def count_tokens(request: Request) -> None:
        _check(request)
        with service.pool.holding() as ticket:
            decoded = await read_decoded(service, request, decode_count, ticket.charge)
            async with service.pool.turn():
                count = await while_connected(request, service.preprocessor.count(decoded.request))
        await request.json({"input_tokens": count})

    return [
        Route("POST", "/v1/messages", handler(service, MESSAGES), x_api_key=True),
        Route("POST", "/v1/messages/count_tokens", count_tokens, x_api_key=True),
    ]
