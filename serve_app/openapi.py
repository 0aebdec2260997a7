"""The OpenAPI document of the server, made from the schemas that decode requests.

Owns what the document says of each route besides its schema. A test holds it to the routes of the application. It tells
of the API alone, nothing of the model or of the settings, so it is open.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from pydantic import BaseModel

from protocols.chat.schema import ChatFields
from protocols.completions.schema import CompletionFields
from protocols.decisions import DecisionFields
from protocols.errors import Family
from protocols.messages.decode import VERSIONS
from protocols.messages.schema import CreateFields, PromptFields
from protocols.responses.schema import ResponsesFields
from protocols.systemone import SystemOneFields
from serve_app.openapi_fields import described

_REFERENCE: Final = "#/components/schemas/"
_JSON: Final = "application/json"
_REASONS: Final[Mapping[int, str]] = {
    200: "Success",
    400: "Malformed, unsupported, or over the context",
    401: "Missing or invalid key",
    404: "Unknown model or route",
    405: "The route has no such method",
    408: "The request body stopped arriving",
    413: "An encoded or decoded body over max_body_bytes",
    415: "Unknown or stacked Content-Encoding",
    422: "The request does not match the schema",
    429: "Request slots exhausted; see Retry-After",
    500: "Execution or output validation failed",
    503: "Queue full, admission paused, or no runtime; see Retry-After",
}
_BODY: Final = (400, 401, 404, 405, 408, 413, 415)
_RUN: Final = (429, 500, 503)


@dataclass(frozen=True, slots=True)
class Operation:
    """One route. `request`: what decodes its body. `answer`: the name of the response's schema. `streams`: may answer
    as server-sent events. `open`: needs no key. `parameters`: OpenAPI parameter objects."""

    method: str
    path: str
    tag: str
    summary: str
    answer: str
    family: Family = "openai"
    request: type[BaseModel] | None = None
    streams: bool = False
    open: bool = False
    statuses: Sequence[int] = ()
    parameters: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    media: Sequence[str] = (_JSON,)


def _header(name: str, schema: Mapping[str, Any], about: str, *, required: bool = False) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": required, "schema": schema, "description": about}


_STRING: Final = {"type": "string"}
_VERSION: Final = _header("anthropic-version", {"enum": list(VERSIONS)}, "The API version.", required=True)
_BETA: Final = _header("anthropic-beta", _STRING, "Accepted and ignored.")
_MODEL: Final = {
    "name": "model",
    "in": "path",
    "required": True,
    "schema": _STRING,
    "description": "Checkpoint identifier or alias; slashes may stand as they are or percent-encoded.",
}
_FORMAT: Final = {
    "name": "format",
    "in": "query",
    "required": False,
    "schema": {"enum": ["json", "prometheus"]},
    "description": "Selects the view regardless of Accept.",
}
_IMAGES: Final = _header("TypeSafe-Danger-Zone-Images", _STRING, "true: needed with image assets.")


class ShowFields(BaseModel):
    """The body of POST /api/show."""

    model: str
    verbose: bool | None = None


OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation(
        "POST",
        "/v1/chat/completions",
        "Chat Completions",
        "An assistant message, whole or as chunks",
        "ChatCompletion",
        request=ChatFields,
        streams=True,
        statuses=(*_BODY, *_RUN),
    ),
    Operation(
        "POST",
        "/v1/completions",
        "Completions",
        "Continuations of raw text or token ids",
        "Completion",
        request=CompletionFields,
        streams=True,
        statuses=(*_BODY, *_RUN),
    ),
    Operation(
        "POST",
        "/v1/responses",
        "Responses",
        "Ordered output items, stateless",
        "Response",
        request=ResponsesFields,
        streams=True,
        statuses=(*_BODY, *_RUN),
    ),
    Operation(
        "POST",
        "/v1/messages",
        "Messages",
        "Content blocks, whole or as named events",
        "Message",
        family="messages",
        request=CreateFields,
        streams=True,
        statuses=(*_BODY, *_RUN),
        parameters=(_VERSION, _BETA),
    ),
    Operation(
        "POST",
        "/v1/messages/count_tokens",
        "Messages",
        "The exact prepared input token count",
        "TokenCount",
        family="messages",
        request=PromptFields,
        statuses=(*_BODY, 500, 503),
        parameters=(_VERSION, _BETA),
    ),
    Operation(
        "POST",
        "/v1/systemone",
        "Decisions",
        "Named noul, choice and score questions about a state",
        "SystemOneAnswer",
        family="systemone",
        request=SystemOneFields,
        statuses=(*_BODY, 422, *_RUN),
        parameters=(_IMAGES,),
        media=(_JSON, "multipart/form-data"),
    ),
    Operation(
        "POST",
        "/v1/decisions",
        "Decisions",
        "Ordered predicate, choice and score questions about a text",
        "DecisionsAnswer",
        request=DecisionFields,
        statuses=(*_BODY, *_RUN),
    ),
    Operation("GET", "/v1/models", "Models", "The loaded model", "ModelList", statuses=(401, 405, 503)),
    Operation(
        "GET",
        "/v1/models/{model}",
        "Models",
        "The card of the loaded model, under any of its names",
        "Model",
        statuses=(401, 404, 405, 503),
        parameters=(_MODEL,),
    ),
    Operation(
        "GET",
        "/api/tags",
        "Ollama discovery",
        "The loaded model as Ollama lists models",
        "OllamaTags",
        family="ollama",
        statuses=(401, 405),
    ),
    Operation(
        "POST",
        "/api/show",
        "Ollama discovery",
        "Capabilities and limits of the loaded model; uncompressed JSON only",
        "OllamaShow",
        family="ollama",
        request=ShowFields,
        statuses=(*_BODY, 500),
    ),
    Operation(
        "GET", "/health", "Operation", "Whether the model runtime is healthy", "Health", open=True, statuses=(503,)
    ),
    Operation(
        "GET",
        "/metrics",
        "Operation",
        "Prometheus text 0.0.4, or one JSON object",
        "Metrics",
        open=True,
        statuses=(400, 503),
        parameters=(_FORMAT,),
    ),
    Operation("GET", "/openapi.json", "Operation", "This document", "Document", open=True),
    Operation("GET", "/docs", "Operation", "This document for people", "Page", open=True),
)

_OTHER_MEDIA: Final[Mapping[str, tuple[str, ...]]] = {"Metrics": ("text/plain", _JSON), "Page": ("text/html",)}


def _object(about: str, *required: str, **properties: Any) -> dict[str, Any]:
    """An object with at least `required`; of the rest only what `properties` says."""
    known = {name: properties.get(name, {}) for name in required}
    return {"type": "object", "description": about, "required": list(required), "properties": {**known, **properties}}


_EVENT: Final = {
    "type": "object",
    "description": "One server-sent event; `data` is a JSON text, or [DONE] at the end of Chat and Completions.",
    "properties": {"event": _STRING, "data": _STRING},
}
_INTEGER: Final = {"type": "integer"}
_LIST: Final = {"type": "array", "items": {"type": "object"}}
ANSWERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "ChatCompletion": _object(
        "A Chat completion.", "id", "object", "created", "model", "choices", "usage", choices=_LIST, created=_INTEGER
    ),
    "Completion": _object(
        "A completion.", "id", "object", "created", "model", "choices", "usage", choices=_LIST, created=_INTEGER
    ),
    "Response": _object("A response.", "id", "object", "created_at", "model", "status", "output", output=_LIST),
    "Message": _object("A message.", "id", "type", "role", "model", "content", "stop_reason", "usage", content=_LIST),
    "TokenCount": _object("A token count.", "input_tokens", input_tokens=_INTEGER),
    "SystemOneAnswer": _object("Answers by question name.", "model", "answers", "usage", answers={"type": "object"}),
    "DecisionsAnswer": _object("Answers in question order.", "model", "answers", "usage", answers=_LIST),
    "ModelList": _object("One card.", "object", "data", data=_LIST),
    "Model": _object(
        "A model card.",
        "id",
        "object",
        "created",
        "owned_by",
        "root",
        "parent",
        "max_model_len",
        "permission",
        "flare",
        created=_INTEGER,
        max_model_len=_INTEGER,
        permission=_LIST,
        flare={"type": "object"},
    ),
    "OllamaTags": _object("Ollama's list.", "models", models=_LIST),
    "OllamaShow": _object("Ollama's description.", "details", "model_info", "capabilities"),
    "Health": _object("Healthy.", "status", status={"const": "ok"}),
    "Metrics": {"description": "Aggregate state.", "type": ["object", "string"]},
    "Document": {"type": "object"},
    "Page": _STRING,
}

_OPENAI_ERROR: Final = _object("An error.", "error", error=_object("", "type", "message", "param", "code"))
ERRORS: Final[Mapping[str, Mapping[str, Any]]] = {
    "Error": _OPENAI_ERROR,
    "MessagesError": _object(
        "An error.", "type", "error", type={"const": "error"}, error=_object("", "type", "message")
    ),
    "OllamaError": _object("An error.", "error", error=_STRING),
    "SchemaError": _object("Schema failures.", "detail", detail=_LIST),
}


@cache
def document() -> dict[str, Any]:
    """The whole document."""
    schemas: dict[str, Any] = {**ANSWERS, **ERRORS}
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Flare", "version": "1", "description": "One language model over six HTTP protocols."},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(operation: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {
        "operationId": f"{operation.method.lower()}{re.sub('[^a-z0-9]+', '_', operation.path).rstrip('_')}",
        "tags": [operation.tag],
        "summary": operation.summary,
        "parameters": list(operation.parameters),
        "security": _security(operation),
        "responses": {"200": _success(operation)},
    }
    if operation.request is not None:
        name = _add_schema(operation.request, operation.answer, schemas)
        content = {media: {"schema": {"$ref": _REFERENCE + name}} for media in operation.media}
        told["requestBody"] = {"required": True, "content": content}
    for status in operation.statuses:
        told["responses"][str(status)] = _failure(operation, status)
    return told


def _security(operation: Operation) -> list[dict[str, list[str]]]:
    """A server without a key takes anything, which the empty alternative says."""
    if operation.open:
        return []
    either: list[dict[str, list[str]]] = [{}, {"bearer": []}]
    return [*either, {"x-api-key": []}] if operation.family == "messages" else either


def _success(operation: Operation) -> dict[str, Any]:
    reference = {"schema": {"$ref": _REFERENCE + operation.answer}}
    content: dict[str, Any] = {media: reference for media in _OTHER_MEDIA.get(operation.answer, (_JSON,))}
    if operation.streams:
        content["text/event-stream"] = {"schema": _EVENT}
    return {"description": _REASONS[200], "content": content}


def _failure(operation: Operation, status: int) -> dict[str, Any]:
    name = "Error"
    if operation.family == "messages":
        name = "MessagesError"
    elif operation.family == "ollama" and status != 401:
        name = "OllamaError"
    elif status == 422:
        name = "SchemaError"
    return {"description": _REASONS[status], "content": {_JSON: {"schema": {"$ref": _REFERENCE + name}}}}


def _add_schema(model: type[BaseModel], answer: str, schemas: dict[str, Any]) -> str:
    """Adds the model and what it refers to, under names of their own; returns the model's."""
    prefix = f"{answer}Request"
    schema = model.model_json_schema(ref_template=f"{_REFERENCE}{prefix}{{model}}")
    for name, part in schema.pop("$defs", {}).items():
        schemas[prefix + name] = _without_titles(part)
    whole = _without_titles(schema)
    whole["properties"] = described(answer, whole["properties"], frozenset(whole.get("required", ())))
    schemas[prefix] = whole
    return prefix


def _without_titles(value: Any, *, names: bool = False) -> Any:
    """The schema without the titles that repeat field names. `names`: the keys of `value` are field names."""
    if isinstance(value, dict):
        return {
            key: _without_titles(part, names=key == "properties" and not names)
            for key, part in value.items()
            if names or key != "title"
        }
    return [_without_titles(part) for part in value] if isinstance(value, list) else value
