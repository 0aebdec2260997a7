"""DeepSeek V4 and V4.1: the official deepseek-recipe state machine behind our own seam.

The official parser owns markup recognition: reasoning delimiters and both DSML spellings, all matched as text. This
adapter feeds it text, finds out which characters became what, buffers each call until its arguments are whole, and
checks names and arguments. Text without "<" is published at once and given to the parser with the next "<".
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Literal

from engine.syntax.arguments import MAX_ARGUMENT_BYTES, Malformed, bounded, loads, paired
from engine.syntax.machine import Phase
from engine.syntax.patterns import Name, Pattern, Space, lit
from engine.syntax.piece import CallCompleted, CallStarted, Ending, Piece, Segment, SyntaxEvent, SyntaxFailure
from engine.types.conversation import ToolDefinition
from engine.types.events import Region

EXTRA_MISSING: Final = "DeepSeek models need the optional package deepseek-recipe: install flare-serve[deepseek]"
CLOSE: Final = "</think>"
MARK: Final = "<｜DSML｜"
OPENERS: Final = tuple(
    Pattern(
        (
            lit(f"<｜DSML｜{space}{outer}>"),
            Space(),
            lit(f'<｜DSML｜{space}invoke name="'),
            Name('"', barred="<>\n"),
        ),
        free=True,
    )
    for space, outer in (("", "tool_calls"), (" ", "calls"))
)
"""How the calls of V4 and V4.1 begin."""
_PARTIAL: Final = tuple(CLOSE[:n] for n in range(1, len(CLOSE))) + tuple(MARK[:n] for n in range(1, len(MARK)))
_STRUCTURE: Final = re.compile(r'\\.|["\\{}\[\]]', re.DOTALL)
"""A complete escape, or a character that matters; a lone backslash matches only at the end."""


class DeepSeekSyntax:
    """One choice's syntax (engine.syntax.piece.Syntax)."""

    def __init__(
        self,
        *,
        opening: Literal["reasoning", "content"],
        tools: Sequence[ToolDefinition],
        tools_active: bool,
        structured: bool,
        padded: bool = False,
    ) -> None:
        self._parser = _Official(opening, tools, tools_active)
        self._tools_active = tools_active
        self._structured = structured
        self._padded = padded and structured
        self._region: Region = "reasoning" if opening == "reasoning" else "text"
        self._thought = opening == "reasoning"
        self._closed = not self._thought
        self._segments: deque[tuple[int, str]] = deque()
        self._pending = ""
        self._unseen: list[str] = []
        self._plain = False
        self._begun = False
        self._ahead = 0
        self._call: _OpenCall | None = None
        self._calls = 0
        self._over: Literal["", "verbatim", "failed", "finished"] = ""
        self._events: list[SyntaxEvent] = []

    @property
    def reasoning_open(self) -> bool:
        return not self._closed and not self._over

    @property
    def tool_pending(self) -> bool:
        if self._over:
            return False
        return self._call is not None or MARK in self._pending or self._pending.endswith(_PARTIAL)

    @property
    def phase(self) -> Phase:
        if not self._structured or not self._closed or self._over in ("failed", "finished"):
            return "free"
        if self._over == "verbatim":
            return "answer"
        return "free" if self._calls else "start"

    @property
    def due(self) -> bool:
        return True

    @property
    def openers(self) -> tuple[Pattern, ...]:
        return OPENERS if self._tools_active else ()

    @property
    def padding(self) -> bool:
        return self._padded and self._thought and self.phase == "start" and not self.held

    @property
    def endings(self) -> tuple[Ending, ...]:
        """Of reasoning; behind calls comes nothing."""
        if not self._structured or self._closed or self._over:
            return ()
        return (Ending((CLOSE,), self._pending, True, self.openers, drops=self._padded),)

    @property
    def attempt(self) -> int:
        return int(self._closed)

    @property
    def called(self) -> bool:
        return self._calls > 0 and self._call is None

    @property
    def held(self) -> str:
        """Text that is not assigned to a region yet, the closing delimiter aside."""
        rest = self._pending.lstrip()
        marked = self._tools_active and rest and (rest.startswith(MARK) or MARK.startswith(rest))
        return rest if self._padded or marked else self._pending

    def feed(self, segment: Segment) -> list[SyntaxEvent]:
        text = segment.text
        if not text:
            return []
        if self._over:
            return [Piece(segment.token, "text" if self._over == "verbatim" else "tool", text)]
        self._unseen.append(text)
        if self._plain and "<" not in text:
            if not self._pending and text[-1] != "\n":
                self._ahead += len(text)
                return [Piece(segment.token, self._region, text)]
            self._segments.append((segment.token, text))
            self._pending += text
            shown = len(self._pending.rstrip("\n"))
            self._ahead += shown
            self._take(shown, self._region)
            return self._taken()
        self._segments.append((segment.token, text))
        self._pending += text
        if self._structured and not self._calls:
            self._await_answer()
        else:
            self._push()
        return self._taken()

    def finish(self, *, truncated: bool) -> list[SyntaxEvent]:
        if self._over in ("", "verbatim"):
            if self._structured and self._closed and not self._calls and MARK not in self._pending:
                self._begin_answer()
            if not self._over:
                self._push()
            for region, text in self._parser.finish() if not self._over else ():
                self._receive(region, text)
            unfinished = not self._over and (self._call is not None or self._opened())
            if unfinished and not truncated:
                self._fail("the output ended inside an unfinished tool call")
            self._take(len(self._pending), "tool" if unfinished or self._calls else "control")
            self._call = None
            self._over = "finished"
        return self._taken()

    def _taken(self) -> list[SyntaxEvent]:
        events, self._events = self._events, []
        return events

    def _await_answer(self) -> None:
        """In front of a constrained answer: the parser gets the reasoning and calls only, so that the answer is
        verbatim from its first character."""
        if not self._closed:
            end = self._pending.find(CLOSE) + len(CLOSE)
            if CLOSE not in self._pending or (self._tools_active and MARK in self._pending[:end]):
                self._push()
                return
            rest = self._pending[end:]
            unseen = "".join(self._unseen)
            self._unseen = [unseen[: len(unseen) - len(rest)]]
            self._push()
            self._take(self._pending.find(CLOSE) + len(CLOSE), "control")
            self._unseen, self._closed = [rest], True
        padding = self._padding()
        if padding:  # the parser would take it for the answer
            self._take(padding, "control")
            self._unseen = [self._pending]
        start = self._pending.lstrip()
        if self._tools_active and start.startswith(MARK):
            self._push()
        elif start and not (self._tools_active and MARK.startswith(start)):
            self._begin_answer()

    def _padding(self) -> int:
        """Characters of the pending text that are whitespace before the answer, and not part of it."""
        return len(self._pending) - len(self._pending.lstrip()) if self._padded else 0

    def _begin_answer(self) -> None:
        self._take(self._padding(), "control")
        self._take(len(self._pending), "text")
        self._over = "verbatim"

    def _push(self) -> None:
        """Gives the parser what it hasn't seen and receives what it makes of it."""
        text = "".join(self._unseen)
        self._unseen.clear()
        for region, delta in self._parser.push(text):
            self._receive(region, delta)
            if self._over:
                return
        if not self._closed and (CLOSE in self._pending or (self._tools_active and MARK in self._pending)):
            self._closed = True
        self._plain = self._begun and not self._calls and not self._pending.rstrip("\n")

    def _receive(self, region: Region, delta: Any) -> None:
        if self._over:
            return
        if region == "tool":
            self._closed = True
            self._receive_call(delta)
            return
        echoed = min(self._ahead, len(delta))  # what the shortcut published already
        self._ahead -= echoed
        delta = delta[echoed:]
        if not delta:
            return
        if region == "text" and self._structured:
            self._align(delta, region, take=False)
            self._begin_answer()
            return
        self._closed = self._closed or region == "text"
        self._region = region
        self._begun = True
        self._align(delta, region)

    def _align(self, delta: str, region: Region, *, take: bool = True) -> None:
        """Finds `delta` in the pending text, behind what the parser drops (closing delimiters, newlines around them),
        and publishes it."""
        at = 0
        while True:
            if self._pending.startswith(CLOSE, at):
                at += len(CLOSE)
            elif self._pending.startswith(delta, at):
                break
            elif self._pending.startswith("\n", at):
                at += 1
            else:
                raise AssertionError(f"the official parser published {delta!r}, which isn't in {self._pending!r}")
        self._take(at, "control")
        if take:
            self._take(len(delta), region)

    def _receive_call(self, delta: dict[str, Any]) -> None:
        self._take(len(self._pending), "tool")
        if "name" in delta:
            if self._call is not None:
                self._fail(f"the arguments of the call to {self._call.name!r} are not a JSON object")
                return
            name = delta["name"].strip()
            if not name:
                self._fail("a tool call has an empty name")
                return
            self._call = _OpenCall(name)
            self._calls += 1
            self._events.append(CallStarted(name))
        if self._call is None:
            return
        try:
            arguments = self._call.add(delta["arguments"])
        except Malformed as error:
            self._fail(str(error))
            return
        if arguments is not None:
            self._events.append(CallCompleted(self._call.name, arguments))
            self._call = None

    def _opened(self) -> bool:
        """Whether the pending text opened a call that never began."""
        return self._tools_active and MARK in self._pending

    def _fail(self, message: str) -> None:
        self._events.append(SyntaxFailure(message))
        self._call = None
        self._over = "failed"
        self._take(len(self._pending), "tool")

    def _take(self, length: int, region: Region) -> None:
        left = length
        while left > 0:
            token, text = self._segments[0]
            if len(text) <= left:
                self._segments.popleft()
            else:
                self._segments[0] = (token, text[left:])
                text = text[:left]
            left -= len(text)
            self._events.append(Piece(token, region, text))
        self._pending = self._pending[length:]


class _OpenCall:
    """A call whose arguments arrive as parts of a JSON text; whole when its outermost bracket closes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._parts: list[str] = []
        self._length = 0
        self._depth = 0
        self._quoted = False
        self._escaping = False

    def add(self, text: str) -> str | None:
        """The whole argument object once it is complete. Raises Malformed when it isn't what it must be."""
        if not text:
            return None
        self._parts.append(text)
        self._length += len(text)
        if self._length > MAX_ARGUMENT_BYTES:
            raise Malformed(f"the arguments of a tool call exceed {MAX_ARGUMENT_BYTES} bytes")
        if self._escaping:
            text, self._escaping = text[1:], False
        for found in _STRUCTURE.finditer(text):
            char = found[0]
            if char == "\\":
                self._escaping = True
            elif char == '"':
                self._quoted = not self._quoted
            elif not self._quoted and char in "{[":
                self._depth += 1
            elif not self._quoted and char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    whole = "".join(self._parts)
                    return self._checked(whole[: len(whole) - len(text) + found.end()])
        return None

    def _checked(self, text: str) -> str:
        text = paired(text)
        try:
            value = loads(text, object_pairs_hook=_Pairs)
        except ValueError as error:
            raise Malformed(f"the arguments of the call to {self.name!r} are not valid JSON: {error}") from error
        if not isinstance(value, _Pairs):
            raise Malformed(f"the arguments of the call to {self.name!r} are not a JSON object")
        keys = [key for key, _ in value]
        if not all(key.strip() for key in keys):
            raise Malformed(f"the call to {self.name!r} has an argument without a name")
        if len(set(keys)) < len(keys):
            raise Malformed(f"the call to {self.name!r} repeats an argument")
        return bounded(text)


class _Pairs(list[tuple[str, Any]]):
    """An object's pairs, repetitions kept."""


class _Official:
    """deepseek-recipe's stream processor: text in, (region, delta) out; a delta of region "tool" is a dict."""

    def __init__(
        self, opening: Literal["reasoning", "content"], tools: Sequence[ToolDefinition], tools_active: bool
    ) -> None:
        recipe = official()
        thinking = opening == "reasoning"
        conversation = recipe.Conversation(
            [recipe.UserMessage("")],
            thinking_mode=thinking,
            tools=[recipe.ToolDefinition(tool.name) for tool in tools] if tools_active else None,
        )
        request = recipe.ConversationRequest(conversation, recipe.ModelVersion.DeepseekV41Flash)
        options = recipe.ParsingOptions(
            parse_tool_calls=tools_active,
            thinking_initial_stage=recipe.ThinkingInitialStage.ReasoningStart if thinking else None,
        )
        generator = recipe.ChatCompletionRequest.chunk_generator(request, "", "")
        self._recipe = recipe
        self._processor = recipe.StreamProcessor(generator, options)
        self._processor.push(recipe.InferenceChunk.ready())

    def push(self, text: str) -> list[tuple[Region, Any]]:
        return self._deltas(self._processor.push(self._recipe.InferenceChunk.text(text, 1)))

    def finish(self) -> list[tuple[Region, Any]]:
        reason = self._recipe.InferenceFinishReason.Stop
        chunks = self._processor.push(self._recipe.InferenceChunk.finish(reason))
        return self._deltas([*chunks, *self._processor.finish()])

    @staticmethod
    def _deltas(chunks: Sequence[Any]) -> list[tuple[Region, Any]]:
        deltas: list[tuple[Region, Any]] = []
        for chunk in chunks:
            for choice in json.loads(chunk.to_json())["choices"]:
                delta = choice["delta"]
                if delta.get("reasoning_content"):
                    deltas.append(("reasoning", delta["reasoning_content"]))
                if delta.get("content"):
                    deltas.append(("text", delta["content"]))
                deltas += [("tool", call["function"]) for call in delta.get("tool_calls") or ()]
        return deltas


def official() -> Any:
    """The deepseek_recipe package. Raises RuntimeError when it isn't installed."""
    try:
        import deepseek_recipe
    except ImportError as error:
        raise RuntimeError(EXTRA_MISSING) from error
    return deepseek_recipe
