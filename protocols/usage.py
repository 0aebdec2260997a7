"""The usage object of Chat and Completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.types.events import Usage


def usage_object(
    prompts: Sequence[int], choices: Sequence[Usage], *, images: int = 0, reasoning: bool = True
) -> dict[str, Any]:
    """`prompts`: tokens of each prompt, counted once however many choices it has. `choices`: counts of every choice in
    index order; a prompt's cached tokens are those of its first choice. `reasoning`: report reasoning tokens."""
    each = len(choices) // max(len(prompts), 1) or 1
    prompt = sum(prompts)
    completion = sum(choice.completion for choice in choices)
    details: dict[str, Any] = {
        "cached_tokens": sum(choice.cached for choice in choices[::each]),
        "cache_write_tokens": 0,
    }
    if images:
        details["multimodal_tokens"] = {"image": images}
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": details,
    }
    if reasoning:
        usage["completion_tokens_details"] = {"reasoning_tokens": sum(choice.reasoning for choice in choices)}
    return usage
