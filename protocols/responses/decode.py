"""POST /v1/responses, from JSON to a GenerationRequest.

Owns the request-level rules: what is stateful and refused, output formats, observations, and what the response repeats
of the request. Items are `items`'s, tools `tools`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from engine.types.constraint import Constraint
from engine.types.conversation import Conversation, Message, Text
from engine.types.request import GenerationRequest, OutputOptions, ReasoningOptions, TemplateOptions
from protocols.fields import (
    Decoded,
    DecodeLimits,
    check_alternatives,
    read,
    refuse,
    refuse_effort_score,
    refuse_unsupported,
)
from protocols.responses.items import Items
from protocols.responses.schema import ResponsesFields, SchemaFormat
from protocols.responses.tools import Declared, ToolSet, read_tools
from protocols.structure import any_object, check_constraint, json_schema

LOGPROBS: Final = "message.output_text.logprobs"
_STATELESS: Final = {
    "store": "responses are not stored: send false or leave it out",
    "previous_response_id": "responses are not stored: send the whole conversation as input",
    "conversation": "conversations are not stored: send the whole conversation as input",
    "background": "background responses are not supported",
    "prompt": "stored prompts are not supported",
    "prompt_logprobs": "is not supported on Responses",
}
_UNSUPPORTED: Final[Mapping[str, tuple[object, ...]]] = {"context_management": ([],), "modalities": (["text"],)}


@dataclass(frozen=True, slots=True)
class ResponsesOptions:
    """What ResponsesEncoder needs of the body. `echo`: the request's part of the response object. `declared`: tools by
    the name the model knows. `logprobs`: entries are wanted; `explicit`: with the caller's alternatives."""

    echo: Mapping[str, Any]
    declared: Mapping[str, Declared]
    logprobs: bool = False
    explicit: bool = False
    as_token_ids: bool = False


def decode(body: Mapping[str, Any], limits: DecodeLimits) -> Decoded:
    """Raises InvalidRequest naming the field at fault."""
    fields = read(ResponsesFields, body)
    _refuse_state(fields, body)
    tools = read_tools(fields.tools or [])
    stops = fields.stops(fields.stop or [], limits)
    constraint = _constraint(fields)
    check_constraint(constraint, stops=stops, ignore_eos=bool(fields.ignore_eos), continuation=False)
    logprobs = LOGPROBS in (fields.include or ())
    request = GenerationRequest(
        api="responses",
        prompts=(_conversation(fields, tools, limits),),
        sampling=fields.overrides(),
        max_tokens=fields.max_output_tokens,
        min_tokens=fields.min_tokens or 0,
        ignore_eos=bool(fields.ignore_eos),
        stops=stops,
        output=_observations(fields, logprobs, limits),
        constraint=constraint,
        reasoning=_reasoning(fields),
        template=TemplateOptions(kwargs=fields.chat_template_kwargs or {}),
        stream=bool(fields.stream),
    )
    options = ResponsesOptions(
        echo=_echo(fields, body, tools),
        declared=tools.declared,
        logprobs=logprobs,
        explicit=bool(fields.logprob_token_ids),
        as_token_ids=bool(fields.return_tokens_as_token_ids),
    )
    return Decoded(request, options)


def _refuse_state(fields: ResponsesFields, body: Mapping[str, Any]) -> None:
    for name, problem in _STATELESS.items():
        if body.get(name) not in (None, False) or (name == "prompt_logprobs" and body.get(name) is not None):
            raise refuse(name, problem)
    if fields.truncation not in (None, "disabled"):
        raise refuse("truncation", "must be 'disabled': input is never truncated")
    refuse_unsupported(body, _UNSUPPORTED)
    refuse_effort_score(body, "reasoning.effort")


def _conversation(fields: ResponsesFields, tools: ToolSet, limits: DecodeLimits) -> Conversation:
    items = Items(limits)
    if fields.instructions:
        items.messages.append(Message("system", (Text(fields.instructions),)))
    if isinstance(fields.input, str):
        items.messages.append(Message("user", (Text(fields.input),)))
    elif isinstance(fields.input, list):
        for index, item in enumerate(fields.input):
            items.add(item, f"input[{index}]")
    else:
        raise refuse("input", "must be a string or an array of items")
    messages = items.finish()
    if all(message.role in ("system", "developer") for message in messages):
        raise refuse("input", "must hold at least one user, assistant or tool item")
    return Conversation(
        messages=messages,
        tools=tuple(tools.definitions),
        tool_choice=tools.choice(fields.tool_choice),
        parallel_tool_calls=fields.parallel_tool_calls is not False,
    )


def _observations(fields: ResponsesFields, logprobs: bool, limits: DecodeLimits) -> OutputOptions:
    wanted = (fields.top_logprobs or 0) if logprobs else None
    check_alternatives(wanted, "top_logprobs" if fields.top_logprobs else "include", limits)
    ids = fields.explicit_ids(logprobs, f'include: ["{LOGPROBS}"]', limits)
    return OutputOptions(logprobs=wanted, logprob_token_ids=ids)


def _constraint(fields: ResponsesFields) -> Constraint | None:
    own = _text_format(fields.text.format if fields.text else None)
    extension = fields.constraint()
    if own is not None and extension is not None:
        raise refuse("text.format", "can't be combined with another output constraint")
    return own or extension


def _text_format(value: Mapping[str, Any] | None) -> Constraint | None:
    if value is None or value.get("type") == "text":
        return None
    match value.get("type"):
        case "json_object":
            return any_object(value, "text.format")
        case "json_schema":
            return json_schema(read(SchemaFormat, value, "text.format").schema_)
    raise refuse("text.format.type", "must be one of 'text', 'json_object' or 'json_schema'")


def _reasoning(fields: ResponsesFields) -> ReasoningOptions:
    effort = fields.reasoning.effort if fields.reasoning else None
    return ReasoningOptions(
        enabled=None if effort is None else effort != "none",
        effort=None if effort == "none" else effort,
        effort_given=effort not in (None, "none"),
        budget=fields.thinking_token_budget,
    )


def _echo(fields: ResponsesFields, body: Mapping[str, Any], tools: ToolSet) -> dict[str, Any]:
    """The keys of the response object that repeat the request, each of a valid type whatever the client sent."""
    metadata = body.get("metadata")
    text = fields.text
    reasoning = fields.reasoning
    echo: dict[str, Any] = {
        "instructions": fields.instructions,
        "tools": tools.echo,
        "tool_choice": fields.tool_choice or "auto",
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "max_output_tokens": fields.max_output_tokens,
        "top_logprobs": fields.top_logprobs or 0,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning else None,
        },
        "text": {"format": (text.format if text else None) or {"type": "text"}},
        "metadata": metadata if isinstance(metadata, dict) else {},
        "previous_response_id": None,
        "max_tool_calls": None,
        "store": False,
        "background": False,
        "truncation": "disabled",
        "service_tier": "default",
    }
    if text and text.verbosity:
        echo["text"]["verbosity"] = text.verbosity
    for name in ("safety_identifier", "prompt_cache_key", "user"):
        value = body.get(name)
        echo[name] = value if isinstance(value, str) else None
    return echo
