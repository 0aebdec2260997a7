"""Routes for operators and discovery: health, metrics, Ollama's listing. None of them takes a generation slot."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs

from protocols.errors import InvalidRequest, NotFound, Unavailable, UnsupportedEncoding
from serve_app import body, discovery, telemetry
from serve_app.ingress.http import Request, Route
from serve_app.ingress.service import Service


def routes(service: Service) -> list[Route]:
    """Health, metrics and Ollama discovery."""

    async def health(request: Request) -> None:
        problem = await service.cluster.health()
        if problem is not None:
            raise Unavailable(problem)
        await request.json({"status": "ok"})

    async def metrics(request: Request) -> None:
        query = parse_qs(request.scope["query_string"].decode("latin-1"), keep_blank_values=True)
        json = telemetry.wants_json(query.get("format", [None])[-1], request.header(b"accept"))
        view = telemetry.View(await service.cluster.snapshot())
        if json:
            await request.json(view.json())
        else:
            await request.answer(200, view.text(), telemetry.TEXT_TYPE)

    async def tags(request: Request) -> None:
        await request.json(discovery.ollama_tags((await service.identity()).facts))

    async def show(request: Request) -> None:
        name = _wanted(await _plain_object(service, request))
        if not service.facts.known_as(name):
            raise NotFound(f"model {name[:200]!r} not found", code="model_not_found")
        await request.json(discovery.ollama_show((await service.identity()).facts))

    return [
        Route("GET", "/health", health, open=True),
        Route("GET", "/metrics", metrics, open=True),
        Route("GET", "/api/tags", tags),
        Route("POST", "/api/show", show),
    ]


async def _plain_object(service: Service, request: Request) -> dict[str, Any]:
    """An uncompressed JSON object. Raises ProtocolError and ClientGone."""
    if body.content_encoding(request.headers) != "identity":
        raise UnsupportedEncoding("Content-Encoding: this route takes uncompressed JSON only")
    settings = service.settings
    limit = settings.max_body_bytes
    with service.pool.holding() as ticket:
        data = await body.read(
            request.receive, request.headers, limit=limit, idle=settings.body_idle_seconds, charge=ticket.charge
        )
        return await service.workers.load(data, lambda value: value)


def _wanted(value: dict[str, Any]) -> str:
    """The model name of an /api/show body. `name` is Ollama's older spelling of the field."""
    name = value.get("model", value.get("name"))
    if not isinstance(name, str) or not name:
        raise InvalidRequest("model: must be a nonempty string", field="model")
    if not isinstance(value.get("verbose", False), bool | None):
        raise InvalidRequest("verbose: must be true or false", field="verbose")
    return name
