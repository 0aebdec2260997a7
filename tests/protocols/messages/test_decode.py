"""Messages requests into neutral conversations: what real clients send, every rule, every single-field change."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from anthropic._constants import ANTHROPIC_API_VERSION

from engine.types.constraint import Constraint
from engine.types.conversation import (
    Conversation,
    Image,
    Message,
    Reasoning,
    Text,
    ToolCall,
    ToolChoice,
    ToolReference,
    ToolResult,
)
from engine.types.request import GenerationRequest
from protocols.errors import InvalidRequest
from protocols.fields import INT32_MAX, DecodeLimits
from protocols.messages.decode import check_version, decode, decode_count
from protocols.messages.thinking import marker
from tests.support import captures

LIMITS = DecodeLimits(vocab_size=1000, vision=True)
PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 8
IMAGE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()},
}
READ = {"name": "Read", "description": "Reads.", "input_schema": {"type": "object", "properties": {}}}
FETCH = {**READ, "name": "WebFetch", "defer_loading": True}
HINT: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}


def body(*messages: Any, **fields: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": message} if not isinstance(message, dict) else message for message in messages]
    return {"model": "any", "max_tokens": 64, "messages": turns or [{"role": "user", "content": "Hi"}], **fields}


def request(*messages: Any, **fields: Any) -> GenerationRequest:
    return decode(body(*messages, **fields), LIMITS).request


def conversation(*messages: Any, **fields: Any) -> Conversation:
    prompt = request(*messages, **fields).prompts[0]
    assert isinstance(prompt, Conversation)
    return prompt


def refused(field: str, *messages: Any, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        decode(body(*messages, **fields), LIMITS)
    assert caught.value.field == field
    assert caught.value.message.startswith(field)
    return caught.value


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def use(id: str = "toolu_1", name: str = "Read") -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name, "input": {"path": "a"}}


def result(content: Any, id: str = "toolu_1", **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": content, **more}]}


# Captured requests


@pytest.mark.parametrize("name", captures.names("/v1/messages"))
def test_captured_requests_decode(name: str) -> None:
    found = decode(captures.body(name), LIMITS).request
    assert found.stream and found.max_tokens == 32000
    assert found.reasoning.enabled and found.reasoning.effort == "high"


@pytest.mark.parametrize("mode", ["", "_bare"])
def test_the_second_turn_extends_the_first(mode: str) -> None:
    turns = []
    for turn in ("turn1", "turn2_tool_result"):
        found = decode(captures.body(f"claude-code-2.1.332{mode}_messages_{turn}"), LIMITS).request.prompts[0]
        assert isinstance(found, Conversation)
        turns.append(found)
    first, second = turns
    assert second.messages[: len(first.messages)] == first.messages
    assert [message.role for message in second.messages[len(first.messages) :]] == ["assistant", "tool"]
    assert second.tools == first.tools


def test_captured_count_of_a_bare_probe() -> None:
    probe = captures.body("claude-code-2.1.332_count_tokens_probe")
    found = decode_count(probe, LIMITS).request
    assert found.max_tokens is None
    assert found.prompts == (Conversation((Message("user", (Text("foo"),)),)),)
    with pytest.raises(InvalidRequest, match="max_tokens: is required"):
        decode(probe, LIMITS)


EVERYTHING = body(
    {"role": "system", "content": [{"type": "text", "text": "Be brief.", **HINT}]},
    {"role": "user", "content": [{"type": "text", "text": "Look.", **HINT}, IMAGE]},
    assistant({"type": "thinking", "thinking": "I look.", "signature": marker("I look.")}, use(), use("toolu_2")),
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "toolu_1",
                "content": [{"type": "text", "text": "x"}, IMAGE],
                **HINT,
            },
            {
                "type": "tool_result",
                "tool_use_id": "toolu_2",
                "content": [{"type": "tool_reference", "tool_name": "WebFetch"}],
                "is_error": True,
            },
            {"type": "text", "text": "Go on."},
        ],
    },
    {
        "role": "system",
        "content": [
            {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {**READ, "name": "New"}}},
            {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "Read"}},
        ],
    },
    system=[{"type": "text", "text": "You help."}],
    tools=[READ, FETCH],
    tool_choice={"type": "tool", "name": "Read", "disable_parallel_tool_use": True},
    thinking={"type": "enabled", "budget_tokens": 2048, "display": "omitted"},
    thinking_token_budget=2048,
    output_config={"effort": "high", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    metadata={"user_id": "u"},
    temperature=0.5,
    top_k=5,
    seed=1,
    stream=True,
)


def test_every_feature_together_decodes() -> None:
    found = decode(EVERYTHING, LIMITS).request
    assert found.constraint == Constraint("json_schema", '{"type":"object"}')
    assert found.sampling.top_k == 5 and found.sampling.seed == 1


@pytest.mark.parametrize("name", [*captures.names("/v1/messages"), "everything"])
def test_any_changed_field_decodes_or_is_refused(name: str) -> None:
    original = EVERYTHING if name == "everything" else captures.body(name)
    refusals = 0
    for change, changed in captures.mutations(original):
        for decoder in (decode, decode_count):
            try:
                decoder(changed, LIMITS)
            except InvalidRequest as error:
                refusals += 1
                assert error.message and error.field, change
    assert refusals > 100


# System text


def test_system_forms_are_the_same_conversation() -> None:
    forms = ["Be brief.", [{"type": "text", "text": "Be brief.", **HINT}]]
    assert len({conversation("Hi", system=form) for form in forms}) == 1
    inline = [conversation("Hi", {"role": "system", "content": form}) for form in forms]
    assert inline[0] == inline[1]
    assert inline[0].messages[-1] == Message("system", (Text("Be brief."),))


def test_a_leading_attribution_block_is_dropped() -> None:
    attribution = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1f;"}
    rest = {"type": "text", "text": "You help."}
    plain = conversation("Hi", system=[rest])
    assert conversation("Hi", system=[attribution, rest]) == plain
    assert len(conversation("Hi", system=[rest, attribution]).messages[0].parts) == 2


@pytest.mark.parametrize("empty", ["", [], [{"type": "text", "text": ""}]])
def test_empty_system_text_produces_nothing(empty: Any) -> None:
    assert conversation("Hi", system=empty) == conversation("Hi")
    assert conversation("Hi", {"role": "system", "content": empty}) == conversation("Hi")


def test_a_system_message_may_stand_last() -> None:
    found = conversation("Hi", assistant(use()), result("x"), {"role": "system", "content": "Note."}, tools=[READ])
    assert [message.role for message in found.messages] == ["user", "assistant", "tool", "system"]


def test_control_metadata_inside_messages_is_ignored() -> None:
    plain = conversation("Hi")
    marked = {"role": "user", "content": "Hi", "output_config": {"effort": "low"}, "id": "m1", "usage": {"a": 1}}
    assert decode(body(marked), LIMITS).request == request("Hi")
    assert conversation(marked) == plain


# Histories


def test_an_assistant_turn_keeps_its_order() -> None:
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": marker("Hm.")}
    found = conversation("Hi", assistant(thinking, {"type": "text", "text": "A"}, use()), result("x"), tools=[READ])
    assert found.messages[1].parts == (Reasoning("Hm."), Text("A"), ToolCall("toolu_1", "Read", {"path": "a"}))


def test_edited_local_thinking_is_refused() -> None:
    edited = {"type": "thinking", "thinking": "Hm!", "signature": marker("Hm.")}
    refused("messages[1].content[0].signature", "Hi", assistant(edited), "Go")


@pytest.mark.parametrize("signature", [{}, {"signature": None}, {"signature": "EqoBCkgIARABGAIiQL"}])
def test_readable_thinking_of_another_provider_is_replayed(signature: Any) -> None:
    block = {"type": "thinking", "thinking": "Hm.", **signature}
    found = conversation("Hi", assistant(block, {"type": "text", "text": "A"}), "Go")
    assert found.messages[1].parts == (Reasoning("Hm."), Text("A"))


def test_unreadable_thinking_leaves_the_rest_of_the_turn() -> None:
    blocks = [{"type": "redacted_thinking", "data": "b64"}, {"type": "thinking", "thinking": "", "signature": "s"}]
    found = conversation("Hi", assistant(*blocks, {"type": "text", "text": "A"}), "Go")
    assert found.messages[1].parts == (Text("A"),)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("done", (Text("done"),)),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], (Text("a"), Text("b"))),
        ([], ()),
        ("", ()),
        (None, ()),
        ([IMAGE], (Image(PNG, "image/png"),)),
        ([{"type": "tool_reference", "tool_name": "WebFetch"}], (ToolReference("WebFetch"),)),
    ],
)
def test_tool_results(content: Any, parts: Any) -> None:
    found = conversation("Hi", assistant(use()), result(content), tools=[READ, FETCH])
    assert found.messages[2] == Message("tool", (ToolResult("toolu_1", parts),))


def test_an_error_result_is_marked() -> None:
    found = conversation("Hi", assistant(use()), result("no such file", is_error=True), tools=[READ])
    assert found.messages[2].parts == (ToolResult("toolu_1", (Text("no such file"),), is_error=True),)


def test_results_and_text_of_one_message_keep_their_order() -> None:
    mixed = {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "b", "content": "2"},
            {"type": "text", "text": "between"},
            {"type": "tool_result", "tool_use_id": "a", "content": "1"},
            IMAGE,
        ],
    }
    found = conversation("Hi", assistant(use("a"), use("b")), mixed, tools=[READ])
    assert [message.role for message in found.messages] == ["user", "assistant", "tool", "user", "tool", "user"]


def test_images_need_a_model_that_takes_them() -> None:
    with pytest.raises(InvalidRequest, match="does not take images"):
        decode(body([IMAGE]), DecodeLimits(vocab_size=1000))
    remote = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    refused("messages[0].content[0].source.type", [remote])


@pytest.mark.parametrize(
    ("role", "block"),
    [
        ("user", use()),
        ("user", {"type": "thinking", "thinking": "x"}),
        ("assistant", IMAGE),
        ("assistant", {"type": "tool_result", "tool_use_id": "a"}),
        ("system", IMAGE),
        ("system", use()),
    ],
)
def test_blocks_stand_only_in_their_role(role: str, block: Any) -> None:
    refused("messages[0].content[0]", {"role": role, "content": [block]}, "Hi")


@pytest.mark.parametrize("kind", ["document", "search_result", "server_tool_use", "compaction"])
def test_blocks_of_other_kinds_are_named(kind: str) -> None:
    error = refused("messages[0].content[0]", {"role": "user", "content": [{"type": kind}]})
    assert kind in error.message


def test_only_system_text_is_no_conversation() -> None:
    refused("messages", {"role": "system", "content": "Be brief."})


# Prefill


def test_a_last_assistant_message_is_continued() -> None:
    found = request("Hi", {"role": "assistant", "content": "The"})
    assert found.template.continue_final_message and not found.template.add_generation_prompt
    normal = request("Hi")
    assert normal.template.add_generation_prompt and not normal.template.continue_final_message


def test_an_empty_last_assistant_message_is_a_plain_request() -> None:
    assert request("Hi", {"role": "assistant", "content": ""}) == request("Hi")


def test_a_prefill_cannot_end_in_a_call() -> None:
    refused("messages", "Hi", assistant(use()), tools=[READ])


def test_a_prefill_cannot_be_constrained() -> None:
    schema = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    refused("continue_final_message", "Hi", {"role": "assistant", "content": "{"}, output_config=schema)


# Boundaries


def test_hints_mark_boundaries_and_change_nothing_else() -> None:
    turns = (
        [{"type": "text", "text": "a", **HINT}, {"type": "text", "text": "b"}, {**IMAGE, **HINT}],
        assistant({"type": "text", "text": "c", **HINT}, use()),
        {"role": "system", "content": [{"type": "text", "text": "d", **HINT}]},
        result("e", **HINT),
    )
    found = conversation(*turns, tools=[READ], system=[{"type": "text", "text": "s", **HINT}])
    assert found.boundaries == ((1, 0), (1, 2), (4, 0))
    assert [type(found.messages[m].parts[p]) for m, p in found.boundaries] == [Text, Image, ToolResult]


def test_only_the_first_four_hints_count() -> None:
    found = conversation([{"type": "text", "text": str(index), **HINT} for index in range(6)])
    assert found.boundaries == ((0, 0), (0, 1), (0, 2), (0, 3))


def test_moving_hints_leave_the_messages_equal() -> None:
    first = conversation([{"type": "text", "text": "a", **HINT}])
    second = conversation("a")
    assert first.messages == second.messages and first != second


# Tools


def test_custom_tools_use_their_schema() -> None:
    plain, custom = conversation(tools=[READ]), conversation(tools=[{**READ, "type": "custom"}])
    assert plain.tools == custom.tools
    assert plain.tools[0].parameters == READ["input_schema"] and not plain.tools[0].freeform


def test_deferred_tools_are_marked() -> None:
    assert [tool.deferred for tool in conversation(tools=[READ, FETCH]).tools] == [False, True]


def test_a_tool_added_inline_is_deferred_and_referenced() -> None:
    addition = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {**READ, "name": "New"}}}
    found = conversation("Hi", {"role": "system", "content": [addition]}, tools=[READ])
    assert [(tool.name, tool.deferred) for tool in found.tools] == [("Read", False), ("New", True)]
    assert found.messages[1].parts == (ToolReference("New"),)


def test_an_added_declared_tool_is_referenced() -> None:
    addition = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "WebFetch"}}
    found = conversation("Hi", {"role": "system", "content": [addition]}, tools=[FETCH])
    assert found.messages[1].parts == (ToolReference("WebFetch"),)


def test_references_need_a_declaration() -> None:
    field = "messages[2].content[0].content[0].tool_name"
    refused(field, "Hi", assistant(use()), result([{"type": "tool_reference", "tool_name": "None"}]), tools=[READ])


@pytest.mark.parametrize(
    ("tool", "field"),
    [
        ({"type": "web_search_20250305", "name": "web_search"}, "tools[0].type"),
        ({"type": "bash_20250124", "name": "bash"}, "tools[0].type"),
        ({**READ, "strict": True}, "tools[0].strict"),
        ({"name": "x"}, "tools[0].input_schema"),
        ({**READ, "name": ""}, "tools[0].name"),
    ],
)
def test_refused_tools(tool: Any, field: str) -> None:
    refused(field, tools=[tool])


def test_repeated_tool_names_are_refused() -> None:
    refused("tools[1].name", tools=[READ, READ])


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        (None, ToolChoice(), True),
        ({"type": "auto"}, ToolChoice(), True),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(), False),
        ({"type": "any"}, ToolChoice("required"), True),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice("required"), False),
        ({"type": "none"}, ToolChoice("none"), True),
        ({"type": "tool", "name": "Read"}, ToolChoice("named", "Read"), True),
    ],
)
def test_tool_choices(choice: Any, expected: ToolChoice, parallel: bool) -> None:
    found = conversation(tools=[READ], tool_choice=choice)
    assert (found.tool_choice, found.parallel_tool_calls) == (expected, parallel)


def test_choices_need_declared_tools() -> None:
    refused("tool_choice", tool_choice={"type": "any"})
    refused("tool_choice", tools=[READ], tool_choice={"type": "tool", "name": "Other"})
    refused("tool_choice.name", tools=[READ], tool_choice={"type": "tool"})


def test_no_tools_at_all() -> None:
    assert conversation(tools=[]) == conversation()


# Thinking, effort, budgets


@pytest.mark.parametrize(("thinking", "enabled"), [("enabled", True), ("adaptive", True), ("disabled", False)])
def test_thinking_modes(thinking: str, enabled: bool) -> None:
    assert request(thinking={"type": thinking}).reasoning.enabled is enabled
    assert request().reasoning.enabled is None


@pytest.mark.parametrize("mode", ["enabled", "adaptive"])
@pytest.mark.parametrize(
    ("budget", "effort"), [(1, "low"), (5000, "low"), (5001, "high"), (20000, "high"), (20001, "max"), (2**40, "max")]
)
def test_budgets_select_effort_and_advise_a_cap(mode: str, budget: int, effort: str) -> None:
    found = request(thinking={"type": mode, "budget_tokens": budget}).reasoning
    assert (found.effort, found.effort_given, found.budget_advisory) == (effort, True, True)
    assert found.budget == min(budget, INT32_MAX)


def test_a_budget_beyond_any_output_is_accepted_and_cannot_cut() -> None:
    assert request(thinking={"type": "enabled", "budget_tokens": 2**80}).reasoning.budget == INT32_MAX


def test_explicit_effort_wins() -> None:
    found = request(thinking={"type": "enabled", "budget_tokens": 1024}, output_config={"effort": "xhigh"}).reasoning
    assert (found.effort, found.budget) == ("xhigh", 1024)


def test_an_explicit_budget_is_binding() -> None:
    found = request(thinking_token_budget=100).reasoning
    assert (found.budget, found.budget_advisory, found.effort) == (100, False, None)
    both = request(thinking_token_budget=2048, thinking={"type": "enabled", "budget_tokens": 2048}).reasoning
    assert (both.budget, both.budget_advisory, both.effort) == (2048, False, "low")


def test_two_budgets_must_match() -> None:
    refused("thinking_token_budget", thinking_token_budget=2048, thinking={"type": "enabled", "budget_tokens": 2049})


@pytest.mark.parametrize("budget", [0, -1, 2**31, 1.0, True, "5"])
def test_explicit_budgets_are_positive_32_bit_integers(budget: Any) -> None:
    refused("thinking_token_budget", thinking_token_budget=budget)


@pytest.mark.parametrize("effort", [80, 80.0, True, "80", "extreme"])
def test_efforts_are_named(effort: Any) -> None:
    refused("output_config.effort", output_config={"effort": effort})


@pytest.mark.parametrize("score", [80, 1.5, True, [80]])
def test_effort_scores_are_no_numbers_here(score: Any) -> None:
    assert "output_config.effort" in str(refused("reasoning_effort", reasoning_effort=score))
    for given in ("low", None):
        assert request(reasoning_effort=given).reasoning == request().reasoning


def test_a_disabled_budget_means_nothing() -> None:
    found = request(thinking={"type": "disabled", "budget_tokens": 4096}).reasoning
    assert (found.enabled, found.budget, found.effort) == (False, None, None)


# Refused and ignored fields


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", True),
        ("logprobs", False),
        ("top_logprobs", 0),
        ("return_tokens_as_token_ids", True),
        ("logprob_token_ids", [1]),
        ("prompt_logprobs", 0),
        ("mcp_servers", [{"type": "url"}]),
        ("compaction", {"type": "summarize"}),
        ("thread", {"type": "create"}),
        ("thread", {"type": "continue", "previous_message_id": "msg_1"}),
        ("logit_bias", {"5": 1}),
    ],
)
def test_refused_fields(field: str, value: Any) -> None:
    refused(field, **{field: value})
    with pytest.raises(InvalidRequest):
        decode_count(body(**{field: value}), LIMITS)


@pytest.mark.parametrize(
    "field", ["metadata", "safeguards", "service_tier", "speed", "betas", "inference_geo", "cache_control", "foo"]
)
def test_ignored_fields(field: str) -> None:
    assert decode(body(**{field: {"a": [1]}}), LIMITS).request == request()


@pytest.mark.parametrize(
    "edit",
    [
        {"type": "clear_thinking_20251015"},
        {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 2}},
        {"type": "clear_tool_uses_20250919"},
        {"type": "compact_20260112"},
    ],
)
def test_active_context_edits_are_refused(edit: Any) -> None:
    refused("context_management.edits[0]", context_management={"edits": [edit]})


@pytest.mark.parametrize(
    "management",
    [
        None,
        {},
        {"edits": []},
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "all"}}]},
    ],
)
def test_keeping_all_thinking_is_no_edit(management: Any) -> None:
    assert request(context_management=management) == request()


@pytest.mark.parametrize("tokens", [0, -1, 1.0, "5", True, None])
def test_max_tokens_is_a_positive_integer(tokens: Any) -> None:
    refused("max_tokens", max_tokens=tokens)


def test_a_limit_beyond_any_context_is_kept_for_clamping() -> None:
    assert request(max_tokens=10**30).max_tokens == INT32_MAX


# Stops, sampling, output formats


def test_stop_sequences() -> None:
    assert request(stop_sequences=["\n\nEND"]).stops.strings == ("\n\nEND",)
    assert request(stop_token_ids=[5], stop_token_sequences=[[1, 2]]).stops.sequences == ((5,), (1, 2))
    refused("stop_sequences", stop_sequences=["a"] * 5)
    refused("stop_sequences", stop_sequences=[""])
    refused("stop_sequences", stop_sequences=["é" * 2049])
    refused("stop_sequences", stop_sequences=["a"], stop_token_ids=[5])


def test_native_extensions() -> None:
    found = request(top_k=20, min_p=0.1, repetition_penalty=1.1, presence_penalty=1.5, ignore_eos=True, min_tokens=3)
    assert (found.sampling.top_k, found.sampling.min_p, found.sampling.repetition_penalty) == (20, 0.1, 1.1)
    assert found.sampling.presence_penalty == 1.5 and found.ignore_eos and found.min_tokens == 3
    assert request(chat_template_kwargs={"a": 1}).template.kwargs == {"a": 1}
    for field, value in (("top_k", 20.0), ("temperature", True), ("top_p", "0.5"), ("min_p", float("nan"))):
        refused(field, **{field: value})


def test_an_output_format_constrains_the_answer() -> None:
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"b": {}, "a": {}}}}
    expected = Constraint("json_schema", '{"type":"object","properties":{"b":{},"a":{}}}')
    assert request(output_config={"format": form}).constraint == expected
    assert request(output_format=form).constraint == expected
    assert request(output_config={"format": form}, output_format=form).constraint == expected
    assert request(guided_regex="a+").constraint == Constraint("regex", "a+")
    refused("output_config.format", output_config={"format": form}, guided_regex="a+")
    refused("stop_sequences", output_config={"format": form}, stop_sequences=["a"])
    refused("ignore_eos", output_config={"format": form}, ignore_eos=True)


# Versions


def test_versions() -> None:
    check_version("2023-06-01")
    check_version(ANTHROPIC_API_VERSION)
    for version in (None, "", "2023-01-01", "2023-06-01, 2023-06-01"):
        with pytest.raises(InvalidRequest, match="anthropic-version"):
            check_version(version)
