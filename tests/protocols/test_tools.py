"""Tool definitions and the rules of each choice mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from engine.types.conversation import Conversation, ToolChoice, ToolDefinition
from engine.types.events import FirstToken, ReasoningDelta, SemanticEvent, Terminated, TextDelta, ToolCallCompleted
from protocols.errors import InvalidRequest
from protocols.tools import MAX_ARGUMENT_BYTES, ToolRules, check_choice, check_unique, function_tool
from tests.support.scenarios import call, end, observed

TOOLS = (ToolDefinition("read", "", {}), ToolDefinition("write", "", {}))


def apply(
    events: Sequence[SemanticEvent], choice: ToolChoice, *, parallel: bool = True, size: int = 1
) -> list[SemanticEvent]:
    rules = ToolRules(Conversation((), TOOLS, choice, parallel))
    shown: list[SemanticEvent] = []
    for start in range(0, len(events), size):
        shown += rules.apply(events[start : start + size])
    last = shown[-1]
    assert isinstance(last, Terminated)
    assert rules.failed == (last.failure == "output")
    return shown


def problem(shown: Sequence[SemanticEvent]) -> str:
    last = shown[-1]
    assert isinstance(last, Terminated) and last.cause == "failed" and last.failure == "output"
    return last.message


AUTO, NONE, REQUIRED = ToolChoice(), ToolChoice("none"), ToolChoice("required")
NAMED = ToolChoice("named", "read")
READ, WRITE, OTHER = call(0, "read", {}), call(0, "write", {}), call(0, "other", {"a": 1})


@pytest.mark.parametrize("size", [1, 100])
@pytest.mark.parametrize(
    ("events", "choice"),
    [
        ([TextDelta("a"), end()], AUTO),
        ([*OTHER, end(calls=1)], AUTO),
        ([*READ, *call(1, "other", {}), end(calls=2)], REQUIRED),
        ([TextDelta("a"), *WRITE, end("limit", calls=1)], REQUIRED),
        ([ReasoningDelta("a"), *READ, *call(1, "read", {}), end(calls=2)], NAMED),
        ([TextDelta("a"), end()], NONE),
    ],
)
def test_what_keeps_the_rules_passes_unchanged(events: list[SemanticEvent], choice: ToolChoice, size: int) -> None:
    assert apply([FirstToken(), *events], choice, size=size) == [FirstToken(), *events]


def test_a_named_choice_omits_answer_text_but_counts_and_observes_it() -> None:
    events: list[SemanticEvent] = [FirstToken(), ReasoningDelta("r"), observed("text", 1), TextDelta("x"), *READ, end()]
    shown = apply(events, NAMED)
    assert shown == [event for event in events if event != TextDelta("x")]
    last = shown[-1]
    assert isinstance(last, Terminated) and last.usage == end().usage


def test_a_named_choice_fails_another_call_before_it_is_shown() -> None:
    shown = apply([FirstToken(), *READ, *call(1, "write", {}), end(calls=2)], NAMED)
    assert shown[:-1] == [FirstToken(), *READ]
    assert "'write' instead of the selected tool 'read'" in problem(shown)


@pytest.mark.parametrize("cause", ["eos", "limit", "string_stop", "token_stop"])
@pytest.mark.parametrize(
    ("events", "choice"),
    [([TextDelta("a")], REQUIRED), (OTHER, REQUIRED), ([], NAMED), (READ[:1], NAMED), (READ[:1], REQUIRED)],
)
def test_missing_calls_fail_at_the_end_however_it_comes(
    cause: Any, events: list[SemanticEvent], choice: ToolChoice
) -> None:
    shown = apply([FirstToken(), *events, end(cause)], choice)
    assert "completed no call" in problem(shown)
    last = shown[-1]
    assert isinstance(last, Terminated) and last.usage == end().usage


def test_a_second_call_fails_when_it_begins() -> None:
    second = call(1, "read", {})
    shown = apply([FirstToken(), *READ, observed("tool", 1, 2), *second, end(calls=2)], AUTO, parallel=False, size=100)
    assert shown[:-1] == [FirstToken(), *READ, observed("tool", 1, 2)]
    assert "second tool call" in problem(shown)
    assert shown[-1].usage.completion == 2  # type: ignore[union-attr]


def test_one_call_is_allowed_without_parallel_calls() -> None:
    events = [FirstToken(), *READ, end(calls=1)]
    assert apply(events, REQUIRED, parallel=False) == events


def test_a_call_against_none_fails() -> None:
    assert "tool_choice is none" in problem(apply([FirstToken(), *READ, end()], NONE))


def test_a_failed_choice_keeps_its_own_failure() -> None:
    failed = end("failed", message="the device failed")
    assert apply([FirstToken(), failed], REQUIRED)[-1] == failed


def test_arguments_over_eight_mebibytes_fail() -> None:
    opened = READ[0]
    whole = '{"a":"' + "x" * (MAX_ARGUMENT_BYTES - 8) + '"}'
    fits = [opened, ToolCallCompleted(0, "call_0", "read", whole), end(calls=1)]
    assert apply(fits, AUTO) == fits
    over = [opened, ToolCallCompleted(0, "call_0", "read", whole[:-2] + 'x"}'), end(calls=1)]
    assert str(MAX_ARGUMENT_BYTES) in problem(apply(over, AUTO))


def test_definitions() -> None:
    schema = {"type": "object", "properties": {"p": {"type": "string"}}}
    tool = function_tool({"name": "read", "description": None, "parameters": schema, "strict": False}, "tools[0]")
    assert tool == ToolDefinition("read", "", schema)
    assert function_tool({"name": "now"}, "tools[0]").parameters == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({}, "tools[0].name"),
        ({"name": ""}, "tools[0].name"),
        ({"name": 1}, "tools[0].name"),
        ({"name": "a", "strict": True}, "tools[0].strict"),
        ({"name": "a", "parameters": "x"}, "tools[0].parameters"),
        ({"name": "a", "description": 1}, "tools[0].description"),
    ],
)
def test_bad_definitions(value: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        function_tool(value, "tools[0]")
    assert caught.value.field == field


def test_names_are_unique() -> None:
    check_unique(TOOLS)
    with pytest.raises(InvalidRequest, match="'read' is declared twice"):
        check_unique((*TOOLS, TOOLS[0]))


def test_choices_need_declared_tools() -> None:
    for choice in (AUTO, NONE):
        check_choice(choice, ())
    check_choice(REQUIRED, TOOLS)
    check_choice(NAMED, TOOLS)
    for choice in (REQUIRED, NAMED):
        with pytest.raises(InvalidRequest, match=r"^tool_choice: "):
            check_choice(choice, ())
    with pytest.raises(InvalidRequest, match="'other' is not declared"):
        check_choice(ToolChoice("named", "other"), TOOLS)
