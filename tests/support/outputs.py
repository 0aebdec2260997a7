"""Feeds generated text to a syntax machine in every chunking, and folds what comes out."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from engine.recipes.catalog import RECIPES
from engine.recipes.recipe import Recipe
from engine.syntax import open_syntax
from engine.syntax.piece import CallCompleted, CallStarted, Piece, Segment, Syntax, SyntaxEvent, SyntaxFailure
from engine.types.conversation import ToolDefinition
from tests.support.byte_model import ByteTokenizer, ByteTokens

CONTROL: dict[str, tuple[str, ...]] = {
    "qwen38": ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    "mimo_v2": ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    "glm53": ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>"),
    "gemma4": ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    "minimax_m3": ("]<]minimax[>[", "<mm:think>", "</mm:think>"),
    "kimi3": ("<|open|>", "<|close|>", "<|sep|>"),
    "muse_spark": ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
    "qwen3": ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    "deepseek4": ("<think>", "</think>", "｜DSML｜"),
    "deepseek41": ("<think>", "</think>", "｜DSML｜"),
}
"""What each recipe's tokenizer has as one token, of what its output syntax is written with."""

WEATHER = ToolDefinition(
    "w",
    "Weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "wind": {"type": "boolean"},
            "o": {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}},
        },
    },
)


@dataclass
class Folded:
    """Neighbouring pieces of a region joined; calls and failures in order."""

    text: str = ""
    reasoning: str = ""
    shown: list[tuple[str, str]] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    failure: str = ""
    order: list[Any] = field(default_factory=list)


def tokens_of(recipe: str) -> ByteTokens:
    return ByteTokens(ByteTokenizer(CONTROL[recipe]))


def machine(
    recipe: str | Recipe,
    *,
    opening: Literal["reasoning", "content"] = "content",
    tools: Sequence[ToolDefinition] = (WEATHER,),
    active: bool = True,
    structured: bool = False,
    padded: bool = False,
    spelled: bool = False,
) -> Syntax:
    """`spelled`: the tokenizer has no control tokens at all."""
    chosen = RECIPES[recipe] if isinstance(recipe, str) else recipe
    tokens = ByteTokens(ByteTokenizer(())) if spelled else _TOKENS.setdefault(chosen.name, tokens_of(chosen.name))
    return open_syntax(
        chosen, tokens, opening=opening, tools=tools, tools_active=active, structured=structured, padded=padded
    )


_TOKENS: dict[str, ByteTokens] = {}


def segments(
    recipe: str, text: str, cuts: random.Random | int | None = None, *, spelled: bool = False
) -> list[Segment]:
    """`text` as tokens: control tokens whole, ordinary text in pieces of `cuts` characters, or cut at random."""
    words = () if spelled else CONTROL[recipe]
    pattern = re.compile("|".join(map(re.escape, words)) or r"(?!)")
    pieces: list[tuple[str, bool]] = []
    start = 0
    for found in pattern.finditer(text):
        pieces += [(part, False) for part in _cut(text[start : found.start()], cuts)]
        pieces.append((found[0], True))
        start = found.end()
    pieces += [(part, False) for part in _cut(text[start:], cuts)]
    return [Segment(index, 1000 if control else None, part) for index, (part, control) in enumerate(pieces)]


def ordinary(segment: Segment) -> Segment:
    """The same text as ordinary pieces."""
    return replace(segment, id=None)


def _cut(text: str, cuts: random.Random | int | None) -> Iterator[str]:
    at = 0
    while at < len(text):
        size = len(text) if cuts is None else cuts if isinstance(cuts, int) else cuts.randint(1, 9)
        yield text[at : at + size]
        at += size


def run(syntax: Syntax, fed: Sequence[Segment], *, truncated: bool = False) -> Folded:
    """Feeds and finishes; checks that every character came back exactly once and in order."""
    events: list[SyntaxEvent] = []
    for segment in fed:
        events += syntax.feed(segment)
    events += syntax.finish(truncated=truncated)
    pieces = [event for event in events if isinstance(event, Piece)]
    by_token: dict[int, str] = {}
    for piece in pieces:
        by_token[piece.token] = by_token.get(piece.token, "") + piece.text
    assert by_token == {segment.token: segment.text for segment in fed if segment.text}
    assert [piece.token for piece in pieces] == sorted(piece.token for piece in pieces)
    return fold(events)


def fold(events: Sequence[SyntaxEvent]) -> Folded:
    folded = Folded()
    for event in events:
        match event:
            case Piece():
                if folded.order and isinstance(folded.order[-1], list) and folded.order[-1][0] == event.region:
                    folded.order[-1][1] += event.text
                else:
                    folded.order.append([event.region, event.text])
                if event.region == "text":
                    folded.text += event.text
                elif event.region == "reasoning":
                    folded.reasoning += event.text
            case CallStarted(name):
                folded.started.append(name)
            case CallCompleted(name, arguments):
                folded.calls.append((name, arguments))
                folded.order.append((name, arguments))
            case SyntaxFailure(message):
                folded.failure = folded.failure or message
    return folded
