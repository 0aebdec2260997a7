"""Incremental decoding: the same text as decoding everything at once, and where each token begins."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.detokenize import Detokenizer
from engine.text.tokenizer import TokenTable


def decode(pieces: list[bytes]) -> tuple[str, list[tuple[str, int, bool]]]:
    decoder = Detokenizer(TokenTable(pieces, bytes(len(pieces))))
    steps = [decoder.feed(token) for token in range(len(pieces))]
    return "".join(text for text, _, _ in steps) + decoder.flush(), steps


PIECES = st.lists(
    st.one_of(
        st.binary(min_size=0, max_size=4),
        st.text(max_size=3).map(lambda text: text.encode("utf-8", "replace")),
        st.sampled_from(
            [b"\xf0", b"\x9f", b"\x98\x80", b"\xef\xbf", b"\xbd", b"\xe2\x82", b"\xac", b"a", b"\xed", b"\xa0"]
        ),
    ),
    max_size=12,
)


@settings(deadline=None, max_examples=300)
@given(PIECES)
def test_the_text_is_that_of_all_bytes(pieces: list[bytes]) -> None:
    assert decode(pieces)[0] == b"".join(pieces).decode("utf-8", "replace")


@settings(deadline=None, max_examples=300)
@given(PIECES)
def test_offsets_count_the_characters_before(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    # Where the text of a prefix holds a character that ends at or before the byte, it counts.
    text, steps = decode(pieces)
    starts = [0, *accumulate(len(piece) for piece in pieces)]
    for start, piece, (_, offset, _) in zip(starts, pieces, steps, strict=False):
        if piece:
            assert offset == _characters_before(whole, start)
    assert len(text) == len(whole.decode("utf-8", "replace"))


def _characters_before(data: bytes, at: int) -> int:
    """Characters that end at or before byte `at`: those of the prefix, but one that the next byte continues."""
    before = data[:at].decode("utf-8", "replace")
    longer = data[: at + 1].decode("utf-8", "replace")
    # A partial character shows as U+FFFD in the prefix. It is continued exactly if one more byte makes no more of it.
    partial = before.endswith("\ufffd") and len(longer) == len(before)
    return len(before) - partial


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"a", b"b"], [("a", 0, True), ("b", 1, True)]),
        ([b"x\xf0\x9f", b"\x98", b"\x80y", b"z"], [("x", 0, False), ("", 1, False), ("😀y", 1, False), ("z", 3, True)]),
        ([b"\xf0\x9f", b"ab", b"c"], [("", 0, False), ("\ufffdab", 1, False), ("c", 3, True)]),
        ([b"\xff", b"a"], [("\ufffd", 0, True), ("a", 1, True)]),
        ([b"\xef\xbf", b"\xbd", b"a"], [("", 0, False), ("\ufffd", 0, False), ("a", 1, True)]),
        ([b"\xe2", b"\xe2\x82\xac"], [("", 0, False), ("\ufffd€", 1, False)]),
        ([b"", b"a"], [("", 0, True), ("a", 0, True)]),
        ([b"\xed", b"\xa0", b"\x80"], [("", 0, False), ("\ufffd\ufffd", 1, False), ("\ufffd", 2, True)]),
    ],
)
def test_spread_and_broken_characters(pieces: list[bytes], expected: list[tuple[str, int, bool]]) -> None:
    assert decode(pieces)[1] == expected


def test_a_character_in_progress_ends_as_a_replacement() -> None:
    decoder = Detokenizer(TokenTable([b"a\xf0\x9f"], b"\0"))
    assert decoder.feed(0) == ("a", 0, False)
    assert decoder.flush() == "\ufffd" and decoder.offset == 2
    assert decoder.flush() == "" and decoder.offset == 2
