"""The tools of a Responses request: functions, custom tools with grammars, namespaces.

Owns how they appear to the model (one flat list of functions, `namespace__name`) and how a call's name leads back to
what the client declared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from engine.types.constraint import Constraint
from engine.types.conversation import ToolChoice, ToolDefinition
from protocols.fields import read, refuse
from protocols.responses.schema import CustomTool, Grammar, Namespace
from protocols.tools import check_choice, function_tool

SEPARATOR: Final = "__"
FREEFORM: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
_SYNTAX: Final = {"lark": "Lark grammar", "regex": "regular expression"}


@dataclass(frozen=True, slots=True)
class Declared:
    """What the client calls a tool that the model knows under its flat name."""

    kind: Literal["function", "custom"]
    name: str
    namespace: str | None = None


def flat(name: str, namespace: str | None) -> str:
    return f"{namespace}{SEPARATOR}{name}" if namespace else name


@dataclass(slots=True)
class ToolSet:
    """`definitions` for the model in order, `declared` by flat name, `echo` as the response repeats them."""

    definitions: list[ToolDefinition] = field(default_factory=list)
    declared: dict[str, Declared] = field(default_factory=dict)
    echo: list[dict[str, Any]] = field(default_factory=list)

    def add(self, value: Mapping[str, Any], at: str) -> None:
        """An entry of `tools`. Hosted web search, which clients send unasked, is dropped; other hosted tools are
        refused. Raises InvalidRequest."""
        kind = value.get("type")
        if isinstance(kind, str) and kind.startswith("web_search"):
            return
        if kind == "namespace":
            space = read(Namespace, value, at)
            for index, inner in enumerate(space.tools):
                self._client_tool(inner, f"{at}.tools[{index}]", space.name)
            self.echo.append(dict(value))
        else:
            self._client_tool(value, at, None)
            empty = {"description": None, "parameters": None, "strict": False} if kind == "function" else {}
            self.echo.append({**empty, **value})

    def _client_tool(self, value: Mapping[str, Any], at: str, namespace: str | None) -> None:
        match value.get("type"):
            case "function":
                definition = function_tool(value, at)
                declared = Declared("function", definition.name, namespace)
            case "custom":
                definition = custom_tool(value, at)
                declared = Declared("custom", definition.name, namespace)
            case None:
                raise refuse(f"{at}.type", "is required")
            case other:
                raise refuse(f"{at}.type", f"{other!r} is not supported: send 'function', 'custom' or 'namespace'")
        name = flat(definition.name, namespace)
        if name in self.declared:
            raise refuse(at, f"the tool name {name!r} is ambiguous: another tool of the request has it too")
        self.declared[name] = declared
        self.definitions.append(
            ToolDefinition(
                name,
                definition.description,
                definition.parameters,
                freeform=definition.freeform,
                input_format=definition.input_format,
            )
        )

    def choice(self, value: str | Mapping[str, Any] | None) -> ToolChoice:
        """Raises InvalidRequest for unknown spellings, undeclared tools, and a tool of the other type."""
        match value:
            case None | "auto":
                return ToolChoice()
            case "none":
                return ToolChoice("none")
            case "required":
                wanted = ToolChoice("required")
            case {"type": "function" | "custom" as kind, "name": str(name), **rest}:
                namespace = rest.get("namespace")
                wanted = ToolChoice("named", flat(name, namespace if isinstance(namespace, str) else None))
                self._check_kind(wanted, kind)
            case {"type": str(kind)} if kind.startswith("web_search"):
                raise refuse("tool_choice", "hosted search is not supported")
            case _:
                raise refuse(
                    "tool_choice",
                    'must be "auto", "none", "required", {"type": "function", "name": NAME} or'
                    ' {"type": "custom", "name": NAME}',
                )
        check_choice(wanted, self.definitions)
        return wanted

    def _check_kind(self, wanted: ToolChoice, kind: str) -> None:
        declared = self.declared.get(wanted.name or "")
        if declared is not None and declared.kind != kind:
            raise refuse("tool_choice", f"the tool {wanted.name!r} is a {declared.kind} tool, not a {kind} tool")


def custom_tool(value: Mapping[str, Any], at: str) -> ToolDefinition:
    """A freeform tool: to the model a function of one string, whose grammar stands in the description."""
    tool = read(CustomTool, value, at)
    wanted = _format(tool.format, f"{at}.format")
    description = tool.description or ""
    if wanted is not None:
        contract = f"`input` must match this {_SYNTAX[wanted.kind]} exactly:\n{wanted.source}"
        description = f"{description}\n\n{contract}" if description else contract
    return ToolDefinition(tool.name, description, FREEFORM, freeform=True, input_format=wanted)


def _format(value: Mapping[str, Any] | None, at: str) -> Constraint | None:
    if value is None or value.get("type") == "text":
        return None
    if value.get("type") != "grammar":
        raise refuse(f"{at}.type", "must be 'text' or 'grammar'")
    # Both spellings are in use: the fields beside `type`, or in a `grammar` object.
    inner = value.get("grammar", value)
    if not isinstance(inner, dict):
        raise refuse(f"{at}.grammar", "must be an object")
    grammar = read(Grammar, inner, at)
    return Constraint(grammar.syntax, grammar.definition)


def read_tools(values: Sequence[Mapping[str, Any]]) -> ToolSet:
    tools = ToolSet()
    for index, value in enumerate(values):
        tools.add(value, f"tools[{index}]")
    return tools
