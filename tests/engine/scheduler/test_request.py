"""What a request tells the ranks, and when it ends."""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler.request import Group, Request, TokenStops
from engine.types.constraint import Constraint
from engine.types.events import TokenRecord
from engine.types.request import OutputOptions, PreparedPrompt
from tests.support.fake_rank import EOS, make_prompt


def request(prompt: PreparedPrompt) -> Request:
    return Request(Group("g", None), 0, prompt, 64)


def test_setup_of_a_plain_request() -> None:
    prompt = make_prompt([5, 6, 7], output=OutputOptions(logprobs=3, logprob_token_ids=(9, 8)))
    setup = request(prompt).setup(2, with_prompt=False)
    assert (setup.length, setup.prompt_length, setup.prompt) == (2, 3, b"")
    assert (setup.banned_until, setup.banned_ids) == (0, ())
    assert (setup.logprobs, setup.logprob_ids, setup.sampling) == (3, (9, 8), prompt.sampling)


def test_penalties_and_scripts_need_the_prompt_and_what_was_committed() -> None:
    prompt = make_prompt([5, 6], committed=(TokenRecord(9),))
    for sampling in (
        replace(prompt.sampling, repetition_penalty=1.5),
        replace(prompt.sampling, presence_penalty=0.5),
        replace(prompt.sampling, frequency_penalty=-0.5),
    ):
        setup = request(replace(prompt, sampling=sampling)).setup(0, with_prompt=False)
        assert np.frombuffer(setup.prompt, "<i4").tolist() == [5, 6, 9]
        assert setup.prompt_length == 2
    assert len(request(prompt).setup(0, with_prompt=True).prompt) == 12


def test_min_tokens_ban_what_ends_at_once() -> None:
    prompt = make_prompt([5, 6], min_tokens=3, eos_ids=(EOS, 11), stop_sequences=((7,), (8, 9)))
    setup = request(prompt).setup(0, with_prompt=False)
    assert (setup.banned_until, setup.banned_ids) == (5, (EOS, 11, 7))
    ignoring = request(replace(prompt, ignore_eos=True)).setup(0, with_prompt=False)
    assert ignoring.banned_ids == (7,)
    constrained = request(replace(prompt, constraint=Constraint("json_object", ""))).setup(0, with_prompt=False)
    assert constrained.banned_until == 0, "the guide masks them instead"


def test_verdicts() -> None:
    made = request(make_prompt([5], max_tokens=2, stop_sequences=((3,),)))
    assert made.verdict() is None
    made.tokens.append(4)
    assert made.verdict() is None
    made.tokens[-1] = EOS
    assert made.verdict() == "eos"
    made.tokens[-1] = 3
    assert made.verdict() == "token_stop"
    made.tokens.append(4)
    assert made.verdict() == "limit"


def test_stop_sequences_wait_for_min_tokens() -> None:
    made = request(make_prompt([5], max_tokens=9, min_tokens=3, stop_sequences=((3, 4),)))
    made.tokens.extend([3, 4])
    assert made.verdict() is None
    made.tokens.extend([3, 4])
    assert made.verdict() == "token_stop"


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 2), max_size=8),
    st.integers(0, 4),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple), max_size=3),
)
def test_stops_match_generated_suffixes_only(
    generated: list[int], prompt: int, sequences: list[tuple[int, ...]]
) -> None:
    tokens = array("i", [1] * prompt + generated)
    wanted = any(len(stop) <= len(generated) and tuple(generated[-len(stop) :]) == stop for stop in sequences)
    if tokens:
        assert TokenStops(sequences).match(tokens, len(generated)) == wanted
