"""Lowering: a decoded request → prompts ready to schedule, with nothing left open.

Owns defaults, clamps, seeds, limits, budgets and the refusals that need the model; the same for every protocol. Leaves
the order and wording of a prompt to `engine.text.turns` and `engine.text.render`, grammars to `engine.grammar`.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.cache.keys import page_keys
from engine.config import LogprobLimits, Manifest
from engine.recipes.recipe import SAMPLING_FIELDS, Recipe, SamplingTable
from engine.recipes.sampling import check
from engine.text.conversation import ConversationRenderer, RenderedConversation
from engine.text.labels import Labels
from engine.types.constraint import Constraint
from engine.types.conversation import Conversation
from engine.types.request import (
    GenerationRequest,
    PreparedPrompt,
    PreparedRequest,
    Prompt,
    RequestError,
    SamplingOverrides,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
)

MAX_INT32: Final = 2**31 - 1
BUDGET_APIS: Final = ("chat", "messages", "responses")
_SEEDS: Final = 2**64


class TokenizerPort(Protocol):
    """What lowering asks of a tokenizer."""

    def encode(self, text: str, *, specials: bool, add_special_tokens: bool = False) -> list[int]: ...

    def encode_segments(self, segments: Sequence[tuple[str, bool]]) -> list[int]: ...

    def token_id(self, text: str, /) -> int | None: ...

    def decode(self, ids: Sequence[int], /) -> str: ...


class TokensPort(Protocol):
    @property
    def vocab_size(self) -> int: ...

    def text(self, token: int, /) -> str: ...

    def is_control(self, token: int, /) -> bool: ...


class ModelPort(Protocol):
    """What lowering asks of a prepared model."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def recipe(self) -> Recipe: ...

    @property
    def tokenizer(self) -> TokenizerPort: ...

    @property
    def tokens(self) -> TokensPort: ...

    @property
    def template(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """What is in force at this server. `context`: prompt plus output tokens. `default_max_tokens` None: all that the
    context leaves. `sampling`: defaults and ranges, the operator's included. `cache_seed`: the start of page key
    chains (`engine.cache.keys.cache_seed`). `vision`: images are accepted."""

    context: int
    default_max_tokens: int | None = None
    thinking_token_budget: int | None = None
    sampling: SamplingTable = field(default_factory=SamplingTable)
    logprobs: LogprobLimits = field(default_factory=LogprobLimits)
    page_tokens: int = 64
    prefix_cache: bool = True
    vocab_size: int = 0
    vision: bool = False
    cache_seed: bytes = b""


@dataclass(frozen=True, slots=True)
class _LoweredPrompt:
    """One prompt, before it is copied for each choice."""

    ids: NDArray[np.int32]
    opening: Literal["reasoning", "content"] | None = None
    tools_active: bool = False
    boundaries: tuple[int, ...] = ()


class Lowering:
    """Lowers requests for one model. Thread-safe once constructed."""

    def __init__(
        self,
        model: ModelPort,
        limits: ServingLimits,
        checker: Callable[[Constraint], None] | None = None,
    ) -> None:
        """`checker` raises RequestError for a constraint that can't be compiled; without one, constraints are refused.

        Raises ValueError, naming the setting, when `limits` can't be kept with this model.
        """
        check(limits.sampling)
        self._model = model
        self._limits = limits
        self._checker = checker
        self._conversations = ConversationRenderer(model)
        self._eos = tuple(model.manifest.eos_ids)
        self._turn_ends = self._with_stop_tokens(model)
        self._close_id = self._single_close(model)
        if limits.thinking_token_budget is not None:
            problem = self.default_budget_problem()
            if problem:
                raise ValueError(f"thinking_token_budget: {problem}")

    def prepare(self, request: GenerationRequest) -> PreparedRequest:
        """Every choice of `request`, in choice order. Raises RequestError."""
        self._check_combinations(request)
        sampling = self._sampling(request.sampling)
        seed = request.sampling.seed
        if seed is None:
            seed = self._limits.sampling.seed
        if seed is None:
            seed = secrets.randbits(64)
        stops = self._stop_sequences(request)
        self._check_constraints(request)
        children: list[PreparedPrompt] = []
        for prompt in request.prompts:
            child = self._child(request, prompt, sampling, stops)
            unscored = replace(child.output, prompt_logprobs=None)
            for choice in range(request.n):
                # A buffered answer takes the scores of a prompt from its first choice; a stream shows them in each.
                output = child.output if choice == 0 or request.stream else unscored
                choice_seed = (seed + len(children)) % _SEEDS
                children.append(replace(child, sampling=replace(sampling, seed=choice_seed), output=output))
        echoes = tuple(self._echo(prompt) for prompt in request.prompts) if request.echo else ()
        return PreparedRequest(tuple(children), echoes)

    def count(self, request: GenerationRequest) -> int:
        """Prompt tokens of `request`, over all its prompts. Raises RequestError for what can't be rendered."""
        prompts = (replace(p, boundaries=()) if isinstance(p, Conversation) else p for p in request.prompts)
        return sum(len(self._lowered(request, prompt).ids) for prompt in prompts)

    def label_ids(self, request: GenerationRequest, labels: Sequence[str]) -> tuple[int | None, ...]:
        """For each label the token that it is directly after the conversation's complete rendered prompt, or None (see
        `engine.text.labels`). Raises RequestError for what can't be rendered."""
        conversation = request.prompts[0]
        if not isinstance(conversation, Conversation):
            raise RequestError("labels need a conversation")
        rendered = self._conversations.render(request, conversation, vision=self._limits.vision)
        return self._labels.after(rendered.segments, labels)

    @cached_property
    def _labels(self) -> Labels:
        return Labels(self._model.tokenizer, self._model.tokens)

    def default_budget_problem(self) -> str:
        """Why this model can't have a default reasoning budget; empty when it can."""
        syntax = self._model.recipe.reasoning
        if syntax is None:
            return "the model has no reasoning syntax"
        if self._close_id is None:
            return f"the model's reasoning does not close with a single token ({syntax.close!r})"
        if self._conversations.default_opening() is None:
            return "the model's chat template has no default output start"
        return ""

    def _check_combinations(self, request: GenerationRequest) -> None:
        constraint = request.constraint
        if constraint is not None:
            if request.template.continue_final_message:
                raise RequestError("an output constraint can't be combined with continue_final_message")
            if request.stops.strings or request.stops.sequences:
                raise RequestError("an output constraint can't be combined with custom stops", field="stop")
            if request.ignore_eos:
                raise RequestError("an output constraint can't be combined with ignore_eos", field="ignore_eos")
            if request.min_tokens:
                raise RequestError("an output constraint can't be combined with min_tokens", field="min_tokens")
            if self._checker is None:
                raise RequestError("this server has no structured output", field="response_format")
        if request.max_tokens is not None and request.min_tokens > request.max_tokens:
            raise RequestError(
                f"min_tokens ({request.min_tokens}) is above max_tokens ({request.max_tokens})", field="min_tokens"
            )
        raw = any(not isinstance(prompt, Conversation) for prompt in request.prompts)
        if raw and request.reasoning.budget is not None:
            raise RequestError("thinking_token_budget needs a conversation", field="thinking_token_budget")

    def _check_constraints(self, request: GenerationRequest) -> None:
        """Compiles the answer's constraint and the grammars of freeform tools, before anything is admitted."""
        if request.constraint is not None and self._checker is not None:
            self._checker(request.constraint)
        for prompt in request.prompts:
            for tool in prompt.tools if isinstance(prompt, Conversation) else ():
                if tool.input_format is None:
                    continue
                if self._checker is None:
                    raise RequestError(f"tools: this server has no grammars, which {tool.name!r} needs", field="tools")
                try:
                    self._checker(tool.input_format)
                except RequestError as error:
                    raise RequestError(f"tools: {tool.name!r}: {error.message}", field="tools") from None

    def _child(
        self,
        request: GenerationRequest,
        prompt: Prompt,
        sampling: SamplingParams,
        stops: tuple[tuple[int, ...], ...],
    ) -> PreparedPrompt:
        lowered = self._lowered(request, prompt)
        max_tokens = self._max_tokens(request, len(lowered.ids))
        limits = self._limits
        keys = page_keys(lowered.ids, limits.page_tokens, limits.cache_seed) if limits.prefix_cache else ()
        return PreparedPrompt(
            token_ids=lowered.ids,
            sampling=sampling,
            max_tokens=max_tokens,
            eos_ids=self._eos if lowered.opening is None else self._turn_ends,
            min_tokens=min(request.min_tokens, max_tokens),
            ignore_eos=request.ignore_eos,
            stop_sequences=stops,
            output=request.output,
            opening=lowered.opening,
            reasoning_budget=self._budget(request, lowered.opening),
            constraint=request.constraint,
            tools_active=lowered.tools_active,
            page_keys=keys,
            boundaries=lowered.boundaries,
        )

    def _lowered(self, request: GenerationRequest, prompt: Prompt) -> _LoweredPrompt:
        if isinstance(prompt, Conversation):
            return self._lowered_conversation(request, prompt)
        ids = self._text_ids(prompt) if isinstance(prompt, TextPrompt) else self._token_ids(prompt)
        return _LoweredPrompt(np.asarray(ids, dtype=np.int32))

    def _lowered_conversation(self, request: GenerationRequest, conversation: Conversation) -> _LoweredPrompt:
        rendered = self._conversations.render(request, conversation, vision=self._limits.vision)
        encode = self._model.tokenizer.encode_segments
        ids = encode(rendered.segments)
        if not ids:
            raise RequestError("the conversation renders to an empty prompt", field="messages")
        return _LoweredPrompt(
            np.asarray(ids, dtype=np.int32),
            rendered.opening,
            rendered.tools_active,
            _positions(rendered, ids, encode),
        )

    def _text_ids(self, prompt: TextPrompt) -> list[int]:
        bos = self._model.manifest.bos_id
        if not prompt.text:
            if bos is None:
                raise RequestError("an empty prompt needs a model with a BOS token", field="prompt")
            return [bos]
        ids = self._model.tokenizer.encode(prompt.text, specials=True, add_special_tokens=prompt.add_special_tokens)
        if not ids:
            raise RequestError("the prompt has no tokens", field="prompt")
        return ids

    def _token_ids(self, prompt: TokenPrompt) -> tuple[int, ...]:
        if not prompt.ids:
            raise RequestError("a prompt of token ids must not be empty", field="prompt")
        _check_vocabulary(prompt.ids, self._vocab_size, "prompt")
        return prompt.ids

    def _echo(self, prompt: Prompt) -> str:
        if isinstance(prompt, TextPrompt):
            return prompt.text
        return self._model.tokenizer.decode(prompt.ids) if isinstance(prompt, TokenPrompt) else ""

    def _max_tokens(self, request: GenerationRequest, prompt_tokens: int) -> int:
        """Output tokens allowed; the whole remaining context bounds them. Raises RequestError when none is left."""
        context = self._limits.context
        limit = context if request.max_tokens == 0 else context - 1  # room for one generated token
        if prompt_tokens > limit:
            raise _too_long(request, prompt_tokens, limit, context)
        wanted = request.max_tokens if request.max_tokens is not None else self._limits.default_max_tokens
        remaining = context - prompt_tokens
        return remaining if wanted is None else max(0, min(wanted, remaining))

    def _budget(self, request: GenerationRequest, opening: str | None) -> int | None:
        asked = request.reasoning
        if opening is None:
            return None
        if asked.budget is None:
            default = self._limits.thinking_token_budget if request.api in BUDGET_APIS else None
            return default if opening == "reasoning" and self._close_id is not None else None
        if asked.budget < 1:
            raise RequestError("thinking_token_budget must be positive", field="thinking_token_budget")
        supported = self._model.recipe.reasoning is not None and (opening == "content" or self._close_id is not None)
        if not supported and not asked.budget_advisory:
            raise RequestError(
                "thinking_token_budget is not supported: the model's reasoning does not close with a single token",
                field="thinking_token_budget",
            )
        if not supported or opening == "content" or asked.budget > MAX_INT32:
            return None
        return asked.budget

    def _sampling(self, asked: SamplingOverrides) -> SamplingParams:
        table = self._limits.sampling
        values: dict[str, Any] = {}
        for name in SAMPLING_FIELDS:
            value = getattr(asked, name)
            default = getattr(table, name)
            if value is None or name not in table.ranges:
                values[name] = default
                continue
            if not math.isfinite(value):
                raise RequestError(f"{name} must be a finite number", field=name)
            low, high = table.ranges[name]
            values[name] = min(max(value, low), high)
        top_k = int(values.pop("top_k"))
        floats = {name: float(value) for name, value in values.items()}
        return SamplingParams(**floats, top_k=top_k if top_k > 0 else -1, seed=0)

    def _stop_sequences(self, request: GenerationRequest) -> tuple[tuple[int, ...], ...]:
        for sequence in request.stops.sequences:
            _check_vocabulary(sequence, self._vocab_size, "stop_token_ids")
        return request.stops.sequences

    @property
    def _vocab_size(self) -> int:
        return self._limits.vocab_size or self._model.manifest.vocab_size

    @staticmethod
    def _with_stop_tokens(model: ModelPort) -> tuple[int, ...]:
        found = (model.tokenizer.token_id(text) for text in model.recipe.stop_tokens)
        return tuple(dict.fromkeys([*model.manifest.eos_ids, *(token for token in found if token is not None)]))

    @staticmethod
    def _single_close(model: ModelPort) -> int | None:
        syntax = model.recipe.reasoning
        if syntax is None or not syntax.single_token_close:
            return None
        return model.tokenizer.token_id(syntax.close)


def _positions(
    rendered: RenderedConversation, ids: list[int], encode: Callable[[Sequence[tuple[str, bool]]], list[int]]
) -> tuple[int, ...]:
    """Token positions of the candidate boundaries: as many tokens as the text before a cut has in common with the
    whole prompt."""
    positions: set[int] = set()
    for cut in rendered.cuts:
        common = _common(encode(_head(rendered.segments, cut)), ids)
        if 0 < common < len(ids):
            positions.add(common)
    return tuple(sorted(positions))


def _common(one: list[int], two: list[int]) -> int:
    """How many tokens both begin with; usually all of the shorter, which costs least."""
    size = min(len(one), len(two))
    if one[:size] == two[:size]:
        return size
    return int(np.argmax(np.asarray(one[:size]) != np.asarray(two[:size])))


def _head(segments: Sequence[tuple[str, bool]], length: int) -> list[tuple[str, bool]]:
    """The first `length` characters of `segments`."""
    head: list[tuple[str, bool]] = []
    for text, trusted in segments:
        if length <= 0:
            break
        head.append((text[:length], trusted))
        length -= len(text)
    return head


def _check_vocabulary(ids: Sequence[int], vocab_size: int, name: str) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestError(f"{name}: token id {token} is outside the vocabulary of {vocab_size}", field=name)


def _too_long(request: GenerationRequest, tokens: int, limit: int, context: int) -> RequestError:
    code: Mapping[str, str] = {"code": "context_length_exceeded"}
    if request.api == "messages":
        return RequestError(f"prompt is too long: {tokens} tokens > {limit} maximum", field="messages", **code)
    return RequestError(
        f"the prompt has {tokens} tokens, but the context of {context} tokens leaves room for {limit}",
        field="prompt" if not isinstance(request.prompts[0], Conversation) else "messages",
        **code,
    )
