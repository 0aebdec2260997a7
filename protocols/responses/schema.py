"""The body of POST /v1/responses as it is on the wire.

Owns the top-level names and types and the shapes of items, parts and tools. Items are validated one by one in `items`
by their type, so that an error names its place. Unknown fields are ignored.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from protocols.fields import (
    Alternatives,
    Budget,
    Fields,
    LogprobFields,
    PositiveCount,
    SamplingFields,
    StringList,
    TokenStopFields,
)
from protocols.structure import StructureFields

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ReasoningSettings(Fields):
    effort: Effort | None = None
    summary: str | None = None


class TextSettings(Fields):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class SchemaFormat(Fields):
    """`strict` belongs to the output format, which is enforced either way."""

    schema_: dict[str, Any] = Field(alias="schema")
    name: str | None = None
    strict: bool | None = None


class ResponsesFields(SamplingFields, TokenStopFields, LogprobFields, StructureFields):
    model: str
    input: Any
    instructions: str | None = None
    max_output_tokens: PositiveCount | None = None
    stream: bool | None = None
    stop: StringList | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningSettings | None = None
    thinking_token_budget: Budget | None = None
    text: TextSettings | None = None
    include: list[str] | None = None
    top_logprobs: Alternatives | None = None
    truncation: str | None = None
    store: bool | None = None
    background: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessageItem(Fields):
    role: str
    content: Any


class ReasoningText(Fields):
    type: str | None = None
    text: str


class ReasoningItem(Fields):
    content: list[ReasoningText] | None = None
    summary: list[ReasoningText] | None = None
    encrypted_content: str | None = None


class FunctionCallItem(Fields):
    call_id: str
    name: str = Field(min_length=1)
    namespace: str | None = None
    arguments: str


class CustomCallItem(Fields):
    call_id: str
    name: str = Field(min_length=1)
    namespace: str | None = None
    input: str


class CallOutputItem(Fields):
    call_id: str
    output: Any


class TextPart(Fields):
    text: str


class RefusalPart(Fields):
    refusal: str


class ImagePart(Fields):
    image_url: str


class CustomTool(Fields):
    name: str = Field(min_length=1)
    description: str | None = None
    format: dict[str, Any] | None = None


class Grammar(Fields):
    syntax: Literal["lark", "regex"]
    definition: str = Field(min_length=1)


class Namespace(Fields):
    name: str = Field(min_length=1)
    description: str | None = None
    tools: list[dict[str, Any]]
