"""Thinking and effort as a request asks for them, resolved against what a recipe's template accepts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from engine.recipes.recipe import Recipe
from engine.types.request import Api, ReasoningOptions, RequestError

LEVELS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""The neutral levels, weakest first."""

SWITCHES: Final = ("enable_thinking", "thinking")
"""chat_template_kwargs that turn thinking on or off, whatever the template calls it."""

NUMERIC_APIS: Final = ("chat",)


@dataclass(frozen=True, slots=True)
class Thinking:
    """`enabled` None leaves the template's default. `effort` None leaves the template's own."""

    enabled: bool | None
    effort: str | int | None


def resolve(recipe: Recipe, asked: ReasoningOptions, kwargs: Mapping[str, Any], api: Api) -> Thinking:
    """What the template is told. chat_template_kwargs win over top-level fields.

    Raises RequestError for unknown levels, numbers where the recipe or the API has none, and switches that aren't
    booleans.
    """
    enabled = asked.enabled
    for name in SWITCHES:
        if name in kwargs and kwargs[name] is not None:
            if not isinstance(kwargs[name], bool):
                raise RequestError(f"chat_template_kwargs.{name} must be a boolean", field="chat_template_kwargs")
            enabled = kwargs[name]
    effort: Any = asked.effort
    given = asked.effort_given or asked.effort is not None
    if "reasoning_effort" in kwargs:
        effort, given = kwargs["reasoning_effort"], True
    if effort is None:
        # an explicit null takes the encoder's default, an omission the recipe's: they are declared the same
        level: str | int | None = recipe.default_effort if given or recipe.default_effort else None
    elif isinstance(effort, str):
        if effort not in LEVELS and effort not in recipe.efforts:
            raise RequestError(
                f"reasoning_effort: {effort!r} is not one of {', '.join(LEVELS)}", field="reasoning_effort"
            )
        if effort == "none" and enabled is None and _can_disable(recipe):
            enabled = False
        level = nearest(effort, recipe.efforts)
    else:
        level = _number(recipe, effort, api)
    if enabled is False and (recipe.reasoning is None or recipe.reasoning.can_disable):
        level = None
    return Thinking(enabled, level)


def nearest(level: str, vocabulary: tuple[str, ...]) -> str | None:
    """`level` in `vocabulary`: itself, else the weakest one that is stronger, else the strongest; None when the
    vocabulary is empty. "none" is the weakest."""
    if level in vocabulary or not vocabulary:
        return level if vocabulary else None
    if level not in LEVELS:
        return vocabulary[-1]
    rank = LEVELS.index(level)
    return next((word for word in vocabulary if word in LEVELS and LEVELS.index(word) > rank), vocabulary[-1])


def template_variables(recipe: Recipe, thinking: Thinking) -> dict[str, Any]:
    """The variables that carry `thinking` into a Jinja template."""
    variables: dict[str, Any] = {}
    if thinking.enabled is not None:
        for name, (on, off) in recipe.thinking_kwargs.items():
            variables[name] = on if thinking.enabled else off
    if thinking.effort is not None:
        variables[recipe.effort_kwarg] = thinking.effort
    return variables


def _can_disable(recipe: Recipe) -> bool:
    return recipe.reasoning is not None and recipe.reasoning.can_disable


def _number(recipe: Recipe, effort: Any, api: Api) -> int:
    if recipe.numeric_effort is None or api not in NUMERIC_APIS:
        raise RequestError(
            f"reasoning_effort: a named level is needed ({', '.join(recipe.efforts) or ', '.join(LEVELS)})",
            field="reasoning_effort",
        )
    low, high = recipe.numeric_effort
    if not isinstance(effort, int) or isinstance(effort, bool) or not low <= effort <= high:
        raise RequestError(
            f"reasoning_effort must be a named level or an integer from {low} to {high}", field="reasoning_effort"
        )
    return effort
