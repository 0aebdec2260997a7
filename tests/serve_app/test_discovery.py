"""Model cards and Ollama's shapes from effective values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from ollama import ListResponse, ShowResponse
from openai.types import Model

from engine.recipes.catalog import RECIPES
from engine.recipes.recipe import SamplingTable
from serve_app.discovery import (
    ImageFacts,
    ModelFacts,
    digest,
    flare_object,
    model_card,
    model_list,
    ollama_show,
    ollama_tags,
)

FACTS = ModelFacts(
    identifier="org/model-7b",
    context=4096,
    vocab_size=1000,
    aliases=("", "house", "org/other"),
    max_top_logprobs=20,
    max_concurrency=64,
    prefill_chunk_size=512,
    sampling=SamplingTable(temperature=0.2, top_p=0.9, ranges={"temperature": (0.01, 2.0)}),
)
VISION = ImageFacts(8, 2048, 1024, 512, 1_000_000, 16 * 2**20)


def card(facts: ModelFacts = FACTS) -> dict[str, Any]:
    return model_card(facts, "abc", 1_700_000_000)


def test_first_nonempty_alias_is_the_id_and_root_the_checkpoint() -> None:
    assert (card()["id"], card()["root"]) == ("house", "org/model-7b")
    plain = card(replace(FACTS, aliases=()))
    assert (plain["id"], plain["root"]) == ("org/model-7b", "org/model-7b")


@pytest.mark.parametrize(
    ("name", "known"),
    [("org/model-7b", True), ("house", True), ("org/other", True), ("", False), ("model-7b", False), ("House", False)],
)
def test_names(name: str, known: bool) -> None:
    assert FACTS.known_as(name) is known


def test_card_has_vllms_fields_and_the_sdk_reads_it() -> None:
    value = card()
    for field in ("id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission"):
        assert field in value
    assert (value["object"], value["owned_by"], value["parent"]) == ("model", "local", None)
    assert (value["max_model_len"], value["context_length"]) == (4096, 4096)
    model = Model.model_validate(value)
    assert (model.id, model.created) == ("house", 1_700_000_000)


def test_permission() -> None:
    (permission,) = card()["permission"]
    allowed = {name for name, value in permission.items() if name.startswith("allow_") and value}
    assert allowed == {"allow_sampling", "allow_view", "allow_logprobs"}
    assert permission["object"] == "model_permission"
    (without,) = card(replace(FACTS, max_top_logprobs=0))["permission"]
    assert without["allow_logprobs"] is False


def test_cards_are_the_same_for_one_instance_and_differ_between_servers() -> None:
    assert card() == card()
    assert model_card(FACTS, "other", 1)["permission"][0]["id"] != card()["permission"][0]["id"]


def test_flare_object_holds_every_field() -> None:
    assert set(flare_object(FACTS)) == {
        "vocab_size",
        "max_top_logprobs",
        "max_concurrency",
        "prefill_chunk_size",
        "default_max_tokens",
        "sampling_defaults",
        "thinking_token_budget",
        "sampling_ranges",
        "max_images_per_prompt",
        "max_image_tokens_per_prompt",
        "image_feature_window_tokens",
        "max_image_tokens_per_image",
        "max_image_pixels",
        "max_image_bytes",
        "input_modalities",
        "output_modalities",
    }


def test_the_context_is_what_every_engine_holds() -> None:
    engines = [{"context": "4000", "device": "cpu"}, {"context": "3000", "device": "cuda"}]
    assert (FACTS.in_force(engines).context, FACTS.in_force(engines).modes["device"]) == (3000, "cpu")
    assert FACTS.in_force([{"context": "9000"}]).context == FACTS.in_force([{}]).context == 4096


def test_flare_object_follows_the_settings() -> None:
    shown = flare_object(FACTS)
    assert (shown["vocab_size"], shown["max_top_logprobs"]) == (1000, 20)
    assert (shown["max_concurrency"], shown["prefill_chunk_size"]) == (64, 512)
    assert shown["thinking_token_budget"] is None
    assert shown["default_max_tokens"] == 4096, "without a setting the context is the bound"
    changed = flare_object(replace(FACTS, default_max_tokens=100, thinking_token_budget=7, modes={"numerics": "fast"}))
    assert (changed["default_max_tokens"], changed["thinking_token_budget"]) == (100, 7)
    assert changed["numerics"] == "fast"


def test_sampling_defaults_and_ranges() -> None:
    shown = flare_object(FACTS)
    assert shown["sampling_defaults"] == {
        "seed": None,
        "temperature": 0.2,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    assert shown["sampling_ranges"]["temperature"] == {"min": 0.01, "max": 2.0}
    assert shown["sampling_ranges"]["top_p"] is None
    assert "seed" not in shown["sampling_ranges"]


def test_a_documented_recipe_shows_its_table() -> None:
    shown = flare_object(replace(FACTS, sampling=RECIPES["qwen38"].sampling))
    assert shown["sampling_ranges"]["top_k"] is None
    assert shown["sampling_ranges"]["temperature"] == {"min": 0.7, "max": 1.0}
    assert shown["sampling_defaults"]["top_k"] == 20
    assert "seed" in shown["sampling_defaults"]


def test_modalities_and_image_fields() -> None:
    shown = flare_object(FACTS)
    assert shown["input_modalities"] == ["text"]
    assert [shown[name] for name in shown if "image" in name] == [0] * 6
    seeing = flare_object(replace(FACTS, images=VISION))
    assert seeing["input_modalities"] == ["text", "image"]
    assert seeing["output_modalities"] == ["text"]
    assert seeing["max_image_tokens_per_prompt"] == 2048


def test_list_has_one_card_and_the_other_sdks_entry() -> None:
    listed = model_list(FACTS, "abc", 1)
    assert listed["object"] == "list"
    assert [entry["id"] for entry in listed["data"]] == ["house"]
    assert [entry["name"] for entry in listed["models"]] == ["house"]


def test_ollama_tags() -> None:
    (entry,) = ollama_tags(FACTS)["models"]
    assert entry["name"] == entry["model"] == "house"
    assert (entry["size"], entry["modified_at"]) == (0, "0001-01-01T00:00:00Z")
    details = entry["details"]
    assert (details["format"], details["families"]) == ("flare", [])
    assert {details[name] for name in ("family", "parameter_size", "quantization_level")} == {""}
    assert len(bytes.fromhex(entry["digest"])) == 32
    parsed = ListResponse.model_validate(ollama_tags(FACTS))
    assert parsed.models[0].model == "house"


def test_ollama_show() -> None:
    shown = ollama_show(FACTS)
    assert shown["model_info"] == {
        "general.name": "org/model-7b",
        "flare.context_length": 4096,
        "flare.vocab_size": 1000,
    }
    assert shown["capabilities"] == ["completion"]
    assert not {"template", "tensors", "modelfile", "parameters", "license"} & set(shown)
    assert ShowResponse.model_validate(shown).modelinfo == shown["model_info"]


def test_capabilities_come_from_what_is_prepared() -> None:
    every = replace(FACTS, tools=True, thinking=True, images=VISION)
    assert ollama_show(every)["capabilities"] == ["completion", "vision", "tools", "thinking"]
    assert ollama_show(replace(FACTS, tools=True))["capabilities"] == ["completion", "tools"]


def test_digest_follows_identity_and_advertised_metadata_only() -> None:
    assert digest(FACTS) == digest(replace(FACTS))
    changes: list[dict[str, Any]] = [
        {"identifier": "org/model-8b"},
        {"context": 2048},
        {"vocab_size": 1001},
        {"aliases": ("mansion",)},
        {"tools": True},
        {"images": VISION},
        {"sampling": SamplingTable()},
    ]
    digests = {digest(replace(FACTS, **change)) for change in changes}
    assert len(digests | {digest(FACTS)}) == len(changes) + 1
    listed = {model_card(FACTS, instance, created)["id"] for instance, created in (("a", 1), ("b", 2))}
    assert listed == {"house"}
