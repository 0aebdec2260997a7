"""The thinking marker: deterministic, bound to its text, indifferent to foreign signatures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.errors import InvalidRequest
from protocols.messages.thinking import PREFIX, check, marker


@given(st.text())
def test_a_marker_is_deterministic_and_accepted_with_its_own_text(text: str) -> None:
    assert marker(text) == marker(text)
    assert marker(text).startswith("flare-thinking-v1:")
    check(text, marker(text), "messages.1.content.0.signature")


@given(st.text(), st.text())
def test_a_marker_is_refused_with_another_text(text: str, other: str) -> None:
    if text == other:
        return
    with pytest.raises(InvalidRequest, match="signature") as caught:
        check(other, marker(text), "messages.1.content.0.signature")
    assert caught.value.field == "messages.1.content.0.signature"


@pytest.mark.parametrize("change", [lambda m: m[:-1] + ("0" if m[-1] != "0" else "1"), lambda m: m + "x", str.upper])
def test_a_damaged_marker_is_refused(change: object) -> None:
    assert callable(change)
    damaged = PREFIX + change(marker("I add 2 and 2."))[len(PREFIX) :]
    with pytest.raises(InvalidRequest):
        check("I add 2 and 2.", damaged, "signature")


@pytest.mark.parametrize("signature", [None, "", "EqoBCkgIARABGAIiQL", "flare-thinking-v0:" + "0" * 64, PREFIX + "abc"])
def test_foreign_signatures_pass(signature: str | None) -> None:
    check("Readable reasoning of another provider.", signature, "signature")


def test_lone_surrogates_have_a_marker() -> None:
    check("\ud800", marker("\ud800"), "signature")
