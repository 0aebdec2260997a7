"""The step link's wire form: msgpack of positional arrays, one kind byte in front.

Owns nothing but the translation; `engine.parallel.step_link` owns sockets. Both ends run the same version of Flare,
so fields have positions and no names. The commonest rows (a plain decode row, a plain sampled row) take one and two
integers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import msgpack

from engine.scheduler.step import (
    LateInputs,
    RankReport,
    Row,
    SampledRow,
    ScoredRow,
    SlotSetup,
    Step,
    StepResult,
)
from engine.types.request import SamplingParams

Message = Step | LateInputs | StepResult | RankReport

_STEP, _LATE, _RESULT, _REPORT = 1, 2, 3, 4
_pack: Callable[[Any], bytes] = msgpack.packb


class CodecError(ValueError):
    """Bytes that are no message of this version."""


def encode(message: Message) -> bytes:
    """One message as bytes."""
    if isinstance(message, Step):
        return b"\x01" + _pack(_step(message))
    if isinstance(message, StepResult):
        return b"\x03" + _pack(_result(message))
    if isinstance(message, LateInputs):
        return b"\x02" + _pack([message.number, message.masks, message.forced])
    return b"\x04" + _pack(astuple(message))


def decode(data: bytes | bytearray | memoryview) -> Message:
    """The message in `data`. Raises CodecError."""
    view = memoryview(data)
    if not len(view):
        raise CodecError("empty message")
    kind = view[0]
    try:
        body = msgpack.unpackb(view[1:], raw=False, strict_map_key=False, use_list=True)
        if kind == _STEP:
            return _read_step(body)
        if kind == _RESULT:
            return _read_result(body)
        if kind == _LATE:
            return LateInputs(*body)
        if kind == _REPORT:
            return RankReport(*body)
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise CodecError(f"message of kind {kind} can't be read: {error}") from error
    raise CodecError(f"unknown message kind {kind}")


def _row(row: Row) -> int | list[Any]:
    if row.start == -1 and row.count == 1 and row.sample and row.score is None and not row.gated:
        return row.slot
    return [row.slot, row.count, row.start, row.tokens, row.sample, row.score, row.gated]


def _sampling(sampling: SamplingParams) -> list[Any]:
    return [
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.seed,
    ]


def _setup(setup: SlotSetup) -> list[Any]:
    return [
        setup.slot,
        _sampling(setup.sampling),
        setup.length,
        setup.prompt_length,
        setup.prompt,
        setup.banned_until,
        setup.banned_ids,
        setup.logprobs,
        setup.logprob_ids,
    ]


def _step(step: Step) -> list[Any]:
    return [
        step.number,
        [_row(row) for row in step.rows],
        [_setup(setup) for setup in step.setups],
        step.tables,
        step.copies,
        step.release,
    ]


def _read_row(data: int | list[Any]) -> Row:
    return Row(data, 1) if isinstance(data, int) else Row(*data)


def _read_setup(data: list[Any]) -> SlotSetup:
    slot, sampling, length, prompt_length, prompt, banned_until, banned_ids, logprobs, logprob_ids = data
    return SlotSetup(
        slot,
        SamplingParams(*sampling),
        length,
        prompt_length,
        prompt,
        banned_until,
        tuple(banned_ids),
        logprobs,
        tuple(logprob_ids),
    )


def _read_step(data: list[Any]) -> Step:
    number, rows, setups, tables, copies, release = data
    return Step(
        number,
        [_read_row(row) for row in rows],
        [_read_setup(setup) for setup in setups],
        [(slot, first, pages) for slot, first, pages in tables],
        [(source, target) for source, target in copies],
        release,
    )


def _sampled(row: SampledRow) -> list[Any]:
    if row.logprob is None and not row.failure and not row.alternatives:
        return [row.slot, row.id]
    return [row.slot, row.id, row.logprob, row.alternatives, row.failure]


def _result(result: StepResult) -> list[Any]:
    return [
        result.number,
        [_sampled(row) for row in result.sampled],
        [[row.slot, row.start, row.entries] for row in result.scored],
        result.seconds,
        result.failure,
    ]


def _read_sampled(data: list[Any]) -> SampledRow:
    if len(data) == 2:
        return SampledRow(data[0], data[1])
    slot, chosen, logprob, alternatives, failure = data
    return SampledRow(slot, chosen, logprob, [(token, value) for token, value in alternatives], failure)


def _read_scored(data: list[Any]) -> ScoredRow:
    slot, start, entries = data
    return ScoredRow(
        slot,
        start,
        [
            (token, logprob, rank, [(other, value, place) for other, value, place in alternatives])
            for token, logprob, rank, alternatives in entries
        ],
    )


def _read_result(data: list[Any]) -> StepResult:
    number, sampled, scored, seconds, failure = data
    return StepResult(
        number, [_read_sampled(row) for row in sampled], [_read_scored(row) for row in scored], seconds, failure
    )
