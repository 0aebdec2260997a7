"""What discovery advertises is what the settings and the model came to, and decoding is held to it."""

from __future__ import annotations

from typing import Any

import pytest

from engine.text import tokenizer
from protocols.chat.decode import decode
from protocols.errors import InvalidRequest
from serve_app.discovery import digest, model_card, ollama_show
from serve_app.settings import SettingsError, load
from serve_app.startup import Startup, start
from tests.support.scripted import script, turn

Sources = dict[str, Startup]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """By recipe: a model without reasoning and tools, and one with both."""
    directory = tmp_path_factory.mktemp("startup")
    found = {}
    for recipe in ("generic", "qwen38"):
        model = script(directory, [turn("hi")], recipe=recipe, name=recipe, context=512)
        found[recipe] = start(load({"model": model, "cache_dir": str(directory / "cache")}), hub="test")
    return found


def changed(source: Startup, **given: Any) -> Startup:
    """The same model with other settings."""
    model = source.settings.model
    settings = load({"model": model.source, "cache_dir": str(model.cache_dir), **given})
    return Startup(settings, source.prepared, "cpu", "test")


def card(sources: Sources, recipe: str = "generic", **given: Any) -> dict[str, Any]:
    return model_card(changed(sources[recipe], **given).facts, "i", 1)


def test_limits_follow_the_settings(sources: Sources) -> None:
    plain = card(sources)
    assert (plain["id"], plain["root"], plain["max_model_len"]) == ("generic", "generic", 512)
    changes = {"context": "300", "max_requests": "7", "prefill_chunk": "33", "default_max_tokens": "50", "engines": "2"}
    other = card(sources, aliases=",house,org/alias", **changes)
    assert (other["id"], other["root"], other["max_model_len"]) == ("house", "generic", 300)
    flare = other["flare"]
    assert (flare["max_concurrency"], flare["prefill_chunk_size"], flare["default_max_tokens"]) == (14, 33, 50)
    assert flare["vocab_size"] == plain["flare"]["vocab_size"] > 256
    assert other["permission"][0]["allow_logprobs"]


def test_log_probabilities_are_advertised_as_they_can_be_had(sources: Sources) -> None:
    without = card(sources, max_top="0")
    assert (without["flare"]["max_top_logprobs"], without["permission"][0]["allow_logprobs"]) == (0, False)
    five = changed(sources["generic"], max_top="5")
    assert model_card(five.facts, "i", 1)["flare"]["max_top_logprobs"] == 5
    body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}
    decode({**body, "top_logprobs": 5}, five.decode_limits)
    with pytest.raises(InvalidRequest, match="5"):
        decode({**body, "top_logprobs": 6}, five.decode_limits)


def test_the_default_budget_is_advertised_and_needs_reasoning(sources: Sources) -> None:
    assert card(sources, "qwen38")["flare"]["thinking_token_budget"] is None
    assert card(sources, "qwen38", thinking_token_budget="9")["flare"]["thinking_token_budget"] == 9
    with pytest.raises(SettingsError, match="thinking_token_budget"):
        changed(sources["generic"], thinking_token_budget="9").lowering()


def test_sampling_in_force_is_advertised(sources: Sources) -> None:
    shown = card(sources, "qwen38", temperature="0.8", seed="5")["flare"]
    assert (shown["sampling_defaults"]["temperature"], shown["sampling_defaults"]["seed"]) == (0.8, 5)
    assert shown["sampling_ranges"]["temperature"] == {"min": 0.7, "max": 1.0}
    assert shown["sampling_ranges"]["top_k"] is None


def test_capabilities_are_the_recipes(sources: Sources) -> None:
    facts = {recipe: source.facts for recipe, source in sources.items()}
    assert ollama_show(facts["generic"])["capabilities"] == ["completion"]
    assert ollama_show(facts["qwen38"])["capabilities"] == ["completion", "tools", "thinking"]


def test_the_digest_survives_a_restart_and_follows_the_settings(sources: Sources) -> None:
    def found(**given: str) -> str:
        return digest(changed(sources["generic"], **given).facts)

    assert found() == found() == found(port="9001", api_key="secret", drain_seconds="3")
    assert len({found(), found(context="300"), found(aliases="house"), found(max_top="3")}) == 4


def test_a_context_beyond_the_models_is_refused(sources: Sources) -> None:
    with pytest.raises(SettingsError, match=r"engine\.context: 513 .* 512"):
        start(changed(sources["generic"], context="513").settings, hub="test")


def test_nothing_of_keys_and_paths_is_advertised(sources: Sources) -> None:
    startup = changed(sources["generic"], api_key="sk-secret")
    shown = repr(model_card(startup.facts, "i", 1)) + repr(ollama_show(startup.facts))
    assert "sk-secret" not in shown and "/" not in shown.replace("org/", "")


@pytest.mark.parametrize("warm", [True, False])
def test_a_warm_lowering_has_read_the_tokenizer(sources: Sources, warm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the first request doesn't wait for it."""
    startup = start(sources["generic"].settings, hub="test")
    startup.lowering(warm=warm)
    monkeypatch.setattr(tokenizer, "LibraryTokenizer", None)
    if warm:
        assert startup.model.tokenizer.encode("hi", specials=True)
        return
    with pytest.raises(AttributeError):
        startup.model.tokenizer.encode("hi", specials=True)
