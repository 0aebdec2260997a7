"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Any

from protocols.fields import (
    Alternatives,
    Choices,
    Count,
    LogprobFields,
    SamplingFields,
    StreamOptions,
    StringList,
    TokenStopFields,
)
from protocols.structure import StructureFields


class CompletionFields(SamplingFields, TokenStopFields, LogprobFields, StructureFields):
    """`prompt` is one of four shapes, told apart in `decode`."""

    prompt: Any
    model: str | None = None
    n: Choices | None = None
    best_of: Choices | None = None
    max_tokens: Count | None = None
    stop: StringList | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    logprobs: Alternatives | None = None
    prompt_logprobs: Alternatives | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
