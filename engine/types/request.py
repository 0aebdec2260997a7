"""Requests on their way in: decoded (GenerationRequest) and lowered (PreparedPrompt).

A GenerationRequest is what a protocol decoder produced: valid, but fields the client omitted are None.
The Preprocessor lowers it with the recipe's defaults and ranges; in a PreparedPrompt nothing is left open,
the seed included, so that a resubmission repeats it exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from engine.types.constraint import Constraint
from engine.types.conversation import Conversation
from engine.types.events import TokenRecord

Api = Literal["chat", "completions", "messages", "responses", "systemone", "decisions"]


class RequestError(ValueError):
    """A request that can't be served as asked: HTTP 400 in every family.

    `field` names the offending request field when one is to blame; `code` is the protocol's error code
    (`context_length_exceeded`, else None).
    """

    def __init__(self, message: str, *, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return (_request_error, (self.message, self.field, self.code))


def _request_error(message: str, field: str | None, code: str | None) -> RequestError:
    return RequestError(message, field=field, code=code)


@dataclass(frozen=True, slots=True)
class SamplingOverrides:
    """What the client asked for; None takes the prepared default. Numbers are clamped when lowered."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling in force. `temperature` > 0; `top_k` -1 means disabled; `seed` is an unsigned 64-bit number."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int


@dataclass(frozen=True, slots=True)
class Stops:
    """What ends generation besides EOS: at most four strings, or at most sixteen token sequences, never both."""

    strings: tuple[str, ...] = ()
    sequences: tuple[tuple[int, ...], ...] = ()
    include_in_output: bool = False


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Observations to compute beside the tokens.

    `logprobs`: None for none, else how many natural alternatives (0..20) accompany the chosen token.
    `logprob_token_ids`: replaces the alternatives, in this order. `prompt_logprobs`: None, or alternatives
    for each prompt position. `timestamps`: a wall-clock time for each token.
    """

    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    timestamps: bool = False


@dataclass(frozen=True, slots=True)
class ReasoningOptions:
    """`enabled` None leaves the template's default. `effort`: a named level, or an integer where the recipe
    has numeric effort; `effort_given` tells an explicit null from an omission. `budget` caps reasoning tokens;
    `budget_advisory` (Messages' thinking.budget_tokens) is ignored, not refused, where no hard cap exists.
    `closed`: reasoning that the generation prompt opens all the same is closed in the prompt, empty."""

    enabled: bool | None = None
    effort: str | int | None = None
    effort_given: bool = False
    budget: int | None = None
    budget_advisory: bool = False
    closed: bool = False


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """How the conversation is rendered. `kwargs` is the client's chat_template_kwargs."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A raw prompt: no template, no parsers, the tokenizer's normal special-token policy."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A raw prompt as token ids, preserved exactly."""

    ids: tuple[int, ...]


Prompt = Conversation | TextPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One decoded client request: `len(prompts) * n` choices, choice index = prompt index * n + choice.

    `max_tokens` None takes the server's default budget. Conversational requests have exactly one prompt.
    """

    api: Api
    prompts: tuple[Prompt, ...]
    n: int = 1
    sampling: SamplingOverrides = SamplingOverrides()
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stops: Stops = Stops()
    output: OutputOptions = OutputOptions()
    constraint: Constraint | None = None
    reasoning: ReasoningOptions = ReasoningOptions()
    template: TemplateOptions = TemplateOptions()
    echo: bool = False
    stream: bool = False


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Prompt positions [start, start + length) that hold one image. `digest`: 32 bytes over content and
    processing settings."""

    start: int
    length: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """One choice, ready to schedule. Picklable; token ids are a one-dimensional int32 array.

    `page_keys`: hash-chained keys of the prompt's full pages (the router reads them). `opening`: whether
    generated text starts inside reasoning; None for raw prompts, whose output isn't parsed.
    `reasoning_budget`: reasoning tokens after which the close token is forced, None for no cap.
    `committed`: tokens an earlier replica already generated, for a resubmission; `first_cached`: the cached
    count that replica reported, so usage doesn't change.
    """

    token_ids: NDArray[np.int32]
    sampling: SamplingParams
    max_tokens: int
    eos_ids: tuple[int, ...]
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    output: OutputOptions = OutputOptions()
    opening: Literal["reasoning", "content"] | None = None
    reasoning_budget: int | None = None
    constraint: Constraint | None = None
    tools_active: bool = False
    page_keys: tuple[bytes, ...] = ()
    images: tuple[ImageSpan, ...] = ()
    boundaries: tuple[int, ...] = ()
    committed: tuple[TokenRecord, ...] = ()
    first_cached: int | None = None


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A lowered GenerationRequest: its children in choice order. `echo_texts` holds each prompt's text when
    `echo` was asked. The engine serves only children whose `max_tokens` > 0 or that want prompt scores."""

    children: tuple[PreparedPrompt, ...]
    echo_texts: tuple[str, ...] = ()
