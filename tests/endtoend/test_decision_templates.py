"""The scorer over every recipe's own template or encoder: common states, labels after the complete prompt, reasoning
that a template always opens closed before them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.recipes.catalog import RECIPES
from tests.endtoend.test_recipes import family, tokenizer
from tests.support.inline_server import Site
from tests.support.outputs import CONTROL
from tests.support.scripted import script, turn

STATE = "The parcel came late, twice."
BODY: dict[str, Any] = {
    "model": "m",
    "state": STATE,
    "questions": {
        "late": {"type": "noul", "instructions": "Was it late?"},
        "team": {"type": "choice", "criteria": {f"team {place}": None for place in range(12)}},
        "harm": {"type": "score", "criteria": ["none", "some", "much"]},
    },
}
CLOSED = {
    "glm53": ("<|assistant|><think>", "</think>"),
    "step5": ("<|im_start|>assistant\n<think>\n", "\n</think>\n"),
    "kimi3": (
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>',
        "<|close|>think<|sep|><|open|>response<|sep|>",
    ),
    "muse_spark": ("<|start|>assistant", " to=user<|message|>"),
}
"""Templates that always open reasoning: the generation prompt, and what closes it."""
TEMPLATED = sorted(name for name, recipe in RECIPES.items() if recipe.template is not None and family(name) in CONTROL)


def served(recipe: str, directory: Path) -> Site:
    """With the vocabulary of the template's family, or a small one for the families whose own is slow to prepare."""
    small = {"specials": ["<|im_start|>", *RECIPES[recipe].stop_tokens], "added": CONTROL[family(recipe)]}
    words = tokenizer(recipe, directory) if family(recipe) != "qwen38" else {"synthetic": small}
    source = script(directory, [turn("x")], recipe=recipe, tokenizer=words, context=4096)
    return Site(source, cache=directory / "cache", engine={"context": 4096, "page_tokens": 16})


@pytest.mark.parametrize("recipe", TEMPLATED)
def test_labels_follow_the_complete_prompt_of_every_template(recipe: str, tmp_path: Path) -> None:
    with served(recipe, tmp_path) as site:
        found = site.post("/v1/systemone", BODY)
        assert found["usage"]["output_tokens"] == 3
        children = [request.children[0] for request in site.engine.prepared]
        prompts = [site.model.tokens.decode(child.token_ids.tolist()) for child in children]
        shared = prompts[0].index(STATE) + len(STATE)
        assert len({prompt[:shared] for prompt in prompts}) == 1, "the state comes first, in the same words"
        for child, prompt in zip(children, prompts, strict=True):
            assert child.opening == "content"
            assert "\nAnswer:" in prompt[shared:] and "Answer:" not in prompt[prompt.rindex("\nAnswer:") + 8 :]
            ids = child.token_ids.tolist()
            labels = child.output.logprob_token_ids
            assert len(set(labels)) == len(labels) in (2, 12, 3)
            for id in labels:
                text = site.model.tokens.text(id)
                assert len(text) == 1 and text.isalnum()
                assert site.model.tokenizer.encode(prompt + text, specials=True) == [*ids, id]


def always_thinks(recipe: str) -> bool:
    syntax = RECIPES[recipe].reasoning
    return syntax is not None and syntax.default_on and not syntax.can_disable


def test_every_recipe_that_always_thinks_is_known_here() -> None:
    assert {name for name in TEMPLATED if always_thinks(name)} == {*CLOSED, "kimi31"}, "kimi31 is prompted as kimi3"


@pytest.mark.parametrize("recipe", CLOSED)
@pytest.mark.parametrize("route", ["systemone", "decisions"])
def test_reasoning_that_a_template_always_opens_is_closed_before_the_answer(
    recipe: str, route: str, tmp_path: Path
) -> None:
    question = {"type": "choice", "instructions": "Which team?", "choices": [{"value": True}, {"value": "two"}]}
    body = BODY if route == "systemone" else {"model": "m", "input": STATE, "questions": [question]}
    normal, closing = CLOSED[recipe]
    with served(recipe, tmp_path) as site:
        usage = site.post(f"/v1/{route}", body)["usage"]
        assert usage["output_tokens"] == len(body["questions"])
        assert usage.get("output_tokens_details", {"reasoning_tokens": 0}) == {"reasoning_tokens": 0}
        for request in site.engine.prepared:
            prompt = site.model.tokens.decode(request.children[0].token_ids.tolist())
            assert prompt[prompt.rindex("\nAnswer:") :].endswith(normal + closing)
        site.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1})
        asked = site.engine.prepared[-1].children[0]
        assert asked.opening == "reasoning" and site.model.tokens.decode(asked.token_ids.tolist()).endswith(normal)
