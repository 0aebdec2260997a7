"""Effort and thinking switches, resolved against each recipe's vocabulary."""

from __future__ import annotations

from typing import Any

import pytest

from engine.recipes.catalog import RECIPES
from engine.text.effort import LEVELS, Thinking, nearest, resolve, template_variables
from engine.types.request import Api, ReasoningOptions, RequestError


def ask(recipe: str, api: Api = "chat", kwargs: dict[str, Any] | None = None, **options: Any) -> Thinking:
    return resolve(RECIPES[recipe], ReasoningOptions(**options), kwargs or {}, api)


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("qwen38", ("low", "low", "low", "medium", "xhigh", "xhigh", "xhigh")),
        ("glm53", ("low", "low", "low", "high", "high", "max", "max")),
        ("kimi3", ("low", "low", "low", "high", "high", "max", "max")),
        ("deepseek4", ("low", "low", "low", "high", "high", "xhigh", "max")),
        ("step5", ("minimal", "minimal", "low", "medium", "high", "xhigh", "max")),
        ("nemotron_h", (None,) * 7),
    ],
)
def test_neutral_levels_find_the_recipes_word(recipe: str, expected: tuple[str | None, ...]) -> None:
    assert tuple(nearest(level, RECIPES[recipe].efforts) for level in LEVELS) == expected


def test_no_effort_turns_thinking_off_where_it_can_be() -> None:
    assert ask("qwen38", effort="none") == Thinking(False, None)
    assert ask("nemotron_h", effort="none") == Thinking(False, None)
    assert ask("glm53", effort="none") == Thinking(None, "low")
    assert ask("qwen38", effort="none", enabled=True) == Thinking(True, "low")


def test_defaults() -> None:
    assert ask("qwen38") == Thinking(None, "xhigh")
    assert ask("deepseek41") == Thinking(None, "high")
    assert ask("deepseek41", effort=None, effort_given=True) == Thinking(None, "high")
    assert ask("gemma4") == Thinking(None, None)


def test_thinking_off_drops_the_effort() -> None:
    assert ask("deepseek41", effort=80, enabled=False) == Thinking(False, None)
    assert ask("deepseek41", kwargs={"thinking": False, "reasoning_effort": "max"}) == Thinking(False, None)


@pytest.mark.parametrize("effort", [1, 80, 100])
def test_scores_of_deepseek41(effort: int) -> None:
    assert ask("deepseek41", effort=effort).effort == effort
    assert ask("deepseek41", kwargs={"reasoning_effort": effort}).effort == effort


@pytest.mark.parametrize("effort", [0, 101, -5, 80.0, True, "80", [80]])
def test_what_is_no_score(effort: Any) -> None:
    with pytest.raises(RequestError, match="reasoning_effort"):
        ask("deepseek41", effort=effort)
    with pytest.raises(RequestError, match="reasoning_effort"):
        ask("deepseek41", kwargs={"reasoning_effort": effort})


@pytest.mark.parametrize(
    ("recipe", "api"),
    [("deepseek4", "chat"), ("qwen38", "chat"), ("deepseek41", "responses"), ("deepseek41", "messages")],
)
def test_scores_where_there_are_none(recipe: str, api: Api) -> None:
    with pytest.raises(RequestError, match="a named level is needed"):
        ask(recipe, api, effort=80)


def test_unknown_levels_name_the_known_ones() -> None:
    with pytest.raises(RequestError, match="'ultra' is not one of none, minimal, low"):
        ask("qwen38", effort="ultra")


def test_template_kwargs_win_over_fields() -> None:
    thinking = ask("qwen38", kwargs={"enable_thinking": True, "reasoning_effort": "low"}, enabled=False, effort="max")
    assert thinking == Thinking(True, "low")
    assert template_variables(RECIPES["qwen38"], thinking) == {"enable_thinking": True, "reasoning_effort": "low"}


def test_variables_have_the_recipes_names() -> None:
    assert template_variables(RECIPES["minimax_m3"], Thinking(True, None)) == {"thinking_mode": "enabled"}
    assert template_variables(RECIPES["minimax_m3"], Thinking(False, None)) == {"thinking_mode": "disabled"}
    assert template_variables(RECIPES["qwen38"], Thinking(None, None)) == {}
