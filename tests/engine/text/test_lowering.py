"""Defaults, clamps, seeds, limits, budgets and refusals, on models whose tokens are bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.cache.keys import page_keys
from engine.recipes.catalog import RECIPES
from engine.recipes.recipe import SamplingTable
from engine.recipes.sampling import wide_ranges
from engine.text.lowering import Lowering, ServingLimits, _common
from engine.types.constraint import Constraint
from engine.types.conversation import Conversation, Image, Message, Text, ToolChoice, ToolDefinition, ToolResult
from engine.types.request import (
    Api,
    GenerationRequest,
    OutputOptions,
    ReasoningOptions,
    RequestError,
    SamplingOverrides,
    Stops,
    TemplateOptions,
    TextPrompt,
    TokenPrompt,
)
from tests.support.byte_model import CHATML, ByteModel, smollm2

THINKING = ByteModel(
    RECIPES["qwen38"],
    (*CHATML, "<think>", "</think>"),
    template="{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}\n</think>\n\n{% endif %}{% endif %}",
    eos=("<|im_end|>",),
)
WIDE = SamplingTable(temperature=0.2, top_p=0.9, ranges=wide_ranges(259))


def lowering(model: ByteModel | None = None, **limits: Any) -> Lowering:
    options = {"context": 1000, "sampling": WIDE, "page_tokens": 16, "vocab_size": 259, **limits}
    return Lowering(model or smollm2(), ServingLimits(**options), lambda constraint: None)


def chat(text: str = "hi", *, api: Api = "chat", **fields: Any) -> GenerationRequest:
    return GenerationRequest(api, (Conversation((Message("user", (Text(text),)),)),), **fields)


def raw(*prompts: TextPrompt | TokenPrompt, **fields: Any) -> GenerationRequest:
    return GenerationRequest("completions", prompts, **fields)


def test_a_chat_prompt_is_the_rendered_template() -> None:
    model = smollm2()
    child = lowering(model).prepare(chat("What?")).children[0]
    assert model.tokenizer.decode(child.token_ids.tolist()) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert child.token_ids.dtype == np.int32
    assert child.opening == "content"
    assert child.eos_ids == (258,)


def test_omitted_fields_take_the_prepared_defaults() -> None:
    sampling = lowering().prepare(chat()).children[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.2, 0.9, -1, 0.0)


@pytest.mark.parametrize(
    ("asked", "field", "expected"),
    [
        (SamplingOverrides(temperature=0), "temperature", 0.01),
        (SamplingOverrides(temperature=5), "temperature", 2.0),
        (SamplingOverrides(top_p=0), "top_p", 0.01),
        (SamplingOverrides(top_k=0), "top_k", -1),
        (SamplingOverrides(top_k=-7), "top_k", -1),
        (SamplingOverrides(top_k=10**9), "top_k", 259),
        (SamplingOverrides(presence_penalty=-9), "presence_penalty", -2.0),
        (SamplingOverrides(min_p=0.3), "min_p", 0.3),
    ],
)
def test_values_clamp_into_their_ranges(asked: SamplingOverrides, field: str, expected: float) -> None:
    sampling = lowering().prepare(chat(sampling=asked)).children[0].sampling
    assert getattr(sampling, field) == expected


def test_a_parameter_without_a_range_is_fixed() -> None:
    limits = {"sampling": RECIPES["qwen38"].sampling}
    asked = SamplingOverrides(temperature=0, top_k=50, min_p=0.5, presence_penalty=9)
    sampling = lowering(THINKING, **limits).prepare(chat(sampling=asked)).children[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.min_p, sampling.presence_penalty) == (0.7, 20, 0.0, 2.0)


@pytest.mark.parametrize("asked", [SamplingOverrides(), SamplingOverrides(temperature=0.8, top_p=0.9)])
def test_the_mode_of_reasoning_changes_no_sampling_value(asked: SamplingOverrides) -> None:
    it = lowering(THINKING, sampling=RECIPES["qwen38"].sampling)
    found = [
        replace(it.prepare(chat(sampling=asked, reasoning=reasoning)).children[0].sampling, seed=0)
        for reasoning in (ReasoningOptions(), ReasoningOptions(enabled=False), ReasoningOptions(effort="low"))
    ]
    assert found[0] == found[1] == found[2]


def test_a_number_that_is_none_is_refused() -> None:
    with pytest.raises(RequestError, match="temperature must be a finite number"):
        lowering().prepare(chat(sampling=SamplingOverrides(temperature=float("nan"))))


def test_a_table_that_misses_its_default_fails_at_start() -> None:
    with pytest.raises(ValueError, match=r"sampling_ranges\.temperature"):
        lowering(sampling=SamplingTable(temperature=1.5, ranges={"temperature": (0.1, 1.0)}))


def test_seeds_advance_by_choice_index_over_all_prompts() -> None:
    request = raw(TextPrompt("a"), TextPrompt("b"), n=2, sampling=SamplingOverrides(seed=2**64 - 2))
    seeds = [child.sampling.seed for child in lowering().prepare(request).children]
    assert seeds == [2**64 - 2, 2**64 - 1, 0, 1]


def test_the_prepared_seed_serves_requests_without_one() -> None:
    prepared = lowering(sampling=replace(WIDE, seed=41)).prepare(chat(n=2))
    assert [child.sampling.seed for child in prepared.children] == [41, 42]


def test_without_any_seed_one_of_64_bits_is_drawn() -> None:
    seeds = {lowering().prepare(chat()).children[0].sampling.seed for _ in range(4)}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert max(seeds) > 2**32


@pytest.mark.parametrize(("asked", "default", "expected"), [(None, None, 95), (None, 7, 7), (9, 7, 9), (500, 7, 95)])
def test_output_limits(asked: int | None, default: int | None, expected: int) -> None:
    request = raw(TokenPrompt((1, 2, 3, 4, 5)), max_tokens=asked)
    prepared = lowering(context=100, default_max_tokens=default).prepare(request)
    assert prepared.children[0].max_tokens == expected


def test_a_prompt_over_the_context_names_both_numbers() -> None:
    request = raw(TokenPrompt(tuple([1] * 100)))
    with pytest.raises(RequestError, match=r"100 tokens.*context of 100.*99") as caught:
        lowering(context=100).prepare(request)
    assert caught.value.code == "context_length_exceeded"


def test_the_messages_wording_of_a_long_prompt() -> None:
    with pytest.raises(RequestError, match=r"^prompt is too long: \d+ tokens > 99 maximum$") as caught:
        lowering(context=100).prepare(chat("x" * 200, api="messages"))
    assert caught.value.code == "context_length_exceeded"


def test_a_full_context_still_serves_zero_tokens() -> None:
    prepared = lowering(context=5).prepare(raw(TokenPrompt((1, 2, 3, 4, 5)), max_tokens=0))
    assert prepared.children[0].max_tokens == 0


def test_raw_prompts_keep_their_ids_and_have_no_syntax() -> None:
    child = lowering().prepare(raw(TokenPrompt((5, 257, 5)))).children[0]
    assert child.token_ids.tolist() == [5, 257, 5]
    assert child.opening is None
    assert not child.tools_active


def test_raw_text_follows_the_tokenizers_special_token_policy() -> None:
    child = lowering().prepare(raw(TextPrompt("<|im_start|>a", add_special_tokens=False))).children[0]
    assert child.token_ids.tolist() == [257, ord("a")]
    child = lowering().prepare(raw(TextPrompt("a"))).children[0]
    assert child.token_ids.tolist() == [257, ord("a")]


def test_empty_raw_prompts() -> None:
    assert lowering().prepare(raw(TextPrompt(""))).children[0].token_ids.tolist() == [257]
    with pytest.raises(RequestError, match="BOS"):
        lowering(smollm2(bos=None)).prepare(raw(TextPrompt("")))
    with pytest.raises(RequestError, match="must not be empty"):
        lowering().prepare(raw(TokenPrompt(())))
    with pytest.raises(RequestError, match=r"token id 259 is outside the vocabulary of 259"):
        lowering().prepare(raw(TokenPrompt((259,))))


def test_echo_texts_are_the_originals() -> None:
    prepared = lowering().prepare(raw(TextPrompt("é<|im_end|>"), TokenPrompt((72, 258)), echo=True, n=2))
    assert prepared.echo_texts == ("é<|im_end|>", "H<|im_end|>")
    assert len(prepared.children) == 4
    assert lowering().prepare(raw(TextPrompt("a"))).echo_texts == ()


def test_stops_and_minimum_tokens() -> None:
    request = raw(TextPrompt("a"), stops=Stops(sequences=((1, 2), (258,))), min_tokens=3, max_tokens=5)
    child = lowering().prepare(request).children[0]
    assert (child.stop_sequences, child.min_tokens, child.max_tokens) == (((1, 2), (258,)), 3, 5)
    with pytest.raises(RequestError, match="stop_token_ids: token id 900"):
        lowering().prepare(raw(TextPrompt("a"), stops=Stops(sequences=((900,),))))
    with pytest.raises(RequestError, match=r"min_tokens \(6\) is above max_tokens \(5\)"):
        lowering().prepare(raw(TextPrompt("a"), min_tokens=6, max_tokens=5))


def test_page_keys_are_those_of_the_prompt() -> None:
    child = lowering(cache_seed=b"seed").prepare(chat()).children[0]
    assert child.page_keys == page_keys(child.token_ids, 16, b"seed")
    assert len(child.page_keys) > 1
    assert lowering(prefix_cache=False).prepare(chat()).children[0].page_keys == ()


def test_output_options_travel() -> None:
    options = OutputOptions(logprobs=3, prompt_logprobs=1)
    assert lowering().prepare(chat(output=options)).children[0].output == options


@pytest.mark.parametrize(
    "fields",
    [
        {"template": TemplateOptions(continue_final_message=True)},
        {"stops": Stops(strings=("x",))},
        {"stops": Stops(sequences=((1,),))},
        {"ignore_eos": True},
        {"min_tokens": 2},
    ],
)
def test_constraints_refuse_what_they_cant_keep(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="can't be combined"):
        lowering().prepare(chat(constraint=Constraint("json_object", ""), **fields))


def test_constraints_are_checked_before_admission() -> None:
    seen: list[Constraint] = []
    wanted = Constraint("regex", "[0-9]+")
    prepared = Lowering(smollm2(), ServingLimits(1000, sampling=WIDE), seen.append).prepare(chat(constraint=wanted))
    assert seen == [wanted]
    assert prepared.children[0].constraint == wanted
    with pytest.raises(RequestError, match="no structured output"):
        Lowering(smollm2(), ServingLimits(1000, sampling=WIDE)).prepare(chat(constraint=wanted))


def test_images_are_refused_by_a_text_only_model() -> None:
    image = Image(b"", "image/png")
    user = Conversation((Message("user", (Text("see"), image)),))
    with pytest.raises(RequestError, match=r"messages\[0\] holds an image"):
        lowering().prepare(GenerationRequest("chat", (user,)))
    result = Conversation((Message("user", (Text("q"),)), Message("tool", (ToolResult("c", (image,)),))))
    with pytest.raises(RequestError, match=r"messages\[1\] holds an image"):
        lowering().prepare(GenerationRequest("messages", (result,)))


def test_counting_equals_preparing() -> None:
    child = lowering().prepare(chat("long enough")).children[0]
    assert lowering().count(chat("long enough", api="messages")) == len(child.token_ids)
    assert lowering(context=10).count(chat("longer than the context")) > 10


def test_a_model_without_any_template_serves_raw_prompts_only() -> None:
    model = smollm2(template=None)
    assert lowering(model).prepare(raw(TextPrompt("a"))).children
    with pytest.raises(RequestError, match="no chat template"):
        lowering(model).prepare(chat())


def budget(model: ByteModel, default: int | None = None, api: Api = "chat", **options: Any) -> int | None:
    request = chat(api=api, reasoning=ReasoningOptions(**options))
    return lowering(model, thinking_token_budget=default).prepare(request).children[0].reasoning_budget


def test_budgets_of_a_model_with_a_single_close_token() -> None:
    assert budget(THINKING, budget=5) == 5
    assert budget(THINKING) is None
    assert budget(THINKING, budget=5, enabled=False) is None
    assert budget(THINKING, budget=2**40, budget_advisory=True) is None
    assert budget(THINKING, default=9) == 9
    assert budget(THINKING, default=9, budget=5) == 5
    assert budget(THINKING, default=9, api="systemone") is None


def test_budgets_where_no_hard_cap_exists() -> None:
    with pytest.raises(RequestError, match="thinking_token_budget is not supported"):
        budget(smollm2(), budget=5)
    assert budget(smollm2(), budget=5, budget_advisory=True) is None
    pieces = replace(THINKING, control=CHATML)  # the tokenizer spells </think> in pieces
    with pytest.raises(RequestError, match="thinking_token_budget is not supported"):
        budget(pieces, budget=5)
    assert budget(pieces, budget=5, enabled=False) is None
    with pytest.raises(RequestError, match="thinking_token_budget needs a conversation"):
        lowering(THINKING).prepare(raw(TextPrompt("a"), reasoning=ReasoningOptions(budget=5)))


@pytest.mark.parametrize("model", [smollm2(), replace(THINKING, control=CHATML)])
def test_a_default_budget_fails_at_start_where_it_cant_be_kept(model: ByteModel) -> None:
    with pytest.raises(ValueError, match=r"^thinking_token_budget: "):
        lowering(model, thinking_token_budget=10)


def test_tools_are_active_unless_there_are_none_or_none_are_wanted() -> None:
    tool = ToolDefinition("look", "", {})

    def active(tools: tuple[ToolDefinition, ...], choice: ToolChoice) -> bool:
        conversation = Conversation((Message("user", (Text("q"),)),), tools, choice)
        return lowering().prepare(GenerationRequest("chat", (conversation,))).children[0].tools_active

    assert active((tool,), ToolChoice())
    assert active((tool,), ToolChoice("named", "look"))
    assert not active((tool,), ToolChoice("none"))
    assert not active((), ToolChoice())
    with pytest.raises(RequestError, match="no tool is declared"):
        active((), ToolChoice("required"))
    with pytest.raises(RequestError, match="not a declared tool"):
        active((tool,), ToolChoice("named", "other"))


def test_stop_tokens_of_the_family_end_conversations_only() -> None:
    assert lowering(THINKING).prepare(chat()).children[0].eos_ids == (258, 256)
    assert lowering(THINKING).prepare(raw(TextPrompt("a"))).children[0].eos_ids == (258,)


@pytest.mark.parametrize(
    ("one", "two", "common"),
    [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 2], 2), ([1, 9, 3], [1, 2, 3], 1), ([9], [1], 0)],
)
def test_what_two_token_lists_begin_with(one: list[int], two: list[int], common: int) -> None:
    assert _common(one, two) == common
