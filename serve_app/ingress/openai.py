"""The OpenAI family: Chat Completions, Completions and the model cards."""

from __future__ import annotations

from protocols.chat import decode as chat_decode
from protocols.chat import encode as chat_encode
from protocols.completions import decode as completions_decode
from protocols.completions import encode as completions_encode
from protocols.errors import NotFound
from serve_app import discovery
from serve_app.ingress.generation import Protocol, handler
from serve_app.ingress.http import Request, Route
from serve_app.ingress.service import Service

CHAT = Protocol(chat_decode.decode, chat_encode.ChatEncoder)
COMPLETIONS = Protocol(completions_decode.decode, completions_encode.CompletionEncoder)


def routes(service: Service) -> list[Route]:
    """Everything below /v1 that speaks OpenAI's dialect, Responses aside."""

    async def models(request: Request) -> None:
        server = await service.identity()
        await request.json(discovery.model_list(server.facts, server.instance, server.created))

    async def model(request: Request) -> None:
        if not service.facts.known_as(request.tail):
            raise NotFound(f"the model {request.tail[:200]!r} does not exist", code="model_not_found")
        server = await service.identity()
        await request.json(discovery.model_card(server.facts, server.instance, server.created))

    return [
        Route("POST", "/v1/chat/completions", handler(service, CHAT)),
        Route("POST", "/v1/completions", handler(service, COMPLETIONS)),
        Route("GET", "/v1/models", models),
        Route("GET", "/v1/models", model, prefix=True),
    ]
