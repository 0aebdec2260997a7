"""The Messages request as it is on the wire.

Owns field names and types. What a field means, which combinations are refused and how blocks become a conversation is
`decode`'s. Unknown fields, and control metadata inside messages and blocks, are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from protocols.fields import Budget, Fields, PositiveCount, SamplingFields, TokenStopFields
from protocols.structure import StructureFields


def _form(value: object) -> str | None:
    """Which form a `string or array of blocks` field has."""
    if isinstance(value, str):
        return "<string>"
    return "<list>" if isinstance(value, list) else None


def _kind(value: object) -> str | None:
    """The union tag of a block: its type, written so that error paths leave it out."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>" if isinstance(kind, str) else None


_BY_FORM = Discriminator(_form, custom_error_type="form", custom_error_message="must be a string or an array of blocks")


class CacheHint(Fields):
    type: str | None = None


class Block(Fields):
    cache_control: CacheHint | None = None


class TextBlock(Block):
    type: Literal["text"]
    text: str


class ImageSource(Fields):
    type: str
    media_type: str | None = None
    data: str | None = Field(default=None, repr=False)


class ImageBlock(Block):
    type: Literal["image"]
    source: ImageSource


class ThinkingBlock(Block):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Block):
    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str
    name: Annotated[str, Field(min_length=1)]
    input: dict[str, Any]


class ToolReferenceBlock(Block):
    """In a tool_result: the definition of a deferred tool belongs here."""

    type: Literal["tool_reference"]
    tool_name: str


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[ToolReferenceBlock, Tag("<tool_reference>")],
    Discriminator(_kind),
]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: (
        Annotated[Annotated[str, Tag("<string>")] | Annotated[list[ResultBlock], Tag("<list>")], _BY_FORM] | None
    ) = None
    is_error: bool | None = None


class ToolField(Fields):
    """An entry of `tools`. Client tools have an `input_schema`; another `type` is a hosted tool."""

    type: str | None = None
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class NamedTool(Fields):
    type: Literal["tool_reference"]
    name: str


class InlineTool(Fields):
    type: Literal["tool_definition"]
    definition: ToolField


class ToolAdditionBlock(Block):
    """In a system message: the tool is offered from here on."""

    type: Literal["tool_addition"]
    tool: Annotated[
        Annotated[NamedTool, Tag("<tool_reference>")] | Annotated[InlineTool, Tag("<tool_definition>")],
        Discriminator(_kind),
    ]


class ToolRemovalBlock(Block):
    """In a system message: the tool is no longer offered."""

    type: Literal["tool_removal"]
    tool: NamedTool


ContentBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[ToolAdditionBlock, Tag("<tool_addition>")]
    | Annotated[ToolRemovalBlock, Tag("<tool_removal>")],
    Discriminator(_kind),
]


class MessageField(Fields):
    role: Literal["user", "assistant", "system"]
    content: Annotated[Annotated[str, Tag("<string>")] | Annotated[list[ContentBlock], Tag("<list>")], _BY_FORM]


class Thinking(Fields):
    """`display` is ignored: the text is always returned."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: PositiveCount | None = None


class ToolChoiceField(Fields):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Fields):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Fields):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Edit(Fields):
    type: str
    keep: Any = None


class ContextManagement(Fields):
    edits: list[Edit] | None = None


class PromptFields(SamplingFields, TokenStopFields, StructureFields):
    """What decides the prompt, shared by generation and token counting; sampling fields are checked in both."""

    model: str
    messages: Annotated[list[MessageField], Field(min_length=1)]
    system: Annotated[Annotated[str, Tag("<string>")] | Annotated[list[TextBlock], Tag("<list>")], _BY_FORM] | None = (
        None
    )
    tools: list[ToolField] | None = None
    tool_choice: ToolChoiceField | None = None
    thinking: Thinking | None = None
    thinking_token_budget: Budget | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    context_management: ContextManagement | None = None
    stop_sequences: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream: bool | None = None
    max_tokens: PositiveCount | None = None


class CreateFields(PromptFields):
    max_tokens: PositiveCount
