"""The body of POST /v1/chat/completions: the OpenAI schema and the extensions that common servers share.

Messages, parts and tools are validated one by one in `decode`, by their role or type, so that an error names its place.
"""

from __future__ import annotations

from typing import Any

from protocols.fields import (
    Alternatives,
    Budget,
    Choices,
    Fields,
    LogprobFields,
    PositiveCount,
    SamplingFields,
    StreamOptions,
    StringList,
    TokenStopFields,
)
from protocols.structure import StructureFields


class ChatFields(SamplingFields, TokenStopFields, LogprobFields, StructureFields):
    messages: list[dict[str, Any]]
    model: str | None = None
    n: Choices | None = None
    max_tokens: PositiveCount | None = None
    max_completion_tokens: PositiveCount | None = None
    stop: StringList | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    prompt_logprobs: Alternatives | None = None
    return_token_ids: bool | None = None
    return_token_timestamps: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    reasoning_effort: Any = None
    thinking_token_budget: Budget | None = None


class MessageFields(Fields):
    """A message of any role; which content it may have is the role's business."""

    role: str
    content: Any = None


class AssistantFields(Fields):
    content: Any = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ToolFields(Fields):
    tool_call_id: str
    content: Any = None


class TextPart(Fields):
    text: str


class RefusalPart(Fields):
    refusal: str


class ImageSource(Fields):
    url: str


class CalledFunction(Fields):
    name: str
    arguments: str | dict[str, Any] | None = None


class CallFields(Fields):
    id: str
    type: str | None = None
    function: CalledFunction
