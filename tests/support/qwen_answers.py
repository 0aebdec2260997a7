"""Answers in the markup of the Qwen recipe as generated tokens, and those tokens through the real output pipeline."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from engine.prepared import PreparedModel
from engine.text.output import OutputPipeline, Validator
from engine.types.events import EndCause, EngineEnd, SemanticEvent, TokenRecord, Update
from engine.types.request import GenerationRequest, PreparedPrompt, SamplingParams

SAMPLING: Final = SamplingParams(1.0, 1.0, -1, 0.0, 1.0, 0.0, 0.0, 1)
PROMPT: Final = 5
CACHED: Final = 2
THINK, CALL, END_CALL = "</think>", "<tool_call>", "</tool_call>"


def ids(model: PreparedModel, *pieces: str) -> list[int]:
    """Delimiters as their tokens; a piece that only holds one spells it out."""
    found: list[int] = []
    for piece in pieces:
        whole = model.tokenizer.token_id(piece) if piece in (THINK, CALL, END_CALL) else None
        found += [whole] if whole is not None else model.tokenizer.encode(piece, specials=False)
    return found


def generated(
    model: PreparedModel,
    request: GenerationRequest,
    tokens: Sequence[int],
    *,
    cause: EndCause = "eos",
    cuts: random.Random | None = None,
    validators: Mapping[str, Validator] | None = None,
) -> Iterator[list[SemanticEvent]]:
    """The events of one choice that opens inside reasoning, update by update; `cuts` draws the updates' sizes."""
    eos = tuple(model.manifest.eos_ids)
    prompt = PreparedPrompt(np.zeros(PROMPT, np.int32), SAMPLING, 1000, eos, opening="reasoning", tools_active=True)
    numbers = itertools.count()
    pipeline = OutputPipeline(
        model, prompt, request, call_id=lambda: f"call_{next(numbers)}", validators=validators or {}
    )
    records = [TokenRecord(id, -0.5, ((id, -0.5),)) for id in tokens]
    yield pipeline.push(Update(0, cached_tokens=CACHED))
    while records:
        size = 1 if cuts is None else cuts.randint(1, len(records))
        yield pipeline.push(Update(0, tuple(records[:size])))
        del records[:size]
    yield pipeline.push(Update(0, end=EngineEnd(cause)))
