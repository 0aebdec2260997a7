"""Answers as event sequences: named scenarios, and a hypothesis strategy for any valid sequence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from engine.types.events import (
    Cause,
    FailureKind,
    FirstToken,
    ObservedToken,
    ReasoningDelta,
    Region,
    SemanticEvent,
    Terminated,
    TextDelta,
    TokenRecord,
    TokensObserved,
    ToolCallCompleted,
    ToolCallStarted,
    Usage,
)

PROMPT = 40
USAGE = Usage(prompt=PROMPT, cached=24, completion=12, reasoning=3)


def token_bytes(id: int) -> bytes:
    """The vocabulary of these scenarios: one printable character a token."""
    return bytes([97 + id % 26])


def observed(region: Region, *ids: int, logprob: float | None = -0.25) -> TokensObserved:
    return TokensObserved(
        tuple(
            ObservedToken(TokenRecord(id, logprob, ((id, -0.25), (id + 1, -2.0))), token_bytes(id), 0, region)
            for id in ids
        )
    )


def call(index: int, name: str, arguments: object) -> list[SemanticEvent]:
    id, text = f"call_{index}", json.dumps(arguments)
    return [ToolCallStarted(index, id, name), ToolCallCompleted(index, id, name, text)]


def end(
    cause: Cause = "eos",
    *,
    stop: str | int | None = None,
    calls: int = 0,
    failure: FailureKind = "execution",
    message: str = "",
) -> Terminated:
    return Terminated(cause, USAGE, stop=stop, tool_calls=calls, failure=failure, message=message)


@dataclass(frozen=True, slots=True)
class Scenario:
    events: tuple[SemanticEvent, ...]

    @property
    def end(self) -> Terminated:
        last = self.events[-1]
        assert isinstance(last, Terminated)
        return last


THINKING = (FirstToken(), ReasoningDelta("Two and "), ReasoningDelta("two."))
ANSWER = (TextDelta("It is "), TextDelta("4."))
PARALLEL = (*call(0, "Read", {"path": "a"}), *call(1, "Read", {"path": "b"}))

SCENARIOS = {
    "text": Scenario((FirstToken(), *ANSWER, end())),
    "reasoning": Scenario((*THINKING, *ANSWER, end())),
    "one call": Scenario((FirstToken(), *call(0, "Read", {"path": "é\n"}), end(calls=1))),
    "reasoning, text and parallel calls": Scenario((*THINKING, *ANSWER, *PARALLEL, end(calls=2))),
    "no arguments": Scenario((FirstToken(), *call(0, "Now", {}), end(calls=1))),
    "undeclared call": Scenario((FirstToken(), *call(0, "Invented", {"a": [1, None]}), end(calls=1))),
    "text after a call": Scenario((FirstToken(), *call(0, "Read", {}), TextDelta("Done."), end(calls=1))),
    "truncated text": Scenario((FirstToken(), *ANSWER, end("limit"))),
    "truncated reasoning": Scenario((*THINKING, end("limit"))),
    "truncated call": Scenario((FirstToken(), *ANSWER, ToolCallStarted(0, "call_0", "Read"), end("limit"))),
    "limit after a call": Scenario((FirstToken(), *call(0, "Read", {}), end("limit", calls=1))),
    "string stop": Scenario((FirstToken(), *ANSWER, end("string_stop", stop="\n\nEND"))),
    "string stop after a call": Scenario((FirstToken(), *call(0, "Read", {}), end("string_stop", stop="X", calls=1))),
    "token stop": Scenario((FirstToken(), *ANSWER, end("token_stop", stop=7))),
    "token stop after a call": Scenario((FirstToken(), *call(0, "Read", {}), end("token_stop", stop=7, calls=1))),
    "empty": Scenario((FirstToken(), end())),
    "failure in mid-stream": Scenario((*THINKING, TextDelta("It"), end("failed", message="the device failed"))),
    "failure after a call": Scenario(
        (FirstToken(), *call(0, "Read", {}), end("failed", failure="output", message="a second call"))
    ),
    "failure before the first token": Scenario((end("failed", failure="unavailable", message="paused"),)),
}
FAILED = [name for name, scenario in SCENARIOS.items() if scenario.end.cause == "failed"]
SUCCEEDED = [name for name in SCENARIOS if name not in FAILED]


def chunked(events: Sequence[SemanticEvent], size: int) -> list[Sequence[SemanticEvent]]:
    return [events[start : start + size] for start in range(0, len(events), size)]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def outputs(draw: st.DrawFn) -> list[SemanticEvent]:
    """Any answer the pipeline can give: runs of text, reasoning and complete calls, perhaps a cut call, one end."""
    events: list[SemanticEvent] = [FirstToken()]
    calls = 0
    for kind in draw(st.lists(st.sampled_from(("text", "reasoning", "call", "tokens")), max_size=12)):
        if kind == "text":
            events.append(TextDelta(draw(st.text(max_size=6))))
        elif kind == "reasoning":
            events.append(ReasoningDelta(draw(st.text(max_size=6))))
        elif kind == "tokens":
            region: Region = draw(st.sampled_from(("text", "reasoning", "tool", "control")))
            events.append(observed(region, *draw(st.lists(st.integers(0, 99), max_size=3))))
        else:
            arguments = draw(st.dictionaries(st.text(max_size=4), _JSON, max_size=3))
            events += call(calls, draw(st.sampled_from(("Read", "Bash"))), arguments)
            calls += 1
    cause: Cause = draw(st.sampled_from(("eos", "limit", "string_stop", "token_stop")))
    if cause == "limit" and draw(st.booleans()):
        events.append(ToolCallStarted(calls, f"call_{calls}", "Cut"))
    events.append(end(cause, stop="X" if cause == "string_stop" else None, calls=calls))
    return events
