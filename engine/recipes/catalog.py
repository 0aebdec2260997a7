"""The catalog: every recipe by name, and the choice of one for a checkpoint.

The thirteen recipes of the API document, the ones the engine runs from real weights (llama, qwen2, qwen3, gemma3) and
a generic one that takes everything from the checkpoint. Data only; nothing here reads a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from engine.recipes.recipe import ReasoningSyntax, Recipe, SamplingTable

THINK: Final = ReasoningSyntax(
    open="<think>", close="</think>", single_token_close=True, default_on=True, can_disable=True
)
ALWAYS_THINK: Final = ReasoningSyntax(
    open="<think>", close="</think>", single_token_close=True, default_on=True, can_disable=False
)
CHATML_STOPS: Final = ("<|im_end|>", "<|endoftext|>")
KIMI_REASONING: Final = ReasoningSyntax(
    open="<|open|>think<|sep|>",
    close="<|close|>think<|sep|>",
    single_token_close=False,
    default_on=True,
    can_disable=False,
)
QWEN_SAMPLING: Final = SamplingTable(
    top_p=0.95,
    top_k=20,
    ranges={"temperature": (0.7, 1.0), "top_p": (0.8, 0.95), "presence_penalty": (0.0, 2.0)},
)
PLAIN_SAMPLING: Final = SamplingTable(top_p=0.95)

_ALL: Final = (
    Recipe(
        name="qwen38",
        model_types=("qwen4_exp", "qwen4_exp_text"),
        syntax="qwen",
        reasoning=THINK,
        tools=True,
        template="qwen38.jinja",
        efforts=("low", "medium", "xhigh"),
        default_effort="xhigh",
        image_profile="qwen",
        sampling=QWEN_SAMPLING,
        stop_tokens=CHATML_STOPS,
    ),
    Recipe(
        name="qwen38_dense",
        model_types=("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen35", "qwen35moe"),
        syntax="qwen",
        reasoning=THINK,
        tools=True,
        template="qwen38.jinja",
        efforts=("low", "medium", "xhigh"),
        default_effort="xhigh",
        image_profile="qwen",
        sampling=QWEN_SAMPLING,
        stop_tokens=CHATML_STOPS,
    ),
    Recipe(
        name="glm53",
        model_types=("glm5_next", "glm5_next_text", "glm_moe_dsa"),
        syntax="glm",
        reasoning=ALWAYS_THINK,
        tools=True,
        template="glm53.jinja",
        efforts=("low", "high", "max"),
        default_effort="max",
        image_profile="glm",
        sampling=SamplingTable(top_p=0.95, ranges={"temperature": (0.95, 1.0), "top_p": (0.95, 1.0)}),
        stop_tokens=("<|endoftext|>", "<|user|>", "<|observation|>"),
    ),
    Recipe(
        name="deepseek4",
        model_types=("deepseek_v4",),
        syntax="deepseek",
        reasoning=THINK,
        tools=True,
        template="native:deepseek4",
        thinking_kwargs={},
        efforts=("low", "high", "xhigh", "max"),
        default_effort="high",
        image_profile="deepseek4",
        sampling=PLAIN_SAMPLING,
        stop_tokens=("<｜end▁of▁sentence｜>",),
    ),
    Recipe(
        name="deepseek41",
        model_types=("deepseek_v41",),
        syntax="deepseek",
        reasoning=THINK,
        tools=True,
        template="native:deepseek41",
        thinking_kwargs={},
        efforts=("low", "high", "xhigh", "max"),
        default_effort="high",
        numeric_effort=(1, 100),
        image_profile="deepseek41",
        sampling=SamplingTable(ranges={"repetition_penalty": (1.0, 1.1)}),
        stop_tokens=("<｜end▁of▁sentence｜>",),
    ),
    Recipe(
        name="mimo_v2",
        model_types=("mimo_v2", "mimo_v2_flash"),
        syntax="qwen",
        syntax_options={"verbatim": True},
        reasoning=THINK,
        tools=True,
        template="mimo_v2.jinja",
        image_profile="mimo",
        sampling=PLAIN_SAMPLING,
        stop_tokens=CHATML_STOPS,
        assumed="the V2.6 chat template: ChatML with the family's compact call tags",
    ),
    Recipe(
        name="kimi3",
        model_types=("kimi_k3",),
        syntax="kimi",
        reasoning=KIMI_REASONING,
        tools=True,
        template="native:kimi3",
        thinking_kwargs={},
        efforts=("low", "high", "max"),
        default_effort="max",
        image_profile="kimi",
        sampling=SamplingTable(ranges={"top_p": (0.95, 1.0)}),
        stop_tokens=("<|end_of_msg|>",),
    ),
    Recipe(
        name="step5",
        model_types=("step5", "step3p7", "step3p5"),
        syntax="qwen",
        reasoning=ALWAYS_THINK,
        tools=True,
        template="step5.jinja",
        efforts=("minimal", "low", "medium", "high", "xhigh", "max"),
        image_profile="step",
        sampling=PLAIN_SAMPLING,
        stop_tokens=CHATML_STOPS,
        assumed="the chat template of Step 3.7",
    ),
    Recipe(
        name="nemotron_h",
        model_types=("nemotron_h", "nemotron_h_omni"),
        syntax="qwen",
        reasoning=THINK,
        tools=True,
        template="nemotron_h.jinja",
        image_profile="nemotron",
        sampling=PLAIN_SAMPLING,
        stop_tokens=CHATML_STOPS,
        assumed="the chat template of Nemotron 3.5 Lightning",
    ),
    Recipe(
        name="kimi31",
        model_types=("kimi_k31",),
        syntax="kimi",
        reasoning=KIMI_REASONING,
        tools=True,
        template="native:kimi3",
        thinking_kwargs={},
        efforts=("low", "high", "max"),
        default_effort="max",
        image_profile="kimi",
        sampling=PLAIN_SAMPLING,
        stop_tokens=("<|end_of_msg|>",),
        assumed="prompt, output syntax and images of Kimi K3",
    ),
    Recipe(
        name="minimax_m3",
        model_types=("minimax_m3_vl", "minimax_m3", "minimax_m3_vl_text"),
        syntax="minimax",
        reasoning=ReasoningSyntax(
            open="<mm:think>", close="</mm:think>", single_token_close=True, default_on=False, can_disable=True
        ),
        tools=True,
        template="minimax_m3.jinja",
        thinking_kwargs={"thinking_mode": ("enabled", "disabled")},
        image_profile="minimax",
        sampling=PLAIN_SAMPLING,
        stop_tokens=("[e~[",),
        assumed="turn markers and system framing of MiniMax M2",
    ),
    Recipe(
        name="muse_spark",
        model_types=("muse_spark", "muse_spark_text"),
        syntax="muse",
        reasoning=ReasoningSyntax(
            open=" to=self<|message|>",
            close="<|eom|>",
            single_token_close=False,
            default_on=True,
            can_disable=False,
            header=True,
        ),
        tools=True,
        template="muse_spark.jinja",
        image_profile="muse",
        stop_tokens=("<|eot|>",),
        assumed="the wording of the system block around the recipients line",
    ),
    Recipe(
        name="gemma4",
        model_types=("gemma4", "gemma4_text", "gemma4_unified"),
        syntax="gemma",
        reasoning=ReasoningSyntax(
            open="<|channel>thought\n", close="<channel|>", single_token_close=True, default_on=False, can_disable=True
        ),
        tools=True,
        template="gemma4.jinja",
        image_profile="gemma4",
        sampling=SamplingTable(top_p=0.95, top_k=64),
        stop_tokens=("<turn|>", "<|tool_response>", "<eos>"),
    ),
    Recipe(name="llama", model_types=("llama", "mistral"), module="llama", fixed_sampling=False),
    Recipe(
        name="qwen2",
        model_types=("qwen2",),
        module="llama",
        syntax="hermes",
        tools=True,
        template="hermes.jinja",
        stop_tokens=CHATML_STOPS,
        fixed_sampling=False,
    ),
    Recipe(
        name="qwen3",
        model_types=("qwen3",),
        module="llama",
        syntax="hermes",
        reasoning=ReasoningSyntax(
            open="<think>", close="</think>", single_token_close=True, default_on=False, can_disable=True
        ),
        tools=True,
        template="hermes.jinja",
        stop_tokens=CHATML_STOPS,
        fixed_sampling=False,
    ),
    Recipe(name="gemma3", model_types=("gemma3", "gemma3_text"), fixed_sampling=False),
    Recipe(name="generic", efforts=("minimal", "low", "medium", "high", "xhigh", "max"), fixed_sampling=False),
)

RECIPES: Final[Mapping[str, Recipe]] = {recipe.name: recipe for recipe in _ALL}


def select(config: Mapping[str, Any], override: str | None = None) -> Recipe:
    """The recipe of a checkpoint whose `config` is in config.json terms (GGUF: its architecture as `model_type`).

    `override` is an operator's choice by name. A model type that no recipe claims gets the generic one.
    Raises ValueError, listing the names, for an unknown override.
    """
    if override is not None:
        if override not in RECIPES:
            raise ValueError(f"recipe: {override!r} is not one of {', '.join(sorted(RECIPES))}")
        return RECIPES[override]
    model_type = config.get("model_type")
    text = config.get("text_config")
    inner = text.get("model_type") if isinstance(text, Mapping) else None
    for wanted in (model_type, inner):
        for recipe in _ALL:
            if wanted in recipe.model_types:
                return recipe
    return RECIPES["generic"]
