"""What a family's machine is made of: states, the rules that lead from one to another, and the forms of its calls.

Data only; `engine.syntax.machine` runs it. Rules are tried where their first literal stands; the reasoning delimiters
that a tokenizer has as one token stand in the text as one private character, so that the same letters in ordinary
pieces don't match.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal

from engine.syntax.arguments import Schemas
from engine.syntax.patterns import OPEN_TOKEN, Pattern, Space, Token, lit
from engine.types.events import Region

NEWLINES: Final = re.compile(r"\n*")
WHITESPACE: Final = re.compile(r"\s*")

Parse = Callable[[str, Schemas], tuple[str, str]]
"""A call's whole text → its name and the JSON text of its arguments. Raises engine.syntax.arguments.Malformed."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a call is written. It ends at `closer`, outside of stretches between `quotes` (`escapes`: a
    backslash escapes the next character). `header`: the pattern after the opener that yields the name, when the
    opener itself doesn't. `spell`: a captured name → the tool's name. `after`: the state that follows.
    `tolerant`: at the end of the output, `closer` inside quotes will do."""

    closer: str
    parse: Parse
    after: str
    spell: Callable[[str], str] = str.strip
    header: Pattern | None = None
    quotes: tuple[str, str] | None = None
    escapes: bool = False
    tolerant: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """Where `pattern` matches, its consumed text gets `region` and the machine goes to `target`, or to what `route`
    makes of the captured name. `call`: the match opens a call. `tool`: an undecided match that has its first literal
    counts as an incomplete call when the output ends. `trim`: whitespace before the match is markup too."""

    pattern: Pattern
    target: str = ""
    region: Region = "control"
    call: CallForm | None = None
    tool: bool = False
    trim: bool = True
    route: Callable[[str], str] | None = None


Lead = Literal["keep", "drop", "join"]


@dataclass(frozen=True, eq=False)
class State:
    """Text that no rule matches gets `region`. `otherwise`: rules are tried only at the start, after `skip`; any
    other text leads there, taking the skipped text along or not (`lead`: "keep", also at the end of the output, "join",
    only in front of text, or "drop"). `strict`: text other than whitespace is an error. `reasoning`/`tool`: what the
    machine reports while in it. `due`: a constrained answer may begin here; `openers`: with what something else may
    begin where an answer is expected, a call, reasoning or markup before the answer; `padding`: a token of whitespace,
    which is markup."""

    region: Region = "text"
    rules: tuple[Rule, ...] = ()
    otherwise: str | None = None
    skip: re.Pattern[str] = NEWLINES
    lead: Lead = "drop"
    strict: bool = False
    reasoning: bool = False
    tool: bool = False
    due: bool = False
    openers: tuple[Pattern, ...] = ()
    padding: bool = False

    @cached_property
    def firsts(self) -> frozenset[str]:
        """The characters with which a rule may begin."""
        return frozenset(option[0] for rule in self.rules for option in rule.pattern.first)

    @cached_property
    def hot(self) -> re.Pattern[str]:
        """Finds the next character with which a rule may begin."""
        return re.compile(f"[{''.join(re.escape(char) for char in sorted(self.firsts))}]" if self.firsts else "(?!)")

    @cached_property
    def trims(self) -> bool:
        """Whether whitespace may turn out to be markup."""
        return any(rule.trim for rule in self.rules)

    @cached_property
    def looks(self) -> re.Pattern[str]:
        """Matches in text that needs a closer look; other text, with nothing held back before it, is plainly this
        state's own."""
        if self.otherwise is not None or self.strict:
            return re.compile(r"(?s:.)")
        return re.compile(f"{self.hot.pattern}|\\s\\Z" if self.trims else self.hot.pattern)


@dataclass(frozen=True, slots=True)
class Setup:
    """What a family needs to know to lay out its states. `open`, `close`: the reasoning delimiters as they stand in
    the text (a private character when they are one token); empty when the recipe has none. `open_text`: the opener
    spelled out. `structured`, `padded`: as in engine.syntax.open_syntax."""

    opening: Literal["reasoning", "content"]
    open: str
    close: str
    open_text: str
    tools: bool
    structured: bool
    padded: bool
    options: frozenset[str]


@dataclass(frozen=True, slots=True)
class Layout:
    """A family's states and where its output starts. The state named "verbatim" is a constrained answer under way."""

    states: Mapping[str, State]
    start: str


def behind_space(pattern: Pattern) -> Pattern:
    """`pattern`, perhaps after whitespace."""
    return replace(pattern, elements=(Space(), *pattern.elements))


def literal(text: str, target: str, *, region: Region = "control", trim: bool = True) -> Rule:
    """A rule for one literal."""
    return Rule(Pattern((lit(text),)), target, region, trim=trim)


def awaited(setup: Setup, rules: Sequence[Rule] = ()) -> State:
    """Reasoning is over and the constrained answer is due; only what `rules` open may stand before it."""
    return State(
        "text",
        tuple(rules),
        otherwise="verbatim",
        skip=WHITESPACE if setup.padded else NEWLINES,
        lead="drop" if setup.padded else "keep",
        due=True,
        openers=tuple(replace(rule.pattern, free=True) for rule in rules),
        padding=setup.padded,
    )


def standard(
    setup: Setup,
    calls: Sequence[Rule],
    *,
    reasoning_calls: Sequence[Rule] | None = None,
    after_call: Sequence[Rule] = (),
    extra: Mapping[str, State] | None = None,
) -> Layout:
    """The layout of families whose output is reasoning, then an answer with calls in it.

    `calls` open calls in the answer, `reasoning_calls` (default: the same) end reasoning as well. `after_call`:
    markup that may follow a call.
    """
    calls = tuple(calls) if setup.tools else ()
    in_reasoning = calls if reasoning_calls is None else tuple(reasoning_calls) if setup.tools else ()
    opener = Token(setup.open_text) if setup.open == OPEN_TOKEN else lit(setup.open_text)
    thought = (Pattern((opener,)),) if setup.open_text else ()
    openers = (*(replace(rule.pattern, free=True) for rule in calls), *thought)
    opens = (literal(setup.open, "reasoning_start"),) if setup.open else ()
    closes = (literal(setup.close, "closed" if setup.structured else "content_start"),) if setup.close else ()
    strays = (literal(setup.close, "content"),) if setup.close else ()
    thinking = (*closes, *_strayed(setup), *in_reasoning)
    content = (*opens, *strays, *calls)
    states = {
        "reasoning": State("reasoning", thinking, reasoning=True),
        "reasoning_start": State("reasoning", thinking, otherwise="reasoning", reasoning=True),
        "content": State("text", content),
        "content_start": State("text", content, otherwise="content"),
        "answer": State("text", (*opens, *calls), otherwise="verbatim", lead="keep", due=True, openers=openers),
        "closed": awaited(setup, calls),
        "verbatim": State("text"),
        "after_call": State(
            "text",
            (*after_call, *content),
            otherwise="verbatim" if setup.structured else "content",
            skip=WHITESPACE,
            lead="drop" if setup.structured else "join",
            due=setup.structured,
            openers=tuple(behind_space(pattern) for pattern in (*openers, *(rule.pattern for rule in after_call))),
        ),
        **(extra or {}),
    }
    answer = "answer" if setup.structured else "content"
    return Layout(states, "reasoning" if setup.opening == "reasoning" else answer)


def _strayed(setup: Setup) -> tuple[Rule, ...]:
    """A second opener inside reasoning is markup, not text."""
    return (literal(setup.open, "reasoning", trim=False),) if setup.open else ()
