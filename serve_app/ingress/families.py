"""Which routes belong to which protocol family, and the application made of some of them.

The `full` layout gives each family an application of its own at its prefix; `compact` puts all into one. The root
application (`openai`) is also where every path without an owner gets its JSON 404.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from serve_app.ingress import admin, decisions, docs, messages, openai, responses
from serve_app.ingress.http import Ingress, Route
from serve_app.ingress.service import Service

FAMILIES: Final[dict[str, tuple[Callable[[Service], list[Route]], ...]]] = {
    "openai": (openai.routes, admin.routes, docs.routes),
    "messages": (messages.routes,),
    "responses": (responses.routes,),
    "systemone": (decisions.systemone_routes,),
    "decisions": (decisions.decisions_routes,),
}
"""Family → its routes."""
PREFIXES: Final[dict[str, str]] = {
    "openai": "/",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "systemone": "/v1/systemone",
    "decisions": "/v1/decisions",
}
"""Family → route prefix of its application in the full layout."""


def application(service: Service, families: Iterable[str] = tuple(FAMILIES)) -> Ingress:
    """The ASGI application of `families`."""
    routes = [route for family in families for make in FAMILIES[family] for route in make(service)]
    return Ingress(
        routes,
        service.keys,
        own_request_id=not service.settings.under_serve,
        on_startup=service.open,
        on_shutdown=service.close,
    )
