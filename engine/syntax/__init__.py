"""Output syntax: which text is answer, reasoning or markup, and which calls it holds.

`open_syntax` lays out the machine of a recipe for one choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Final, Literal, Protocol

from engine.recipes.recipe import ReasoningSyntax, Recipe
from engine.syntax import gemma, glm, hermes, kimi, minimax, muse, qwen
from engine.syntax.arguments import Schemas
from engine.syntax.deepseek import DeepSeekSyntax
from engine.syntax.machine import Machine
from engine.syntax.patterns import CLOSE_TOKEN, OPEN_TOKEN
from engine.syntax.piece import Syntax
from engine.syntax.states import Layout, Setup, standard
from engine.types.conversation import ToolDefinition

Opening = Literal["reasoning", "content"]

FAMILIES: Final[Mapping[str, Callable[[Setup], Layout]]] = {
    "qwen": qwen.layout,
    "glm": glm.layout,
    "gemma": gemma.layout,
    "minimax": minimax.layout,
    "kimi": kimi.layout,
    "muse": muse.layout,
    "hermes": hermes.layout,
}


class Vocabulary(Protocol):
    """What the syntax asks of a token table."""

    @property
    def vocab_size(self) -> int: ...

    def text(self, token: int, /) -> str: ...


def open_syntax(
    recipe: Recipe,
    tokens: Vocabulary,
    *,
    opening: Opening,
    tools: Sequence[ToolDefinition] = (),
    tools_active: bool = False,
    structured: bool = False,
    padded: bool = False,
) -> Syntax:
    """The machine for one choice. `structured`: the answer is constrained, so it is verbatim once it begins. `padded`:
    whitespace between the end of reasoning and that answer isn't part of it."""
    if recipe.syntax == "deepseek":
        return DeepSeekSyntax(
            opening=opening, tools=tools, tools_active=tools_active, structured=structured, padded=padded
        )
    singles = _single_tokens(recipe, tokens)
    options = frozenset(option for option, on in recipe.syntax_options.items() if on)
    layout = _layout(
        recipe.syntax, options, recipe.reasoning, singles, opening, tools_active and recipe.tools, structured, padded
    )
    terminals: dict[str, str] = {}
    if recipe.reasoning is not None:
        if singles[0]:
            terminals[recipe.reasoning.open] = OPEN_TOKEN
        if singles[1]:
            terminals[recipe.reasoning.close] = CLOSE_TOKEN
    return Machine(layout, terminals, Schemas(tools))


@lru_cache(maxsize=512)
def _layout(
    family: str | None,
    options: frozenset[str],
    reasoning: ReasoningSyntax | None,
    singles: tuple[bool, bool],
    opening: Opening,
    tools: bool,
    structured: bool,
    padded: bool,
) -> Layout:
    open_text = reasoning.open.rstrip() if reasoning is not None else ""
    close_text = reasoning.close if reasoning is not None else ""
    setup = Setup(
        opening,
        OPEN_TOKEN if singles[0] else open_text,
        CLOSE_TOKEN if singles[1] else close_text,
        open_text,
        tools,
        structured,
        padded and structured,
        options,
    )
    return standard(setup, ()) if family is None else FAMILIES[family](setup)


_INDEXED: Final[dict[int, tuple[Vocabulary, dict[str, bool]]]] = {}


def _single_tokens(recipe: Recipe, tokens: Vocabulary) -> tuple[bool, bool]:
    """Whether reasoning opens and closes by one token each, so by that token alone. Remembered for the last tables."""
    if recipe.reasoning is None or not recipe.reasoning.single_token_close:
        return False, False
    entry = _INDEXED.get(id(tokens))
    if entry is None:
        entry = (tokens, {})
        if len(_INDEXED) >= 16:
            _INDEXED.clear()
        _INDEXED[id(tokens)] = entry
    known = entry[1]
    wanted = (recipe.reasoning.open, recipe.reasoning.close)
    if not all(text in known for text in wanted):
        texts = {tokens.text(token) for token in range(tokens.vocab_size)}
        known.update((text, text in texts) for text in wanted)
    return known[wanted[0]], known[wanted[1]]
