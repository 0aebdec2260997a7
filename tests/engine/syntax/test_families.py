"""Every family's outputs, in every chunking: streamed equals whole, and all characters come back."""

from __future__ import annotations

import json
import random
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.syntax.piece import Syntax
from tests.support.family_outputs import OUTPUTS, Output
from tests.support.outputs import CONTROL, Folded, machine, run, segments

CASES = [pytest.param(output, id=f"{output.recipe}-{output.name}") for output in OUTPUTS]


def check(folded: Folded, output: Output, *, truncated: bool) -> None:
    assert folded.text == output.content
    assert folded.reasoning == output.reasoning
    assert folded.calls == list(output.calls)
    expected = output.started if output.started is not None else tuple(name for name, _ in output.calls)
    assert folded.started == list(expected)
    if output.failure and (output.never or not truncated):
        assert output.failure in folded.failure
    else:
        assert folded.failure == ""


@pytest.mark.parametrize("output", CASES)
@pytest.mark.parametrize("cut", [None, 1, 2, 5])
def test_what_each_output_means(output: Output, cut: int | None) -> None:
    fed = segments(output.recipe, output.text, cut)
    for truncated in (False, True):
        check(
            run(machine(output.recipe, opening=output.opening), fed, truncated=truncated), output, truncated=truncated
        )


@pytest.mark.parametrize("output", CASES)
def test_every_cut_in_two_gives_the_same(output: Output) -> None:
    whole = run(machine(output.recipe, opening=output.opening), segments(output.recipe, output.text))
    words = CONTROL[output.recipe]
    for at in range(1, len(output.text)):
        if any(
            output.text[start : start + len(word)] == word for word in words for start in range(at - len(word) + 1, at)
        ):
            continue  # control tokens are never cut
        first = segments(output.recipe, output.text[:at])
        second = [
            type(segment)(segment.token + len(first), segment.id, segment.text)
            for segment in segments(output.recipe, output.text[at:])
        ]
        assert run(machine(output.recipe, opening=output.opening), [*first, *second]) == whole, at


@pytest.mark.parametrize("recipe", sorted(CONTROL))
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_mix_in_any_chunking_gives_the_same(recipe: str, data: st.DataObject) -> None:
    mine = [output.text for output in OUTPUTS if output.recipe == recipe] or ["x"]
    pieces = st.one_of(st.sampled_from(mine), st.sampled_from(CONTROL[recipe]), st.text('<>/\n |abc="{}', max_size=12))
    text = "".join(data.draw(st.lists(pieces, max_size=5)))
    opening: Literal["reasoning", "content"] = data.draw(st.sampled_from(["reasoning", "content"]))
    structured = data.draw(st.booleans())
    padded = data.draw(st.booleans())
    active = data.draw(st.booleans())
    seed = data.draw(st.integers(0, 2**32))

    def opened() -> Syntax:
        return machine(recipe, opening=opening, structured=structured, padded=padded, active=active)

    whole = run(opened(), segments(recipe, text))
    chunked = run(opened(), segments(recipe, text, random.Random(seed)))
    if recipe.startswith("deepseek"):  # the official parser publishes newlines next to dropped markup either way
        whole.order, chunked.order = [], []
    assert chunked == whole
    for _, arguments in whole.calls:
        assert isinstance(json.loads(arguments), dict)
    if not active:
        assert not whole.calls
        assert not whole.failure
