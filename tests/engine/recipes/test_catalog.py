"""The API document's sampling table as test data, selection, and what every recipe must hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import engine.recipes
from engine.recipes.catalog import RECIPES, select
from engine.recipes.recipe import SAMPLING_FIELDS
from engine.recipes.sampling import check

QWEN_RANGES = {"temperature": (0.7, 1), "top_p": (0.8, 0.95), "presence_penalty": (0, 2)}
TABLE: dict[str, tuple[float, float, int, dict[str, tuple[float, float]]]] = {
    "qwen38": (1, 0.95, 20, QWEN_RANGES),
    "qwen38_dense": (1, 0.95, 20, QWEN_RANGES),
    "glm53": (1, 0.95, -1, {"temperature": (0.95, 1), "top_p": (0.95, 1)}),
    "deepseek4": (1, 0.95, -1, {}),
    "deepseek41": (1, 1, -1, {"repetition_penalty": (1, 1.1)}),
    "mimo_v2": (1, 0.95, -1, {}),
    "kimi3": (1, 1, -1, {"top_p": (0.95, 1)}),
    "step5": (1, 0.95, -1, {}),
    "nemotron_h": (1, 0.95, -1, {}),
    "kimi31": (1, 0.95, -1, {}),
    "minimax_m3": (1, 0.95, -1, {}),
    "muse_spark": (1, 1, -1, {}),
    "gemma4": (1, 0.95, 64, {}),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_sampling_table_is_the_documents(name: str) -> None:
    temperature, top_p, top_k, ranges = TABLE[name]
    table = RECIPES[name].sampling
    assert (table.temperature, table.top_p, table.top_k) == (temperature, top_p, top_k)
    assert (table.min_p, table.repetition_penalty, table.presence_penalty, table.frequency_penalty) == (0, 1, 0, 0)
    assert dict(table.ranges) == ranges
    assert table.seed is None
    assert RECIPES[name].fixed_sampling


def test_there_are_thirteen_documented_recipes() -> None:
    assert set(TABLE) == {name for name, recipe in RECIPES.items() if recipe.fixed_sampling}


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_is_whole(name: str) -> None:
    recipe = RECIPES[name]
    check(recipe.sampling)
    assert set(recipe.sampling.ranges) <= set(SAMPLING_FIELDS)
    assert (recipe.syntax is None) == (recipe.reasoning is None and not recipe.tools)
    if recipe.default_effort is not None:
        assert recipe.default_effort in recipe.efforts
    if recipe.template is not None and not recipe.template.startswith("native:"):
        folder = Path(engine.recipes.__file__).parent / "templates"
        assert (folder / recipe.template).is_file()


def test_every_model_type_selects_one_recipe() -> None:
    claimed = [model_type for recipe in RECIPES.values() for model_type in recipe.model_types]
    assert len(claimed) == len(set(claimed))
    for recipe in RECIPES.values():
        for model_type in recipe.model_types:
            assert select({"model_type": model_type}) is recipe


@pytest.mark.parametrize(
    ("config", "override", "expected"),
    [
        ({"model_type": "qwen3_5"}, None, "qwen38_dense"),
        ({"model_type": "vision_wrapper", "text_config": {"model_type": "gemma3_text"}}, None, "gemma3"),
        ({"model_type": "llama"}, "qwen38", "qwen38"),
        ({"model_type": "never_heard_of"}, None, "generic"),
        ({}, None, "generic"),
    ],
)
def test_selection(config: dict[str, Any], override: str | None, expected: str) -> None:
    assert select(config, override).name == expected


def test_an_unknown_override_lists_the_names() -> None:
    with pytest.raises(ValueError, match=r"'qwen99' is not one of .*qwen38_dense"):
        select({}, "qwen99")
