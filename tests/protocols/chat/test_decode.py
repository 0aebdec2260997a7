"""Chat bodies: the neutral request they become, and every refusal with its field."""

from __future__ import annotations

import base64
from typing import Any

import pytest

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
from engine.types.request import GenerationRequest, OutputOptions, ReasoningOptions, Stops, TemplateOptions
from protocols.chat.decode import ChatOptions, decode
from protocols.errors import InvalidRequest, ProtocolError
from protocols.fields import DecodeLimits
from tests.support import captures

LIMITS = DecodeLimits(vocab_size=100, prompt_logprobs=True, vision=True)
USER = [{"role": "user", "content": "hi"}]
PNG = b"\x89PNG\r\n\x1a\n" + bytes(8)
URL = "data:image/png;base64," + base64.b64encode(PNG).decode()
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}


def request(**body: Any) -> GenerationRequest:
    return decode({"model": "m", "messages": USER, **body}, LIMITS).request


def options(**body: Any) -> ChatOptions:
    found = decode({"model": "m", "messages": USER, **body}, LIMITS).options
    assert isinstance(found, ChatOptions)
    return found


def conversation(*messages: dict[str, Any], **body: Any) -> Conversation:
    (prompt,) = request(messages=list(messages), **body).prompts
    assert isinstance(prompt, Conversation)
    return prompt


def refusal(limits: DecodeLimits = LIMITS, **body: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        decode({"model": "m", "messages": USER, **body}, limits)
    assert caught.value.field and caught.value.message.startswith(f"{caught.value.field}: ")
    return caught.value


def test_a_minimal_body_leaves_everything_open() -> None:
    assert request() == GenerationRequest(
        api="chat", prompts=(Conversation((Message("user", (Text("hi"),)),)),), template=TemplateOptions()
    )
    assert decode({"messages": USER}, LIMITS).request == request()


def test_roles_and_content_forms() -> None:
    found = conversation(
        {"role": "system", "content": "s"},
        {"role": "developer", "content": [{"type": "text", "text": "d"}]},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "refusal": "no"},
        {"role": "user", "content": ""},
    )
    assert found.messages == (
        Message("system", (Text("s"),)),
        Message("developer", (Text("d"),)),
        Message("user", (Text("a"), Text("b"))),
        Message("assistant", (Text("no"),)),
        Message("user", ()),
    )


def test_a_string_and_its_block_are_the_same() -> None:
    for text in ("x", ""):
        blocks = [{"type": "text", "text": text}]
        assert conversation({"role": "user", "content": text}) == conversation({"role": "user", "content": blocks})


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_assistant_turns_keep_reasoning_text_and_calls(field: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"p": [1, "é"]}'}}
    found = conversation(
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "t", field: "r", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    )
    assert found.messages[1:] == (
        Message("assistant", (Reasoning("r"), Text("t"), ToolCall("c1", "read", {"p": [1, "é"]}))),
        Message("tool", (ToolResult("c1", (Text("done"),)),)),
    )


@pytest.mark.parametrize("arguments", ["", None, "{}", {}])
def test_calls_without_arguments(arguments: object) -> None:
    call = {"id": "c1", "function": {"name": "now", "arguments": arguments}}
    found = conversation({"role": "assistant", "content": "", "tool_calls": [call]})
    assert found.messages[0].parts == (ToolCall("c1", "now", {}),)


@pytest.mark.parametrize("content", ["", [], None])
def test_empty_tool_results(content: object) -> None:
    found = conversation({"role": "tool", "tool_call_id": "c", "content": content})
    assert found.messages[0].parts == (ToolResult("c", ()),)


def test_images_in_user_and_tool_messages() -> None:
    part = {"type": "image_url", "image_url": {"url": URL, "detail": "high"}}
    found = conversation(
        {"role": "user", "content": [{"type": "text", "text": "a"}, part, {"type": "text", "text": "b"}]},
        {"role": "tool", "tool_call_id": "c", "content": [part]},
    )
    image = Image(PNG, "image/png")
    assert found.messages[0].parts == (Text("a"), image, Text("b"))
    assert found.messages[1].parts == (ToolResult("c", (image,)),)


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{}], "messages[0].role"),
        ([{"role": 1, "content": "x"}], "messages[0].role"),
        ([{"role": "function", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 1}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "file", "file": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].image_url"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x.org/a.png"}}]}],
            "messages[0].content[0].image_url.url",
        ),
        ([{"role": "system", "content": [{"type": "image_url", "image_url": {"url": URL}}]}], "messages[0].content[0]"),
        ([*USER, {"role": "assistant", "content": 5}], "messages[1].content"),
        ([*USER, {"role": "assistant", "content": "", "reasoning": 5}], "messages[1].reasoning"),
        ([*USER, {"role": "assistant", "tool_calls": {}}], "messages[1].tool_calls"),
        ([*USER, {"role": "assistant", "tool_calls": [{"id": "c"}]}], "messages[1].tool_calls[0].function"),
        (
            [*USER, {"role": "assistant", "tool_calls": [{"function": {"name": "a"}}]}],
            "messages[1].tool_calls[0].id",
        ),
        (
            [*USER, {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "a", "arguments": "{"}}]}],
            "messages[1].tool_calls[0].function.arguments",
        ),
        (
            [*USER, {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "a", "arguments": "[]"}}]}],
            "messages[1].tool_calls[0].function.arguments",
        ),
        (
            [*USER, {"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "custom": {}}]}],
            "messages[1].tool_calls[0].type",
        ),
        ([*USER, {"role": "tool", "content": "x"}], "messages[1].tool_call_id"),
    ],
)
def test_bad_messages(messages: object, field: str) -> None:
    assert refusal(messages=messages).field == field


def test_a_text_model_refuses_images() -> None:
    content = [{"type": "image_url", "image_url": {"url": URL}}]
    error = refusal(DecodeLimits(100), messages=[{"role": "user", "content": content}])
    assert "does not take images" in error.message


def test_tools() -> None:
    found = conversation(*USER, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    assert [tool.name for tool in found.tools] == ["read"]
    assert found.tool_choice == ToolChoice("required") and not found.parallel_tool_calls


@pytest.mark.parametrize("tools", [None, []])
def test_no_tools(tools: object) -> None:
    found = conversation(*USER, tools=tools, tool_choice="auto", parallel_tool_calls=None)
    assert found.tools == () and found.parallel_tool_calls


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "function": {"name": "read"}}, ToolChoice("named", "read")),
    ],
)
def test_tool_choices(choice: object, expected: ToolChoice) -> None:
    assert conversation(*USER, tools=[TOOL], tool_choice=choice).tool_choice == expected


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": ["read"]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools[1]"),
        ({"tools": [{"type": "function", "function": {"name": "a", "strict": True}}]}, "tools[0].function.strict"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "read"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": 1}, "tool_choice"),
        ({"tools": [TOOL], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"functions": [{"name": "a"}]}, "functions"),
        ({"function_call": {"name": "a"}}, "function_call"),
    ],
)
def test_bad_tools(body: dict[str, Any], field: str) -> None:
    found = refusal(**body).field
    assert found is not None and found.startswith(field)


def test_strict_output_formats_are_no_strict_tools() -> None:
    schema = {"name": "x", "schema": {"type": "object"}, "strict": True}
    constraint = request(response_format={"type": "json_schema", "json_schema": schema}).constraint
    assert constraint is not None and constraint.kind == "json_schema"


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 8}, 8),
        ({"max_tokens": 7, "max_completion_tokens": 8}, 8),
        ({"max_tokens": None}, None),
        ({"max_tokens": 10**12}, 10**12),
    ],
)
def test_output_limits(body: dict[str, Any], limit: int | None) -> None:
    assert request(**body).max_tokens == limit


def test_sampling_and_endings() -> None:
    found = request(
        n=128,
        temperature=0,
        top_k=5,
        seed=-1,
        min_tokens=3,
        ignore_eos=True,
        stop=["a"],
        include_stop_str_in_output=True,
    )
    assert (found.n, found.sampling.temperature, found.sampling.top_k, found.sampling.seed) == (128, 0.0, 5, 2**64 - 1)
    assert found.min_tokens == 3 and found.ignore_eos and found.stops == Stops(("a",), (), True)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, OutputOptions()),
        ({"logprobs": False, "top_logprobs": None}, OutputOptions()),
        ({"top_logprobs": 0}, OutputOptions()),
        ({"logprobs": True}, OutputOptions(logprobs=0)),
        ({"logprobs": True, "top_logprobs": 20}, OutputOptions(logprobs=20)),
        (
            {"logprobs": True, "top_logprobs": 1, "logprob_token_ids": [9, 3, 9]},
            OutputOptions(logprobs=1, logprob_token_ids=(9, 3)),
        ),
        ({"logprob_token_ids": []}, OutputOptions()),
        ({"prompt_logprobs": 0}, OutputOptions(prompt_logprobs=0)),
        ({"return_token_timestamps": True}, OutputOptions(timestamps=True)),
    ],
)
def test_observations(body: dict[str, Any], expected: OutputOptions) -> None:
    assert request(**body).output == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, ReasoningOptions()),
        ({"reasoning_effort": None}, ReasoningOptions(effort_given=True)),
        ({"reasoning_effort": "low"}, ReasoningOptions(enabled=True, effort="low", effort_given=True)),
        ({"reasoning_effort": "none"}, ReasoningOptions(enabled=False)),
        ({"reasoning_effort": 80}, ReasoningOptions(effort=80, effort_given=True)),
        ({"thinking_token_budget": 1}, ReasoningOptions(budget=1)),
        ({"thinking_token_budget": 2**31 - 1}, ReasoningOptions(budget=2**31 - 1)),
        ({"thinking_token_budget": None}, ReasoningOptions()),
    ],
)
def test_reasoning(body: dict[str, Any], expected: ReasoningOptions) -> None:
    assert request(**body).reasoning == expected


def test_continuation_turns_the_generation_prompt_off() -> None:
    messages = [*USER, {"role": "assistant", "content": "The"}]
    expected = TemplateOptions(add_generation_prompt=False, continue_final_message=True)
    assert request(messages=messages, continue_final_message=True).template == expected
    both = request(messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert both.template == expected
    plain = request(add_generation_prompt=False, chat_template_kwargs={"enable_thinking": False}).template
    assert plain == TemplateOptions(False, False, {"enable_thinking": False})


def test_scoring_a_single_token_continuation() -> None:
    found = request(
        messages=[*USER, {"role": "assistant", "content": "The"}],
        max_tokens=1,
        continue_final_message=True,
        add_generation_prompt=False,
        logprobs=True,
        top_logprobs=20,
    )
    assert found.output.logprobs == 20 and found.sampling.temperature is None


def test_options() -> None:
    assert options() == ChatOptions()
    assert options(
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        return_tokens_as_token_ids=True,
        return_token_ids=True,
        return_token_timestamps=True,
        include_reasoning=False,
        logprobs=True,
        logprob_token_ids=[1],
    ) == ChatOptions(True, True, True, False, True, True, True, True, True)
    assert decode({"messages": USER, "return_token_ids": True}, LIMITS).prompt_ids
    assert not options(stream=True, stream_options={"continuous_usage_stats": True}).continuous_usage
    assert not options(stream=False, stream_options=None).include_usage


def test_group_sizes_are_bounded() -> None:
    assert refusal(DecodeLimits(100, max_group=4), n=5).field == "n"


LONG = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The"}]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 1.0}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 0, "prompt_logprobs": 1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": "a", "stop_token_ids": [1]}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"top_logprobs": 1, "logprobs": False}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"logprobs": True, "logprob_token_ids": [1] * 129}, "logprob_token_ids"),
        ({"logprobs": True, "logprob_token_ids": [100]}, "logprob_token_ids[0]"),
        ({"messages": LONG, "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"continue_final_message": True}, "continue_final_message"),
        (
            {"messages": LONG, "continue_final_message": True, "response_format": {"type": "json_object"}},
            "continue_final_message",
        ),
        ({"response_format": {"type": "json_object"}, "stop": "x"}, "stop"),
        ({"response_format": {"type": "json_object"}, "stop_token_ids": [1]}, "stop_token_ids"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"reasoning_effort": 80.0}, "reasoning_effort"),
        ({"reasoning_effort": True}, "reasoning_effort"),
        ({"reasoning_effort": "80"}, "reasoning_effort"),
        ({"reasoning_effort": ["low"]}, "reasoning_effort"),
        ({"thinking_token_budget": 0}, "thinking_token_budget"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"thinking_token_budget": 2**31}, "thinking_token_budget"),
        ({"thinking_token_budget": 5.0}, "thinking_token_budget"),
        ({"thinking_token_budget": True}, "thinking_token_budget"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"documents": [{}]}, "documents"),
        ({"echo": True}, "echo"),
    ],
)
def test_refusals(body: dict[str, Any], field: str) -> None:
    assert refusal(**body).field == field


@pytest.mark.parametrize("name", captures.names("/v1/chat/completions"))
def test_captured_requests(name: str) -> None:
    decoded = decode(captures.body(name), DecodeLimits(100))
    (prompt,) = decoded.request.prompts
    assert isinstance(prompt, Conversation) and len(prompt.tools) == 10
    assert decoded.options == ChatOptions(stream=True, include_usage=True)
    if name.endswith("tool_result"):
        assistant, tool = prompt.messages[2:]
        assert [type(part) for part in assistant.parts] == [Reasoning, ToolCall]
        assert isinstance(tool.parts[0], ToolResult)


@pytest.mark.parametrize("name", captures.names("/v1/chat/completions"))
def test_any_single_change_of_a_captured_request_is_served_or_refused(name: str) -> None:
    body = captures.body(name)
    body["tools"] = body["tools"][:1]
    for change, changed in captures.mutations(body):
        try:
            decode(changed, LIMITS)
        except ProtocolError as error:
            assert error.status == 400 and error.message, change
