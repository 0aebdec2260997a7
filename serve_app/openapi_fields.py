"""What the API document says of request fields: a few words on each, and the shapes that a decoder tells apart itself.

The order here is the order in which fields are shown: what a request is about first, extensions after. Types and
bounds come from the schemas that decode requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_IDS: Final = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}

_STRING: Final = {"type": "string"}
_OPTIONAL: Final = {"anyOf": [_STRING, {"type": "null"}]}


def _question(kind: str, field: str = "", most: int = 0, **entry: Any) -> dict[str, Any]:
    """A question of Decisions; `entry` are the properties of one entry of `field`, of which there are 2 to `most`."""
    properties: dict[str, Any] = {"type": {"const": kind}, "name": _STRING, "instructions": _STRING}
    if field:
        item = {"type": "object", "required": [next(iter(entry))], "additionalProperties": False}
        item["properties"] = {**entry, "description": _OPTIONAL}
        properties[field] = {"type": "array", "minItems": 2, "maxItems": most, "items": item}
    required = ["type", "instructions", *([field] if field else ())]
    return {"type": "object", "required": required, "additionalProperties": False, "properties": properties}


def _messages(*roles: str) -> dict[str, Any]:
    message = {"type": "object", "required": ["role"], "properties": {"role": {"enum": list(roles)}, "content": {}}}
    return {"type": "array", "minItems": 1, "items": message}


SHAPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "stop": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
    "prompt": {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}, "minItems": 1},
            _IDS,
            {"type": "array", "items": _IDS, "minItems": 1},
        ]
    },
    "input": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
    "reasoning_effort": {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
}
"""Fields that their schema leaves open, since the decoder tells their forms apart and says what is wrong."""

SHAPES_OF: Final[Mapping[tuple[str, str], Mapping[str, Any]]] = {
    ("ChatCompletion", "messages"): _messages("system", "developer", "user", "assistant", "tool"),
    ("DecisionsAnswer", "input"): {"anyOf": [_STRING, _messages("user")]},
    ("DecisionsAnswer", "questions"): {
        "type": "array",
        "minItems": 1,
        "maxItems": 64,
        "items": {
            "anyOf": [
                _question("predicate"),
                _question("choice", "choices", 128, value={"type": ["string", "boolean"]}),
                _question("score", "levels", 10, label=_STRING),
            ]
        },
    },
}
"""The same of one route, by the name of its answer."""

MEANINGS: Final[Mapping[str, str]] = {
    "model": "Any name: the loaded model answers. Discovery takes its identifier and its aliases.",
    "messages": "The conversation, oldest message first.",
    "system": "System text, as a string or as text blocks.",
    "prompt": "One text, several texts, token ids, or several lists of token ids.",
    "input": "A text, or the items or messages of the conversation.",
    "instructions": "System text in front of the input.",
    "state": "What the questions are about: a text, an object or an array.",
    "questions": "What to decide, 1 to 64 questions.",
    "assets": "Named images that the state or the questions refer to.",
    "safety_identifier": "Taken and not used.",
    "verbose": "Taken and not used.",
    "stream": "Answer with server-sent events.",
    "stream_options": "include_usage: a last chunk with usage; continuous_usage_stats: usage in every chunk too.",
    "n": "Choices; each takes a request slot and continues the seed.",
    "best_of": "Must equal n.",
    "max_tokens": "Bound on generated tokens; the remaining context bounds them too.",
    "max_completion_tokens": "Bound on generated tokens, reasoning included; the remaining context bounds them too.",
    "max_output_tokens": "Bound on generated tokens, reasoning included; the remaining context bounds them too.",
    "min_tokens": "No end of sequence and no stop before so many tokens.",
    "temperature": "Clamped to the range in the model card, as the six fields below are.",
    "top_p": "Smallest set of tokens with this probability.",
    "top_k": "So many likeliest tokens; -1 or 0: all.",
    "min_p": "Tokens at least so likely, relative to the likeliest.",
    "repetition_penalty": "Above 1 makes tokens of the prompt and of the answer less likely.",
    "presence_penalty": "Subtracted from the logits of tokens the answer has.",
    "frequency_penalty": "Subtracted once for each time the answer has the token.",
    "seed": "Makes sampling repeatable; the model card shows the default.",
    "stop": "Up to four texts that end the answer, 4096 bytes together; not with token stops.",
    "stop_sequences": "Up to four texts that end the answer, 4096 bytes together; not with token stops.",
    "stop_token_ids": "Tokens that end the answer; with sequences at most sixteen.",
    "stop_token_sequences": "Token sequences that end the answer, each of at most 64 ids.",
    "include_stop_str_in_output": "Keep the matched stop in the answer.",
    "ignore_eos": "Go on after the end of sequence; not with an output constraint.",
    "echo": "Repeat the prompt in front of the answer.",
    "tools": "Functions that the client runs; Responses also takes custom tools and namespaces.",
    "tool_choice": "auto, none, required (any on Messages), or one named tool.",
    "parallel_tool_calls": "False: at most one call in an answer.",
    "reasoning": "effort: a named level.",
    "reasoning_effort": "A named level; an integer from 1 to 100 where the model takes one.",
    "thinking": "Turns thinking on or off; budget_tokens caps it and selects an effort.",
    "thinking_token_budget": "Cap on reasoning tokens, after which the reasoning is closed.",
    "include_reasoning": "False: leave the reasoning out of the answer.",
    "response_format": "Constrains the answer to JSON or to a JSON schema.",
    "text": "format: constrains the answer to JSON or to a JSON schema.",
    "output_config": "effort: a named level; format: constrains the answer to a JSON schema.",
    "output_format": "Constrains the answer to a JSON schema.",
    "structured_outputs": "One of json, regex, choice, grammar and json_object.",
    "grammar": "A Lark grammar of the answer.",
    "guided_json": "A JSON schema of the answer.",
    "guided_regex": "A regular expression of the answer.",
    "guided_choice": "The answer is one of these texts.",
    "guided_grammar": "A Lark grammar of the answer.",
    "guided_json_object": "The answer is a JSON object.",
    "guided_whitespace_pattern": "Not supported: refused.",
    "logprobs": "Log probabilities: true on Chat, the number of alternatives on Completions.",
    "top_logprobs": "Alternatives of each token.",
    "logprob_token_ids": "These tokens as the alternatives, at most 128.",
    "prompt_logprobs": "Scores of the prompt with so many alternatives; not with stream.",
    "include": "message.output_text.logprobs asks for log probabilities; other values are ignored.",
    "return_tokens_as_token_ids": "Spell tokens as token_id:N in log probabilities.",
    "return_token_ids": "Add the ids of prompt and answer.",
    "return_token_timestamps": "Add the time of each token.",
    "add_special_tokens": "False: no BOS in front of a text.",
    "add_generation_prompt": "False: end the prompt behind the last message.",
    "continue_final_message": "Continue the last message, which is the assistant's.",
    "chat_template_kwargs": "Variables of the chat template, such as enable_thinking.",
    "context_management": "Only the edit that keeps all thinking; others are refused.",
    "truncation": "disabled: input is never truncated.",
    "store": "False: nothing is stored.",
    "background": "False: not supported.",
}
"""Field → its meaning, the same on every route that has it."""


def described(answer: str, properties: Mapping[str, Any], required: frozenset[str]) -> dict[str, Any]:
    """The properties of the request for `answer` in the order of MEANINGS, required ones first, with their meanings
    and shapes."""
    order = {name: place for place, name in enumerate(MEANINGS)}
    names = sorted(properties, key=lambda name: (name not in required, order.get(name, len(order))))
    return {name: {**_shape(answer, name, properties[name]), **_meaning(name)} for name in names}


def _shape(answer: str, name: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    shape = SHAPES_OF.get((answer, name), SHAPES.get(name))
    return schema if shape is None else {**shape, **({"default": None} if "default" in schema else {})}


def _meaning(name: str) -> dict[str, str]:
    return {"description": MEANINGS[name]} if name in MEANINGS else {}
