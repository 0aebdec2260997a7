"""Tools on the wire: definitions, choice modes, and the rules that the model's calls must keep.

Owns the function definition that Chat and Responses share, the checks of a choice against what is declared, and
ToolRules, which stands between the output pipeline and an encoder. Leaves the order of tool results and the prompt's
instruction to `engine.text.lowering`, markup and argument types to `engine.syntax`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from engine.types.conversation import Conversation, ToolChoice, ToolDefinition
from engine.types.events import (
    SemanticEvent,
    Terminated,
    TextDelta,
    TokensObserved,
    ToolCallCompleted,
    ToolCallStarted,
    Usage,
)
from protocols.fields import Fields, read, refuse

MAX_ARGUMENT_BYTES: Final = 8 * 1024 * 1024
NO_PARAMETERS: Final[Mapping[str, Any]] = {"type": "object", "properties": {}}


class FunctionFields(Fields):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


def function_tool(value: Mapping[str, Any], at: str) -> ToolDefinition:
    """A client-executed function. Raises InvalidRequest, also for a strict schema."""
    fields = read(FunctionFields, value, at)
    if not fields.name:
        raise refuse(f"{at}.name", "must not be empty")
    if fields.strict:
        raise refuse(f"{at}.strict", "strict function schemas are not supported: send false or leave it out")
    return ToolDefinition(fields.name, fields.description or "", fields.parameters or NO_PARAMETERS)


def check_unique(tools: Sequence[ToolDefinition], at: str = "tools") -> None:
    """Raises InvalidRequest when two tools have the same name."""
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in seen:
            raise refuse(f"{at}[{index}]", f"the tool name {tool.name!r} is declared twice")
        seen.add(tool.name)


def check_choice(choice: ToolChoice, tools: Sequence[ToolDefinition], at: str = "tool_choice") -> None:
    """Raises InvalidRequest when `choice` needs a tool that isn't declared."""
    if choice.mode == "required" and not tools:
        raise refuse(at, "requires at least one declared tool")
    if choice.mode == "named" and choice.name not in {tool.name for tool in tools}:
        raise refuse(at, f"the tool {choice.name!r} is not declared")


class ToolRules:
    """Holds one choice's calls to the request's tool choice. A violation ends the choice as failed: later events,
    its real end included, are swallowed, and `failed` tells the ingress that the engine need not go on."""

    def __init__(self, conversation: Conversation) -> None:
        self._choice = conversation.tool_choice
        self._parallel = conversation.parallel_tool_calls
        self._declared = frozenset(tool.name for tool in conversation.tools)
        self._begun = 0
        self._accepted = 0
        self._tokens = 0
        self._reasoning = 0
        self.failed = False

    def apply(self, events: Sequence[SemanticEvent]) -> list[SemanticEvent]:
        """The events to encode: those of `events` that may be shown, perhaps ending in a failure."""
        shown: list[SemanticEvent] = []
        for event in events:
            if self.failed:
                break
            problem = self._problem(event)
            if problem is not None:
                self.failed = True
                usage = event.usage if isinstance(event, Terminated) else self._usage()
                shown.append(Terminated("failed", usage, failure="output", message=problem))
            elif not (isinstance(event, TextDelta) and self._choice.mode == "named"):
                shown.append(event)
        return shown

    def _problem(self, event: SemanticEvent) -> str | None:
        match event:
            case TokensObserved(tokens):
                self._tokens += len(tokens)
                self._reasoning += sum(token.region == "reasoning" for token in tokens)
            case ToolCallStarted():
                return self._begin(event.name)
            case ToolCallCompleted():
                return self._finish(event)
            case Terminated() if event.cause != "failed" and not self._accepted:
                return self._missing()
        return None

    def _begin(self, name: str) -> str | None:
        self._begun += 1
        if self._choice.mode == "none":
            return f"the model called {name!r} although tool_choice is none"
        if self._choice.mode == "named" and name != self._choice.name:
            return f"the model called {name!r} instead of the selected tool {self._choice.name!r}"
        if not self._parallel and self._begun > 1:
            return "the model began a second tool call although parallel tool calls are disabled"
        return None

    def _finish(self, event: ToolCallCompleted) -> str | None:
        if len(event.arguments) * 4 > MAX_ARGUMENT_BYTES and len(event.arguments.encode()) > MAX_ARGUMENT_BYTES:
            return f"the arguments of the call to {event.name!r} exceed {MAX_ARGUMENT_BYTES} bytes"
        self._accepted += event.name in self._declared
        return None

    def _missing(self) -> str | None:
        match self._choice.mode:
            case "required":
                return "tool_choice is required, but the model completed no call to a declared tool"
            case "named":
                return f"the model completed no call to the selected tool {self._choice.name!r}"
            case _:
                return None

    def _usage(self) -> Usage:
        return Usage(0, 0, self._tokens, self._reasoning)
