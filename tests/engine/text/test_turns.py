"""The order of tool results and what a neutral conversation becomes before any template sees it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from engine.text.turns import arrange, inline_as_user, presented_tools
from engine.types.conversation import (
    Conversation,
    Image,
    Message,
    Part,
    Text,
    ToolCall,
    ToolChoice,
    ToolDefinition,
    ToolResult,
)
from engine.types.request import RequestError

PNG = Image(b"png", "image/png")


def calls(*ids: str) -> Message:
    return Message("assistant", tuple(ToolCall(call, f"tool {call}", {}) for call in ids))


def result(call: str, *parts: Text | Image) -> Message:
    return Message("tool", (ToolResult(call, parts or (Text(f"result {call}"),)),))


def user(text: str) -> Message:
    return Message("user", (Text(text),))


def order(messages: Sequence[Message]) -> list[str]:
    """Call ids and texts in the order in which they are printed."""
    return [turn.call_id or turn.text or "calls" for turn in arrange(Conversation(tuple(messages)))]


@pytest.mark.parametrize("shuffled", list(itertools.permutations("abc")))
def test_results_of_parallel_calls_come_in_call_order(shuffled: tuple[str, ...]) -> None:
    messages = [user("q"), calls("a", "b", "c"), *(result(call) for call in shuffled)]
    assert order(messages) == ["q", "calls", "a", "b", "c"]


def test_images_of_a_result_move_with_it() -> None:
    turns = arrange(Conversation((calls("a", "b"), result("b", Text("late"), PNG), result("a"))))
    assert [turn.call_id for turn in turns] == ["", "a", "b"]
    assert [block.content for block in turns[2].blocks] == ["late", PNG]
    assert turns[2].name == "tool b"


def test_messages_between_results_keep_their_positions() -> None:
    messages = [calls("a", "b"), result("b"), user("meanwhile"), result("a")]
    assert order(messages) == ["calls", "a", "meanwhile", "b"]


@pytest.mark.parametrize(
    "results",
    [("b", "b"), ("b", "x"), ("c", "a"), ("b",), ("b", "a", "x")],
    ids=["twice", "unknown", "part", "one", "more"],
)
def test_odd_ids_leave_the_supplied_order(results: tuple[str, ...]) -> None:
    messages = [calls("a", "b", "c") if results == ("c", "a") else calls("a", "b"), *map(result, results)]
    assert order(messages) == ["calls", *results]


def test_repeated_call_ids_leave_the_supplied_order() -> None:
    assert order([calls("a", "a"), result("a"), result("b")]) == ["calls", "a", "b"]


def test_results_never_move_across_another_assistant_message() -> None:
    messages = [calls("a", "b"), result("b"), calls("c", "d"), result("d"), result("c")]
    assert order(messages) == ["calls", "b", "calls", "c", "d"]
    messages = [calls("a", "b"), result("b"), Message("assistant", (Text("hm"),)), result("a")]
    assert order(messages) == ["calls", "b", "hm", "a"]


def test_a_result_without_a_call_is_kept() -> None:
    turns = arrange(Conversation((user("q"), result("nobody"))))
    assert (turns[1].call_id, turns[1].name, turns[1].text) == ("nobody", "", "result nobody")


def test_arguments_must_be_an_object() -> None:
    bad: Part = ToolCall("c", "w", [1])  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="must be a JSON object"):
        arrange(Conversation((Message("assistant", (bad,)),)))


def test_an_image_stands_where_it_was() -> None:
    turns = arrange(Conversation((Message("user", (Text("a"), PNG, Text("b"), Text("c"))),)))
    assert [block.content for block in turns[0].blocks] == ["a", PNG, "b", "c"]


def test_instructions_of_ours_follow_the_callers() -> None:
    system = Message("system", (Text("theirs"),))
    assert arrange(Conversation((system, user("q"))), ["ours"])[0].text == "theirs\n\nours"
    alone = arrange(Conversation((user("q"),)), ["ours", "more"])
    assert (alone[0].role, alone[0].text, alone[1].text) == ("system", "ours\n\nmore", "q")


def test_only_later_instructions_are_wrapped() -> None:
    messages = (Message("system", (Text("lead"),)), user("q"), Message("system", (Text("x"), Text("y"))))
    turns = inline_as_user(arrange(Conversation(messages)))
    assert [(turn.role, turn.text) for turn in turns] == [
        ("system", "lead"),
        ("user", "q"),
        ("user", "<system>x\n\ny</system>"),
    ]


def test_a_named_tool_may_be_a_deferred_one() -> None:
    tools = (ToolDefinition("a", "", {}), ToolDefinition("late", "", {}, deferred=True))
    assert [tool.name for tool in presented_tools(Conversation((), tools))] == ["a"]
    named = Conversation((), tools, ToolChoice("named", "late"))
    assert [tool.name for tool in presented_tools(named)] == ["late"]
