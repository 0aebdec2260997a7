"""Sampling tables of a loaded model: the recipe's own, or what its checkpoint recommends.

The API document's recipes keep their table exactly. Other models take defaults from generation_config.json, else
from their model card, and declare wide ranges. Whatever is in force in the end, an operator's changes included, must
pass `check`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, cast

from engine.recipes.recipe import SAMPLING_FIELDS, Recipe, SamplingField, SamplingTable

CARDS: Final[tuple[tuple[str, Mapping[SamplingField, float]], ...]] = (
    ("smollm2", {"temperature": 0.2, "top_p": 0.9}),
    ("smollm3", {"temperature": 0.6, "top_p": 0.95}),
)
"""Model-card recommendations, by a lower-case part of the checkpoint's name. Source: the cards."""

_VALID: Final[Mapping[SamplingField, tuple[float, float]]] = {
    "temperature": (1e-6, 100.0),
    "top_p": (1e-6, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-6, 100.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
}


def table_for(
    recipe: Recipe,
    *,
    model_id: str,
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    vocab_size: int,
) -> SamplingTable:
    """The table of a checkpoint under `recipe`.

    `generation` holds generation_config.json's fields (empty when it has none); `config` and `model_id` name the
    checkpoint, by which a model card's recommendation is found. Values that no sampler accepts are ignored.
    """
    if recipe.fixed_sampling:
        return recipe.sampling
    values: dict[str, float] = {str(name): value for name, value in _card(model_id, config).items()}
    for name in SAMPLING_FIELDS:
        given = generation.get(name)
        if isinstance(given, int | float) and not isinstance(given, bool) and _valid(name, float(given)):
            values[name] = given
    ranges = wide_ranges(vocab_size)
    for name, (low, high) in ranges.items():
        if name in values:
            values[name] = min(max(values[name], low), high)
    top_k = int(values.get("top_k", -1))
    values["top_k"] = -1 if top_k == 0 else top_k
    return replace(recipe.sampling, **cast(Any, values), ranges=ranges)


def wide_ranges(vocab_size: int) -> dict[SamplingField, tuple[float, float]]:
    """What models outside the API document's table let a client choose."""
    return {
        "temperature": (0.01, 2.0),
        "top_p": (0.01, 1.0),
        "top_k": (-1, vocab_size),
        "min_p": (0.0, 1.0),
        "repetition_penalty": (0.5, 2.0),
        "presence_penalty": (-2.0, 2.0),
        "frequency_penalty": (-2.0, 2.0),
    }


def check(table: SamplingTable) -> None:
    """Raises ValueError naming the field unless every default is valid and inside its range, and every range holds
    only valid sampler values (temperature and top-p positive)."""
    for name in SAMPLING_FIELDS:
        default = float(getattr(table, name))
        if not _valid(name, default):
            raise ValueError(f"sampling.{name}: {default:g} is not a valid value")
        if name not in table.ranges:
            continue
        low, high = table.ranges[name]
        if not (_valid(name, low) and _valid(name, high)) or low > high:
            raise ValueError(f"sampling_ranges.{name}: [{low:g}, {high:g}] is not a range of valid values")
        if not low <= default <= high:
            raise ValueError(f"sampling_ranges.{name}: [{low:g}, {high:g}] does not contain the default {default:g}")


def _valid(name: SamplingField, value: float) -> bool:
    low, high = _VALID[name]
    return math.isfinite(value) and low <= value <= high and (name != "top_k" or float(value).is_integer())


def _card(model_id: str, config: Mapping[str, Any]) -> Mapping[SamplingField, float]:
    names = " ".join(str(name) for name in (model_id, config.get("_name_or_path", ""), config.get("name", ""))).lower()
    for part, values in CARDS:
        if part in names:
            return values
    return {}
