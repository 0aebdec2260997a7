"""Strict types, the shared rules and their error texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from engine.types.request import Stops
from protocols.errors import InvalidRequest
from protocols.fields import (
    DecodeLimits,
    LogprobFields,
    SamplingFields,
    StringList,
    TokenStopFields,
    check_alternatives,
    check_prompt_scores,
    path,
    read,
    refuse_unsupported,
)

LIMITS = DecodeLimits(vocab_size=100, prompt_logprobs=True)


class Body(SamplingFields, TokenStopFields, LogprobFields):
    stop: StringList | None = None


def refusal(body: Mapping[str, Any]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        fields = read(Body, body)
        fields.stops(fields.stop or [], LIMITS)
        fields.explicit_ids(True, "logprobs", LIMITS)
    assert caught.value.field is not None and caught.value.message.startswith(caught.value.field)
    return caught.value


def stops(body: Mapping[str, Any]) -> Stops:
    fields = read(Body, body)
    return fields.stops(fields.stop or [], LIMITS)


NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", ["0.5", True, [], {}, float("nan"), float("inf"), 10**400])
def test_numbers_are_not_coerced(field: str, value: object) -> None:
    assert refusal({field: value}).field == field


@pytest.mark.parametrize("field", ["top_k", "seed", "min_tokens"])
@pytest.mark.parametrize("value", ["20", 20.0, True, [20]])
def test_integers_are_not_coerced(field: str, value: object) -> None:
    assert refusal({field: value}).message == f"{field}: must be an integer"


@pytest.mark.parametrize("field", ["ignore_eos", "include_stop_str_in_output", "return_tokens_as_token_ids"])
@pytest.mark.parametrize("value", ["true", 1, 0, []])
def test_booleans_are_not_coerced(field: str, value: object) -> None:
    assert refusal({field: value}).message == f"{field}: must be true or false"


@pytest.mark.parametrize("field", [*NUMBERS, "top_k", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens"])
def test_null_is_an_omission(field: str) -> None:
    assert read(Body, {field: None}) == read(Body, {})


def test_sampling_out_of_range_passes_to_the_lowering() -> None:
    overrides = read(Body, {"temperature": 99, "top_p": 0, "min_p": -3, "top_k": 10**9}).overrides()
    assert (overrides.temperature, overrides.top_p, overrides.min_p, overrides.top_k) == (99.0, 0.0, -3.0, 10**9)


def test_top_k_zero_disables_the_filter() -> None:
    assert read(Body, {"top_k": 0}).overrides().top_k == -1


@pytest.mark.parametrize(
    ("given", "used"), [(0, 0), (7, 7), (-1, 2**64 - 1), (-(2**63), 2**63), (2**63 - 1, 2**63 - 1)]
)
def test_seeds_are_64_bits(given: int, used: int) -> None:
    assert read(Body, {"seed": given}).overrides().seed == used


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_seeds_beyond_64_bits_are_refused(seed: int) -> None:
    assert refusal({"seed": seed}).field == "seed"


def test_unknown_fields_are_ignored() -> None:
    assert read(Body, {"whatever": object()}) == read(Body, {})


def test_string_stops() -> None:
    assert stops({"stop": "END"}).strings == ("END",)
    assert stops({"stop": ["a", "b", "c", "d"]}).strings == ("a", "b", "c", "d")
    assert stops({"stop": []}) == Stops()
    assert stops({"stop": "x", "include_stop_str_in_output": True}).include_in_output


@pytest.mark.parametrize(
    ("stop", "limit"),
    [(["a", "b", "c", "d", "e"], "at most 4"), (["a", ""], "empty"), ("", "empty"), ("é" * 2048 + "x", "4096")],
)
def test_string_stops_over_a_limit(stop: object, limit: str) -> None:
    error = refusal({"stop": stop})
    assert error.field == "stop" and limit in error.message


def test_string_stops_at_the_byte_limit() -> None:
    assert stops({"stop": ["é" * 1024, "é" * 1024]}).strings[0][0] == "é"


@pytest.mark.parametrize("stop", [1, True, {}, ["a", 1], [None], [["a"]]])
def test_string_stops_of_a_wrong_type(stop: object) -> None:
    assert (refusal({"stop": stop}).field or "").startswith("stop")


def test_token_stops_of_both_fields() -> None:
    assert stops({"stop_token_ids": [3, 99], "stop_token_sequences": [[1, 2], [3]]}).sequences == (
        (3,),
        (99,),
        (1, 2),
        (3,),
    )


def test_sixteen_sequences_of_sixty_four_ids_are_the_limit() -> None:
    assert len(stops({"stop_token_ids": [1] * 8, "stop_token_sequences": [[1] * 64] * 8}).sequences) == 16


@pytest.mark.parametrize(
    ("body", "field", "limit"),
    [
        ({"stop_token_ids": [1] * 17}, "stop_token_ids", "16"),
        ({"stop_token_ids": [1] * 8, "stop_token_sequences": [[1]] * 9}, "stop_token_sequences", "16"),
        ({"stop_token_sequences": [[1], [1] * 65]}, "stop_token_sequences[1]", "64"),
        ({"stop_token_sequences": [[]]}, "stop_token_sequences[0]", "empty"),
        ({"stop_token_ids": [5, 100]}, "stop_token_ids[1]", "99"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "-1"),
        ({"stop_token_sequences": [[1, 100]]}, "stop_token_sequences[0][1]", "99"),
        ({"stop_token_ids": [True]}, "stop_token_ids[0]", "integer"),
        ({"stop_token_ids": [1.0]}, "stop_token_ids[0]", "integer"),
        ({"stop_token_ids": 1}, "stop_token_ids", "array"),
        ({"stop_token_sequences": [1]}, "stop_token_sequences[0]", "array"),
        ({"stop": "x", "stop_token_ids": [1]}, "stop", "combined"),
        ({"stop": "x", "stop_token_sequences": [[1]]}, "stop", "combined"),
        ({"min_tokens": -1}, "min_tokens", "0"),
    ],
)
def test_token_stops_over_a_limit(body: dict[str, object], field: str, limit: str) -> None:
    error = refusal(body)
    assert error.field == field and limit in error.message


def explicit(ids: object, *, enabled: bool = True, limits: DecodeLimits = LIMITS) -> tuple[int, ...]:
    return read(Body, {"logprob_token_ids": ids}).explicit_ids(enabled, "logprobs: true", limits)


def test_explicit_ids_lose_repetitions_and_keep_order() -> None:
    assert explicit([9, 3, 9, 7, 3]) == (9, 3, 7)
    assert explicit(list(range(100)) + [0] * 28) == tuple(range(100))


@pytest.mark.parametrize("ids", [None, []])
def test_no_explicit_ids(ids: object) -> None:
    assert explicit(ids, enabled=False, limits=DecodeLimits(100, logprob_token_ids=False)) == ()


@pytest.mark.parametrize(
    ("ids", "limit"),
    [([1] * 129, "128"), ([100], "99"), ([-1], "99"), ([True], "integer"), ([1.0], "integer"), ("1", "array")],
)
def test_explicit_ids_over_a_limit(ids: object, limit: str) -> None:
    error = refusal({"logprob_token_ids": ids})
    assert (error.field or "").startswith("logprob_token_ids") and limit in error.message


def test_explicit_ids_need_logprobs_and_the_capability() -> None:
    with pytest.raises(InvalidRequest, match="set logprobs: true"):
        explicit([1], enabled=False)
    with pytest.raises(InvalidRequest, match="re-export"):
        explicit([1], limits=DecodeLimits(100, logprob_token_ids=False))


def test_alternatives_beyond_the_loaded_capacity() -> None:
    five = DecodeLimits(100, max_top_logprobs=5, prompt_logprobs=True)
    check_alternatives(5, "top_logprobs", five)
    check_prompt_scores(5, "prompt_logprobs", five)
    with pytest.raises(InvalidRequest, match="top_logprobs: must be at most 5"):
        check_alternatives(6, "top_logprobs", five)
    with pytest.raises(InvalidRequest, match="prompt_logprobs: must be at most 5"):
        check_prompt_scores(6, "prompt_logprobs", five)


def test_capabilities_that_are_off() -> None:
    none = DecodeLimits(100, max_top_logprobs=0)
    check_alternatives(None, "logprobs", none)
    check_prompt_scores(None, "prompt_logprobs", none)
    with pytest.raises(InvalidRequest, match="without generation log probabilities"):
        check_alternatives(0, "logprobs", none)
    with pytest.raises(InvalidRequest, match="without prompt log probabilities"):
        check_prompt_scores(0, "prompt_logprobs", none)


@pytest.mark.parametrize(
    "body",
    [
        {"logit_bias": {"1": 5}},
        {"bad_words": ["x"]},
        {"allowed_token_ids": [1]},
        {"json_schema": {"type": "object"}},
        {"regex": "a"},
        {"ebnf": 'root ::= "a"'},
        {"use_beam_search": True},
        {"length_penalty": 0.5},
        {"truncate_prompt_tokens": 5},
        {"skip_special_tokens": False},
        {"own": 1},
    ],
)
def test_known_fields_that_cant_be_honoured(body: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="is not supported") as caught:
        refuse_unsupported(body, {"own": (2,)})
    assert caught.value.field == next(iter(body))


@pytest.mark.parametrize(
    "body",
    [{"logit_bias": {}}, {"logit_bias": None}, {"use_beam_search": False}, {"length_penalty": 1.0}, {"own": 2}],
)
def test_their_neutral_values_pass(body: dict[str, object]) -> None:
    refuse_unsupported(body, {"own": (2,)})


def test_paths_leave_union_tags_out() -> None:
    assert path(("messages", 0, "<user>", "content", 1)) == "messages[0].content[1]"


def test_a_place_inside_the_body() -> None:
    with pytest.raises(InvalidRequest, match=r"^tools\[2\]\.seed: must be an integer$"):
        read(Body, {"seed": "x"}, "tools[2]")
