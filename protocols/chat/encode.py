"""Semantic events into Chat Completions: chunks of a stream, or the buffered object.

Owns the order of chunks and the shape of both answers. Everything a frame says comes from the choice's Accumulator or
from the events just added to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import orjson

from engine.types.events import (
    FirstToken,
    ObservedToken,
    ReasoningDelta,
    SemanticEvent,
    Terminated,
    TextDelta,
    TokensObserved,
    ToolCallCompleted,
)
from protocols.accumulator import Accumulator, Block, failure
from protocols.chat.decode import ChatOptions
from protocols.encoder import ResponseContext, sse
from protocols.errors import ExecutionFailed, ProtocolError, body
from protocols.fields import Decoded
from protocols.observations import TokenNames, chat_entries, prompt_logprobs
from protocols.usage import usage_object

DONE: Final = b"data: [DONE]\n\n"
_PLAIN: Final = b',"logprobs":null,"finish_reason":null}]'


def finish_reason(end: Terminated, calls: int) -> str:
    """Chat's finish reason: the limit first, then calls of an answer that the user did not stop."""
    if end.cause == "limit":
        return "length"
    if calls and end.cause == "eos":
        return "tool_calls"
    return "stop"


class ChatEncoder:
    """Encodes one response of `n` choices. See protocols.encoder.Encoder."""

    def __init__(self, context: ResponseContext, decoded: Decoded) -> None:
        assert isinstance(decoded.options, ChatOptions)
        self._context = context
        self._options = decoded.options
        self._names = TokenNames(context.token_bytes, decoded.options.as_token_ids)
        self._observe = decoded.options.logprobs or decoded.options.token_ids or decoded.options.timestamps
        keep = self._observe and not decoded.options.stream
        self._choices = [Accumulator(keep_tokens=keep) for _ in range(decoded.request.n)]
        self._opened = [False] * decoded.request.n
        self._pending: list[list[ObservedToken]] = [[] for _ in range(decoded.request.n)]
        self._first = True
        id = context.request_id
        self._id = id if id.startswith("chatcmpl-") else f"chatcmpl-{id}"
        head = self._head("chat.completion.chunk")
        self._opening = orjson.dumps(head)[:-1]
        self._heads = [
            b"data: " + self._opening + b',"choices":[{"index":%d,"delta":' % index
            for index in range(decoded.request.n)
        ]
        quiet = self._options.include_usage and not self._options.continuous_usage
        self._tail = (b',"usage":null' if quiet else b"") + b"}\n\n"
        self._plain = _PLAIN + self._tail

    def feed(self, choice: int, events: Sequence[SemanticEvent]) -> list[bytes]:
        state = self._choices[choice]
        if not self._options.stream:
            for event in events:
                state.add(event)
            return []
        for event in events:
            if isinstance(event, TokensObserved):
                state.add(event)
                if self._observe:
                    self._pending[choice].extend(event.tokens)
        frames: list[bytes] = []
        for event in events:
            if isinstance(event, TokensObserved):
                continue
            block = state.add(event)
            if isinstance(event, FirstToken):
                self._open(choice, frames)
            for delta in self._deltas(event, block):
                self._open(choice, frames)
                frames.append(self._chunk(choice, delta))
        if self._pending[choice] and (state.end is None or state.end.cause == "failed"):
            self._open(choice, frames)
            frames.append(self._chunk(choice, b'{"content":""}'))
        if state.end is not None and state.end.cause != "failed":
            self._open(choice, frames)
            frames.append(self._terminal(choice, state.end))
        return frames

    def finish(self) -> list[bytes]:
        error = self._failed()
        if error is not None:
            return self.fail(error)
        if not self._options.include_usage:
            return [DONE]
        usage = orjson.dumps(self._usage())
        return [b"data: " + self._opening + b',"choices":[],"usage":' + usage + b"}\n\n", DONE]

    def fail(self, error: ProtocolError) -> list[bytes]:
        return [sse(orjson.dumps(body(error, "openai")))]

    def result(self) -> dict[str, Any]:
        error = self._failed()
        if error is not None:
            raise error
        response = self._head("chat.completion")
        response["choices"] = [self._choice(index) for index in range(len(self._choices))]
        response["usage"] = self._usage()
        if self._options.prompt_logprobs is not None:
            scores = self._choices[0].scores
            response["prompt_logprobs"] = prompt_logprobs(scores, self._names, self._options.prompt_logprobs)
        if self._options.token_ids:
            response["prompt_token_ids"] = list(self._context.prompt_ids[0])
        return response

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._context.created, "model": self._context.model}

    def _failed(self) -> ProtocolError | None:
        for state in self._choices:
            if state.end is None:
                return ExecutionFailed("generation ended without a result")
            if state.end.cause == "failed":
                return failure(state.end)
        return None

    def _usage(self) -> dict[str, Any]:
        prompt = self._context.prompt_tokens[0]
        counts = [state.usage(prompt) for state in self._choices]
        return usage_object((prompt,), counts, images=self._context.image_tokens)

    # Chunks of a stream.

    def _deltas(self, event: SemanticEvent, block: Block | None) -> tuple[bytes, ...]:
        if isinstance(event, TextDelta | ReasoningDelta) and not event.text:
            return ()
        if isinstance(event, TextDelta):
            return (b'{"content":' + orjson.dumps(event.text) + b"}",)
        if isinstance(event, ReasoningDelta) and self._options.include_reasoning:
            text = orjson.dumps(event.text)
            return (b'{"reasoning":' + text + b',"reasoning_content":' + text + b"}",)
        if isinstance(event, ToolCallCompleted) and block is not None:
            opened = {"index": block.call, **_call(block, arguments="")}
            filled = {"index": block.call, "function": {"arguments": block.text}}
            return tuple(orjson.dumps({"tool_calls": [delta]}) for delta in (opened, filled))
        return ()

    def _open(self, choice: int, frames: list[bytes]) -> None:
        """The role chunk, once, when the first token is there."""
        if self._opened[choice]:
            return
        self._opened[choice] = True
        extra = b""
        if self._first and self._options.token_ids:
            extra = b',"prompt_token_ids":' + orjson.dumps(list(self._context.prompt_ids[0]))
        self._first = False
        tail = _PLAIN + extra + self._continuous() + self._tail
        frames.append(self._heads[choice] + b'{"role":"assistant","content":""}' + tail)

    def _chunk(self, choice: int, delta: bytes) -> bytes:
        if not self._observe and not self._options.continuous_usage:
            return self._heads[choice] + delta + self._plain
        middle = self._observations(choice) + b',"finish_reason":null}]'
        return self._heads[choice] + delta + middle + self._continuous() + self._tail

    def _terminal(self, choice: int, end: Terminated) -> bytes:
        reason = orjson.dumps(finish_reason(end, len(self._choices[choice].calls)))
        middle = (
            self._observations(choice) + b',"finish_reason":' + reason + b',"stop_reason":' + orjson.dumps(end.stop)
        )
        usage = self._continuous()
        if self._options.token_ids and not self._options.include_usage and self._all_ended():
            usage = b',"usage":' + orjson.dumps(self._usage())
        return self._heads[choice] + b"{}" + middle + b"}]" + usage + self._tail

    def _all_ended(self) -> bool:
        return all(state.end is not None for state in self._choices)

    def _continuous(self) -> bytes:
        return b',"usage":' + orjson.dumps(self._usage()) if self._options.continuous_usage else b""

    def _observations(self, choice: int) -> bytes:
        """The choice's entries for the tokens observed since the last chunk."""
        if not self._observe:
            return b',"logprobs":null'
        tokens = self._pending[choice]
        self._pending[choice] = []
        fields = self._observed(tokens)
        return b"," + orjson.dumps(fields)[1:-1]

    def _observed(self, tokens: Sequence[ObservedToken]) -> dict[str, Any]:
        """`logprobs`, `token_ids` and `token_timestamps` of a choice, as far as they were asked for."""
        fields: dict[str, Any] = {"logprobs": None}
        if self._options.logprobs:
            entries = chat_entries(tokens, self._names, explicit=self._options.explicit)
            fields["logprobs"] = {"content": entries, "refusal": None}
        if self._options.token_ids:
            fields["token_ids"] = [token.record.id for token in tokens]
        if self._options.timestamps:
            fields["token_timestamps"] = [token.record.time for token in tokens]
        return fields

    # The buffered object.

    def _choice(self, index: int) -> dict[str, Any]:
        state = self._choices[index]
        assert state.end is not None
        calls = state.calls
        text = state.text
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if calls and not text else text,
            "refusal": None,
        }
        reasoning = state.reasoning if self._options.include_reasoning else ""
        if reasoning:
            message["reasoning"] = message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        return {
            "index": index,
            "message": message,
            **self._observed(state.tokens),
            "finish_reason": finish_reason(state.end, len(calls)),
            "stop_reason": state.end.stop,
        }


def _call(block: Block, arguments: str | None = None) -> dict[str, Any]:
    text = block.text if arguments is None else arguments
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": text}}
