"""The Responses answer: the life cycle of items as named server-sent events, and the response object whole.

Owns item ids, indexes, sequence numbers and endings. An item is shown when its first text, or its complete call, is
there. Every event is cut from the same items that the response object lists.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from engine.types.events import (
    ReasoningDelta,
    Region,
    SemanticEvent,
    Terminated,
    TextDelta,
    TokensObserved,
    ToolCallCompleted,
)
from protocols.accumulator import Accumulator, Block, failure
from protocols.encoder import ResponseContext, sse
from protocols.errors import ExecutionFailed, OutputInvalid, ProtocolError, SlotsExhausted
from protocols.exact_json import dumps, loads
from protocols.fields import Decoded
from protocols.observations import TokenNames, chat_entries
from protocols.responses.decode import ResponsesOptions
from protocols.responses.tools import Declared

_PREFIX: Final = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
_TEXT: Final = "response.output_text"
_REASONING: Final = "response.reasoning_text"


class ResponsesEncoder:
    """Implements protocols.encoder.Encoder for the one choice of a Responses request."""

    def __init__(self, context: ResponseContext, decoded: Decoded) -> None:
        options: ResponsesOptions = decoded.options
        self._context = context
        self._options = options
        self._names = TokenNames(context.token_bytes, options.as_token_ids)
        self._state = Accumulator()
        self._sequence = -1
        self._items: list[dict[str, Any]] = []
        self._open: Block | None = None
        self._pending: list[dict[str, Any]] = []
        self._entries: list[dict[str, Any]] = []
        self._completed_at: int | None = None
        self._region: Region | None = None

    def feed(self, choice: int, events: Sequence[SemanticEvent]) -> list[bytes]:
        """Raises OutputInvalid for a call of a custom tool without its input."""
        frames = self._start() if events else []
        for event in events:
            frames += self._take(event, self._state.add(event))
        return frames

    def finish(self) -> list[bytes]:
        end = self._state.end
        if end is None:
            return self.fail(ExecutionFailed("generation ended without a result"))
        if end.cause == "failed":
            return self.fail(failure(end))
        response = self.result()
        return [*self._start(), self._event(f"response.{response['status']}", response=response)]

    def fail(self, error: ProtocolError) -> list[bytes]:
        frames = self._start()
        code = "rate_limit_exceeded" if isinstance(error, SlotsExhausted) else "server_error"
        items = list(self._items)
        if self._open is not None:
            items.append(self._item(self._open, "incomplete"))
        response = self._response("failed", items)
        response["error"] = {"code": code, "message": error.message}
        return [*frames, self._event("response.failed", response=response)]

    def result(self) -> dict[str, Any]:
        end = self._state.end
        if end is None:
            raise ExecutionFailed("generation ended without a result")
        if end.cause == "failed":
            raise failure(end)
        response = self._response("incomplete" if end.cause == "limit" else "completed", self._items)
        if end.cause == "limit":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = self._completed_at
        response["usage"] = _usage(end)
        return response

    # What one event causes.

    def _take(self, event: SemanticEvent, block: Block | None) -> list[bytes]:
        match event:
            case TextDelta(text) | ReasoningDelta(text) if block is not None and text:
                return self._extend(block, text)
            case TokensObserved(tokens) if tokens:
                self._region = tokens[-1].region
                if self._options.logprobs:
                    texts = (token for token in tokens if token.region == "text")
                    self._pending += chat_entries(texts, self._names, explicit=self._options.explicit)
            case ToolCallCompleted() if block is not None:
                return self._call(block)
            case Terminated() if event.cause != "failed":
                return self._end(event)
        return []

    def _extend(self, block: Block, text: str) -> list[bytes]:
        frames = [] if block is self._open else self._begin(block)
        if block.kind == "text":
            return [*frames, self._text_delta(text)]
        return [*frames, self._content_event(f"{_REASONING}.delta", delta=text)]

    def _text_delta(self, text: str) -> bytes:
        """Carries the entries observed since the last delta."""
        entries, self._pending = self._pending, []
        self._entries += entries
        return self._content_event(f"{_TEXT}.delta", delta=text, logprobs=entries)

    def _begin(self, block: Block) -> list[bytes]:
        """Opens the item of a text or reasoning block."""
        frames = self._close("completed")
        self._open, self._entries = block, []
        item = self._item(block, "in_progress")
        item["content"] = []
        frames.append(self._event("response.output_item.added", output_index=len(self._items), item=item))
        frames.append(self._content_event("response.content_part.added", part=_part(block.kind, "", [])))
        return frames

    def _close(self, status: str) -> list[bytes]:
        """Ends the open item, which then belongs to the response."""
        block = self._open
        if block is None:
            return []
        frames = []
        if block.kind == "text":
            if self._pending:
                frames.append(self._text_delta(""))
            done = {"text": block.text, "logprobs": self._entries}
            frames.append(self._content_event(f"{_TEXT}.done", **done))
        else:
            frames.append(self._content_event(f"{_REASONING}.done", text=block.text))
        item = self._item(block, status)
        frames.append(self._content_event("response.content_part.done", part=item["content"][0]))
        self._open = None
        return [*frames, self._finish_item(item)]

    def _finish_item(self, item: dict[str, Any]) -> bytes:
        self._items.append(item)
        return self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _call(self, block: Block) -> list[bytes]:
        frames = self._close("completed")
        item = self._call_item(block)
        field, name = "arguments", "response.function_call_arguments"
        if item["type"] == "custom_tool_call":
            field, name = "input", "response.custom_tool_call_input"
        index = len(self._items)
        opened = {**item, field: "", "status": "in_progress"}
        frames.append(self._event("response.output_item.added", output_index=index, item=opened))
        place = {"item_id": item["id"], "output_index": index}
        if item[field]:
            frames.append(self._event(f"{name}.delta", **place, delta=item[field]))
        frames.append(self._event(f"{name}.done", **place, **{field: item[field]}))
        return [*frames, self._finish_item(item)]

    def _end(self, end: Terminated) -> list[bytes]:
        """Closes what is open. An answer whose text was stopped away entirely still has a message for its entries."""
        self._completed_at = int(time.time())
        frames: list[bytes] = []
        answered = any(item["type"] != "reasoning" for item in self._items)
        if self._pending and not answered and (self._open is None or self._open.kind == "reasoning"):
            frames += self._begin(Block("text", 0))
        return frames + self._close("incomplete" if end.cause == "limit" and self._cut() else "completed")

    def _cut(self) -> bool:
        """Whether the output ended inside the open item, and not in markup or a call behind it."""
        if self._open is None or any(block.kind == "tool" for block in self._state.blocks[-1:]):
            return False
        return self._region in (None, self._open.kind)

    # Items and events.

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        """A message or reasoning item at the next place of the output."""
        content = [_part(block.kind, block.text, self._entries)]
        if block.kind == "text":
            item = {"type": "message", "role": "assistant", "content": content}
        else:
            item = {"type": "reasoning", "summary": [], "content": content}
        return {"id": self._id(str(item["type"])), "status": status, **item}

    def _call_item(self, block: Block) -> dict[str, Any]:
        """A call under the name, namespace and kind that the client declared; an undeclared one is a function call."""
        declared = self._options.declared.get(block.name) or Declared("function", block.name)
        kind = "custom_tool_call" if declared.kind == "custom" else "function_call"
        item = {
            "id": self._id(kind),
            "type": kind,
            "status": "completed",
            "call_id": block.id,
            "name": declared.name,
        }
        if declared.namespace is not None:
            item["namespace"] = declared.namespace
        if kind == "custom_tool_call":
            item["input"] = _custom_input(block)
        else:
            item["arguments"] = block.text
        return item

    def _id(self, kind: str) -> str:
        return f"{_PREFIX[kind]}_{self._context.request_id}_{len(self._items)}"

    def _content_event(self, name: str, **fields: Any) -> bytes:
        """An event about the only content part of the open item."""
        kind = "message" if self._open is not None and self._open.kind == "text" else "reasoning"
        return self._event(name, item_id=self._id(kind), output_index=len(self._items), content_index=0, **fields)

    def _event(self, name: str, **fields: Any) -> bytes:
        self._sequence += 1
        return sse(dumps({"type": name, "sequence_number": self._sequence, **fields}), name)

    def _start(self) -> list[bytes]:
        if self._sequence >= 0:
            return []
        response = self._response("in_progress", [])
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def _response(self, status: str, output: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        sampling = self._context.sampling
        return {
            "id": f"resp_{self._context.request_id}",
            "object": "response",
            "created_at": self._context.created,
            "completed_at": None,
            "status": status,
            "model": self._context.model,
            "error": None,
            "incomplete_details": None,
            "output": output,
            "usage": None,
            "temperature": sampling.temperature if sampling else 1.0,
            "top_p": sampling.top_p if sampling else 1.0,
            "presence_penalty": sampling.presence_penalty if sampling else 0.0,
            "frequency_penalty": sampling.frequency_penalty if sampling else 0.0,
            **self._options.echo,
        }


def _part(kind: str, text: str, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if kind == "text":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": entries}
    return {"type": "reasoning_text", "text": text}


def _custom_input(block: Block) -> str:
    value = loads(block.text.encode()).get("input")
    if not isinstance(value, str):
        raise OutputInvalid(f"the call of the custom tool {block.name!r} has no input text")
    return value


def _usage(end: Terminated) -> dict[str, Any]:
    usage = end.usage
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }
