"""The wire form gives back exactly what went in."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.parallel.step_codec import CodecError, Message, decode, encode
from engine.scheduler.step import LateInputs, RankReport, Row, SampledRow, ScoredRow, SlotSetup, Step, StepResult
from engine.types.request import SamplingParams

small = st.integers(0, 2**31 - 1)
floats = st.floats(allow_nan=False)
pairs = st.lists(st.tuples(small, floats), max_size=3)

rows = st.builds(
    Row, small, small, st.integers(-1, 2**20), st.binary(max_size=16), st.booleans(), st.none() | small, st.booleans()
)
sampling = st.builds(
    SamplingParams, floats, floats, st.integers(-1, 100), floats, floats, floats, floats, st.integers(0, 2**64 - 1)
)
setups = st.builds(
    SlotSetup,
    small,
    sampling,
    small,
    small,
    st.binary(max_size=8),
    small,
    st.lists(small, max_size=3).map(tuple),
    st.none() | small,
    st.lists(small, max_size=3).map(tuple),
)
steps = st.builds(
    Step,
    small,
    st.lists(rows | st.builds(Row, small, st.just(1)), max_size=4),
    st.lists(setups, max_size=2),
    st.lists(st.tuples(small, small, st.lists(small, max_size=3)), max_size=2),
    st.lists(st.tuples(small, small), max_size=2),
    st.lists(small, max_size=3),
)
sampled = st.builds(SampledRow, small, small, st.none() | floats, pairs, st.text(max_size=5))
scored = st.builds(
    ScoredRow,
    small,
    small,
    st.lists(st.tuples(small, floats, small, st.lists(st.tuples(small, floats, small), max_size=2)), max_size=3),
)
results = st.builds(
    StepResult, small, st.lists(sampled, max_size=3), st.lists(scored, max_size=2), floats, st.text(max_size=5)
)
late = st.builds(
    LateInputs,
    small,
    st.dictionaries(small, st.binary(max_size=8), max_size=2),
    st.dictionaries(small, small, max_size=2),
)
reports = st.builds(
    RankReport,
    small,
    small,
    small,
    small,
    st.text(max_size=5),
    st.text(max_size=5),
    st.text(max_size=5),
    st.text(max_size=5),
)


@settings(max_examples=150, deadline=None)
@given(steps | results | late | reports)
def test_what_goes_in_comes_out(message: Message) -> None:
    assert decode(encode(message)) == message


def test_plain_rows_are_small() -> None:
    """32 decode rows fit in a small frame: the commonest step costs next to nothing on the wire."""
    assert len(encode(Step(7, [Row(slot, 1) for slot in range(32)]))) < 64
    assert len(encode(StepResult(7, [SampledRow(slot, 40_000) for slot in range(32)], seconds=0.01))) < 256


@pytest.mark.parametrize("data", [b"", b"\x09\xc0", b"\x01\xc0", b"\x01", b"\x03\x91\x01", b"\x02\x90"])
def test_other_bytes_are_an_error(data: bytes) -> None:
    with pytest.raises(CodecError):
        decode(data)
