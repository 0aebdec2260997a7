"""Recipe: what distinguishes one model family from another, as data.

Nothing outside `engine.recipes` branches on a model's name. A recipe has five parts: template, output syntax, image
profile, sampling table, model module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

SamplingField = Literal[
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
]
SAMPLING_FIELDS: tuple[SamplingField, ...] = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


@dataclass(frozen=True, slots=True)
class SamplingTable:
    """Defaults and inclusive ranges. A field without a range is fixed at its default. `seed` None draws one per
    request. Source: the contract's table, else the checkpoint's generation_config.json, else the model card."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    ranges: Mapping[SamplingField, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReasoningSyntax:
    """How reasoning is delimited. `close` is one vocabulary token exactly when `hard_budget` is possible.
    `default_on`: generated text starts inside reasoning unless the request turns thinking off; `can_disable`
    tells whether it may. `header`: the generated text opens with a header that says what follows, so it counts as
    reasoning until the header says otherwise."""

    open: str
    close: str
    single_token_close: bool
    default_on: bool
    can_disable: bool
    header: bool = False


@dataclass(frozen=True, slots=True)
class Recipe:
    """`name` as in the contract. `model_types`: `config.json` model types (or GGUF architectures) that select it by
    default. `module`: the file in `engine.models`; None while the engine can't run the family yet. `syntax`: a
    grammar in `engine.syntax`, or None when the output has neither calls nor reasoning. `template`: file name of our
    own chat template in `engine/recipes/templates`, used when the checkpoint has none; "native:NAME" for an encoder
    in code. `thinking_kwargs`: template variables that switch thinking, each with its value for on and for off.
    `effort_kwarg`: the template variable that takes the effort. `efforts`: accepted effort levels, weakest first,
    mapped from the neutral levels by `engine.text.effort`. `stop_tokens`: strings of tokens that end generation
    besides the checkpoint's EOS. `fixed_sampling`: the sampling table is the whole truth; otherwise the checkpoint's
    generation_config.json and model card fill it (`engine.recipes.sampling`). `assumed`: facts borrowed from a sibling.
    """

    name: str
    model_types: tuple[str, ...] = ()
    module: str | None = None
    syntax: str | None = None
    syntax_options: Mapping[str, bool] = field(default_factory=dict)
    reasoning: ReasoningSyntax | None = None
    tools: bool = False
    template: str | None = None
    thinking_kwargs: Mapping[str, tuple[Any, Any]] = field(default_factory=lambda: {"enable_thinking": (True, False)})
    effort_kwarg: str = "reasoning_effort"
    efforts: tuple[str, ...] = ()
    default_effort: str | None = None
    numeric_effort: tuple[int, int] | None = None
    image_profile: str | None = None
    sampling: SamplingTable = SamplingTable()
    stop_tokens: tuple[str, ...] = ()
    fixed_sampling: bool = True
    assumed: str = ""
