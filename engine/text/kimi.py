"""Kimi K3 prompts as token segments: the markup is control tokens, everything else plain text.

The family has no template in Jinja; user text can't become a control token because it never shares a segment with one.
The wording inside the internal system messages is assumed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from engine.syntax.kimi import escape
from engine.text.control import Segment, clean
from engine.text.render import Opening, Rendered, RenderOptions
from engine.text.turns import Origin, Turn, tool_json
from engine.types.conversation import Image, ToolCall
from engine.types.request import RequestError

OPEN: Final = "<|open|>"
CLOSE: Final = "<|close|>"
SEP: Final = "<|sep|>"
END: Final = "<|end_of_msg|>"
IMAGE: Final = "<|kimi_image_placeholder|>"
REQUIRED: Final = "required: call at least one tool in the next message"
JSON_ONLY: Final = "Answer with one valid JSON {what} and nothing else: no explanation, no code fence."


class KimiRenderer:
    """engine.text.render.Renderer. Thinking can't be turned off, so switches for it have no effect."""

    native_instructions = True

    def render(self, turns: Sequence[Turn], options: RenderOptions) -> Rendered:
        writer = _Writer(frozenset(options.boundaries))
        _preamble(writer, options)
        last = len(turns) - 1
        indices: dict[str, int] = {}
        opening: Opening = "content"
        for index, turn in enumerate(turns):
            continued = options.continue_final_message and index == last
            if turn.role == "assistant":
                indices = {call.id: number for number, call in enumerate(turn.calls, 1)}
                opening = _assistant(writer, turn, continued=continued)
            elif continued:
                raise RequestError("continue_final_message needs a final assistant message", field="messages")
            else:
                _plain(writer, turn, indices)
        if options.continue_final_message:
            if not turns:
                raise RequestError("continue_final_message needs a final assistant message", field="messages")
            return writer.rendered(opening)
        if options.add_generation_prompt:
            writer.open("message", role="assistant")
            writer.open("think")
            return writer.rendered("reasoning")
        return writer.rendered("content")


class _Writer:
    """Collects segments and the offsets at which boundaries end."""

    def __init__(self, boundaries: frozenset[Origin]) -> None:
        self._segments: list[Segment] = []
        self._boundaries = boundaries
        self._length = 0
        self._cuts: list[int] = []

    def text(self, text: str) -> None:
        self._add(clean(text), False)

    def open(self, name: str, **attributes: str) -> None:
        self._add(OPEN, True)
        self._add(name + "".join(f' {key}="{escape(clean(value))}"' for key, value in attributes.items()), False)
        self._add(SEP, True)

    def close(self, name: str) -> None:
        self._add(CLOSE, True)
        self._add(name, False)
        self._add(SEP, True)

    def end(self) -> None:
        self.close("message")
        self._add(END, True)

    def blocks(self, turn: Turn) -> None:
        origin: Origin | None = None
        for index, block in enumerate(turn.blocks):
            if isinstance(block.content, Image):
                self._add(IMAGE, True)
            else:
                joined = index and not isinstance(turn.blocks[index - 1].content, Image)
                self.text(("\n\n" if joined else "") + block.content)
            origin = block.origin
            following = turn.blocks[index + 1].origin if index + 1 < len(turn.blocks) else None
            if origin in self._boundaries and origin != following:
                self._cuts.append(self._length)

    def rendered(self, opening: Opening) -> Rendered:
        return Rendered(tuple(self._segments), opening, tuple(sorted(set(self._cuts))))

    def _add(self, text: str, trusted: bool) -> None:
        if not text:
            return
        self._length += len(text)
        if self._segments and self._segments[-1][1] == trusted and not trusted:
            text = self._segments.pop()[0] + text
        self._segments.append((text, trusted))


def _preamble(writer: _Writer, options: RenderOptions) -> None:
    if options.tools:
        declared = [tool_json(tool) for tool in options.tools]
        text = json.dumps(declared, ensure_ascii=False, sort_keys=True, indent=2)
        _internal(writer, "tool-declare", f"```json\n{text}\n```")
    if options.thinking.effort is not None:
        _internal(writer, "thinking-effort", str(options.thinking.effort))
    if options.required:
        _internal(writer, "tool-choice", REQUIRED)
    constraint = options.constraint
    if constraint is not None and constraint.kind == "json_object":
        _internal(writer, "response-format", JSON_ONLY.format(what="object"))
    if constraint is not None and constraint.kind == "json_schema":
        what = "value that matches this JSON Schema,"
        _internal(writer, "response-format", f"{JSON_ONLY.format(what=what)}\n```json\n{constraint.source}\n```")


def _internal(writer: _Writer, kind: str, text: str) -> None:
    writer.open("message", role="system", type=kind)
    writer.text(text)
    writer.end()


def _plain(writer: _Writer, turn: Turn, indices: Mapping[str, int]) -> None:
    if turn.role == "tool":
        index = indices.get(turn.call_id)
        attributes = {"tool": turn.name} if turn.name else {}
        if index is not None:
            attributes["index"] = str(index)
        writer.open("message", role="tool", **attributes)
    else:
        writer.open("message", role=turn.role)
    writer.blocks(turn)
    writer.end()


def _assistant(writer: _Writer, turn: Turn, *, continued: bool) -> Opening:
    """An assistant turn; without its end when it is to be continued: inside its reasoning if that is all it has."""
    if continued and turn.calls:
        raise RequestError("a final assistant message with tool calls can't be continued", field="messages")
    writer.open("message", role="assistant")
    writer.open("think")
    writer.text(turn.reasoning)
    if continued and turn.reasoning and not turn.blocks:
        return "reasoning"
    writer.close("think")
    writer.open("response")
    writer.blocks(turn)
    if continued:
        return "content"
    writer.close("response")
    if turn.calls:
        writer.open("tools")
        for index, call in enumerate(turn.calls, 1):
            _call(writer, call, index)
        writer.close("tools")
    writer.end()
    return "content"


def _call(writer: _Writer, call: ToolCall, index: int) -> None:
    writer.open("call", tool=call.name, index=str(index))
    for key, value in call.arguments.items():
        writer.open("argument", key=key, type=_type(value))
        writer.text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        writer.close("argument")
    writer.close("call")


def _type(value: Any) -> str:
    match value:
        case str():
            return "string"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case None:
            return "null"
        case list() | tuple():
            return "array"
        case _:
            return "object"
