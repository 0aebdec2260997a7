"""The output pipeline of one choice: committed tokens in, semantic events out.

ids → bytes → UTF-8 → stop matcher → syntax machine → events. Owns what is text and what was returned, how many tokens
count, and the final cause of the end, all in one place. Any cut of the same tokens into updates gives the same events,
neighbouring deltas and observations merged. Leaves rules about tools to `protocols.tools`.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from engine.prepared import PreparedModel
from engine.syntax import open_syntax
from engine.syntax.piece import CallCompleted, CallStarted, Piece, Segment, Syntax, SyntaxEvent
from engine.text.detokenize import Detokenizer
from engine.text.stops import StopMatcher
from engine.types.conversation import Conversation
from engine.types.events import (
    Cause,
    EngineEnd,
    FailureKind,
    FirstToken,
    ObservedToken,
    PromptScored,
    ReasoningDelta,
    Region,
    SemanticEvent,
    Terminated,
    TextDelta,
    TokenRecord,
    TokensObserved,
    ToolCallCompleted,
    ToolCallStarted,
    Update,
    Usage,
)
from engine.types.request import GenerationRequest, PreparedPrompt

MAX_ARGUMENT_BYTES: Final = 8 * 1024 * 1024

Validator = Callable[[str], str | None]
"""A freeform tool's completed input → what is wrong with it, or None."""


@dataclass(slots=True)
class _Held:
    """A token on its way to the syntax machine. `start`, `text`: its visible text in the output (empty for a hidden
    token and for one whose character isn't complete). `id`: as in Segment."""

    index: int
    id: int | None
    start: int
    text: str
    hidden: bool


class OutputPipeline:
    """One choice. `call_id` names each tool call; `validators`: by name of a freeform tool, its input's check.

    `stop_at`: the token count at which text ended the choice, so that the engine need not go on; None otherwise.
    `terminated`: Terminated was emitted; further updates are ignored.
    """

    def __init__(
        self,
        model: PreparedModel,
        prompt: PreparedPrompt,
        request: GenerationRequest,
        *,
        call_id: Callable[[], str],
        validators: Mapping[str, Validator] | None = None,
    ) -> None:
        self.stop_at: int | None = None
        self.terminated = False
        self._tokens = model.tokens
        self._call_id = call_id
        self._validators = validators or {}
        self._freeform = _freeform_tools(request)
        self._syntax = _syntax(model, prompt, request)
        self._text = Detokenizer(model.tokens)
        self._specials = model.tokens.specials
        self._shown_specials = _delimiters(model)
        self._eos = frozenset(() if prompt.ignore_eos else prompt.eos_ids)
        self._min_tokens = prompt.min_tokens
        stops = request.stops
        self._strings = stops.strings
        self._include = stops.include_in_output
        self._matcher = StopMatcher(stops.strings) if stops.strings else None
        self._sequences = prompt.stop_sequences
        self._sequence_matcher = StopMatcher(prompt.stop_sequences) if prompt.stop_sequences else None
        self._withheld: deque[tuple[int, TokenRecord]] = deque()
        self._prompt_tokens = len(prompt.token_ids)
        self._image_tokens = sum(image.length for image in prompt.images)
        self._cached: int = prompt.first_cached or 0
        self._count = 0
        self._observed_reasoning = 0
        self._calls = 0
        self._open_call: tuple[int, str] | None = None
        self._completed_calls = 0
        self._queue: deque[_Held] = deque()
        self._unseen: deque[tuple[int, TokenRecord, int]] = deque()
        self._hidden: set[int] = set()
        self._events: list[SemanticEvent] = []
        self._run: Region = "text"
        self._run_text: list[str] = []
        self._run_tokens: list[ObservedToken] = []

    def push(self, update: Update) -> list[SemanticEvent]:
        """The events that `update` causes, in order; the last is Terminated when the choice has ended."""
        if self.terminated:
            return []
        self._events = []
        if update.cached_tokens is not None:
            self._cached = update.cached_tokens
        if update.scores is not None:
            self._events.append(PromptScored(update.scores))
        for record in update.records:
            if self._commit(record):
                return self._events
        if update.end is not None:
            self._engine_end(update.end)
        self._flush_run()
        return self._events

    # From committed tokens to text.

    def _commit(self, record: TokenRecord) -> bool:
        """Takes one committed token; whether the choice has ended."""
        index = self._count
        self._count = index + 1
        if index == 0:
            self._events.append(FirstToken(self._cached))
        if record.id in self._eos:
            self._return_withheld(0)
            self._finish("eos")
        elif self._sequence_matcher is None:
            self._return(index, record)
        else:
            self._withhold(index, record, self._sequence_matcher)
        return self.terminated

    def _withhold(self, index: int, record: TokenRecord, matcher: StopMatcher) -> None:
        """Tokens that could begin a stop sequence wait; those of a matched one are never returned."""
        self._withheld.append((index, record))
        found = matcher.feed((record.id,), armed=self._count >= self._min_tokens)
        if found is None:
            self._return_withheld(matcher.held)
            return
        self._return_withheld(len(self._sequences[found.index]))
        if self._include:
            for _, each in self._withheld:
                self._show_stop(each.id)
        self._withheld.clear()
        self._finish("token_stop", stop=record.id)

    def _return_withheld(self, kept: int) -> None:
        while len(self._withheld) > kept and not self.terminated:
            self._return(*self._withheld.popleft())

    def _return(self, index: int, record: TokenRecord) -> None:
        """A token that is part of the output."""
        token, start = record.id, self._text.offset
        if token in self._specials:
            self._end_character(index - 1)
            start = self._text.offset
            if token not in self._shown_specials:
                self._hidden.add(index)
            self._unseen.append((index, record, start))
            self._advance(_Held(index, token, start, "", hidden=True))
            return
        text, offset, whole = self._text.feed(token)
        if offset > start:  # the token broke off a character of the tokens before
            self._advance(_Held(index - 1, None, start, text[:1], hidden=False))
            text, start, whole = text[1:], offset, self._tokens.whole[token] is not None
        self._unseen.append((index, record, start))
        if self._matcher is not None:
            self._match(_Held(index, token if whole else None, start, text, hidden=False), self._matcher)
        elif text:
            self._feed(Segment(index, token if whole else None, text))

    def _end_character(self, index: int) -> None:
        """Ends a character in progress whose last byte is in token `index`."""
        start = self._text.offset
        text = self._text.flush()
        if text:
            self._advance(_Held(index, None, start, text, hidden=False))

    def _show_stop(self, token: int) -> None:
        """A token of a stop that is included in the output: its text is shown, but it isn't a returned token."""
        if token not in self._specials:
            self._feed(Segment(self._count - 1, None, self._text.feed(token)[0]))

    def _advance(self, held: _Held) -> None:
        if self.terminated:
            return
        if self._matcher is None:
            self._parse(held)
        else:
            self._match(held, self._matcher)

    # String stops.

    def _match(self, held: _Held, matcher: StopMatcher) -> None:
        end = held.start + len(held.text)
        found = matcher.feed(held.text, armed=self._count >= self._min_tokens)
        if found is None and not matcher.held and not self._queue:
            self._parse(held)
            return
        self._queue.append(held)
        if found is None:
            self._release(end - matcher.held)
            return
        stop = self._strings[found.index]
        self._release(held.start + found.end - (0 if self._include else len(stop)), clip=True)
        self._queue.clear()
        self.stop_at = self._count
        self._finish("string_stop", stop=stop)

    def _release(self, limit: int, *, clip: bool = False) -> None:
        """Passes on the text before character `limit`; a control token only whole, unless text is clipped there."""
        while self._queue:
            held = self._queue[0]
            end = held.start + len(held.text)
            if end <= limit and (held.text or held.hidden or held.start < limit):
                self._parse(self._queue.popleft())
                continue
            if held.start >= limit or (held.id is not None and self._tokens.is_control(held.id) and not clip):
                return
            size = limit - held.start
            rest = _Held(held.index, None, limit, held.text[size:], hidden=False)
            self._queue[0] = rest
            self._parse(_Held(held.index, None, held.start, held.text[:size], hidden=False))
            return

    # Syntax, regions and events.

    def _parse(self, held: _Held) -> None:
        if held.hidden and held.id is not None:
            if self._syntax is None:
                self._piece(held.index, "control", "")
            else:
                self._feed(Segment(held.index, held.id, self._tokens.text(held.id)))
        elif held.text:
            self._feed(Segment(held.index, held.id, held.text))

    def _feed(self, segment: Segment) -> None:
        if self._syntax is None:
            self._piece(segment.token, "text", segment.text)
        else:
            self._handle(self._syntax.feed(segment))

    def _handle(self, events: list[SyntaxEvent]) -> None:
        for event in () if self.terminated else events:
            if isinstance(event, Piece):
                self._piece(event.token, event.region, event.text)
            elif isinstance(event, CallStarted):
                self._start_call(event.name)
            elif isinstance(event, CallCompleted):
                if not self._complete_call(event):
                    return
            else:
                self._fail("output", event.message)
                return

    def _piece(self, index: int, region: Region, text: str) -> None:
        """`text` of token `index` lies in `region`: shows it, and observes the tokens up to there."""
        shown = region in ("text", "reasoning") and not (self._hidden and index in self._hidden)
        if shown and region != self._run:
            self._flush_run()
            self._run = region
        while self._unseen and self._unseen[0][0] <= index:
            self._observe(region)
        if shown and text:
            self._run_text.append(text)

    def _observe(self, region: Region) -> None:
        """The oldest token without a region has one now."""
        index, record, offset = self._unseen.popleft()
        if self._hidden and index in self._hidden and region in ("text", "reasoning"):
            region = "control"
        if region == "reasoning":
            self._observed_reasoning += 1
        self._run_tokens.append(ObservedToken(record, self._tokens.bytes(record.id), offset, region))

    def _start_call(self, name: str) -> None:
        self._flush_run()
        self._open_call = (self._calls, self._call_id())
        self._calls += 1
        self._events.append(ToolCallStarted(*self._open_call, name))

    def _complete_call(self, event: CallCompleted) -> bool:
        assert self._open_call is not None
        index, call_id = self._open_call
        problem = self._problem(event)
        if problem is not None:
            self._fail("output", problem)
            return False
        self._flush_run()
        self._completed_calls += 1
        self._events.append(ToolCallCompleted(index, call_id, event.name, event.arguments))
        return True

    def _problem(self, call: CallCompleted) -> str | None:
        """Why a completed call can't be returned."""
        if len(call.arguments) * 4 > MAX_ARGUMENT_BYTES and len(call.arguments.encode()) > MAX_ARGUMENT_BYTES:
            return f"the arguments of the call to {call.name!r} exceed {MAX_ARGUMENT_BYTES} bytes"
        if call.name not in self._freeform:
            return None
        arguments: Any = json.loads(call.arguments)
        text = arguments.get("input") if isinstance(arguments, dict) else None
        if not isinstance(text, str):
            return f"the call to {call.name!r} has no string input"
        validate = self._validators.get(call.name)
        wrong = validate(text) if validate is not None else None
        return None if wrong is None else f"the input of the call to {call.name!r} is invalid: {wrong}"

    def _flush_run(self) -> None:
        """Emits what gathered since the last event: observed tokens, then the text of one region."""
        if self._run_tokens:
            self._events.append(TokensObserved(tuple(self._run_tokens)))
            self._run_tokens = []
        if self._run_text:
            text = self._run_text[0] if len(self._run_text) == 1 else "".join(self._run_text)
            self._events.append(TextDelta(text) if self._run == "text" else ReasoningDelta(text))
            self._run_text = []

    # The end.

    def _engine_end(self, end: EngineEnd) -> None:
        """The engine ended the choice, and no token before did: what it says is the cause."""
        if end.cause == "failed":
            self._fail(end.kind, end.message, ours=False)
        elif end.cause == "cancelled":
            self._fail("unavailable", end.message or "the request was cancelled", ours=False)
        else:
            self._return_withheld(0)
            self._finish(end.cause)

    def _finish(self, cause: Cause, stop: str | int | None = None) -> None:
        """The choice ends here. An unfinished call is left out where the limit or the caller's stop cut it off; where
        the model itself ended, it is an error."""
        if cause != "string_stop":  # what a string stop left is beyond it
            self._end_character(self._count - 1)
            while self._queue:
                self._parse(self._queue.popleft())
        if self._syntax is not None:
            self._handle(self._syntax.finish(truncated=cause != "eos"))
        if cause != "string_stop":
            while self._unseen:  # tokens without bytes
                self._observe("control")
        self._terminate(Terminated(cause, self._usage(), stop, self._completed_calls))

    def _fail(self, kind: FailureKind, message: str, *, ours: bool = True) -> None:
        if ours:
            self.stop_at = self._count
        self._terminate(Terminated("failed", self._usage(), None, self._completed_calls, kind, message))

    def _terminate(self, event: Terminated) -> None:
        """The first end counts."""
        if self.terminated:
            return
        self._flush_run()
        self._events.append(event)
        self.terminated = True

    def _usage(self) -> Usage:
        return Usage(self._prompt_tokens, self._cached, self._count, self._observed_reasoning, self._image_tokens)


def _syntax(model: PreparedModel, prompt: PreparedPrompt, request: GenerationRequest) -> Syntax | None:
    """The machine of a conversation's output; raw prompts have none."""
    if prompt.opening is None:
        return None
    asked = request.prompts[0]
    return open_syntax(
        model.recipe,
        model.tokens,
        opening=prompt.opening,
        tools=asked.tools if isinstance(asked, Conversation) else (),
        tools_active=prompt.tools_active,
        structured=prompt.constraint is not None,
        padded=prompt.constraint is not None and prompt.constraint.json,
    )


def _freeform_tools(request: GenerationRequest) -> frozenset[str]:
    asked = request.prompts[0]
    return (
        frozenset(tool.name for tool in asked.tools if tool.freeform)
        if isinstance(asked, Conversation)
        else frozenset()
    )


def _delimiters(model: PreparedModel) -> frozenset[int]:
    """Special tokens that may be shown: reasoning delimiters, which a structured answer may contain as text."""
    syntax = model.recipe.reasoning
    if syntax is None:
        return frozenset()
    return frozenset(
        token for token in model.tokens.specials if model.tokens.text(token) in (syntax.open, syntax.close)
    )
