"""The machine: runs a family's states over generated text, token by token.

Owns look-ahead, the assignment of every character to a region, and the buffering of calls until they are whole. Linear
in the length of the output; text is held back only while a delimiter is undecided. What the states are is data
(`engine.syntax.states` and a file a family).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from typing import Final, Literal

from engine.syntax.arguments import MAX_ARGUMENT_BYTES, Malformed, Schemas, bounded
from engine.syntax.patterns import DELIMITERS, Lit, Pattern, Probe, Verdict, probe
from engine.syntax.piece import CallCompleted, CallStarted, Ending, Piece, Segment, SyntaxEvent, SyntaxFailure
from engine.syntax.states import CallForm, Layout, Rule, State
from engine.types.events import Region

Phase = Literal["free", "start", "answer"]

_MAX_GLUE: Final = 64
"""Characters of whitespace before a delimiter that count as its markup."""

_MAX_CALL: Final = 2 * MAX_ARGUMENT_BYTES
"""Characters of a call with its markup."""


class Closer:
    """Finds the end of a call in text that arrives in parts: `literal`, outside of quotes. `quotes`: what opens and
    what closes a quoted stretch."""

    def __init__(self, literal: str, quotes: tuple[str, str] | None = None, escapes: bool = False) -> None:
        self.literal = literal
        words = (literal, *(quotes or ()))
        parts = [*([r"\\."] if escapes else []), *map(re.escape, dict.fromkeys(words))]
        self._pattern = re.compile("|".join(parts), re.DOTALL)
        self._quotes = quotes
        self._quoted = False
        self._longest = max(*map(len, words), 2)
        self.tail = ""
        first = {*(word[0] for word in words), *("\\" if escapes else "")}
        self._hot = re.compile(f"[{''.join(map(re.escape, sorted(first)))}]")

    def feed(self, text: str) -> int | None:
        """Where in `text` the call ends, after the literal; None if not yet."""
        if not self.tail and not self._hot.search(text):
            return None
        window = self.tail + text
        at = 0
        for found in self._pattern.finditer(window):
            at = found.end()
            if found[0] == self.literal:
                if not self._quoted:
                    return at - len(self.tail)
            elif self._quotes is not None and found[0] == self._quotes[self._quoted]:
                self._quoted = not self._quoted
        hot = self._hot.search(window, max(at, len(window) - self._longest + 1))
        self.tail = window[hot.start() :] if hot else ""
        return None


class _Call:
    """A call being written."""

    def __init__(self, form: CallForm, name: str | None) -> None:
        self.form = form
        self.name = name
        self.closer = Closer(form.closer, form.quotes, form.escapes)
        self.parts: list[str] = []
        self.length = 0
        self.head = ""
        self.end: int | None = None

    def goes_on(self, text: str) -> bool:
        """The quick way for text in the middle of a call: adds it, unless the call ends in it or needs a closer
        look; then `end` remembers where it ends."""
        if self.name is None or self.length > _MAX_CALL:
            return False
        self.end = self.closer.feed(text)
        if self.end is not None:
            return False
        self.add(text)
        return True

    @property
    def ends(self) -> bool:
        """Whether the text so far ends as a call does, though inside quotes."""
        return "".join(self.parts).rstrip().endswith(self.form.closer)

    def end_in(self, text: str) -> int | None:
        """Where in `text`, the next of the call, the call ends."""
        end, self.end = self.end, None
        return self.closer.feed(text) if end is None else end

    def add(self, text: str) -> None:
        self.parts.append(text)
        self.length += len(text)


class Machine:
    """One choice's syntax (engine.syntax.piece.Syntax). `terminals`: single-token delimiters by their text, with the
    private characters that stand for them."""

    def __init__(self, layout: Layout, terminals: Mapping[str, str], schemas: Schemas) -> None:
        self._states = layout.states
        self._terminals = terminals
        self._schemas = schemas
        self._buffer = ""
        self._segments: deque[tuple[int, str, int]] = deque()
        self._events: list[SyntaxEvent] = []
        self._call: _Call | None = None
        self._undecided: Verdict | None = None
        self._undecided_tool = False
        self._finished = False
        self._attempt = 0
        self._completed = False
        self._enter(layout.start)

    @property
    def reasoning_open(self) -> bool:
        return self._state.reasoning and self._call is None

    @property
    def tool_pending(self) -> bool:
        return self._call is not None or self._state.tool or self._undecided is not None

    @property
    def phase(self) -> Phase:
        """What a constraint on the answer has to do with the next token: nothing ("free"), it is the answer's, or an
        answer or one of `openers` may start ("start", also while what was started is undecided)."""
        if self._call is not None:
            return "free"
        if self._name == "verbatim":
            return "answer"
        return "start" if self._state.due or self._state.openers else "free"

    @property
    def due(self) -> bool:
        """In phase "start": whether the answer itself may start, not only what may stand before it."""
        return self._state.due

    @property
    def openers(self) -> tuple[Pattern, ...]:
        """In phase "start": with what a call, reasoning or markup before the answer may start."""
        return self._state.openers

    @property
    def padding(self) -> bool:
        """In phase "start", with nothing held: whether whitespace may come first, as markup."""
        return self._state.padding and self._call is None and not self._buffer

    @property
    def endings(self) -> tuple[Ending, ...]:
        """The texts that lead from here to where an answer is awaited; not those that only a token can be."""
        if self._call is not None:
            form = self._call.form
            return self._leading_to(form.after, (form.closer,), self._call.closer.tail)
        found: list[Ending] = []
        for rule in self._state.rules:
            texts = [element.options for element in rule.pattern.elements if isinstance(element, Lit)]
            if rule.call is not None:  # one whose opener looks ahead for its closer may begin and end in one token
                if self._undecided is not None and any(rule.call.closer in options for options in texts):
                    found += self._leading_to(rule.call.after, (rule.call.closer,), self._buffer)
            elif self.phase == "free" and rule.route is None and len(rule.pattern.elements) == len(texts) == 1:
                found += self._leading_to(rule.target, texts[0], self._buffer)
        return tuple(found)

    def _leading_to(self, name: str, literals: tuple[str, ...], held: str) -> tuple[Ending, ...]:
        state = self._states[name]
        texts = tuple(text for text in literals if not any(char in DELIMITERS for char in text))
        if not texts or not (state.due or state.openers):
            return ()
        return (Ending(texts, held, state.due, state.openers, drops=state.lead == "drop"),)

    @property
    def attempt(self) -> int:
        """Counts how often phase "start" began."""
        return self._attempt

    @property
    def called(self) -> bool:
        """The last call is complete and nothing else has begun, so that the output may end."""
        return self._name in ("after_call", "between", "called") and self._completed

    @property
    def held(self) -> str:
        """Text that is not assigned to a region yet."""
        return "".join(text for _, text, _ in self._segments)

    def feed(self, segment: Segment) -> list[SyntaxEvent]:
        text = segment.text
        if not text:
            return []
        if segment.id is not None and text in self._terminals:
            held = self._terminals[text]
        elif self._call is not None and self._call.goes_on(text):
            return [Piece(segment.token, "tool", text)]
        elif not self._buffer and self._call is None and not self._looks.search(text):
            return [Piece(segment.token, self._state.region, text)]
        else:
            held = text
        self._buffer += held
        self._segments.append((segment.token, text, len(held)))
        self._run(final=False)
        return self._taken()

    def finish(self, *, truncated: bool) -> list[SyntaxEvent]:
        if self._finished:
            return []
        self._finished = True
        self._run(final=True)
        if self._call is not None and self._call.form.tolerant and self._call.ends:
            self._complete(self._call)  # its last value isn't closed, but the call itself is
        opened = self._undecided_tool and self._undecided is Verdict.OPENED
        unfinished = self._call is not None or self._state.tool or opened
        if unfinished or self._undecided is not None:
            self._take(len(self._buffer), "tool")
            if unfinished and not truncated:
                self._events.append(SyntaxFailure("the output ended inside an unfinished tool call"))
        self._take(len(self._buffer), self._state.region)
        self._undecided, self._undecided_tool, self._call = None, False, None
        return self._taken()

    def _taken(self) -> list[SyntaxEvent]:
        events, self._events = self._events, []
        return events

    def _enter(self, name: str) -> None:
        self._name = name
        self._state = self._states[name]
        self._looks = self._state.looks
        self._attempt += bool(self._state.due or self._state.openers)

    def _run(self, *, final: bool) -> None:
        """Consumes what can be decided of the buffer."""
        while True:
            self._undecided, self._undecided_tool = None, False
            if self._call is not None:
                if not self._run_call(self._call):
                    return
            elif not self._buffer:
                return
            elif self._state.otherwise is not None:
                if not self._run_start(self._state.otherwise, final):
                    return
            elif not self._run_text(final):
                return

    def _run_start(self, otherwise: str, final: bool) -> bool:
        """A state whose rules hold only at its start. False when more text is needed."""
        state = self._state
        skipped = state.skip.match(self._buffer)
        at = skipped.end() if skipped else 0
        if state.lead == "drop":
            self._take(at, "control")
            at = 0
        if at == len(self._buffer):
            if final:
                self._take(at, state.region if state.lead == "keep" else "control")
            if final or at <= _MAX_GLUE:
                return False
        if at > _MAX_GLUE:
            self._enter(otherwise)
            return True
        found = self._match(at)
        if isinstance(found, tuple):
            self._take(at, "control")
            self._apply(*found)
            return True
        if found is not None and not (final and not self._undecided_call(found)):
            return False
        self._enter(otherwise)
        return True

    def _run_text(self, final: bool) -> bool:
        """A state whose rules hold anywhere. False when more text is needed or all is consumed."""
        buffer, state = self._buffer, self._state
        position = 0
        while True:
            hot = state.hot.search(buffer, position)
            if hot is None:
                end = len(buffer)
                return not self._plain(end if final or not state.trims else self._before_glue(end))
            at = hot.start()
            found = self._match(at)
            if isinstance(found, tuple):
                start = self._before_glue(at) if found[0].trim else at
                if self._plain(start):
                    self._take(at - start, "control")
                    self._apply(*found)
                return True
            if found is None or (final and not self._undecided_call(found)):
                position = at + 1
                continue
            return not self._plain(self._before_glue(at))

    def _before_glue(self, at: int) -> int:
        """Where the whitespace that ends at `at` begins, as far as it may be markup."""
        start = at
        while start > 0 and at - start < _MAX_GLUE and self._buffer[start - 1].isspace():
            start -= 1
        return start

    def _plain(self, length: int) -> bool:
        """Takes text that belongs to the state itself; False, having failed, where the state allows none."""
        if self._state.strict and self._buffer[:length].strip():
            self._fail("unexpected text inside a tool call")
            return False
        self._take(length, self._state.region)
        return True

    def _match(self, at: int) -> tuple[Rule, Probe] | Rule | None:
        """The rule that matches at `at` with its probe; a rule that is still undecided there; or None."""
        undecided: Rule | None = None
        for rule in self._state.rules:
            result = probe(rule.pattern, self._buffer, at)
            if result.verdict is Verdict.MATCH:
                self._undecided = None
                return rule, Probe(result.verdict, result.end - at, result.name)
            if result.verdict is not Verdict.NO and (undecided is None or rule.tool):
                undecided = rule
                self._undecided = result.verdict
                self._undecided_tool = rule.tool
        return undecided

    def _undecided_call(self, rule: Rule) -> bool:
        """At the end of the output: is what is undecided a part of a call's markup, rather than text?"""
        begun = rule.region == "tool" and rule.call is None and self._state.otherwise is not None
        return self._state.strict or begun or (rule.tool and self._undecided is Verdict.OPENED)

    def _apply(self, rule: Rule, result: Probe) -> None:
        consumed = self._take(result.end, rule.region)
        if rule.call is not None:
            name = None if result.name is None else rule.call.spell(result.name)
            self._call = _Call(rule.call, name)
            self._call.add(consumed)
            if name is not None:
                self._start(name)
            return
        self._enter(rule.route(result.name or "") if rule.route is not None else rule.target)

    def _start(self, name: str) -> None:
        if name:
            self._events.append(CallStarted(name))
        else:
            self._fail("a tool call has an empty name")

    def _run_call(self, call: _Call) -> bool:
        """Feeds the buffer to the open call. False when more text is needed."""
        while self._segments:
            text = self._segments[0][1]
            end = call.end_in(text)
            taken = len(text) if end is None else end
            whole = taken == len(text)
            consumed = self._take(self._segments[0][2] if whole else taken, "tool")
            call.add(consumed)
            if call.length > _MAX_CALL:
                self._fail(f"a tool call exceeds {_MAX_CALL} characters")
                return True
            if call.name is None and call.form.header is not None:
                self._find_name(call, call.form.header, consumed)
                if self._call is None:
                    return True
            if end is not None:
                self._complete(call)
                return True
        return False

    def _find_name(self, call: _Call, header: Pattern, consumed: str) -> None:
        call.head += consumed
        result = probe(header, call.head, 0)
        if result.verdict is Verdict.MATCH:
            call.name = call.form.spell(result.name or "")
            self._start(call.name)
        elif result.verdict is Verdict.NO:
            self._fail("a tool call has no valid header")

    def _complete(self, call: _Call) -> None:
        try:
            name, arguments = call.form.parse("".join(call.parts), self._schemas)
            if not name:
                raise Malformed("a tool call has an empty name")
            bounded(arguments)
        except Malformed as error:
            self._fail(str(error))
            return
        if call.name is None:
            self._events.append(CallStarted(name))
        self._events.append(CallCompleted(name, arguments))
        self._call = None
        self._completed = True
        self._enter(call.form.after)

    def _fail(self, message: str) -> None:
        """Ends the parse: what follows is markup that nobody shows."""
        self._events.append(SyntaxFailure(message))
        self._call = None
        self._name = "failed"
        self._state = _FAILED
        self._looks = _FAILED.looks

    def _take(self, length: int, region: Region) -> str:
        """Moves `length` characters of the buffer into pieces; their original text."""
        if length <= 0:
            return ""
        taken: list[str] = []
        left = length
        segments = self._segments
        while left:
            token, text, size = segments[0]
            if size <= left:
                segments.popleft()
                left -= size
            else:
                segments[0] = (token, text[left:], size - left)
                text = text[:left]
                left = 0
            taken.append(text)
            self._events.append(Piece(token, region, text))
        self._buffer = self._buffer[length:]
        return "".join(taken)


_FAILED: Final = State("tool")
