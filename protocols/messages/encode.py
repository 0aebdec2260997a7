"""The Messages answer: named server-sent events, and the same message whole.

Owns block order and indexes, stop reasons and usage. A tool_use block is shown when its call is complete, so that a
call cut by the output limit leaves no trace. Both deliveries read one accumulator: the folded stream is the buffered
message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from engine.types.events import SemanticEvent, Terminated, Usage
from protocols.accumulator import Accumulator, Block, failure
from protocols.encoder import ResponseContext, sse
from protocols.errors import ExecutionFailed, ProtocolError, body
from protocols.exact_json import dumps, loads
from protocols.fields import Decoded
from protocols.messages.thinking import marker

_EMPTY: Final[Mapping[str, Any]] = {"stop_details": None, "container": None}
_USER_STOPS: Final = ("string_stop", "token_stop")


class MessagesEncoder:
    """Implements protocols.encoder.Encoder for the one choice of a Messages request."""

    def __init__(self, context: ResponseContext, decoded: Decoded) -> None:
        self._context = context
        self._state = Accumulator()
        self._started = False
        self._open: Block | None = None
        self._index = -1

    def feed(self, choice: int, events: Sequence[SemanticEvent]) -> list[bytes]:
        frames = self._start() if events else []
        for event in events:
            block = self._state.add(event)
            if block is not None:
                frames += self._extend(block, getattr(event, "text", ""))
        return frames

    def finish(self) -> list[bytes]:
        end = self._state.end
        if end is None:
            return self.fail(ExecutionFailed("generation ended without a result"))
        if end.cause == "failed":
            return self.fail(failure(end))
        reason, sequence = stop_reason(end)
        delta = {"stop_reason": reason, "stop_sequence": sequence, **_EMPTY}
        frames = [*self._start(), *self._close()]
        frames.append(_event("message_delta", delta=delta, usage=_final_usage(end.usage)))
        frames.append(_event("message_stop"))
        return frames

    def fail(self, error: ProtocolError) -> list[bytes]:
        return [sse(dumps(body(error, "messages")), "error")]

    def result(self) -> dict[str, Any]:
        end = self._state.end
        if end is None:
            raise ExecutionFailed("generation ended without a result")
        if end.cause == "failed":
            raise failure(end)
        message = self._message(_usage(end.usage))
        message["content"] = [content for block in self._state.blocks if (content := _content(block)) is not None]
        message["stop_reason"], message["stop_sequence"] = stop_reason(end)
        return message

    def _message(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._context.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._context.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            **_EMPTY,
            "usage": usage,
        }

    def _start(self) -> list[bytes]:
        """message_start, once: the whole prompt counted as input, since reuse is not known yet."""
        if self._started:
            return []
        self._started = True
        usage = Usage(prompt=sum(self._context.prompt_tokens), cached=0, completion=0)
        return [_event("message_start", message=self._message(_usage(usage)))]

    def _extend(self, block: Block, text: str) -> list[bytes]:
        if block.kind == "tool":
            return self._call(block) if block.complete else []
        if not text:
            return []
        frames: list[bytes] = []
        if block is not self._open:
            frames = self._close()
            empty = _text("") if block.kind == "text" else _thinking("", "")
            frames += self._begin(empty)
            self._open = block
        delta = {"type": "text_delta", "text": text}
        if block.kind == "reasoning":
            delta = {"type": "thinking_delta", "thinking": text}
        return [*frames, self._delta(delta)]

    def _call(self, block: Block) -> list[bytes]:
        frames = self._close()
        frames += self._begin(_tool_use(block.id, block.name, {}))
        frames.append(self._delta({"type": "input_json_delta", "partial_json": block.text}))
        frames.append(_event("content_block_stop", index=self._index))
        return frames

    def _begin(self, block: Mapping[str, Any]) -> list[bytes]:
        self._index += 1
        return [_event("content_block_start", index=self._index, content_block=block)]

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> list[bytes]:
        block, self._open = self._open, None
        if block is None:
            return []
        frames = []
        if block.kind == "reasoning":
            frames.append(self._delta({"type": "signature_delta", "signature": marker(block.text)}))
        frames.append(_event("content_block_stop", index=self._index))
        return frames


def stop_reason(end: Terminated) -> tuple[str, str | None]:
    """`stop_reason` and `stop_sequence`. The limit comes first; calls count when the user's stops ended nothing."""
    if end.cause == "limit":
        return "max_tokens", None
    if end.cause == "string_stop":
        return "stop_sequence", str(end.stop)
    if end.tool_calls and end.cause not in _USER_STOPS:
        return "tool_use", None
    return "end_turn", None


def _event(name: str, **fields: Any) -> bytes:
    return sse(dumps({"type": name, **fields}), name)


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": None}


def _thinking(text: str, signature: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": signature}


def _tool_use(id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name, "input": arguments, "caller": {"type": "direct"}}


def _content(block: Block) -> dict[str, Any] | None:
    """The whole content block; None for what the stream doesn't show either."""
    if block.kind == "tool":
        return _tool_use(block.id, block.name, loads(block.text.encode())) if block.complete else None
    if not block.text:
        return None
    return _text(block.text) if block.kind == "text" else _thinking(block.text, marker(block.text))


def _final_usage(usage: Usage) -> dict[str, Any]:
    """Native counts: what was reused is not input again, and together they are the prompt."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
        "server_tool_use": None,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        **_final_usage(usage),
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "inference_geo": None,
        "service_tier": "standard",
    }
