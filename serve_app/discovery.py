"""What clients learn of the loaded model: the model card with its `flare` object, and Ollama's tags and show.

Owns the effective values that are published, never keys or paths. Everything here is a pure function of ModelFacts and
of the server's instance, so that every ingress replica answers the same.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import orjson

from engine.recipes.recipe import SAMPLING_FIELDS, SamplingTable

OWNER: Final = "local"
UNKNOWN_TIME: Final = "0001-01-01T00:00:00Z"
IN_FORCE: Final = ("device", "attention", "numerics", "dtype")
"""Modes that only the loaded engine knows, by their names in its report."""


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """Image limits in force; all zero without vision. Names and meanings as in the model card."""

    max_images_per_prompt: int = 0
    max_image_tokens_per_prompt: int = 0
    image_feature_window_tokens: int = 0
    max_image_tokens_per_image: int = 0
    max_image_pixels: int = 0
    max_image_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The loaded model as served. `identifier`: the checkpoint's. `aliases`: configured names; the first nonempty one
    is the public id. `context`: prompt plus output tokens. `tools`, `thinking`: the recipe declares a tool syntax, a
    reasoning syntax. `modes`: device, dtype, numerics and such as fixed at start."""

    identifier: str
    context: int
    vocab_size: int
    aliases: tuple[str, ...] = ()
    max_top_logprobs: int = 0
    max_concurrency: int = 1
    prefill_chunk_size: int = 1
    default_max_tokens: int | None = None
    thinking_token_budget: int | None = None
    sampling: SamplingTable = field(default_factory=SamplingTable)
    tools: bool = False
    thinking: bool = False
    images: ImageFacts = ImageFacts()
    modes: Mapping[str, str | int | bool] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The public id: what generation objects and the card say."""
        return next((alias for alias in self.aliases if alias), self.identifier)

    @property
    def vision(self) -> bool:
        return self.images.max_images_per_prompt > 0

    def known_as(self, name: str) -> bool:
        return bool(name) and (name == self.identifier or name in self.aliases)

    def in_force(self, engines: Sequence[Mapping[str, str]]) -> ModelFacts:
        """The same with what "auto" came to, and the context that every KV pool holds, from the engines' reports."""
        known = {name: engines[0][name] for name in IN_FORCE if name in engines[0]}
        context = min([self.context, *(int(reported["context"]) for reported in engines if "context" in reported)])
        return replace(self, context=context, modes={**self.modes, **known})


def model_card(facts: ModelFacts, instance: str, created: int) -> dict[str, Any]:
    """The card of GET /v1/models. `instance` and `created` are the server's, drawn once."""
    card: dict[str, Any] = {
        "id": facts.id,
        "object": "model",
        "created": created,
        "owned_by": OWNER,
        "root": facts.identifier,
        "parent": None,
        "max_model_len": facts.context,
        "permission": [_permission(facts, instance, created)],
        "flare": flare_object(facts),
        "context_length": facts.context,
        "context_window": facts.context,
        "max_input_tokens": facts.context,
        "max_output_tokens": _default_budget(facts),
        "supports_function_calling": facts.tools,
        "supports_reasoning": facts.thinking,
    }
    return card


def model_list(facts: ModelFacts, instance: str, created: int) -> dict[str, Any]:
    """GET /v1/models. `models` repeats the model in the shape that System One's SDK lists, with the day on which this
    server was created: of the model's own release nothing is known."""
    entry = {
        "name": facts.id,
        "description": f"{facts.identifier} served by Flare",
        "release_date": time.strftime("%Y-%m-%d", time.gmtime(created)),
    }
    return {"object": "list", "data": [model_card(facts, instance, created)], "models": [entry]}


def flare_object(facts: ModelFacts) -> dict[str, Any]:
    """Prepared and selected serving metadata."""
    sampling = facts.sampling
    ranges: dict[str, Any] = {}
    for name in SAMPLING_FIELDS:
        bounds = sampling.ranges.get(name)
        ranges[name] = None if bounds is None else {"min": bounds[0], "max": bounds[1]}
    return {
        "vocab_size": facts.vocab_size,
        "max_top_logprobs": facts.max_top_logprobs,
        "max_concurrency": facts.max_concurrency,
        "prefill_chunk_size": facts.prefill_chunk_size,
        "default_max_tokens": _default_budget(facts),
        "sampling_defaults": {"seed": sampling.seed, **{name: getattr(sampling, name) for name in SAMPLING_FIELDS}},
        "thinking_token_budget": facts.thinking_token_budget,
        "sampling_ranges": ranges,
        **asdict(facts.images),
        "input_modalities": ["text", "image"] if facts.vision else ["text"],
        "output_modalities": ["text"],
        **facts.modes,
    }


def _default_budget(facts: ModelFacts) -> int:
    """Without a configured budget the remaining context is the bound."""
    return facts.context if facts.default_max_tokens is None else min(facts.default_max_tokens, facts.context)


def _permission(facts: ModelFacts, instance: str, created: int) -> dict[str, Any]:
    return {
        "id": f"modelperm-{instance}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": facts.max_top_logprobs > 0,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }


def ollama_tags(facts: ModelFacts) -> dict[str, Any]:
    """GET /api/tags."""
    entry = {
        "name": facts.id,
        "model": facts.id,
        "modified_at": UNKNOWN_TIME,
        "size": 0,
        "digest": digest(facts),
        "details": _details(),
    }
    return {"models": [entry]}


def ollama_show(facts: ModelFacts) -> dict[str, Any]:
    """POST /api/show."""
    capabilities = ["completion"]
    if facts.vision:
        capabilities.append("vision")
    if facts.tools:
        capabilities.append("tools")
    if facts.thinking:
        capabilities.append("thinking")
    return {
        "details": _details(),
        "model_info": {
            "general.name": facts.identifier,
            "flare.context_length": facts.context,
            "flare.vocab_size": facts.vocab_size,
        },
        "capabilities": capabilities,
        "modified_at": UNKNOWN_TIME,
    }


def digest(facts: ModelFacts) -> str:
    """SHA-256 over the model's identity and all that discovery says of it: the same after a restart, another when
    anything advertised changes."""
    told = {"identifier": facts.identifier, "id": facts.id, "show": ollama_show(facts), "flare": flare_object(facts)}
    return hashlib.sha256(orjson.dumps(told, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _details() -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "flare",
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": "",
    }
