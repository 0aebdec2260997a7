"""Every error a client can see, as a tree, and each family's body for it.

ProtocolError
├── InvalidRequest        400  invalid_request_error
│   ├── ContextExceeded   400  code context_length_exceeded
│   └── ThreadUnsupported 400  Messages: details.error_code thread_unsupported_request
├── Unauthorized          401  authentication_error
├── NotFound              404  invalid_request_error (OpenAI), not_found_error (Messages)
├── MethodNotAllowed      405
├── RequestTimeout        408
├── BodyTooLarge          413  request_too_large
├── UnsupportedEncoding   415
├── SchemaInvalid         422  System One's detail list
├── SlotsExhausted        429  rate_limit_error, Retry-After
├── ExecutionFailed       500  server_error / api_error
│   └── OutputInvalid     500
└── Unavailable           503  server_error / api_error, Retry-After
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from engine.types.request import RequestError

Family = Literal["openai", "messages", "systemone", "ollama"]


class ProtocolError(Exception):
    """`field` names the request field at fault, when there is one; it is part of the message already."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: str | None = None
    retry_after: int | None = None

    def __init__(self, message: str, *, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        if code is not None:
            self.code = code


class InvalidRequest(ProtocolError):
    status = 400
    type = "invalid_request_error"


class ContextExceeded(InvalidRequest):
    code = "context_length_exceeded"


class ThreadUnsupported(InvalidRequest):
    """A Messages request asks for history that the server holds. The Anthropic SDK finds the code in `details` and then
    sends the whole conversation."""

    code = "thread_unsupported_request"


class Unauthorized(ProtocolError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class NotFound(ProtocolError):
    status = 404
    type = "invalid_request_error"


class MethodNotAllowed(ProtocolError):
    """`allowed`: the methods that the route has."""

    status = 405
    type = "invalid_request_error"

    def __init__(self, message: str, *, allowed: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.allowed = tuple(allowed)


class RequestTimeout(ProtocolError):
    status = 408
    type = "invalid_request_error"


class BodyTooLarge(ProtocolError):
    status = 413
    type = "request_too_large"


class UnsupportedEncoding(ProtocolError):
    status = 415
    type = "invalid_request_error"


class SchemaInvalid(ProtocolError):
    """System One's schema failures: `detail` entries with loc, msg, type, input."""

    status = 422
    type = "invalid_request_error"

    def __init__(self, detail: Sequence[dict[str, Any]]) -> None:
        super().__init__("the request does not match the schema")
        self.detail = list(detail)


class SlotsExhausted(ProtocolError):
    status = 429
    type = "rate_limit_error"
    retry_after = 1


class ExecutionFailed(ProtocolError):
    status = 500


class OutputInvalid(ExecutionFailed):
    pass


class Unavailable(ProtocolError):
    status = 503
    retry_after = 2


def from_request_error(error: RequestError) -> InvalidRequest:
    """A 400 found after decoding (lowering, tokenizing, admission limits)."""
    kind = ContextExceeded if error.code == "context_length_exceeded" else InvalidRequest
    return kind(error.message, field=error.field, code=error.code)


def body(error: ProtocolError, family: Family) -> dict[str, Any]:
    """The JSON body of `error` in the family's shape (contract, Transport and admission)."""
    if family == "ollama" and not isinstance(error, Unauthorized):
        return {"error": error.message}
    if family == "systemone" and isinstance(error, SchemaInvalid):
        return {"detail": error.detail}
    if family == "messages":
        told: dict[str, Any] = {"type": _messages_type(error), "message": error.message}
        if isinstance(error, ThreadUnsupported):
            told["details"] = {"error_code": error.code}
        return {"type": "error", "error": told}
    return {"error": {"type": error.type, "message": error.message, "param": None, "code": error.code}}


def _messages_type(error: ProtocolError) -> str:
    if error.status >= 500:
        return "api_error"
    return "not_found_error" if error.status == 404 else error.type
