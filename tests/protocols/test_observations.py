"""Entries, arrays and prompt scores as the protocols spell them."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from engine.types.events import ObservedToken, PositionScore, TokenRecord
from protocols.observations import (
    NOT_FINITE,
    PromptArrays,
    TokenNames,
    chat_entries,
    chat_entry,
    generated_arrays,
    prompt_logprobs,
)

VOCABULARY = [b" a", b"b", "é".encode(), "😀".encode()[:2], "😀".encode()[2:], b"<eos>", b"\xff", b"long token"]
NAMES = TokenNames(VOCABULARY.__getitem__)
AS_IDS = TokenNames(VOCABULARY.__getitem__, as_ids=True)


def token(record: TokenRecord, offset: int = 0) -> ObservedToken:
    return ObservedToken(record, VOCABULARY[record.id], offset, "text")


def test_natural_alternatives_stay_as_the_engine_ordered_them() -> None:
    entry = chat_entry(TokenRecord(5, -3.0, ((1, -0.5), (0, -1.0))), NAMES, explicit=False)
    assert entry == {
        "token": "<eos>",
        "logprob": -3.0,
        "bytes": [60, 101, 111, 115, 62],
        "top_logprobs": [
            {"token": "b", "logprob": -0.5, "bytes": [98]},
            {"token": " a", "logprob": -1.0, "bytes": [32, 97]},
        ],
    }


def test_explicit_ids_get_the_chosen_token_only_when_it_is_absent() -> None:
    absent = chat_entry(TokenRecord(5, -3.0, ((1, -0.5),)), NAMES, explicit=True)
    assert [alternative["token"] for alternative in absent["top_logprobs"]] == ["b", "<eos>"]
    present = chat_entry(TokenRecord(5, -3.0, ((5, -3.0), (1, -0.5))), NAMES, explicit=True)
    assert [alternative["token"] for alternative in present["top_logprobs"]] == ["<eos>", "b"]


def test_a_hundred_and_twenty_eight_ids_and_the_chosen_one() -> None:
    record = TokenRecord(0, -1.0, tuple((1, float(-i)) for i in range(128)))
    assert len(chat_entry(record, NAMES, explicit=True)["top_logprobs"]) == 129


def test_bytes_stay_exact_where_text_is_replaced() -> None:
    entry = chat_entry(TokenRecord(3, -1.0, ((6, -2.0),)), NAMES, explicit=False)
    assert (entry["token"], entry["bytes"]) == ("\ufffd", [0xF0, 0x9F])
    assert (entry["top_logprobs"][0]["token"], entry["top_logprobs"][0]["bytes"]) == ("\ufffd", [0xFF])


def test_token_ids_instead_of_strings_keep_bytes() -> None:
    entry = chat_entry(TokenRecord(1, -1.0, ((0, -2.0),)), AS_IDS, explicit=False)
    assert (entry["token"], entry["bytes"]) == ("token_id:1", [98])
    assert entry["top_logprobs"][0]["token"] == "token_id:0"


def test_values_json_cannot_hold() -> None:
    entry = chat_entry(TokenRecord(1, -math.inf, ((0, -math.inf),)), NAMES, explicit=False)
    assert entry["logprob"] == NOT_FINITE == entry["top_logprobs"][0]["logprob"] == -9999.0


def test_forced_and_unobserved_tokens_have_no_entry() -> None:
    tokens = [token(TokenRecord(1, -1.0)), token(TokenRecord(1, -1.0, forced=True)), token(TokenRecord(1))]
    assert len(chat_entries(tokens, NAMES, explicit=False)) == 1
    assert len(generated_arrays(tokens, NAMES, 0)) == 1


def test_arrays_are_parallel_and_maps_hold_the_chosen_token() -> None:
    tokens = [token(TokenRecord(0, -1.0, ((1, -0.5),)), 0), token(TokenRecord(1, -0.25), 2)]
    assert generated_arrays(tokens, NAMES, 10).wire() == {
        "tokens": [" a", "b"],
        "token_logprobs": [-1.0, -0.25],
        "top_logprobs": [{"b": -0.5, " a": -1.0}, {"b": -0.25}],
        "text_offset": [10, 12],
    }


def test_the_first_of_equal_strings_stays_in_a_map() -> None:
    tokens = [token(TokenRecord(6, -3.0, ((3, -1.0), (4, -2.0))))]
    names = generated_arrays([token(TokenRecord(6, -3.0, ((3, -1.0),)))], NAMES, 0).top_logprobs
    assert names == [{"\ufffd": -1.0}]
    ids = generated_arrays(tokens, AS_IDS, 0).top_logprobs
    assert ids == [{"token_id:3": -1.0, "token_id:4": -2.0, "token_id:6": -3.0}]


def test_prompt_entries_across_chunks() -> None:
    arrays = PromptArrays([0, 2, 3, 1], NAMES, alternatives=1)
    first = arrays.entries([None, PositionScore(2, -0.5, 2, ((1, -0.1, 1), (2, -0.5, 2)))])
    second = arrays.entries([PositionScore(3, -math.inf, 9), PositionScore(1, -0.7, 1, ((1, -0.7, 1),))])
    first.extend(second)
    assert first.wire() == {
        "tokens": [" a", "é", "\ufffd", "b"],
        "token_logprobs": [None, -0.5, -9999.0, -0.7],
        "top_logprobs": [None, {"b": -0.1, "é": -0.5}, {"\ufffd": -9999.0}, {"b": -0.7}],
        "text_offset": [0, 2, 3, 4],
    }


def test_prompt_scores_name_ids_and_decoded_text() -> None:
    scores = [None, PositionScore(1, -2.5, 2, ((0, -0.25, 1), (1, -2.5, 2), (2, -9.0, 3)))]
    assert prompt_logprobs(scores, AS_IDS, 2) == [
        None,
        {
            "1": {"logprob": -2.5, "rank": 2, "decoded_token": "b"},
            "0": {"logprob": -0.25, "rank": 1, "decoded_token": " a"},
        },
    ]
    assert prompt_logprobs(scores, NAMES, 0)[1] == {"1": {"logprob": -2.5, "rank": 2, "decoded_token": "b"}}


@given(st.lists(st.integers(0, len(VOCABULARY) - 1), min_size=1, max_size=30), st.data())
def test_prompt_offsets_slice_the_decoded_tokens_for_any_chunking(ids: list[int], data: st.DataObject) -> None:
    arrays = PromptArrays(ids, NAMES, alternatives=0)
    whole = arrays.entries([])
    left = len(ids)
    while left:
        size = data.draw(st.integers(1, left))
        whole.extend(arrays.entries([PositionScore(0, -1.0, 1)] * size))
        left -= size
    text = "".join(NAMES.text(id) for id in ids)
    ends = [*whole.text_offset[1:], len(text)]
    assert [text[start:end] for start, end in zip(whole.text_offset, ends, strict=True)] == whole.tokens
