"""Responses requests into neutral conversations: what real clients send, every rule, every single-field change."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from engine.types.constraint import Constraint
from engine.types.conversation import (
    Conversation,
    Image,
    Message,
    Reasoning,
    Text,
    ToolCall,
    ToolChoice,
    ToolResult,
)
from engine.types.request import GenerationRequest
from protocols.errors import InvalidRequest
from protocols.fields import DecodeLimits
from protocols.responses.decode import decode
from tests.support import captures

LIMITS = DecodeLimits(vocab_size=1000, vision=True)
PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 8
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64," + base64.b64encode(PNG).decode()}
READ = {"type": "function", "name": "Read", "parameters": {"type": "object", "properties": {"path": {}}}}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": LARK}
SPACE = {"type": "namespace", "name": "agents", "description": "d", "tools": [{**READ, "name": "wait"}]}
LOGPROBS = ["message.output_text.logprobs"]


def request(items: Any = "Hi", **fields: Any) -> GenerationRequest:
    return decode({"model": "any", "input": items, **fields}, LIMITS).request


def conversation(items: Any = "Hi", **fields: Any) -> Conversation:
    prompt = request(items, **fields).prompts[0]
    assert isinstance(prompt, Conversation)
    return prompt


def refused(field: str, items: Any = "Hi", **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        request(items, **fields)
    assert caught.value.field == field
    assert caught.value.message.startswith(field)
    return caught.value


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def call(id: str = "c1", arguments: str = '{"path": "a"}', **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": id, "name": "Read", "arguments": arguments, **more}


def output(content: Any, id: str = "c1") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": id, "output": content}


# Captured requests


@pytest.mark.parametrize("name", captures.names("/v1/responses"))
def test_captured_requests_decode(name: str) -> None:
    decoded = decode(captures.body(name), LIMITS)
    prompt = decoded.request.prompts[0]
    assert isinstance(prompt, Conversation) and decoded.request.stream
    assert prompt.messages[0].role == "developer" and prompt.messages[-1].role in ("user", "tool")
    assert "web_search" not in json.dumps(decoded.options.echo["tools"])


def test_the_second_turn_extends_the_first() -> None:
    turns = []
    for turn in ("turn1_catalog_apply_patch", "turn2_custom_tool_call_output"):
        found = decode(captures.body(f"codex-0.171.0_responses_{turn}"), LIMITS).request.prompts[0]
        assert isinstance(found, Conversation)
        turns.append(found)
    first, second = turns
    assert second.messages[: len(first.messages)] == first.messages
    added = second.messages[len(first.messages) :]
    assert [message.role for message in added] == ["assistant", "tool"]
    assert [type(part) for part in added[0].parts] == [Reasoning, ToolCall]
    assert second.tools == first.tools


def test_captured_tools() -> None:
    found = decode(captures.body("codex-0.171.0_responses_turn1_fallback_metadata"), LIMITS).request.prompts[0]
    assert isinstance(found, Conversation)
    names = [tool.name for tool in found.tools]
    assert "multi_agent_v1__spawn_agent" in names and "exec_command" in names
    patch = decode(captures.body("codex-0.171.0_responses_turn1_catalog_apply_patch"), LIMITS).request.prompts[0]
    assert isinstance(patch, Conversation)
    (custom,) = [tool for tool in patch.tools if tool.freeform]
    assert custom.name == "apply_patch" and custom.input_format is not None
    assert custom.input_format.kind == "lark" and custom.input_format.source in custom.description


EVERYTHING: dict[str, Any] = {
    "model": "any",
    "instructions": "Be brief.",
    "input": [
        {"type": "message", "id": "m1", "role": "developer", "content": "You code."},
        user([{"type": "input_text", "text": "Look."}, {**IMAGE, "detail": "original"}]),
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "A", "annotations": []}], "phase": "x"},
        call(id="c1", status="completed"),
        {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "a"},
        {**call(id="c3"), "name": "wait", "namespace": "agents"},
        output([{"type": "input_text", "text": "x"}, IMAGE]),
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
        output("z", id="c3"),
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Note."}]},
    ],
    "tools": [READ, PATCH, SPACE, {"type": "web_search"}],
    "tool_choice": {"type": "custom", "name": "apply_patch"},
    "parallel_tool_calls": False,
    "reasoning": {"effort": "low", "summary": "auto"},
    "thinking_token_budget": 100,
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
    "include": LOGPROBS,
    "top_logprobs": 2,
    "logprob_token_ids": [5, 6, 5],
    "return_tokens_as_token_ids": True,
    "max_output_tokens": 9,
    "metadata": {"a": "b"},
    "store": False,
    "truncation": "disabled",
    "temperature": 0.5,
    "top_k": 5,
    "seed": 1,
    "stream": True,
}


def test_every_feature_together_decodes() -> None:
    decoded = decode(EVERYTHING, LIMITS)
    found = decoded.request
    assert found.constraint == Constraint("json_schema", '{"type":"object"}')
    assert (found.max_tokens, found.sampling.top_k, found.reasoning.budget) == (9, 5, 100)
    assert found.output.logprobs == 2 and found.output.logprob_token_ids == (5, 6)
    assert decoded.options.logprobs and decoded.options.explicit and decoded.options.as_token_ids
    prompt = found.prompts[0]
    assert isinstance(prompt, Conversation)
    roles = ["system", "developer", "user", "assistant", "tool", "tool", "tool", "developer"]
    assert [message.role for message in prompt.messages] == roles
    assert prompt.messages[3].parts == (
        Reasoning("Hm."),
        Text("A"),
        ToolCall("c1", "Read", {"path": "a"}),
        ToolCall("c2", "apply_patch", {"input": "a"}),
        ToolCall("c3", "agents__wait", {"path": "a"}),
    )


@pytest.mark.parametrize("name", [*captures.names("/v1/responses"), "everything"])
def test_any_changed_field_decodes_or_is_refused(name: str) -> None:
    original = EVERYTHING if name == "everything" else captures.body(name)
    refusals = 0
    for change, changed in captures.mutations(original):
        try:
            decode(changed, LIMITS)
        except InvalidRequest as error:
            refusals += 1
            assert error.message and error.field, change
    assert refusals > 100


# Input


def test_input_forms() -> None:
    assert conversation("Hi") == conversation([user("Hi")]) == conversation([{"type": "message", **user("Hi")}])
    assert conversation("Hi") == conversation([user([{"type": "input_text", "text": "Hi"}])])
    assert conversation("").messages == (Message("user", (Text(""),)),)
    assert request("", max_output_tokens=1).max_tokens == 1


@pytest.mark.parametrize("items", [None, 5, {}, []])
def test_refused_inputs(items: Any) -> None:
    refused("input", items)


def test_instructions_lead() -> None:
    found = conversation([{"role": "developer", "content": "D"}, user("Hi")], instructions="I")
    assert found.messages[:2] == (Message("system", (Text("I"),)), Message("developer", (Text("D"),)))
    assert conversation(instructions="") == conversation(instructions=None) == conversation()


def test_the_model_is_named() -> None:
    with pytest.raises(InvalidRequest, match="model: is required"):
        decode({"input": "Hi"}, LIMITS)


def test_items_without_id_or_status_and_with_null_contents() -> None:
    reasoning: Any = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None}
    found = conversation([user("Hi"), reasoning, {"role": "assistant", "content": "A"}, user("Go")])
    assert [message.role for message in found.messages] == ["user", "assistant", "user"]
    assert found.messages[1].parts == (Text("A"),)


def test_readable_reasoning_is_kept_and_encrypted_reasoning_refused() -> None:
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "S"}], "encrypted_content": "x"}
    assert conversation([user("Hi"), summary]).messages[1].parts == (Reasoning("S"),)
    both = {**summary, "content": [{"type": "reasoning_text", "text": "R"}]}
    assert conversation([user("Hi"), both]).messages[1].parts == (Reasoning("R"),)
    opaque = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}
    refused("input[1].encrypted_content", [user("Hi"), opaque])


@pytest.mark.parametrize("arguments", ["[1]", '"x"', '{"a":', "null"])
def test_arguments_are_json_objects(arguments: str) -> None:
    refused("input[1].arguments", [user("Hi"), call(arguments=arguments)])


def test_empty_arguments_are_an_empty_object() -> None:
    assert conversation([user("Hi"), call(arguments="")]).messages[1].parts == (ToolCall("c1", "Read", {}),)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("done", (Text("done"),)),
        ("", ()),
        ([], ()),
        ([{"type": "input_text", "text": "a"}, IMAGE], (Text("a"), Image(PNG, "image/png"))),
    ],
)
@pytest.mark.parametrize("kind", ["function_call_output", "custom_tool_call_output"])
def test_tool_outputs(content: Any, parts: Any, kind: str) -> None:
    found = conversation([user("Hi"), call(), {"type": kind, "call_id": "c1", "output": content}])
    assert found.messages[2] == Message("tool", (ToolResult("c1", parts),))


@pytest.mark.parametrize(
    ("item", "field"),
    [
        ({"type": "item_reference", "id": "m"}, "input[0]"),
        ({"type": "web_search_call", "id": "w"}, "input[0].type"),
        ({"type": "compaction", "encrypted_content": "x"}, "input[0].type"),
        ({"id": "x"}, "input[0].type"),
        ("text", "input[0]"),
        ({"role": "tool", "content": "x"}, "input[0].role"),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}, "input[0].content[0].type"),
        ({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}, "input[0].content[0].file_id"),
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": "https://example.com/a.png"}]},
            "input[0].content[0].image_url",
        ),
        ({"role": "developer", "content": [IMAGE]}, "input[0].content[0]"),
    ],
)
def test_refused_items(item: Any, field: str) -> None:
    refused(field, [item, user("Hi")])


# Tools


def test_custom_tools_become_functions_of_one_string() -> None:
    (tool,) = conversation(tools=[PATCH]).tools
    assert tool.freeform and tool.input_format == Constraint("lark", 'start: "a"')
    assert tool.parameters["properties"] == {"input": {"type": "string"}}
    assert tool.description.startswith("Edits.") and 'start: "a"' in tool.description


@pytest.mark.parametrize("form", [None, {"type": "text"}])
def test_custom_tools_without_a_grammar(form: Any) -> None:
    (tool,) = conversation(tools=[{"type": "custom", "name": "note", "format": form}]).tools
    assert tool.freeform and tool.input_format is None


def test_regex_grammars_and_the_nested_spelling() -> None:
    regex = {"type": "grammar", "syntax": "regex", "definition": "a+"}
    nested = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a+"}}
    for form in (regex, nested):
        (tool,) = conversation(tools=[{**PATCH, "format": form}]).tools
        assert tool.input_format == Constraint("regex", "a+")
    refused("tools[0].format.syntax", tools=[{**PATCH, "format": {**regex, "syntax": "ebnf"}}])
    refused("tools[0].format.type", tools=[{**PATCH, "format": {"type": "other"}}])


def test_namespaces_become_flat_names() -> None:
    assert [tool.name for tool in conversation(tools=[SPACE, READ]).tools] == ["agents__wait", "Read"]


@pytest.mark.parametrize(
    "tools",
    [
        [READ, READ],
        [READ, {**PATCH, "name": "Read"}],
        [SPACE, {**READ, "name": "agents__wait"}],
        [
            {"type": "namespace", "name": "a__b", "tools": [{**READ, "name": "c"}]},
            {"type": "namespace", "name": "a", "tools": [{**READ, "name": "b__c"}]},
        ],
    ],
)
def test_ambiguous_names_are_refused(tools: Any) -> None:
    with pytest.raises(InvalidRequest, match="ambiguous"):
        request(tools=tools)


@pytest.mark.parametrize("kind", ["web_search", "web_search_preview", "web_search_2025_08_26"])
def test_unasked_hosted_search_is_dropped(kind: str) -> None:
    assert conversation(tools=[READ, {"type": kind}]) == conversation(tools=[READ])
    refused("tool_choice", tools=[READ, {"type": kind}], tool_choice={"type": kind})


@pytest.mark.parametrize("kind", ["file_search", "computer_use_preview", "code_interpreter", "mcp", "local_shell"])
def test_other_hosted_tools_are_refused(kind: str) -> None:
    refused("tools[0].type", tools=[{"type": kind}])


def test_strict_tools_are_refused() -> None:
    refused("tools[0].strict", tools=[{**READ, "strict": True}])
    assert conversation(tools=[{**READ, "strict": False}]) == conversation(tools=[{**READ, "strict": None}])


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "name": "Read"}, ToolChoice("named", "Read")),
        ({"type": "custom", "name": "apply_patch"}, ToolChoice("named", "apply_patch")),
        ({"type": "function", "name": "agents__wait"}, ToolChoice("named", "agents__wait")),
        ({"type": "function", "name": "wait", "namespace": "agents"}, ToolChoice("named", "agents__wait")),
    ],
)
def test_tool_choices(choice: Any, expected: ToolChoice) -> None:
    assert conversation(tools=[READ, PATCH, SPACE], tool_choice=choice).tool_choice == expected


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "apply_patch"},
        {"type": "custom", "name": "Read"},
        {"type": "function", "name": "Other"},
        {"type": "function"},
        {"type": "allowed_tools", "mode": "auto", "tools": []},
        {"type": "file_search"},
        "any",
    ],
)
def test_refused_tool_choices(choice: Any) -> None:
    refused("tool_choice", tools=[READ, PATCH, SPACE], tool_choice=choice)


def test_required_needs_a_tool() -> None:
    refused("tool_choice", tools=[], tool_choice="required")
    refused("tool_choice", tools=[{"type": "web_search"}], tool_choice="required")


# State


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("store", True),
        ("previous_response_id", "resp_1"),
        ("conversation", "conv_1"),
        ("conversation", {"id": "conv_1"}),
        ("background", True),
        ("truncation", "auto"),
        ("prompt", {"id": "p"}),
        ("prompt_logprobs", 0),
        ("prompt_logprobs", 5),
        ("logit_bias", {"5": 1}),
    ],
)
def test_stateful_and_unsupported_fields_are_refused(field: str, value: Any) -> None:
    refused(field, **{field: value})


def test_stateless_spellings_and_unknown_fields_change_nothing() -> None:
    plain = request()
    for fields in (
        {"store": False, "background": False, "truncation": "disabled", "previous_response_id": None},
        {"conversation": None, "prompt": None, "prompt_logprobs": None, "truncation": None},
        {"client_metadata": {"a": 1}, "prompt_cache_key": "k", "text": {"verbosity": "low"}, "service_tier": "auto"},
        {"include": ["reasoning.encrypted_content", "anything"], "stream_options": {"include_obfuscation": False}},
        {"metadata": 5, "user": 5, "safety_identifier": []},
    ):
        assert request(**fields) == plain


# Observations, formats, effort


def test_logprobs_need_the_include() -> None:
    assert request(include=LOGPROBS).output.logprobs == 0
    assert request(include=LOGPROBS, top_logprobs=20).output.logprobs == 20
    assert request(top_logprobs=5).output.logprobs is None
    refused("logprob_token_ids", logprob_token_ids=[5])
    assert request(logprob_token_ids=[]).output.logprob_token_ids == ()
    assert request(include=LOGPROBS, logprob_token_ids=[9, 5, 9]).output.logprob_token_ids == (9, 5)
    for bad in (21, -1, True, 1.0):
        refused("top_logprobs", include=LOGPROBS, top_logprobs=bad)
    refused("logprob_token_ids[0]", include=LOGPROBS, logprob_token_ids=[1000])


def test_logprobs_need_the_capability() -> None:
    body = {"model": "m", "input": "Hi", "include": LOGPROBS}
    with pytest.raises(InvalidRequest, match="without generation log probabilities"):
        decode(body, DecodeLimits(vocab_size=10, max_top_logprobs=0))
    with pytest.raises(InvalidRequest, match="at most 5"):
        decode({**body, "top_logprobs": 6}, DecodeLimits(vocab_size=10, max_top_logprobs=5))


def test_text_formats() -> None:
    assert request(text={}).constraint is None and request(text={"format": {"type": "text"}}).constraint is None
    assert request(text={"format": {"type": "json_object"}}).constraint == Constraint("json_object", "")
    described = request(text={"format": {"type": "json_object", "schema": {"required": ["a"]}}}).constraint
    assert described == Constraint("json_schema", '{"type":"object","required":["a"]}')
    form = {"type": "json_schema", "name": "n", "schema": {"b": 1, "a": 2}, "strict": True}
    assert request(text={"format": form}).constraint == Constraint("json_schema", '{"b":1,"a":2}')
    refused("text.format.type", text={"format": {"type": "grammar"}})
    refused("text.format.schema", text={"format": {"type": "json_schema"}})
    refused("text.format", text={"format": form}, guided_regex="a")
    refused("stop", text={"format": form}, stop=["a"])
    refused("ignore_eos", text={"format": form}, ignore_eos=True)


@pytest.mark.parametrize("score", [80, 1.5, True, [80]])
def test_effort_scores_are_no_numbers_here(score: Any) -> None:
    assert "reasoning.effort" in str(refused("reasoning_effort", reasoning_effort=score))
    for given in ("low", None):
        assert request(reasoning_effort=given).reasoning == request().reasoning


@pytest.mark.parametrize("effort", ["minimal", "low", "medium", "high", "xhigh", "max"])
def test_named_efforts(effort: str) -> None:
    found = request(reasoning={"effort": effort}).reasoning
    assert (found.effort, found.effort_given, found.enabled) == (effort, True, True)


def test_no_effort_turns_thinking_off_and_none_given_leaves_it() -> None:
    assert request(reasoning={"effort": "none"}).reasoning.enabled is False
    for absent in (None, {}, {"effort": None}, {"summary": "auto"}):
        found = request(reasoning=absent).reasoning
        assert (found.enabled, found.effort, found.effort_given) == (None, None, False)


@pytest.mark.parametrize("effort", [80, 80.0, True, "80", "extreme"])
def test_efforts_are_named(effort: Any) -> None:
    refused("reasoning.effort", reasoning={"effort": effort})


@pytest.mark.parametrize("budget", [0, -1, 2**31, 1.0, True])
def test_budgets_are_positive_32_bit_integers(budget: Any) -> None:
    refused("thinking_token_budget", thinking_token_budget=budget)


@pytest.mark.parametrize("tokens", [0, -1, 1.5, True, "5"])
def test_output_limits_are_positive_integers(tokens: Any) -> None:
    refused("max_output_tokens", max_output_tokens=tokens)


def test_without_a_limit_the_server_decides() -> None:
    assert request().max_tokens is None


def test_stops() -> None:
    assert request(stop="x").stops.strings == ("x",)
    assert request(stop_token_ids=[5]).stops.sequences == ((5,),)
    refused("stop", stop=["a"] * 5)
