"""Tables of checkpoints outside the documented recipes, and the check of what is in force."""

from __future__ import annotations

from typing import Any

import pytest

from engine.recipes.catalog import RECIPES
from engine.recipes.recipe import SamplingTable
from engine.recipes.sampling import check, table_for


def smollm(generation: dict[str, Any]) -> SamplingTable:
    return table_for(
        RECIPES["llama"],
        model_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        config={"model_type": "llama"},
        generation=generation,
        vocab_size=49152,
    )


def test_documented_recipes_ignore_the_checkpoints_generation_config() -> None:
    table = table_for(
        RECIPES["qwen38"], model_id="x", config={}, generation={"temperature": 0.6, "top_k": 7}, vocab_size=9
    )
    assert table is RECIPES["qwen38"].sampling


def test_the_model_card_speaks_where_the_checkpoint_is_silent() -> None:
    table = smollm({"eos_token_id": 2})
    assert (table.temperature, table.top_p, table.top_k) == (0.2, 0.9, -1)
    assert table.ranges["temperature"] == (0.01, 2.0)
    assert table.ranges["top_k"] == (-1, 49152)


def test_generation_config_wins_over_the_card() -> None:
    table = smollm({"temperature": 0.6, "top_k": 50})
    assert (table.temperature, table.top_p, table.top_k) == (0.6, 0.9, 50)


@pytest.mark.parametrize(
    ("generation", "field", "expected"),
    [
        ({"temperature": 0}, "temperature", 0.2),
        ({"temperature": True}, "temperature", 0.2),
        ({"temperature": "hot"}, "temperature", 0.2),
        ({"temperature": 7.5}, "temperature", 2.0),
        ({"top_k": 0}, "top_k", -1),
        ({"top_k": 100000}, "top_k", 49152),
        ({"repetition_penalty": 1.05}, "repetition_penalty", 1.05),
    ],
)
def test_odd_generation_configs(generation: dict[str, Any], field: str, expected: float) -> None:
    assert getattr(smollm(generation), field) == expected


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (SamplingTable(temperature=0.0), "sampling.temperature: 0 is not a valid"),
        (SamplingTable(temperature=float("nan")), "sampling.temperature: nan is not a valid"),
        (SamplingTable(top_k=-2), "sampling.top_k: -2 is not a valid"),
        (SamplingTable(temperature=0.5, ranges={"temperature": (0.7, 1)}), "does not contain the default 0.5"),
        (SamplingTable(ranges={"temperature": (0.0, 1.0)}), "sampling_ranges.temperature: .* valid values"),
        (SamplingTable(ranges={"temperature": (-1.0, 1.0)}), "not a range of valid values"),
        (SamplingTable(ranges={"top_p": (1.0, 0.5)}), "not a range"),
        (SamplingTable(ranges={"top_p": (0.1, 0.5)}), "does not contain the default 1"),
        (SamplingTable(ranges={"top_p": (0.1, 1.5)}), "not a range of valid values"),
        (SamplingTable(ranges={"top_k": (-1, 3.5)}), "not a range of valid values"),
    ],
)
def test_a_bad_table_is_refused_naming_the_field(table: SamplingTable, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(table)
