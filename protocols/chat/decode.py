"""POST /v1/chat/completions into the neutral request.

Owns the roles, parts and tool spellings of Chat, and which of its fields exclude each other. Raises InvalidRequest
naming the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from engine.types.conversation import (
    Conversation,
    Image,
    Message,
    Part,
    Reasoning,
    Text,
    ToolCall,
    ToolChoice,
    ToolDefinition,
    ToolResult,
)
from engine.types.request import GenerationRequest, OutputOptions, ReasoningOptions, TemplateOptions
from protocols.chat.schema import (
    AssistantFields,
    CallFields,
    ChatFields,
    ImageSource,
    MessageFields,
    RefusalPart,
    TextPart,
    ToolFields,
)
from protocols.fields import (
    Decoded,
    DecodeLimits,
    check_alternatives,
    check_prompt_scores,
    json_object,
    read,
    refuse,
    refuse_unsupported,
)
from protocols.images import image_url
from protocols.structure import check_constraint
from protocols.tools import check_choice, check_unique, function_tool

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_UNSUPPORTED: Final[Mapping[str, tuple[object, ...]]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"], []),
    "web_search_options": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "add_special_tokens": (False,),
}


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What ChatEncoder needs of the body. `logprobs` turns entries on, `explicit` says that their alternatives are the
    caller's ids; `prompt_logprobs`: alternatives of each prompt position, None for none."""

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    include_reasoning: bool = True
    logprobs: bool = False
    explicit: bool = False
    as_token_ids: bool = False
    token_ids: bool = False
    timestamps: bool = False
    prompt_logprobs: int | None = None


def decode(body: Mapping[str, Any], limits: DecodeLimits) -> Decoded:
    """Raises InvalidRequest for anything malformed, over a limit, unsupported or combined against the rules."""
    fields = read(ChatFields, body)
    refuse_unsupported(body, _UNSUPPORTED)
    if (fields.n or 1) > limits.max_group:
        raise refuse("n", f"must be at most {limits.max_group}, the choices this server can run")
    options = _options(fields)
    conversation = _conversation(fields, limits)
    template = _template(fields, conversation)
    stops = fields.stops(fields.stop or [], limits)
    constraint = fields.constraint()
    check_constraint(
        constraint,
        stops=stops,
        ignore_eos=bool(fields.ignore_eos),
        continuation=template.continue_final_message,
    )
    request = GenerationRequest(
        api="chat",
        prompts=(conversation,),
        n=fields.n or 1,
        sampling=fields.overrides(),
        max_tokens=fields.max_completion_tokens or fields.max_tokens,
        min_tokens=fields.min_tokens or 0,
        ignore_eos=bool(fields.ignore_eos),
        stops=stops,
        output=_observations(fields, limits),
        constraint=constraint,
        reasoning=_reasoning(fields),
        template=template,
        stream=options.stream,
    )
    return Decoded(request, options, prompt_ids=options.token_ids)


def _options(fields: ChatFields) -> ChatOptions:
    stream = bool(fields.stream)
    if fields.stream_options is not None and not stream:
        raise refuse("stream_options", "is only allowed with stream: true")
    if fields.prompt_logprobs is not None and stream:
        raise refuse("prompt_logprobs", "is not available with stream: true")
    usage = fields.stream_options is not None and bool(fields.stream_options.include_usage)
    return ChatOptions(
        stream=stream,
        include_usage=usage,
        continuous_usage=usage
        and fields.stream_options is not None
        and bool(fields.stream_options.continuous_usage_stats),
        include_reasoning=fields.include_reasoning is not False,
        logprobs=bool(fields.logprobs),
        explicit=bool(fields.logprob_token_ids),
        as_token_ids=bool(fields.return_tokens_as_token_ids),
        token_ids=bool(fields.return_token_ids),
        timestamps=bool(fields.return_token_timestamps),
        prompt_logprobs=fields.prompt_logprobs,
    )


def _observations(fields: ChatFields, limits: DecodeLimits) -> OutputOptions:
    wanted = (fields.top_logprobs or 0) if fields.logprobs else None
    if fields.top_logprobs and not fields.logprobs:
        raise refuse("top_logprobs", "needs logprobs: true")
    check_alternatives(wanted, "top_logprobs" if fields.top_logprobs else "logprobs", limits)
    check_prompt_scores(fields.prompt_logprobs, "prompt_logprobs", limits)
    return OutputOptions(
        logprobs=wanted,
        logprob_token_ids=fields.explicit_ids(bool(fields.logprobs), "logprobs: true", limits),
        prompt_logprobs=fields.prompt_logprobs,
        timestamps=bool(fields.return_token_timestamps),
    )


def _template(fields: ChatFields, conversation: Conversation) -> TemplateOptions:
    continuation = bool(fields.continue_final_message)
    generation = fields.add_generation_prompt
    if continuation and generation:
        raise refuse("continue_final_message", "can't be combined with add_generation_prompt: true")
    if continuation and conversation.messages[-1].role != "assistant":
        raise refuse("continue_final_message", "needs an assistant message at the end of messages")
    return TemplateOptions(
        add_generation_prompt=not continuation if generation is None else generation,
        continue_final_message=continuation,
        kwargs=fields.chat_template_kwargs or {},
    )


def _reasoning(fields: ChatFields) -> ReasoningOptions:
    effort = fields.reasoning_effort
    if isinstance(effort, bool) or not isinstance(effort, str | int | None):
        raise refuse("reasoning_effort", "must be a named level or an integer")
    if isinstance(effort, str) and effort not in EFFORTS:
        raise refuse(
            "reasoning_effort", f"must be one of {', '.join(EFFORTS)}, or an integer where the model takes one"
        )
    return ReasoningOptions(
        enabled=effort != "none" if isinstance(effort, str) else None,
        effort=None if effort == "none" else effort,
        effort_given="reasoning_effort" in fields.model_fields_set and effort != "none",
        budget=fields.thinking_token_budget,
    )


def _conversation(fields: ChatFields, limits: DecodeLimits) -> Conversation:
    if not fields.messages:
        raise refuse("messages", "must not be empty")
    tools = _tools(fields.tools or [])
    choice = _tool_choice(fields.tool_choice)
    check_choice(choice, tools)
    return Conversation(
        messages=tuple(_message(value, f"messages[{i}]", limits) for i, value in enumerate(fields.messages)),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=fields.parallel_tool_calls is not False,
    )


def _tools(values: list[dict[str, Any]]) -> tuple[ToolDefinition, ...]:
    tools = []
    for index, value in enumerate(values):
        at = f"tools[{index}]"
        if value.get("type", "function") != "function":
            raise refuse(f"{at}.type", "must be 'function': only client-executed functions are supported")
        if not isinstance(value.get("function"), dict):
            raise refuse(f"{at}.function", "must be an object")
        tools.append(function_tool(value["function"], f"{at}.function"))
    check_unique(tools)
    return tuple(tools)


def _tool_choice(value: str | dict[str, Any] | None) -> ToolChoice:
    match value:
        case None | "auto":
            return ToolChoice()
        case "none":
            return ToolChoice("none")
        case "required":
            return ToolChoice("required")
        case {"type": "function", "function": {"name": str(name)}} if name:
            return ToolChoice("named", name)
    raise refuse(
        "tool_choice",
        'must be "auto", "none", "required" or {"type": "function", "function": {"name": NAME}}',
    )


def _message(value: dict[str, Any], at: str, limits: DecodeLimits) -> Message:
    fields = read(MessageFields, value, at)
    match fields.role:
        case "system" | "developer":
            return Message(fields.role, _content(fields.content, f"{at}.content", None))
        case "user":
            return Message("user", _content(fields.content, f"{at}.content", limits))
        case "assistant":
            return Message("assistant", _assistant(read(AssistantFields, value, at), at))
        case "tool":
            result = read(ToolFields, value, at)
            content = [] if result.content is None else result.content
            parts = _content(content, f"{at}.content", limits)
            return Message("tool", (ToolResult(result.tool_call_id, parts),))
    raise refuse(f"{at}.role", "must be one of 'system', 'developer', 'user', 'assistant' or 'tool'")


def _assistant(fields: AssistantFields, at: str) -> tuple[Part, ...]:
    parts: list[Part] = []
    reasoning = fields.reasoning or fields.reasoning_content
    if reasoning:
        parts.append(Reasoning(reasoning))
    if fields.content is not None:
        parts.extend(_content(fields.content, f"{at}.content", None))
    if fields.refusal:
        parts.append(Text(fields.refusal))
    for index, value in enumerate(fields.tool_calls or []):
        parts.append(_call(value, f"{at}.tool_calls[{index}]"))
    return tuple(parts)


def _call(value: dict[str, Any], at: str) -> ToolCall:
    if value.get("type", "function") not in ("function", None):
        raise refuse(f"{at}.type", "must be 'function'")
    call = read(CallFields, value, at)
    arguments: Any = call.function.arguments
    if arguments is None or arguments == "":
        arguments = {}
    field, otherwise = f"{at}.function.arguments", "must be the JSON text of an object"
    if isinstance(arguments, str):
        arguments = json_object(arguments, field, otherwise)
    if not isinstance(arguments, dict):
        raise refuse(field, otherwise)
    return ToolCall(call.id, call.function.name, arguments)


def _content(content: Any, at: str, limits: DecodeLimits | None) -> tuple[Text | Image, ...]:
    """A string or a list of parts; empty texts leave nothing. `limits` None: text only."""
    if isinstance(content, str):
        return (Text(content),) if content else ()
    if not isinstance(content, list):
        raise refuse(at, "must be a string or an array of parts")
    parts = [_part(value, f"{at}[{index}]", limits) for index, value in enumerate(content)]
    return tuple(part for part in parts if part != Text(""))


def _part(value: Any, at: str, limits: DecodeLimits | None) -> Text | Image:
    if not isinstance(value, dict):
        raise refuse(at, "must be an object")
    match value.get("type"):
        case "text" | "input_text" | "output_text":
            return Text(read(TextPart, value, at).text)
        case "refusal":
            return Text(read(RefusalPart, value, at).refusal)
        case "image_url" | "input_image":
            if limits is None:
                raise refuse(at, "images are only accepted in user and tool messages")
            source = value.get("image_url")
            if not isinstance(source, str):
                if not isinstance(source, dict):
                    raise refuse(f"{at}.image_url", "must be an object with a url")
                source = read(ImageSource, source, f"{at}.image_url").url
            return image_url(source, f"{at}.image_url.url", limits)
        case None:
            raise refuse(f"{at}.type", "is required")
        case kind:
            raise refuse(f"{at}.type", f"{kind!r} parts are not supported: send 'text' or 'image_url'")
