"""From the neutral conversation to the turns that a template prints, one way for all protocols.

Owns the merge of system and developer instructions, instructions of our own (required tool, JSON output), the order of
tool results, deferred tools and the joining of blocks. Knows no template and no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from engine.types.conversation import (
    Conversation,
    Image,
    Message,
    Reasoning,
    Text,
    ToolCall,
    ToolDefinition,
    ToolReference,
    ToolResult,
)
from engine.types.request import RequestError

Origin = tuple[int, int]
TurnRole = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a turn; `origin` is its (message, part) in the conversation, None for text of ours."""

    content: str | Image
    origin: Origin | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn as a template prints it. Blocks of text are joined with a blank line. `name` of a tool turn: the
    function that was called, empty when the call is unknown."""

    role: TurnRole
    blocks: tuple[Block, ...] = ()
    reasoning: str = ""
    reasoning_origin: Origin | None = None
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""

    @property
    def text(self) -> str:
        """The blocks of text, joined; images left out."""
        return "\n\n".join(block.content for block in self.blocks if isinstance(block.content, str))


def arrange(conversation: Conversation, instructions: Sequence[str] = ()) -> tuple[Turn, ...]:
    """The turns of `conversation`: instructions merged, tool results in call order, blocks without text dropped.

    `instructions` of ours are appended to the leading system turn, which is added when there is none.
    Raises RequestError for parts that their role can't hold.
    """
    messages = _reordered(conversation.messages)
    tools = {tool.name: tool for tool in conversation.tools}
    turns: list[Turn] = []
    names: dict[str, str] = {}
    for index, message in messages:
        turn = _turn(index, message, tools, names)
        if turn is not None:
            turns.append(turn)
    if any(message.role == "developer" for message in conversation.messages):
        turns = _merged(conversation.messages, turns)
    return tuple(_with_instructions(turns, instructions))


def inline_as_user(turns: Iterable[Turn]) -> tuple[Turn, ...]:
    """Noninitial system turns as user turns in place, their text wrapped in <system>…</system>."""
    return tuple(
        Turn("user", (Block(f"<system>{turn.text}</system>", _last_origin(turn)),))
        if index and turn.role == "system"
        else turn
        for index, turn in enumerate(turns)
    )


def presented_tools(conversation: Conversation) -> tuple[ToolDefinition, ...]:
    """The tools that the prompt declares: none under "none", the chosen one under "named", else those not deferred.

    Raises RequestError when the choice needs a tool that isn't declared.
    """
    choice = conversation.tool_choice
    if choice.mode == "none":
        return ()
    if choice.mode == "named":
        chosen = tuple(tool for tool in conversation.tools if tool.name == choice.name)
        if not chosen:
            raise RequestError(f"tool_choice names {choice.name!r}, which is not a declared tool", field="tool_choice")
        return chosen[:1]
    if choice.mode == "required" and not conversation.tools:
        raise RequestError("tool_choice requires a tool call, but no tool is declared", field="tool_choice")
    return tuple(tool for tool in conversation.tools if not tool.deferred)


def tool_json(tool: ToolDefinition) -> dict[str, Any]:
    """A definition in the shape in which templates take it."""
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": _plain(tool.parameters)},
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _turn(index: int, message: Message, tools: Mapping[str, ToolDefinition], names: dict[str, str]) -> Turn | None:
    if message.role == "tool":
        return _tool_turn(index, message, tools, names)
    blocks: list[Block] = []
    reasoning: list[str] = []
    reasoning_origin: Origin | None = None
    calls: list[ToolCall] = []
    for position, part in enumerate(message.parts):
        origin = (index, position)
        match part:
            case Text():
                if part.text:
                    blocks.append(Block(part.text, origin))
            case Image() if message.role == "user":
                blocks.append(Block(part, origin))
            case ToolReference() if message.role != "assistant":
                blocks.append(Block(_reference(part, tools), origin))
            case Reasoning() if message.role == "assistant":
                if part.text:
                    reasoning.append(part.text)
                    reasoning_origin = origin
            case ToolCall() if message.role == "assistant":
                if not isinstance(part.arguments, Mapping):
                    raise RequestError(f"messages[{index}]: the arguments of {part.name!r} must be a JSON object")
                calls.append(part)
                names[part.id] = part.name
            case _:
                kind = type(part).__name__
                raise RequestError(f"messages[{index}]: a {message.role} message can't hold {kind}", field="messages")
    role: TurnRole = "system" if message.role == "developer" else message.role
    if role == "system" and not blocks:
        return None
    return Turn(role, tuple(blocks), "\n\n".join(reasoning), reasoning_origin, tuple(calls))


def _tool_turn(index: int, message: Message, tools: Mapping[str, ToolDefinition], names: Mapping[str, str]) -> Turn:
    if len(message.parts) != 1 or not isinstance(message.parts[0], ToolResult):
        raise RequestError(f"messages[{index}]: a tool message holds exactly one tool result", field="messages")
    result = message.parts[0]
    origin = (index, 0)
    blocks: list[Block] = []
    for part in result.parts:
        match part:
            case Text():
                if part.text:
                    blocks.append(Block(part.text, origin))
            case Image():
                blocks.append(Block(part, origin))
            case ToolReference():
                blocks.append(Block(_reference(part, tools), origin))
    if result.is_error:
        blocks.insert(0, Block("The tool call failed:"))
    return Turn("tool", tuple(blocks), call_id=result.call_id, name=names.get(result.call_id, ""))


def _reference(part: ToolReference, tools: Mapping[str, ToolDefinition]) -> str:
    tool = tools.get(part.name)
    if tool is None:
        raise RequestError(f"tool_reference names {part.name!r}, which is not a declared tool", field="tools")
    return json.dumps(tool_json(tool), ensure_ascii=False)


def _reordered(messages: Sequence[Message]) -> list[tuple[int, Message]]:
    """Messages with their index; results of parallel calls in call order where every id is unique and matches."""
    ordered = list(enumerate(messages))
    index = 0
    while index < len(messages):
        if messages[index].role != "assistant":
            index += 1
            continue
        calls = [part.id for part in messages[index].parts if isinstance(part, ToolCall)]
        end = index + 1
        while end < len(messages) and messages[end].role != "assistant":
            end += 1
        slots = [at for at in range(index + 1, end) if _result_id(messages[at]) is not None]
        ids = [_result_id(messages[at]) for at in slots]
        if len(slots) == len(calls) > 1 and len(set(calls)) == len(calls) and set(ids) == set(calls):
            by_call = sorted(slots, key=lambda at: calls.index(str(_result_id(messages[at]))))
            for slot, source in zip(slots, by_call, strict=True):
                ordered[slot] = (source, messages[source])
        index = end
    return ordered


def _result_id(message: Message) -> str | None:
    if message.role != "tool" or len(message.parts) != 1 or not isinstance(message.parts[0], ToolResult):
        return None
    return message.parts[0].call_id


def _merged(messages: Sequence[Message], turns: Sequence[Turn]) -> list[Turn]:
    """One leading system turn of all system and developer instructions, each section with its role's label."""
    sections: list[Block] = []
    for turn in turns:
        origin = _last_origin(turn)
        if turn.role == "system" and origin is not None:
            label = "Developer" if messages[origin[0]].role == "developer" else "System"
            sections.append(Block(f"{label}:\n{turn.text}", origin))
    rest = [turn for turn in turns if turn.role != "system"]
    return [Turn("system", tuple(sections)), *rest] if sections else rest


def _with_instructions(turns: Sequence[Turn], instructions: Sequence[str]) -> list[Turn]:
    blocks = tuple(Block(text) for text in instructions)
    if not blocks:
        return list(turns)
    if turns and turns[0].role == "system":
        return [replace(turns[0], blocks=turns[0].blocks + blocks), *turns[1:]]
    return [Turn("system", blocks), *turns]


def _last_origin(turn: Turn) -> Origin | None:
    return turn.blocks[-1].origin if turn.blocks else None
