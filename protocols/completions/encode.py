"""Semantic events into Completions: chunks of a stream, or the buffered object.

Owns echo, the parallel arrays with their offsets, and the order of choices: index = prompt × n + choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from engine.types.events import (
    ObservedToken,
    PositionScore,
    PromptScored,
    SemanticEvent,
    Terminated,
    TextDelta,
    TokensObserved,
)
from protocols.accumulator import Accumulator, failure
from protocols.completions.decode import CompletionOptions
from protocols.encoder import ResponseContext, sse
from protocols.errors import ExecutionFailed, ProtocolError, body
from protocols.fields import Decoded
from protocols.observations import LogprobArrays, PromptArrays, TokenNames, generated_arrays, prompt_logprobs
from protocols.usage import usage_object

DONE: Final = b"data: [DONE]\n\n"
_PLAIN: Final = b',"logprobs":null,"finish_reason":null}]'


@dataclass(slots=True)
class _Choice:
    """One choice's state: what was folded, and what of it still has to be sent."""

    output: Accumulator
    echo: str
    opened: bool = False
    pending: list[ObservedToken] = field(default_factory=list)
    prompt: PromptArrays | None = None


class CompletionEncoder:
    """Encodes one response. See protocols.encoder.Encoder."""

    def __init__(self, context: ResponseContext, decoded: Decoded) -> None:
        assert isinstance(decoded.options, CompletionOptions)
        self._context = context
        self._options = decoded.options
        self._n = decoded.request.n
        self._names = TokenNames(context.token_bytes, decoded.options.as_token_ids)
        self._observe = decoded.options.logprobs is not None or decoded.options.token_ids
        self._echo_entries = decoded.options.echo_entries
        self._choices = [self._new(prompt) for prompt in range(len(decoded.request.prompts)) for _ in range(self._n)]
        id = context.request_id
        self._id = id if id.startswith("cmpl-") else f"cmpl-{id}"
        self._opening = orjson.dumps(self._head())[:-1]
        self._heads = [
            b"data: " + self._opening + b',"choices":[{"index":%d,"text":' % index
            for index in range(len(self._choices))
        ]
        quiet = self._options.include_usage and not self._options.continuous_usage
        self._tail = (b',"usage":null' if quiet else b"") + b"}\n\n"
        self._plain = _PLAIN + self._tail

    def _new(self, prompt: int) -> _Choice:
        echo = self._context.echo_texts[prompt] if self._options.echo else ""
        state = _Choice(Accumulator(keep_tokens=self._observe and not self._options.stream), echo)
        if self._echo_entries:
            state.prompt = self._prompt_arrays(prompt)
        return state

    def _prompt_arrays(self, prompt: int) -> PromptArrays:
        return PromptArrays(self._context.prompt_ids[prompt], self._names, self._options.logprobs or 0)

    def feed(self, choice: int, events: Sequence[SemanticEvent]) -> list[bytes]:
        state = self._choices[choice]
        if not self._options.stream:
            for event in events:
                state.output.add(event)
            return []
        for event in events:
            if isinstance(event, TokensObserved):
                state.output.add(event)
                if self._observe:
                    state.pending.extend(event.tokens)
        frames: list[bytes] = []
        for event in events:
            if isinstance(event, TextDelta):
                state.output.add(event)
                self._open(choice, frames)
                if event.text:
                    frames.append(self._chunk(choice, event.text))
            elif isinstance(event, PromptScored):
                if state.prompt is not None:
                    frames.append(self._scored(choice, event.scores.entries))
            elif not isinstance(event, TokensObserved):
                state.output.add(event)
        end = state.output.end
        if end is not None and end.cause != "failed":
            self._open(choice, frames)
            frames.append(self._terminal(choice, end))
        elif state.pending:
            self._open(choice, frames)
            frames.append(self._chunk(choice, ""))
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
        return {
            **self._head(),
            "choices": [self._choice(index) for index in range(len(self._choices))],
            "usage": self._usage(),
        }

    def _head(self) -> dict[str, Any]:
        context = self._context
        return {"id": self._id, "object": "text_completion", "created": context.created, "model": context.model}

    def _failed(self) -> ProtocolError | None:
        for state in self._choices:
            if state.output.end is None:
                return ExecutionFailed("generation ended without a result")
            if state.output.end.cause == "failed":
                return failure(state.output.end)
        return None

    def _usage(self) -> dict[str, Any]:
        prompts = self._context.prompt_tokens
        counts = [state.output.usage(prompts[index // self._n]) for index, state in enumerate(self._choices)]
        return usage_object(prompts, counts, reasoning=False)

    # Chunks of a stream.

    def _open(self, choice: int, frames: list[bytes]) -> None:
        """The choice's first chunk where something precedes its output: the echo, or its prompt's ids."""
        state = self._choices[choice]
        if state.opened:
            return
        state.opened = True
        if state.echo or self._options.token_ids:
            frames.append(self._frame(choice, state.echo, {"logprobs": None, **self._prompt_ids(choice)}))

    def _prompt_ids(self, choice: int) -> dict[str, Any]:
        if not self._options.token_ids:
            return {}
        return {"prompt_token_ids": list(self._context.prompt_ids[choice // self._n])}

    def _scored(self, choice: int, scores: Sequence[PositionScore | None]) -> bytes:
        """The entries of one completed prompt chunk; the first such frame carries the echoed text."""
        state = self._choices[choice]
        assert state.prompt is not None
        fields: dict[str, Any] = {"logprobs": state.prompt.entries(scores).wire()}
        text = ""
        if not state.opened:
            text, state.opened = state.echo, True
            fields |= self._prompt_ids(choice)
        return self._frame(choice, text, fields)

    def _chunk(self, choice: int, text: str) -> bytes:
        if not self._observe and not self._options.continuous_usage:
            return self._heads[choice] + orjson.dumps(text) + self._plain
        return self._frame(choice, text, self._take(choice))

    def _terminal(self, choice: int, end: Terminated) -> bytes:
        return self._frame(choice, "", self._take(choice), end)

    def _take(self, choice: int) -> dict[str, Any]:
        state = self._choices[choice]
        tokens, state.pending = state.pending, []
        return self._observed(tokens, len(state.echo))

    def _observed(self, tokens: Sequence[ObservedToken], start: int) -> dict[str, Any]:
        fields: dict[str, Any] = {"logprobs": None}
        if self._options.logprobs is not None:
            fields["logprobs"] = generated_arrays(tokens, self._names, start).wire()
        if self._options.token_ids:
            fields["token_ids"] = [token.record.id for token in tokens]
        return fields

    def _frame(self, choice: int, text: str, fields: dict[str, Any], end: Terminated | None = None) -> bytes:
        fields["finish_reason"] = None if end is None else finish_reason(end)
        if end is not None:
            fields["stop_reason"] = end.stop
        usage = b',"usage":' + orjson.dumps(self._usage()) if self._options.continuous_usage else b""
        return self._heads[choice] + orjson.dumps(text) + b"," + orjson.dumps(fields)[1:] + b"]" + usage + self._tail

    # The buffered object.

    def _choice(self, index: int) -> dict[str, Any]:
        state = self._choices[index]
        end = state.output.end
        assert end is not None
        scores = state.output.scores or self._choices[index - index % self._n].output.scores
        fields = self._observed(state.output.tokens, len(state.echo))
        if self._echo_entries:
            arrays: LogprobArrays = self._prompt_arrays(index // self._n).entries(scores)
            arrays.extend(generated_arrays(state.output.tokens, self._names, len(state.echo)))
            fields["logprobs"] = arrays.wire()
        choice = {
            "index": index,
            "text": state.echo + state.output.text,
            **fields,
            **self._prompt_ids(index),
            "finish_reason": finish_reason(end),
            "stop_reason": end.stop,
        }
        if self._options.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(scores, self._names, self._options.prompt_logprobs)
        return choice


def finish_reason(end: Terminated) -> str:
    return "length" if end.cause == "limit" else "stop"
