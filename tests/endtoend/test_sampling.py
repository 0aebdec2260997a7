"""Sampling over whole requests: defaults, ranges, clamps, seeds, types, and the distribution that the filters leave."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from serve_app.settings import SettingsError
from tests.endtoend.conftest import scripted_site
from tests.support.inline_server import Site
from tests.support.tiny_sources import log_softmax, tiny_source

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def in_force(site: Site, **fields: Any) -> Any:
    """The sampling with which a request runs."""
    site.completion("plain", max_tokens=1, **fields)
    return site.engine.prepared[-1].children[0].sampling


# ---- defaults and ranges ----


def test_omitted_fields_take_the_recipes_defaults(scripted: Site) -> None:
    sampling = in_force(scripted)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 0.95, 20)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.0, 1.0)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("asked", "field", "used"),
    [
        ({"temperature": 0}, "temperature", 0.7),
        ({"temperature": 5}, "temperature", 1.0),
        ({"temperature": -3.5}, "temperature", 0.7),
        ({"temperature": 0.8}, "temperature", 0.8),
        ({"top_p": 0}, "top_p", 0.8),
        ({"top_p": 7}, "top_p", 0.95),
        ({"presence_penalty": 9}, "presence_penalty", 2.0),
        ({"presence_penalty": -9}, "presence_penalty", 0.0),
        ({"top_k": 50}, "top_k", 20),
        ({"top_k": -5}, "top_k", 20),
        ({"min_p": 0.5}, "min_p", 0.0),
        ({"repetition_penalty": 1.5}, "repetition_penalty", 1.0),
        ({"frequency_penalty": 1}, "frequency_penalty", 0.0),
    ],
)
def test_values_clamp_and_fixed_parameters_stay(scripted: Site, asked: dict[str, Any], field: str, used: float) -> None:
    assert getattr(in_force(scripted, **asked), field) == used


@pytest.mark.parametrize(
    ("asked", "field", "used"),
    [
        ({"temperature": 0}, "temperature", 0.01),
        ({"top_k": 10**9}, "top_k", 1024),
        ({"top_k": 0}, "top_k", -1),
        ({"top_k": -1}, "top_k", -1),
        ({"min_p": 2}, "min_p", 1.0),
        ({"repetition_penalty": 0}, "repetition_penalty", 0.5),
        ({"frequency_penalty": -3}, "frequency_penalty", -2.0),
    ],
)
def test_other_models_have_wide_ranges(tiny: tuple[Site, Any], asked: dict[str, Any], field: str, used: float) -> None:
    assert getattr(in_force(tiny[0], **asked), field) == used


def test_the_card_shows_defaults_and_ranges(scripted: Site) -> None:
    flare = scripted.send("GET", "/v1/models").json["data"][0]["flare"]
    assert flare["sampling_defaults"] == {
        "temperature": 1.0,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": None,
    }
    assert flare["sampling_ranges"]["temperature"] == {"min": 0.7, "max": 1.0}
    assert flare["sampling_ranges"]["top_k"] is None


@pytest.mark.parametrize(
    "sampling",
    [
        {"ranges": {"temperature": [1.1, 1.5]}},
        {"ranges": {"temperature": [0.0, 1.5]}},
        {"ranges": {"top_p": [0.5, 1.5]}},
        {"ranges": {"min_p": [0.1, 0.9]}},
        {"temperature": 3.0},
        {"ranges": {"top_k": [5, 2]}},
    ],
)
def test_ranges_that_miss_their_default_or_hold_bad_values_fail_at_start(
    tmp_path: Path, sampling: dict[str, Any]
) -> None:
    with pytest.raises(SettingsError, match="sampling"):
        scripted_site(tmp_path, sampling=sampling)


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", True),
        ("temperature", "1"),
        ("top_p", [1]),
        ("top_k", 20.0),
        ("top_k", True),
        ("top_k", "20"),
        ("min_p", {}),
        ("seed", 1.5),
        ("seed", "1"),
        ("seed", 2**64),
        ("repetition_penalty", "x"),
        ("n", 0),
        ("n", 1.0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("min_tokens", -1),
        ("ignore_eos", 1),
    ],
)
def test_malformed_types(scripted: Site, endpoint: str, field: str, value: Any) -> None:
    body = {"prompt": "plain"} if endpoint == COMPLETIONS else {"messages": [{"role": "user", "content": "plain"}]}
    assert field in scripted.refused(endpoint, {**body, field: value})


def test_numbers_that_json_does_not_have(scripted: Site) -> None:
    for text in (b"NaN", b"Infinity", b"1e999"):
        reply = scripted.send("POST", COMPLETIONS, b'{"prompt": "plain", "temperature": %s}' % text)
        assert reply.status == 400


# ---- seeds ----


def test_a_seed_gives_the_same_tokens_and_others_differ(tiny: tuple[Site, Any]) -> None:
    site, _ = tiny

    def ids(**fields: Any) -> tuple[int, ...]:
        answer = site.completion("hello", max_tokens=12, temperature=1.5, top_p=1, return_token_ids=True, **fields)
        return tuple(answer["choices"][0]["token_ids"])

    assert ids(seed=4) == ids(seed=4) != ids(seed=5)
    assert ids(seed=-1) == ids(seed=2**64 - 1), "a signed seed is its bit pattern"
    assert len({ids() for _ in range(4)}) == 4, "without a default seed each request draws its own"


def test_requests_without_a_seed_follow_the_cards(tmp_path: Path) -> None:
    source, _ = tiny_source(tmp_path)
    with Site(source, cache=tmp_path / "cache", sampling={"seed": 1234}) as site:
        flare = site.send("GET", "/v1/models").json["data"][0]["flare"]
        assert flare["sampling_defaults"]["seed"] == 1234
        fields: dict[str, Any] = {"max_tokens": 10, "temperature": 1.5, "top_p": 1, "return_token_ids": True}
        first, second = (site.completion("hello", **fields)["choices"][0]["token_ids"] for _ in range(2))
        given = site.completion("hello", seed=1234, **fields)["choices"][0]["token_ids"]
        assert first == second == given
        assert site.completion("hello", seed=9, **fields)["choices"][0]["token_ids"] != first


# ---- distributions ----


def left(logprobs: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Float64 probabilities after temperature, top-k, top-p and min-p in this order, each over what the one before
    left."""
    chances = (logprobs / temperature).softmax(0)
    order = chances.argsort(descending=True, stable=True)
    kept = order[:top_k] if top_k > 0 else order
    mass = chances[kept] / chances[kept].sum()
    kept = kept[mass.cumsum(0) - mass < top_p]
    kept = kept[chances[kept] >= min_p * chances[order[0]]]
    result = torch.zeros_like(chances)
    result[kept] = chances[kept]
    return result / result.sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(0.9, -1, 1.0, 0.0), (1.3, 12, 1.0, 0.0), (1.2, 30, 0.8, 0.02)],
)
def test_requests_follow_the_filtered_distribution(
    tiny: tuple[Site, Any], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    site, model = tiny
    prompt = [5, 6, 7]
    wanted = left(log_softmax(model, prompt)[-1], temperature, top_k, top_p, min_p)
    counts = torch.zeros(len(wanted), dtype=torch.float64)
    groups, each = 6, 128
    for group in range(groups):
        answer = site.completion(
            prompt,
            n=each,
            max_tokens=1,
            ignore_eos=True,
            return_token_ids=True,
            seed=group * each,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
        )
        for choice in answer["choices"]:
            counts[choice["token_ids"][0]] += 1
    ideal = wanted * groups * each
    assert int(counts[wanted == 0].sum()) == 0
    often = ideal >= 5
    observed = torch.cat((counts[often], counts[~often].sum()[None]))
    expected = torch.cat((ideal[often], ideal[~often].sum()[None]))
    real = expected > 0
    statistic = float(((observed - expected)[real] ** 2 / expected[real]).sum())
    freedom = max(int(real.sum()) - 1, 1)
    # Wilson and Hilferty's approximation: five sigmas above the mean of chi-square.
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 5 * math.sqrt(2 / (9 * freedom))) ** 3
