"""Rules of the machine itself: delimiters by token only, states that budgets and grammars ask for, hostile outputs."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, cast

import pytest

from engine.constrained import StructuredSyntax
from engine.recipes.catalog import RECIPES
from engine.syntax import open_syntax
from engine.syntax.arguments import MAX_ARGUMENT_BYTES
from engine.syntax.machine import Closer
from engine.syntax.piece import Piece, Segment, SyntaxFailure
from tests.support.family_outputs import PARIS, PARIS_JSON, Q, dsml, dsml_invoke, dsml_parameter, gemma, qwen
from tests.support.outputs import machine, ordinary, run, segments, tokens_of


def feed(syntax: Any, recipe: str, text: str) -> None:
    for segment in segments(recipe, text):
        syntax.feed(segment)


@pytest.mark.parametrize("recipe", ["qwen38", "glm53", "mimo_v2"])
def test_a_delimiter_in_ordinary_pieces_is_text(recipe: str) -> None:
    pieces = [ordinary(segment) for segment in segments(recipe, "so </think> is spelled")]
    folded = run(machine(recipe, opening="reasoning"), pieces)
    assert (folded.reasoning, folded.text) == ("so </think> is spelled", "")
    folded = run(machine(recipe), [ordinary(segment) for segment in segments(recipe, "the <think> tag")])
    assert (folded.reasoning, folded.text) == ("", "the <think> tag")


@pytest.mark.parametrize(
    ("recipe", "mention"), [("glm53", "<tool_call>w"), ("qwen38", "<tool_call><function=w"), ("qwen38", "<tool_call>")]
)
def test_a_delimiter_behind_a_mentioned_tag_is_no_part_of_a_name(recipe: str, mention: str) -> None:
    syntax = machine(recipe, opening="reasoning")
    feed(syntax, recipe, f"so {mention}</think>")
    assert not syntax.reasoning_open and not syntax.tool_pending
    for cut in (None, 1, 3):
        folded = run(machine(recipe, opening="reasoning"), segments(recipe, f"so {mention}</think>Hi", cut))
        assert (folded.reasoning, folded.text, folded.failure) == (f"so {mention}", "Hi", "")


def test_minimax_and_gemma_close_by_token_only() -> None:
    pieces = [ordinary(segment) for segment in segments("minimax_m3", "a</mm:think>b")]
    assert run(machine("minimax_m3", opening="reasoning"), pieces).reasoning == "a</mm:think>b"
    pieces = [ordinary(segment) for segment in segments("gemma4", "a<channel|>b")]
    assert run(machine("gemma4", opening="reasoning"), pieces).reasoning == "a<channel|>b"


def test_gemmas_opener_is_matched_as_text_in_any_tokenisation() -> None:
    for cut in (1, 3, None):
        folded = run(machine("gemma4"), segments("gemma4", "<|channel>thought\nhm\n<channel|>Hi", cut))
        assert (folded.reasoning, folded.text) == ("hm", "Hi")
    spelled = [Segment(index, None, char) for index, char in enumerate("<|channel>thought\nhm\n")]
    folded = run(machine("gemma4"), [*spelled, Segment(len(spelled), 1000, "<channel|>")])
    assert folded.reasoning == "hm"


def test_deepseeks_delimiters_are_matched_as_text() -> None:
    pieces = [Segment(index, index, char) for index, char in enumerate("so</think>Hi")]
    folded = run(machine("deepseek4", opening="reasoning"), pieces)
    assert (folded.reasoning, folded.text) == ("so", "Hi")


def test_a_tokenizer_without_the_delimiter_token_matches_text() -> None:
    syntax = machine("qwen38", opening="reasoning", spelled=True)
    folded = run(syntax, segments("qwen38", "so</think>Hi", 2, spelled=True))
    assert (folded.reasoning, folded.text) == ("so", "Hi")


def test_a_recipe_without_syntax_is_all_text() -> None:
    recipe = RECIPES["llama"]
    syntax = open_syntax(recipe, tokens_of("qwen38"), opening="content", tools=(), tools_active=False)
    folded = run(syntax, segments("qwen38", "<think>a</think><tool_call>"))
    assert folded.order == [["text", "<think>a</think><tool_call>"]]


@pytest.mark.parametrize(
    "recipe", ["qwen38", "glm53", "gemma4", "minimax_m3", "kimi3", "muse_spark", "qwen3", "deepseek4"]
)
def test_without_tools_calls_are_text(recipe: str) -> None:
    folded = run(machine(recipe, active=False), segments(recipe, f"a {qwen(PARIS)} b"))
    assert folded.text == f"a {qwen(PARIS)} b"
    assert not folded.calls


def test_what_budgets_ask_for() -> None:
    syntax = machine("qwen38", opening="reasoning")
    assert (syntax.reasoning_open, syntax.tool_pending) == (True, False)
    feed(syntax, "qwen38", "hm ")
    assert (syntax.reasoning_open, syntax.tool_pending) == (True, False)
    feed(syntax, "qwen38", "<tool_call>\n")
    assert syntax.tool_pending
    feed(syntax, "qwen38", "no, prose")
    assert (syntax.reasoning_open, syntax.tool_pending) == (True, False)
    feed(syntax, "qwen38", "<tool_call><function=w><parameter=")
    assert (syntax.reasoning_open, syntax.tool_pending) == (False, True)
    feed(syntax, "qwen38", "city>x</parameter></function>")
    assert (syntax.reasoning_open, syntax.tool_pending) == (False, False)


@pytest.mark.parametrize("recipe", ["qwen38", "deepseek4", "kimi3"])
def test_reasoning_ends_with_its_delimiter(recipe: str) -> None:
    syntax = machine(recipe, opening="reasoning")
    close = RECIPES[recipe].reasoning
    assert close is not None
    feed(syntax, recipe, "a < b")
    assert syntax.reasoning_open
    feed(syntax, recipe, close.close)
    assert not syntax.reasoning_open


def test_a_partial_text_delimiter_is_undecided() -> None:
    syntax = machine("deepseek4", opening="reasoning")
    feed(syntax, "deepseek4", "hm </th")
    assert syntax.tool_pending
    feed(syntax, "deepseek4", "e end")
    assert (syntax.reasoning_open, syntax.tool_pending) == (True, False)


@pytest.mark.parametrize("recipe", ["qwen38", "gemma4", "deepseek4", "qwen3"])
def test_a_structured_answer_is_verbatim_once_it_begins(recipe: str) -> None:
    text = f'{{"a": "{qwen(PARIS)}{gemma("")}{dsml(dsml_invoke())}</think><think>"}}'
    folded = run(machine(recipe, structured=True), segments(recipe, text))
    assert (folded.text, folded.calls, folded.failure) == (text, [], "")


def test_a_call_may_stand_before_a_structured_answer() -> None:
    folded = run(machine("qwen38", structured=True), segments("qwen38", f'{qwen(PARIS)}\n{{"a": 1}}'))
    assert (folded.text, folded.calls) == ('{"a": 1}', [("w", PARIS_JSON)])


def test_phases_of_a_structured_output() -> None:
    syntax = cast(StructuredSyntax, machine("qwen38", opening="reasoning", structured=True))
    assert syntax.phase == "free"
    feed(syntax, "qwen38", "hm</think>")
    assert (syntax.phase, syntax.due, syntax.attempt) == ("start", True, 1)
    feed(syntax, "qwen38", "<tool_call>")
    assert (syntax.phase, syntax.held) == ("start", "<tool_call>")
    feed(syntax, "qwen38", "<function=w></function>")
    assert (syntax.phase, syntax.called, syntax.attempt) == ("start", True, 2)
    feed(syntax, "qwen38", "{")
    assert (syntax.phase, syntax.called) == ("answer", False)


def test_nothing_is_parsed_after_a_failure() -> None:
    syntax = machine("gemma4")
    fed = segments("gemma4", f"<|tool_call>oops<tool_call|>{gemma('')}", 1)
    folded = run(syntax, fed)
    assert folded.failure
    assert folded.calls == []
    assert syntax.finish(truncated=False) == []


@pytest.mark.parametrize("size", [MAX_ARGUMENT_BYTES - 200, MAX_ARGUMENT_BYTES + 200])
@pytest.mark.parametrize("recipe", ["qwen38", "gemma4", "deepseek4"])
def test_arguments_are_bounded_to_8_mebibytes(recipe: str, size: int) -> None:
    value = "v" * size
    text = {
        "qwen38": qwen(f"<parameter=city>\n{value}\n</parameter>\n"),
        "gemma4": gemma(f"city:{Q}{value}{Q}"),
        "deepseek4": dsml(dsml_invoke(dsml_parameter("city", value))),
    }[recipe]
    folded = run(machine(recipe), segments(recipe, text, 65_536))
    if size > MAX_ARGUMENT_BYTES:
        assert "exceed" in folded.failure
        assert not folded.calls
    else:
        assert folded.failure == ""
        assert len(folded.calls[0][1]) == size + len('{"city": ""}')


def test_a_call_that_never_ends_is_given_up() -> None:
    syntax = machine("qwen38")
    feed(syntax, "qwen38", "<tool_call><function=w><parameter=city>")
    failures = [
        event
        for index in range(40)
        for event in syntax.feed(Segment(100 + index, None, "x" * 2**19))
        if isinstance(event, SyntaxFailure)
    ]
    assert len(failures) == 1
    assert "exceeds" in failures[0].message


@pytest.mark.parametrize(
    "text",
    [
        "<" * 20_000,
        "\n" * 20_000,
        " " * 5_000 + "<tool_call>" + " " * 5_000,
        "<tool_call><function=" + "n" * 20_000,
        "<tool_call>" * 3_000,
        "<function=w>" * 3_000,
    ],
)
def test_adversarial_text_comes_back_whole(text: str) -> None:
    folded = run(machine("qwen38"), segments("qwen38", text, 3), truncated=True)
    assert "".join(part for _, part in folded.order) == text


def test_a_long_name_is_no_header() -> None:
    text = f"<tool_call><function={'n' * 2**20}><parameter=a>1</parameter></function>"
    folded = run(machine("qwen38"), segments("qwen38", text, 4096))
    assert (folded.text, folded.calls, folded.failure) == (text, [], "")


def test_lone_surrogates_and_odd_characters_pass() -> None:
    text = "a\u2028\x00\ufffd\U0001f600\ufeff"
    assert run(machine("qwen38"), segments("qwen38", text, 1)).text == text


def test_empty_segments_are_nothing() -> None:
    syntax = machine("qwen38")
    assert syntax.feed(Segment(0, None, "")) == []
    assert syntax.feed(Segment(1, 5, "a")) == [Piece(1, "text", "a")]


@pytest.mark.parametrize("literal", ["</x>", "]]"])
@pytest.mark.parametrize("quotes", [None, ('"', '"'), ("<v>", "</v>")])
def test_the_closer_finds_the_same_end_in_every_chunking(literal: str, quotes: tuple[str, str] | None) -> None:
    text = f'a<v>{literal}</v>b"{literal}"c]</x{literal}tail'
    ends = set()
    for size in (1, 2, 3, 5, len(text)):
        closer, at = Closer(literal, quotes), 0
        for start in range(0, len(text), size):
            end = closer.feed(text[start : start + size])
            if end is not None:
                at = start + end
                break
        ends.add(at)
    assert len(ends) == 1
    assert text[: ends.pop()].endswith(literal)


def test_options_of_an_edited_recipe_count() -> None:
    edited = replace(RECIPES["qwen38"], syntax_options={"verbatim": True})
    folded = run(machine(edited), segments("qwen38", qwen("<parameter=city>\nx\n</parameter>\n")))
    assert folded.calls == [("w", '{"city": "\\nx\\n"}')]


def test_every_family_in_the_catalog_has_a_machine() -> None:
    families = {recipe.syntax for recipe in RECIPES.values() if recipe.syntax}
    for family in families:
        recipe = next(recipe for recipe in RECIPES.values() if recipe.syntax == family)
        assert re.match(r"[a-z]+$", family)
        open_syntax(recipe, tokens_of("qwen38"), opening="content", tools=(), tools_active=True)
