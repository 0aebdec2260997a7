"""The neutral conversation of a Messages request: system text, turns, tool results, offered tools, boundaries.

Owns which block may stand in which role and what it becomes. `cache_control` on a user's text, image or tool result
marks a boundary and changes nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from engine.types.conversation import (
    Image,
    Message,
    Part,
    Reasoning,
    Text,
    ToolCall,
    ToolDefinition,
    ToolReference,
    ToolResult,
)
from protocols.fields import DecodeLimits, refuse
from protocols.images import base64_image
from protocols.messages.schema import (
    Block,
    ContentBlock,
    ImageBlock,
    InlineTool,
    MessageField,
    NamedTool,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolAdditionBlock,
    ToolField,
    ToolReferenceBlock,
    ToolRemovalBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from protocols.messages.thinking import check

MAX_BOUNDARIES: Final = 4
ATTRIBUTION: Final = "x-anthropic-billing-header:"
"""How the block begins that some clients put before the system text; it may change with every request."""


@dataclass(slots=True)
class History:
    """Builds the conversation block by block. `tools`: the offered tools by name, in order."""

    limits: DecodeLimits
    tools: dict[str, ToolDefinition] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    boundaries: list[tuple[int, int]] = field(default_factory=list)

    def declare(self, tool: ToolField, at: str, *, inline: bool = False) -> ToolDefinition:
        """Adds a client tool. Raises InvalidRequest for hosted, strict and repeated ones."""
        if tool.type not in (None, "custom"):
            raise refuse(f"{at}.type", f"hosted tool '{tool.type}' is not supported; give an input_schema and run it")
        if tool.input_schema is None:
            raise refuse(f"{at}.input_schema", "is required")
        if tool.strict:
            raise refuse(f"{at}.strict", "strict tools are not supported")
        if tool.name in self.tools:
            raise refuse(f"{at}.name", f"tool '{tool.name}' is declared twice")
        definition = ToolDefinition(
            tool.name, tool.description or "", tool.input_schema, deferred=inline or bool(tool.defer_loading)
        )
        self.tools[tool.name] = definition
        return definition

    def system(self, content: str | Sequence[TextBlock] | None) -> None:
        """The request's `system`; a leading attribution block is dropped."""
        texts = [content] if isinstance(content, str) else [block.text for block in content or ()]
        if not isinstance(content, str) and texts and texts[0].startswith(ATTRIBUTION):
            del texts[0]
        if parts := tuple(Text(text) for text in texts if text):
            self.messages.append(Message("system", parts))

    def add(self, message: MessageField, at: str) -> None:
        """One turn of `messages`. Raises InvalidRequest naming the block that can't stand there."""
        content = message.content
        blocks = [TextBlock(type="text", text=content)] if isinstance(content, str) else content
        match message.role:
            case "user":
                self._user(blocks, at)
            case "assistant":
                self._assistant(blocks, at)
            case "system":
                self._system(blocks, at)

    def _user(self, blocks: Sequence[ContentBlock], at: str) -> None:
        parts: list[Part] = []
        results = False
        for index, block in enumerate(blocks):
            place = f"{at}.content[{index}]"
            match block:
                case TextBlock():
                    if not block.text:
                        continue
                    parts.append(Text(block.text))
                case ImageBlock():
                    parts.append(image(block, place, self.limits))
                case ToolResultBlock():
                    self._flush(parts)
                    results = True
                    self.messages.append(Message("tool", (self._result(block, place),)))
                    self._mark(block, len(self.messages) - 1, 0)
                    continue
                case _:
                    raise refuse(place, f"a {block.type} block can't stand in a user message")
            self._mark(block, len(self.messages), len(parts) - 1)
        if not parts and not results:
            parts.append(Text(""))
        self._flush(parts)

    def _flush(self, parts: list[Part]) -> None:
        if parts:
            self.messages.append(Message("user", tuple(parts)))
            parts.clear()

    def _mark(self, block: Block, message: int, part: int) -> None:
        if block.cache_control is not None and len(self.boundaries) < MAX_BOUNDARIES:
            self.boundaries.append((message, part))

    def _result(self, block: ToolResultBlock, at: str) -> ToolResult:
        content = [TextBlock(type="text", text=block.content)] if isinstance(block.content, str) else block.content
        parts: list[Text | Image | ToolReference] = []
        for index, piece in enumerate(content or ()):
            place = f"{at}.content[{index}]"
            match piece:
                case TextBlock():
                    if piece.text:
                        parts.append(Text(piece.text))
                case ImageBlock():
                    parts.append(image(piece, place, self.limits))
                case ToolReferenceBlock():
                    parts.append(self._reference(piece.tool_name, f"{place}.tool_name"))
        return ToolResult(block.tool_use_id, tuple(parts), bool(block.is_error))

    def _reference(self, name: str, at: str) -> ToolReference:
        if name not in self.tools:
            raise refuse(at, f"tool '{name}' is not declared in tools")
        return ToolReference(name)

    def _assistant(self, blocks: Sequence[ContentBlock], at: str) -> None:
        parts: list[Part] = []
        for index, block in enumerate(blocks):
            place = f"{at}.content[{index}]"
            match block:
                case TextBlock():
                    if block.text:
                        parts.append(Text(block.text))
                case ThinkingBlock():
                    check(block.thinking, block.signature, f"{place}.signature")
                    if block.thinking:
                        parts.append(Reasoning(block.thinking))
                case RedactedThinkingBlock():
                    pass  # another provider's, and unreadable: there is nothing to show the model
                case ToolUseBlock():
                    parts.append(ToolCall(block.id, block.name, block.input))
                case _:
                    raise refuse(place, f"a {block.type} block can't stand in an assistant message")
        if parts:
            self.messages.append(Message("assistant", tuple(parts)))

    def _system(self, blocks: Sequence[ContentBlock], at: str) -> None:
        parts: list[Part] = []
        for index, block in enumerate(blocks):
            place = f"{at}.content[{index}]"
            match block:
                case TextBlock():
                    if block.text:
                        parts.append(Text(block.text))
                case ToolAdditionBlock(tool=InlineTool(definition=definition)):
                    parts.append(ToolReference(self.declare(definition, f"{place}.tool.definition", inline=True).name))
                case ToolAdditionBlock(tool=NamedTool() as tool):
                    parts.append(self._reference(tool.name, f"{place}.tool.name"))
                case ToolRemovalBlock(tool=tool):
                    self._reference(tool.name, f"{place}.tool.name")
                    parts.append(Text(f"The tool {tool.name} is no longer available."))
                case _:
                    raise refuse(place, f"a {block.type} block can't stand in a system message")
        if parts:
            self.messages.append(Message("system", tuple(parts)))


def image(block: ImageBlock, at: str, limits: DecodeLimits) -> Image:
    """A base64 image. Raises InvalidRequest for other sources and for what `protocols.images` refuses."""
    if block.source.type != "base64":
        raise refuse(f"{at}.source.type", "must be 'base64': images are not downloaded or stored")
    if block.source.data is None:
        raise refuse(f"{at}.source.data", "is required")
    return base64_image(block.source.data, f"{at}.source.data", limits)


def check_context(edits: Sequence[Mapping[str, object]]) -> None:
    """Raises InvalidRequest for context edits that would change the conversation."""
    for index, edit in enumerate(edits):
        kind, keep = edit.get("type"), edit.get("keep")
        if kind != "clear_thinking_20251015" or keep not in ("all", {"type": "all"}):
            raise refuse(
                f"context_management.edits[{index}]",
                "active context edits are not supported; only clear_thinking_20251015 with keep 'all' is",
            )
