"""Input items of a Responses request into the messages of a neutral conversation.

Owns every item and part type. Neighbouring items of the assistant (reasoning, messages, calls) are one turn, in their
order, as the model produced them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

from engine.types.conversation import Image, Message, Part, Reasoning, Text, ToolCall, ToolResult
from protocols.fields import DecodeLimits, json_object, read, refuse
from protocols.images import image_url
from protocols.responses.schema import (
    CallOutputItem,
    CustomCallItem,
    FunctionCallItem,
    ImagePart,
    MessageItem,
    ReasoningItem,
    RefusalPart,
    TextPart,
)
from protocols.responses.tools import flat

_ROLES: Final = ("system", "developer", "user", "assistant")


@dataclass(slots=True)
class Items:
    """Builds messages item by item; call `finish` at the end."""

    limits: DecodeLimits
    messages: list[Message] = field(default_factory=list)
    _turn: list[Part] = field(default_factory=list)

    def add(self, item: Any, at: str) -> None:
        """Raises InvalidRequest naming the item's field at fault."""
        if not isinstance(item, dict):
            raise refuse(at, "must be an object")
        match item.get("type", "message" if "role" in item else None):
            case "message":
                self._message(read(MessageItem, item, at), at)
            case "reasoning":
                self._reasoning(read(ReasoningItem, item, at), at)
            case "function_call":
                call = read(FunctionCallItem, item, at)
                arguments = _arguments(call.arguments, f"{at}.arguments")
                self._turn.append(ToolCall(call.call_id, flat(call.name, call.namespace), arguments))
            case "custom_tool_call":
                custom = read(CustomCallItem, item, at)
                name = flat(custom.name, custom.namespace)
                self._turn.append(ToolCall(custom.call_id, name, {"input": custom.input}))
            case "function_call_output" | "custom_tool_call_output":
                output = read(CallOutputItem, item, at)
                parts = self._content(output.output, f"{at}.output", images=True)
                self._append(Message("tool", (ToolResult(output.call_id, parts),)))
            case "item_reference":
                raise refuse(at, "stored items are not supported: send the whole item")
            case None:
                raise refuse(f"{at}.type", "is required")
            case kind:
                raise refuse(f"{at}.type", f"{kind!r} items are not supported")

    def finish(self) -> tuple[Message, ...]:
        if self._turn:
            self.messages.append(Message("assistant", tuple(self._turn)))
            self._turn.clear()
        return tuple(self.messages)

    def _append(self, message: Message) -> None:
        self.finish()
        self.messages.append(message)

    def _message(self, item: MessageItem, at: str) -> None:
        if item.role not in _ROLES:
            raise refuse(f"{at}.role", f"must be one of {', '.join(map(repr, _ROLES))}")
        role = cast(Literal["system", "developer", "user", "assistant"], item.role)
        parts = self._content(item.content, f"{at}.content", images=role == "user")
        if role == "assistant":
            self._turn.extend(parts)
        elif role == "user":
            self._append(Message(role, parts or (Text(""),)))
        elif parts:
            self._append(Message(role, parts))

    def _reasoning(self, item: ReasoningItem, at: str) -> None:
        """Readable reasoning: the text itself, else its summary."""
        text = "".join(part.text for part in item.content or ())
        text = text or "\n\n".join(part.text for part in item.summary or () if part.text)
        if text:
            self._turn.append(Reasoning(text))
        elif item.encrypted_content:
            raise refuse(
                f"{at}.encrypted_content", "encrypted reasoning can't be read: send its content, or leave it out"
            )

    def _content(self, content: Any, at: str, *, images: bool) -> tuple[Text | Image, ...]:
        """A string or a list of parts; empty texts leave nothing."""
        if isinstance(content, str):
            return (Text(content),) if content else ()
        if not isinstance(content, list):
            raise refuse(at, "must be a string or an array of parts")
        parts = [self._part(part, f"{at}[{index}]", images) for index, part in enumerate(content)]
        return tuple(part for part in parts if part != Text(""))

    def _part(self, part: Any, at: str, images: bool) -> Text | Image:
        if not isinstance(part, dict):
            raise refuse(at, "must be an object")
        match part.get("type"):
            case "input_text" | "output_text" | "text":
                return Text(read(TextPart, part, at).text)
            case "refusal":
                return Text(read(RefusalPart, part, at).refusal)
            case "input_image":
                if not images:
                    raise refuse(at, "images are only accepted in user messages and tool outputs")
                if part.get("file_id") is not None:
                    raise refuse(f"{at}.file_id", "stored files are not supported: send a base64 data URL")
                return image_url(read(ImagePart, part, at).image_url, f"{at}.image_url", self.limits)
            case None:
                raise refuse(f"{at}.type", "is required")
            case kind:
                raise refuse(f"{at}.type", f"{kind!r} parts are not supported: send text or images")


def _arguments(text: str, at: str) -> Mapping[str, Any]:
    return json_object(text, at, "must be the JSON text of an object") if text else {}
