"""The neutral conversation: what every protocol decoder produces and the lowering consumes.

Owns the vocabulary of messages and tools. Leaves rendering to `engine.text` and the wire shapes to
`protocols`. Every value is frozen; order is meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.types.constraint import Constraint

Role = Literal["system", "developer", "user", "assistant", "tool"]
ToolMode = Literal["auto", "none", "required", "named"]


@dataclass(frozen=True, slots=True)
class Text:
    """One text block. Neighbouring blocks of a message are joined with a blank line when lowered."""

    text: str


@dataclass(frozen=True, slots=True)
class Image:
    """One encoded image (PNG, JPEG or static WebP), as the client sent it."""

    data: bytes = field(repr=False)
    media_type: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Readable reasoning of an earlier assistant turn."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of an earlier assistant turn; `arguments` is a JSON object."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolReference:
    """Renders the definition of the deferred tool `name` at this place."""

    name: str


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a client's tool returned for the call `call_id`; text, images and references in order."""

    call_id: str
    parts: tuple[Text | Image | ToolReference, ...]
    is_error: bool = False


Part = Text | Image | Reasoning | ToolCall | ToolResult | ToolReference


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. A `tool` message holds exactly one ToolResult; an `assistant` message may hold Text,
    Reasoning and ToolCall parts in the order in which they were produced."""

    role: Role
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """A function that the client executes.

    `parameters` is the JSON Schema of its argument object. `deferred` keeps it out of the rendered tool
    list until a ToolReference names it. `input_format` belongs to a freeform tool, whose model-facing
    schema is `{"input": string}`: the completed input is validated against it byte for byte.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    deferred: bool = False
    freeform: bool = False
    input_format: Constraint | None = None


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which calls are wanted. `name` is set exactly when `mode` is "named"."""

    mode: ToolMode = "auto"
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """A whole conversation. `boundaries` are (message, part) indices whose ends are candidate prefix
    checkpoints; they never change the rendered prompt."""

    messages: tuple[Message, ...]
    tools: tuple[ToolDefinition, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    boundaries: tuple[tuple[int, int], ...] = ()
