"""The API document, for programs and for people. Open: it tells nothing of the model or of the settings."""

from __future__ import annotations

from serve_app import docs_page, openapi
from serve_app.ingress.http import Request, Route
from serve_app.ingress.service import Service


def routes(service: Service) -> list[Route]:
    """/openapi.json and /docs."""

    async def document(request: Request) -> None:
        await request.json(openapi.document())

    async def page(request: Request) -> None:
        await request.answer(
            200,
            docs_page.page(request.scope.get("scheme", ""), request.header(b"host") or ""),
            b"text/html; charset=utf-8",
        )

    return [
        Route("GET", "/openapi.json", document, open=True),
        Route("GET", "/docs", page, open=True),
    ]
