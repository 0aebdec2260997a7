"""The output pipeline: regions, stops, entries, ends and counts, and independence of how updates are cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.prepared import PreparedModel
from engine.text import output as output_module
from engine.text.output import OutputPipeline
from engine.types.conversation import Conversation, ToolDefinition
from engine.types.events import (
    EngineEnd,
    FirstToken,
    PositionScore,
    PromptScored,
    PromptScores,
    ReasoningDelta,
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
from engine.types.request import GenerationRequest, ImageSpan, PreparedPrompt, SamplingParams, Stops, TextPrompt
from tests.support.scripted import prepared

SAMPLING = SamplingParams(1.0, 1.0, -1, 0.0, 1.0, 0.0, 0.0, 0)
LIMIT = EngineEnd("limit")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    """A Qwen-like recipe over a synthetic vocabulary, in which bytes 0–255 are the ids 0–255."""
    return prepared(tmp_path_factory.mktemp("output"), [], recipe="qwen38")


class Choice:
    """A pipeline and what it was asked."""

    def __init__(
        self,
        model: PreparedModel,
        *,
        strings: Sequence[str] = (),
        sequences: Sequence[Sequence[int]] = (),
        include: bool = False,
        opening: Any = None,
        tools: Sequence[ToolDefinition] = (),
        validators: Mapping[str, Callable[[str], str | None]] | None = None,
        **prompt: Any,
    ) -> None:
        self.model = model
        asked = Conversation((), tuple(tools)) if opening else TextPrompt("x")
        stops = Stops(tuple(strings), tuple(map(tuple, sequences)), include)
        fields = {"max_tokens": 100, "eos_ids": tuple(model.manifest.eos_ids), "opening": opening, **prompt}
        self.prompt = PreparedPrompt(
            np.array([1, 2, 3], np.int32),
            SAMPLING,
            stop_sequences=stops.sequences,
            tools_active=bool(tools),
            **fields,
        )
        numbers = itertools.count()
        self.pipeline = OutputPipeline(
            model,
            self.prompt,
            GenerationRequest("chat" if opening else "completions", (asked,), stops=stops),
            call_id=lambda: f"call_{next(numbers)}",
            validators=validators,
        )

    def ids(self, *pieces: str | int) -> list[int]:
        """Strings as ordinary text, "<...>" tokens by their spelling where the tokenizer has them, ids as they are."""
        found: list[int] = []
        for piece in pieces:
            control = self.model.tokenizer.token_id(piece) if isinstance(piece, str) and len(piece) > 1 else piece
            if isinstance(control, int):
                found.append(control)
            else:
                found += self.model.tokenizer.encode(str(piece), specials=False)
        return found

    def run(self, ids: Sequence[int], end: EngineEnd | None = None, cuts: Sequence[int] = ()) -> Output:
        """Pushes `ids`, cut into updates before the positions `cuts`, and `end` with the last of them."""
        bounds = sorted({0, len(ids), *(cut for cut in cuts if 0 < cut < len(ids))})
        pairs = list(itertools.pairwise(bounds)) or [(0, 0)]
        events: list[SemanticEvent] = []
        for number, (start, stop) in enumerate(pairs):
            records = tuple(TokenRecord(token, logprob=-1.0) for token in ids[start:stop])
            last = number == len(pairs) - 1
            events += self.pipeline.push(
                Update(0, records, cached_tokens=2 if number == 0 else None, end=end if last else None)
            )
        return Output(events)


class Output:
    """Events, folded."""

    def __init__(self, events: Sequence[SemanticEvent]) -> None:
        self.events = list(events)
        self.text = "".join(event.text for event in events if isinstance(event, TextDelta))
        self.reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
        self.tokens = [token for event in events if isinstance(event, TokensObserved) for token in event.tokens]
        self.calls = [event for event in events if isinstance(event, ToolCallCompleted)]
        ends = [event for event in events if isinstance(event, Terminated)]
        assert len(ends) <= 1 and (not ends or events[-1] is ends[0])
        self.end = ends[0] if ends else None
        assert all(event.text for event in events if isinstance(event, TextDelta | ReasoningDelta))

    @property
    def cause(self) -> str | None:
        return self.end.cause if self.end else None

    @property
    def usage(self) -> Usage:
        assert self.end is not None
        return self.end.usage

    def folded(self) -> tuple[Any, ...]:
        """What doesn't depend on how neighbours were merged."""
        merged: list[Any] = []
        for event in self.events:
            if isinstance(event, TokensObserved):
                continue
            if merged and isinstance(event, TextDelta | ReasoningDelta) and type(merged[-1]) is type(event):
                merged[-1] = type(event)(merged[-1].text + event.text)
            else:
                merged.append(event)
        return (*merged, tuple(self.tokens))


# Text, entries, offsets


def test_plain_text(model: PreparedModel) -> None:
    choice = Choice(model)
    output = choice.run(choice.ids("Hello the world"), LIMIT)
    assert output.text == "Hello the world" and output.cause == "limit"
    assert isinstance(output.events[0], FirstToken) and output.events[0].cached == 2
    assert b"".join(token.data for token in output.tokens) == b"Hello the world"
    for token in output.tokens:
        assert output.text[token.text_offset :].startswith(token.data.decode())
        assert token.region == "text"
    assert output.usage == Usage(3, 2, len(output.tokens))
    assert not choice.pipeline.push(Update(0, (TokenRecord(65),)))
    assert choice.pipeline.terminated and choice.pipeline.stop_at is None


def test_nothing_but_an_end(model: PreparedModel) -> None:
    output = Choice(model, max_tokens=0).run([], LIMIT)
    assert output.events == [Terminated("limit", Usage(3, 2, 0))]


def test_a_character_over_several_tokens(model: PreparedModel) -> None:
    choice = Choice(model)
    first = choice.run(list("a😀".encode())[:3])
    assert isinstance(first.events[0], FirstToken) and first.text == "a" and len(first.tokens) == 1
    rest = choice.run([*"a😀".encode()[3:], *choice.ids("b")], LIMIT)
    assert rest.text == "😀b"
    assert [token.text_offset for token in [*first.tokens, *rest.tokens]] == [0, 1, 1, 1, 1, 2]


def test_an_unfinished_character_is_flushed_at_the_end(model: PreparedModel) -> None:
    output = Choice(model).run([65, 0xF0, 0x9F], LIMIT)
    assert output.text == "A\ufffd"
    assert [(token.data, token.region) for token in output.tokens] == [
        (b"A", "text"),
        (b"\xf0", "text"),
        (b"\x9f", "text"),
    ]


def test_a_broken_character_belongs_to_the_tokens_before(model: PreparedModel) -> None:
    output = Choice(model, strings=["BC"]).run([0xF0, 0x9F, *b"ABC"])
    assert output.text == "\ufffdA" and [token.text_offset for token in output.tokens] == [0, 0, 1]


# Ends


def test_eos_has_no_entry_and_counts(model: PreparedModel) -> None:
    choice = Choice(model)
    output = choice.run([65, model.manifest.eos_ids[0]])
    assert output.cause == "eos" and output.text == "A" and len(output.tokens) == 1
    assert output.usage.completion == 2 and choice.pipeline.stop_at is None


def test_eos_on_the_last_allowed_token_beats_the_limit(model: PreparedModel) -> None:
    assert Choice(model, max_tokens=2).run([65, model.manifest.eos_ids[0]], EngineEnd("eos")).cause == "eos"


def test_ignored_eos_keeps_its_entry_and_the_limit_is_the_cause(model: PreparedModel) -> None:
    eos = model.manifest.eos_ids[0]
    output = Choice(model, ignore_eos=True).run([65, eos, 66, eos], LIMIT)
    assert output.cause == "limit" and output.text == "AB"
    assert [(token.record.id, token.region, token.text_offset) for token in output.tokens] == [
        (65, "text", 0),
        (eos, "control", 1),
        (66, "text", 1),
        (eos, "control", 2),
    ]


def test_special_tokens_are_hidden_and_control_tokens_of_raw_text_are_not(model: PreparedModel) -> None:
    choice = Choice(model)
    output = choice.run(choice.ids("A", "<|im_start|>", "<think>", "B"), LIMIT)
    assert output.text == "A<think>B"
    assert [token.region for token in output.tokens] == ["text", "control", "text", "text"]
    assert [token.data for token in output.tokens][1] == b"<|im_start|>"


def test_failures_and_cancellation(model: PreparedModel) -> None:
    failed = Choice(model).run([65], EngineEnd("failed", "execution", "not finite"))
    assert failed.text == "A" and failed.end == Terminated(
        "failed", Usage(3, 2, 1), failure="execution", message="not finite"
    )
    lost = Choice(model).run([65], EngineEnd("cancelled"))
    assert lost.end is not None and (lost.cause, lost.end.failure) == ("failed", "unavailable")


def test_scores_pass_first(model: PreparedModel) -> None:
    scores = PromptScores(0, (None, PositionScore(2, -0.5, 1)))
    events = Choice(model).pipeline.push(Update(0, (TokenRecord(65),), scores))
    assert events[:2] == [PromptScored(scores), FirstToken(0)]


def test_forced_tokens_and_images_are_counted(model: PreparedModel) -> None:
    choice = Choice(model, images=(ImageSpan(0, 2, b""),))
    events = choice.pipeline.push(Update(0, (TokenRecord(65, forced=True),), end=LIMIT))
    output = Output(events)
    assert output.tokens[0].record.forced
    assert output.usage == Usage(3, 0, 1, image=2)


# Token stops


def test_a_stop_sequence_is_never_returned(model: PreparedModel) -> None:
    choice = Choice(model, sequences=[(66, 67, 68), (90,)])
    output = choice.run([65, 66, 67, 66, 67, 68, 99])
    assert output.text == "ABC" and output.cause == "token_stop"
    assert output.end is not None and output.end.stop == 68
    assert output.usage.completion == 6 and len(output.tokens) == 3
    included = Choice(model, sequences=[(66, 67)], include=True).run([65, 66, 67])
    assert included.text == "ABC" and len(included.tokens) == 1


def test_a_withheld_beginning_is_returned_at_other_ends(model: PreparedModel) -> None:
    eos = model.manifest.eos_ids[0]
    for ids, end, cause in (([65, 66, eos], None, "eos"), ([65, 66], LIMIT, "limit")):
        output = Choice(model, sequences=[(66, 67)]).run(ids, end)
        assert (output.text, output.cause, len(output.tokens)) == ("AB", cause, 2)


def test_min_tokens_puts_stops_off(model: PreparedModel) -> None:
    tokens = Choice(model, sequences=[(66,)], min_tokens=3).run([66, 66, 65, 66])
    assert tokens.text == "BBA" and tokens.usage.completion == 4
    strings = Choice(model, strings=["B"], min_tokens=3).run([66, 66, 65, 66])
    assert strings.text == "BBA" and strings.usage.completion == 4


# String stops


def test_a_string_stop_across_tokens(model: PreparedModel) -> None:
    choice = Choice(model, strings=["world"])
    output = choice.run([*b"hello wor", *b"ld and more"])
    assert output.text == "hello " and output.cause == "string_stop"
    assert output.end is not None and output.end.stop == "world"
    assert output.usage.completion == 11 and choice.pipeline.stop_at == 11
    assert b"".join(token.data for token in output.tokens) == b"hello "


def test_a_clipped_token_keeps_its_entry_and_bytes(model: PreparedModel) -> None:
    choice = Choice(model, strings=["e wor"])
    ids = choice.ids("A the", " world", " and")
    assert [model.tokens.bytes(token) for token in ids] == [b"A", b" the", b" world", b" and"]
    output = choice.run(ids)
    assert output.text == "A th"
    assert [token.data for token in output.tokens] == [b"A", b" the"]
    assert output.usage.completion == 3
    including = Choice(model, strings=["e wor"], include=True).run(ids)
    assert including.text == "A the wor"
    assert [token.data for token in including.tokens] == [b"A", b" the", b" world"]


def test_a_stop_on_the_last_allowed_token_beats_the_limit(model: PreparedModel) -> None:
    assert Choice(model, strings=["B"]).run([65, 66], LIMIT).cause == "string_stop"


def test_only_what_could_begin_a_stop_is_held_back(model: PreparedModel) -> None:
    choice = Choice(model, strings=["lord"])
    ids = choice.ids(" world")
    assert len(ids) == 1
    first = choice.run(ids)
    assert first.text == " world" and len(first.tokens) == 1
    second = choice.run(choice.ids(" hello"))
    assert second.text == " hel" and len(second.tokens) == 1
    assert choice.run([*b"r"]).text == ""
    third = choice.run([*b"e"], LIMIT)
    assert third.text == "lore" and len(third.tokens) == 2


def test_a_stop_of_a_spread_character(model: PreparedModel) -> None:
    output = Choice(model, strings=["😀"]).run([65, *"😀".encode(), 66])
    assert output.text == "A" and len(output.tokens) == 1 and output.usage.completion == 5


def test_stops_do_not_see_special_tokens(model: PreparedModel) -> None:
    choice = Choice(model, strings=["<|im_start|>", "BC"], ignore_eos=True)
    output = choice.run(choice.ids("A", "<|im_start|>", "B", "<|im_start|>", "C"))
    assert output.text == "A" and output.cause == "string_stop"
    assert [token.region for token in output.tokens] == ["text", "control"]


# Conversations

WEATHER = ToolDefinition("weather", "", {"type": "object", "properties": {"days": {"type": "integer"}}})
CALL = ("<tool_call>", "\n<function=weather>\n<parameter=days>\n3\n</parameter>\n</function>\n", "</tool_call>")


def test_reasoning_then_answer(model: PreparedModel) -> None:
    choice = Choice(model, opening="reasoning")
    ids = choice.ids("hm, the", "</think>", "\n\nyes")
    output = choice.run([*ids, model.manifest.eos_ids[0]])
    assert (output.reasoning, output.text, output.cause) == ("hm, the", "yes", "eos")
    regions = [token.region for token in output.tokens]
    close = ids.index(choice.ids("</think>")[0])
    assert regions[:close] == ["reasoning"] * close and regions[close] == "control" and regions[-1] == "text"
    assert output.usage.reasoning == close
    assert output.usage.completion == len(ids) + 1


def test_calls(model: PreparedModel) -> None:
    choice = Choice(model, opening="content", tools=[WEATHER])
    output = choice.run([*choice.ids("Let me see. ", *CALL, "\n", *CALL), model.manifest.eos_ids[0]])
    assert [(call.index, call.id, call.name, json.loads(call.arguments)) for call in output.calls] == [
        (0, "call_0", "weather", {"days": 3}),
        (1, "call_1", "weather", {"days": 3}),
    ]
    started = [event for event in output.events if isinstance(event, ToolCallStarted)]
    assert [(event.index, event.id) for event in started] == [(0, "call_0"), (1, "call_1")]
    assert output.end is not None and output.end.tool_calls == 2 and output.cause == "eos"
    assert output.text.strip() == "Let me see."
    assert {token.region for token in output.tokens} >= {"text", "tool"}
    assert output.usage.completion == len(output.tokens) + 1


def test_a_limit_leaves_an_unfinished_call_out_and_eos_makes_it_an_error(model: PreparedModel) -> None:
    choice = Choice(model, opening="content", tools=[WEATHER])
    ids = choice.ids("<tool_call>", "\n<function=weather>\n<parameter=days>")
    cut = choice.run(ids, LIMIT)
    assert cut.cause == "limit" and not cut.calls and cut.text == ""
    broken = Choice(model, opening="content", tools=[WEATHER]).run([*ids, model.manifest.eos_ids[0]])
    assert broken.end is not None and (broken.cause, broken.end.failure) == ("failed", "output")
    assert broken.usage.completion == len(ids) + 1


def test_the_limit_right_after_a_call_is_still_the_limit(model: PreparedModel) -> None:
    choice = Choice(model, opening="content", tools=[WEATHER])
    output = choice.run(choice.ids(*CALL), LIMIT)
    assert output.cause == "limit" and len(output.calls) == 1 and output.end is not None and output.end.tool_calls == 1


def test_a_string_stop_after_a_call(model: PreparedModel) -> None:
    choice = Choice(model, opening="content", tools=[WEATHER], strings=["END"])
    output = choice.run(choice.ids(*CALL, "\nEND"))
    assert output.cause == "string_stop" and len(output.calls) == 1


PATCH = ToolDefinition("patch", "", {"type": "object", "properties": {"input": {"type": "string"}}}, freeform=True)


def _patch(choice: Choice, key: str, value: str) -> list[int]:
    return choice.ids("<tool_call>", f"<function=patch><parameter={key}>{value}</parameter></function>", "</tool_call>")


def test_freeform_input_is_validated_before_the_call_completes(model: PreparedModel) -> None:
    def check(text: str) -> str | None:
        return None if text == "good" else f"{text!r} doesn't match"

    def run(key: str, value: str) -> Output:
        choice = Choice(model, opening="content", tools=[PATCH], validators={"patch": check})
        output = choice.run(_patch(choice, key, value))
        assert (choice.pipeline.stop_at is None) == (output.cause is None)
        return output

    assert len(run("input", "good").calls) == 1
    for key, value, message in (("input", "bad", "'bad' doesn't match"), ("other", "good", "no string input")):
        output = run(key, value)
        assert output.end is not None and not output.calls
        assert (output.cause, output.end.failure) == ("failed", "output") and message in output.end.message


def test_arguments_are_bounded(model: PreparedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert output_module.MAX_ARGUMENT_BYTES == 8 * 1024 * 1024
    monkeypatch.setattr(output_module, "MAX_ARGUMENT_BYTES", 20)

    def run(text: str) -> Output:
        choice = Choice(model, opening="content", tools=[WEATHER])
        return choice.run(choice.ids("<tool_call>", f"<function=weather><parameter=x>{text}</parameter></function>"))

    assert len(run("é" * 5).calls) == 1  # {"x":"ééééé"}: 18 bytes
    over = run("é" * 7)
    assert over.end is not None and over.end.failure == "output" and "exceed 20 bytes" in over.end.message


def test_a_structured_answer_may_contain_the_delimiter(model: PreparedModel) -> None:
    from engine.types.constraint import Constraint

    choice = Choice(model, opening="content", constraint=Constraint("regex", ".*"))
    output = choice.run(choice.ids("a", "</think>", "b"), LIMIT)
    assert output.text == "a</think>b"


# Any cut of the updates gives the same events

LETTERS = st.lists(
    st.one_of(
        st.sampled_from([*b"ABC", *b"\xf0\x9f\x98\x80", 0xC3, 0xA9]),
        st.sampled_from(["<think>", "</think>", "<|im_start|>", " the", "AB", "<tool_call>"]),
    ),
    max_size=14,
)


@settings(max_examples=150, deadline=None)
@given(
    LETTERS,
    st.lists(st.text("ABCé😀", min_size=1, max_size=3), max_size=2),
    st.lists(st.integers(1, 14), max_size=6),
    st.sampled_from([None, "content", "reasoning"]),
    st.booleans(),
)
def test_any_chunking_gives_the_same_events(
    model: PreparedModel, pieces: list[str | int], strings: list[str], cuts: list[int], opening: Any, include: bool
) -> None:
    def choice() -> Choice:
        return Choice(model, strings=strings, opening=opening, include=include)

    ids = choice().ids(*pieces)
    whole = choice().run(ids, LIMIT)
    assert choice().run(ids, LIMIT, cuts).folded() == whole.folded()
    assert choice().run(ids, LIMIT, range(len(ids))).folded() == whole.folded()


@settings(max_examples=150, deadline=None)
@given(LETTERS, st.lists(st.text("ABCé😀", min_size=1, max_size=3), max_size=2), st.booleans())
def test_raw_text_and_entries_match_the_definition(
    model: PreparedModel, pieces: list[str | int], strings: list[str], include: bool
) -> None:
    """Against the definition over the whole output: the text is that of all visible bytes up to the stop that ends
    first; the entries are the tokens that begin before the cut; usage counts up to the token that completes it."""
    choice = Choice(model, strings=strings, include=include)
    ids = choice.ids(*pieces)
    output = choice.run(ids, LIMIT)
    text, count, found = "", len(ids), None
    for number in range(1, len(ids) + 1):
        text = _visible(model, ids[:number], final=number == len(ids))
        ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in strings if stop in text]
        if ends:
            found, count = min(ends), number
            break
    if found is None:
        assert output.cause == "limit" and output.text == text
        assert [token.record.id for token in output.tokens] == ids
        return
    cut = found[0] + (0 if include else found[1])
    assert output.end is not None and (output.cause, output.end.stop) == ("string_stop", found[2])
    assert output.text == text[:cut] and output.usage.completion == count
    returned = len(output.tokens)
    assert [token.record.id for token in output.tokens] == ids[:returned]
    assert all(token.text_offset <= cut for token in output.tokens)
    if returned < len(ids):
        assert len(_visible(model, ids[:returned], final=True)) >= cut


def _visible(model: PreparedModel, ids: Sequence[int], *, final: bool) -> str:
    """Text of `ids` without special tokens, which end a character in progress; a last unfinished one is not shown
    unless `final`."""
    shown, run = "", b""
    for token in ids:
        if model.tokens.is_special(token):
            shown, run = shown + run.decode("utf-8", "replace"), b""
        else:
            run += model.tokens.bytes(token)
    if final:
        return shown + run.decode("utf-8", "replace")
    import codecs

    return shown + codecs.getincrementaldecoder("utf-8")("replace").decode(run)


def test_the_pipeline_imports_no_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = "import sys, engine.text.output; assert not {'torch', 'transformers', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
