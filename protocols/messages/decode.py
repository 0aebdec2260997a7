"""POST /v1/messages and its count_tokens, from JSON to a GenerationRequest.

Owns the request-level rules: versions, refused fields, tool choice, thinking budgets and effort, prefill. Blocks are
`history`'s, names and types `schema`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from engine.types.constraint import Constraint
from engine.types.conversation import Conversation, ToolCall, ToolChoice
from engine.types.request import GenerationRequest, ReasoningOptions, TemplateOptions
from protocols.errors import ThreadUnsupported
from protocols.fields import INT32_MAX, Decoded, DecodeLimits, read, refuse, refuse_effort_score, refuse_unsupported
from protocols.messages.history import History, check_context
from protocols.messages.schema import CreateFields, PromptFields, ToolChoiceField
from protocols.structure import check_constraint, json_schema
from protocols.tools import check_choice

VERSION: Final = "2023-06-01"
VERSIONS: Final = (VERSION, "2026-10-21")
"""The documented version, and the one that the Anthropic SDK sends since 2.14: its requests have the same shapes."""
LOW_BUDGET: Final = 5_000
HIGH_BUDGET: Final = 20_000
_REFUSED: Final = (
    "logprobs",
    "top_logprobs",
    "return_tokens_as_token_ids",
    "logprob_token_ids",
    "prompt_logprobs",
)
_HOSTED: Final[Mapping[str, tuple[object, ...]]] = {"mcp_servers": ([],), "container": (), "compaction": ()}


def check_version(version: str | None) -> None:
    """The `anthropic-version` header. Raises InvalidRequest unless it is a supported one."""
    if version is None:
        raise refuse("anthropic-version", f"the header is required; send {VERSION}")
    if version.strip() not in VERSIONS:
        raise refuse("anthropic-version", f"'{version[:40]}' is not supported; send {VERSION}")


def decode(body: Mapping[str, Any], limits: DecodeLimits) -> Decoded:
    """A generation request. Raises InvalidRequest naming the field at fault."""
    return Decoded(_request(read(CreateFields, body), body, limits), None)


def decode_count(body: Mapping[str, Any], limits: DecodeLimits) -> Decoded:
    """The same request without generation: `max_tokens` may be missing. Raises InvalidRequest."""
    return Decoded(_request(read(PromptFields, body), body, limits), None)


def _request(fields: PromptFields, body: Mapping[str, Any], limits: DecodeLimits) -> GenerationRequest:
    for name in _REFUSED:
        if body.get(name) is not None:
            raise refuse(name, "is not supported on Messages")
    if body.get("thread") is not None:
        raise ThreadUnsupported("thread: history is not stored: send the whole conversation", field="thread")
    refuse_unsupported(body, _HOSTED)
    refuse_effort_score(body, "output_config.effort")
    if fields.context_management is not None:
        check_context([edit.model_dump() for edit in fields.context_management.edits or ()])
    conversation = _conversation(fields, limits)
    continuation = _prefills(fields, conversation)
    stops = fields.stops(fields.stop_sequences or [], limits, field="stop_sequences")
    constraint = _constraint(fields)
    check_constraint(
        constraint,
        stops=stops,
        ignore_eos=bool(fields.ignore_eos),
        continuation=continuation,
        stop_field="stop_sequences",
    )
    return GenerationRequest(
        api="messages",
        prompts=(conversation,),
        sampling=fields.overrides(),
        max_tokens=None if fields.max_tokens is None else min(fields.max_tokens, INT32_MAX),
        min_tokens=min(fields.min_tokens or 0, INT32_MAX),
        ignore_eos=bool(fields.ignore_eos),
        stops=stops,
        constraint=constraint,
        reasoning=_reasoning(fields),
        template=TemplateOptions(
            add_generation_prompt=not continuation,
            continue_final_message=continuation,
            kwargs=fields.chat_template_kwargs or {},
        ),
        stream=bool(fields.stream),
    )


def _conversation(fields: PromptFields, limits: DecodeLimits) -> Conversation:
    history = History(limits)
    for index, tool in enumerate(fields.tools or ()):
        history.declare(tool, f"tools[{index}]")
    history.system(fields.system)
    for index, message in enumerate(fields.messages):
        history.add(message, f"messages[{index}]")
    if all(message.role == "system" for message in history.messages):
        raise refuse("messages", "must hold at least one user or assistant message with content")
    return Conversation(
        messages=tuple(history.messages),
        tools=tuple(history.tools.values()),
        tool_choice=_tool_choice(fields.tool_choice, history),
        parallel_tool_calls=not (fields.tool_choice and fields.tool_choice.disable_parallel_tool_use),
        boundaries=tuple(history.boundaries),
    )


def _tool_choice(choice: ToolChoiceField | None, history: History) -> ToolChoice:
    match choice and choice.type:
        case "any":
            wanted = ToolChoice("required")
        case "tool":
            if choice is None or choice.name is None:
                raise refuse("tool_choice.name", "is required")
            wanted = ToolChoice("named", choice.name)
        case "none":
            wanted = ToolChoice("none")
        case _:
            wanted = ToolChoice()
    check_choice(wanted, list(history.tools.values()))
    return wanted


def _prefills(fields: PromptFields, conversation: Conversation) -> bool:
    """Whether the last message is the beginning of the answer."""
    last = conversation.messages[-1]
    if fields.messages[-1].role != "assistant" or last.role != "assistant":
        return False
    if isinstance(last.parts[-1], ToolCall):
        raise refuse("messages", "the last message ends in tool_use: its tool_result must follow")
    return True


def _constraint(fields: PromptFields) -> Constraint | None:
    config = fields.output_config.format if fields.output_config else None
    if config is not None and fields.output_format is not None and config != fields.output_format:
        raise refuse("output_format", "can't be combined with output_config.format: give one output constraint")
    own = config or fields.output_format
    extension = fields.constraint()
    if own is None:
        return extension
    if extension is not None:
        raise refuse("output_config.format", "can't be combined with another output constraint")
    return json_schema(own.schema_)


def _reasoning(fields: PromptFields) -> ReasoningOptions:
    """Budgets above 32 bits are longer than any output, so they become the largest 32-bit one, which never cuts."""
    thinking = fields.thinking
    enabled = None if thinking is None else thinking.type != "disabled"
    hint = thinking.budget_tokens if thinking is not None and enabled else None
    budget = fields.thinking_token_budget
    if budget is not None and hint is not None and budget != hint:
        raise refuse("thinking_token_budget", "must equal thinking.budget_tokens when both are given")
    effort = (fields.output_config.effort if fields.output_config else None) or _effort(hint)
    return ReasoningOptions(
        enabled=enabled,
        effort=effort,
        effort_given=effort is not None,
        budget=budget if budget is not None else None if hint is None else min(hint, INT32_MAX),
        budget_advisory=budget is None and hint is not None,
    )


def _effort(budget: int | None) -> str | None:
    if budget is None:
        return None
    return "low" if budget <= LOW_BUDGET else "high" if budget <= HIGH_BUDGET else "max"
