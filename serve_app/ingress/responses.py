"""The Responses family."""

from __future__ import annotations

from protocols.responses.decode import decode
from protocols.responses.encode import ResponsesEncoder
from serve_app.ingress.generation import Protocol, handler
from serve_app.ingress.http import Route
from serve_app.ingress.service import Service

RESPONSES = Protocol(decode, ResponsesEncoder)


def routes(service: Service) -> list[Route]:
    """/v1/responses: stateless, so there is nothing to retrieve or delete."""
    return [Route("POST", "/v1/responses", handler(service, RESPONSES))]
