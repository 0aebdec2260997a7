"""A recipe's tokenizer and grammars with its output syntax, and what each family writes before, instead of and behind a
constrained answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, cast

from engine.constrained import ConstrainedDecoding, StructuredSyntax
from engine.grammar import Grammars
from engine.recipes.catalog import RECIPES
from engine.scheduler.guide import Segments
from engine.syntax import open_syntax
from engine.synthetic_tokenizer import synthetic_definition
from engine.text.tokenizer import Tokenizer, TokenTable, build_table, byte_alphabet
from engine.types.constraint import Constraint
from tests.support.family_outputs import (
    HERMES_PARIS,
    KIMI_PARIS,
    NEXT,
    PARIS,
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

    def joined(self, text: str) -> int:
        """The token of JOINED."""
        (token,) = (n for n in range(self.tokens.vocab_size) if self.tokens.bytes(n) == text.encode("latin-1"))
        return token

    def folded(
        self,
        ids: Sequence[int],
        opening: Literal["reasoning", "content"],
        constraint: Constraint = SCHEMA,
        *,
        tools: bool = True,
    ) -> Folded:
        syntax, segments = self.syntax(opening, tools, constraint), Segments(self.tokens.bytes)
        events = [event for token in ids for event in syntax.feed(segments.next(token))]
        return fold([*events, *syntax.finish(truncated=False)])


JOINED = (
    *(">\n", ">\n\n", ">.", ">y", ">yes", ">{", ">\n{", ">\xc3"),
    *("nk>\n\n", "</think>\n\n", "</think>yes", ".</think>no"),
)
"""Tokens of ordinary text, byte for byte, that hold the end of a closing text and more."""


@cache
def rig(recipe: str, joined: bool = False) -> Rig:
    """`joined`: without tokens for the reasoning delimiters, and with those of JOINED."""
    control = [text for text in CONTROL[family(recipe)] if not joined or "think" not in text]
    definition = synthetic_definition(["<end>"], control)
    if joined:
        vocabulary = definition["model"]["vocab"]
        letters = {byte: letter for letter, byte in byte_alphabet().items()}
        for text in JOINED:
            vocabulary["".join(letters[byte] for byte in text.encode("latin-1"))] = len(vocabulary)
        for entry in definition["added_tokens"]:
            entry["id"] += len(JOINED)
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
