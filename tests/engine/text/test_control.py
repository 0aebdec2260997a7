"""Spelled control tokens are broken before rendering and whole again after it."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from engine.text.control import BREAK, ControlTokens, clean, mark, strip_breaks, take_marks

WORDS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "[gMASK]", "<tool_call>", "ab", "bc")
CONTROL = ControlTokens(WORDS)
FINDER = re.compile("|".join(map(re.escape, WORDS)))
TEXTS = st.lists(
    st.one_of(st.sampled_from([*WORDS, "<|im_", "start|>", "<", ">", "think", "/think"]), st.text(max_size=4))
)


@given(TEXTS.map("".join), TEXTS.map("".join))
def test_protected_texts_hold_no_control_token_alone_or_together(first: str, second: str) -> None:
    protected = CONTROL.protect(first), CONTROL.protect(second)
    assert not FINDER.search("".join(protected))
    assert strip_breaks(protected[0]) == clean(first)


@given(TEXTS.map("".join))
def test_text_in_a_template_splits_into_what_it_was(text: str) -> None:
    rendered = f"<|im_start|>user\n{CONTROL.protect(text)}<|im_end|>\n<think>"
    segments = CONTROL.split(rendered)
    assert "".join(part for part, _ in segments) == f"<|im_start|>user\n{clean(text)}<|im_end|>\n<think>"
    recognised = [found for part, trusted in segments if trusted for found in FINDER.findall(part)]
    assert recognised == ["<|im_start|>", "<|im_end|>", "<think>"]


@given(TEXTS.map("".join))
def test_names_glued_into_tags_form_no_control_token(name: str) -> None:
    protected = CONTROL.protect(name)
    for glued in (f"<{protected}>", f"</{protected}>", f"<|{protected}|>", f"[{protected}]"):
        assert not FINDER.search(glued)


def test_harmless_text_is_one_trusted_segment() -> None:
    rendered = "<|im_start|>user\n" + CONTROL.protect("x < y and y > z") + "<|im_end|>"
    assert CONTROL.split(rendered) == (("<|im_start|>user\nx < y and y > z<|im_end|>", True),)
    assert CONTROL.split("") == ()


def test_values_are_protected_with_their_keys() -> None:
    tree = CONTROL.protect_tree({"<think>": ["<think>", 1, None, ("x", {"y": True})]})
    assert tree == {f"<{BREAK}think>": [f"<{BREAK}think>", 1, None, ["x", {"y": True}]]}


def test_without_control_tokens_text_is_only_cleaned() -> None:
    assert ControlTokens(["\n\n", "x"]).protect("a\n\nx\ud800") == "a\n\nx\ufffd"


def test_marks_are_taken_out_with_their_places() -> None:
    assert take_marks(f"ab{mark(0)}c{mark(7)}{mark(2)}d") == ("abcd", [2, 3, 3])


def test_what_is_remembered_is_bounded_and_changes_nothing() -> None:
    control = ControlTokens(WORDS)
    texts = [f"name {number}" for number in range(5000)] + ["<|im_end|>", "im_end", "a</think>b", "</th"]
    first = [control.protect(text) for text in texts]
    assert [control.protect(text) for text in texts] == first == [control._protected(text) for text in texts]
    assert len(control._known) <= 4096
