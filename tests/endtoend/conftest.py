"""Served models that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import torch

from tests.support.inline_server import Site
from tests.support.scripted import script, spelled, times, token, turn
from tests.support.tiny_sources import log_softmax, tiny_source

THINKING_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{{ '<think>\n\n</think>\n\n' if enable_thinking is defined and not enable_thinking else '<think>\n' }}{% endif %}"
)
CALL = (
    token("<tool_call>"),
    "\n<function=lookup>\n<parameter=city>\nParis\n</parameter>\n</function>\n",
    token("</tool_call>"),
)
NEVER = float("-inf")
TURNS = (
    turn("hello world, it is the answer"),
    turn(spelled("a🙂b"), " the end", when="emoji"),
    turn(spelled("🙂🙂"), when="faces"),
    turn("so it is\n", token("</think>"), "\n\n", *CALL, when="call"),
    turn("so it is\n", token("</think>"), "\n\nthe answer is yes", when="reason"),
    turn("so it is\n", token("</think>"), "\n\n", *CALL, "\nand now more text", when="stops later"),
    turn("one", token("<|im_end|>"), " two", token("<|im_end|>"), when="ends"),
    turn(times(40, " the"), then="repeat", when="again"),
    turn({"id": 0xF0}, {"id": 0x9F}, "x", when="broken", logits={"0": {"#241": 499.0, "#242": 498.0, "#7": NEVER}}),
    turn("plain", token("<think>"), " text", token("<tool_call>"), " more", when="delimiters"),
)


@pytest.fixture(scope="session")
def demo() -> Iterator[Site]:
    """The demo model in float32, every observation allowed, chunks of 64."""
    with Site("builtin:smollm2", engine={"dtype": "float32", "prefill_chunk": 64}, logprobs={"prompt": True}) as site:
        yield site


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A scripted Qwen with reasoning and tools, every observation allowed, chunks of 16."""
    with scripted_site(tmp_path_factory.mktemp("scripted"), logprobs={"prompt": True}) as site:
        yield site


def scripted_site(
    directory: Path,
    /,
    *,
    recipe: str = "qwen38",
    template: str = THINKING_TEMPLATE,
    image_profile: Mapping[str, Any] | None = None,
    prefill_delay_ms: float = 0.0,
    **settings: Any,
) -> Site:
    """`prefill_delay_ms`: how long every prompt takes. `settings` are the product's."""
    fields: dict[str, Any] = {"recipe": recipe, "chat_template": template, "bos": "<|im_start|>"}
    if image_profile is not None:
        fields["image_profile"] = dict(image_profile)
    turns = [{**each, "prefill_delay_ms": prefill_delay_ms} for each in TURNS]
    engine = {"prefill_chunk": 16, "page_tokens": 16, **settings.pop("engine", {})}
    return Site(script(directory, turns, **fields), cache=directory / "cache", engine=engine, **settings)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Site, Any]]:
    """A tiny random llama in whose head rows 40, 50 and 60 are equal; and transformers' model of it."""

    def edit(model: Any) -> None:
        likely = int(model(torch.tensor([[5, 6, 7]])).logits[0, -1].argmax())
        model.lm_head.weight[[40, 50, 60]] = 0.9 * model.lm_head.weight[likely]

    directory = tmp_path_factory.mktemp("tiny")
    source, model = tiny_source(directory, edit)
    engine = {"dtype": "float32", "prefill_chunk": 16, "page_tokens": 16}
    with Site(source, cache=directory / "cache", engine=engine, logprobs={"prompt": True}) as site:
        yield site, model


def prompt_before_equals(model: Any, below: int) -> tuple[list[int], int]:
    """A prompt after which the tiny model ranks its equal ids at most `below`th, and their rank."""
    for seed in range(200):
        prompt = torch.randint(3, 700, (6,), generator=torch.Generator().manual_seed(seed)).tolist()
        values = log_softmax(model, prompt)[-1]
        rank = 1 + int((values > values[40]).sum())
        if rank <= below:
            return prompt, rank
    raise AssertionError("the equal rows are never among the best")


torch.set_num_threads(1)


@pytest.fixture(scope="module")
def claude(site: Site) -> Iterator[anthropic.Anthropic]:
    """A client of the module's own `site`, as `gpt` is."""
    with anthropic.Anthropic(base_url=site.url, api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def gpt(site: Site) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key="any", max_retries=0) as client:
        yield client
