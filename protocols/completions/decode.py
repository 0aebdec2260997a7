"""POST /v1/completions into the neutral request: raw prompts, no template, no parsers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from engine.types.request import GenerationRequest, OutputOptions, TextPrompt, TokenPrompt
from protocols.completions.schema import CompletionFields
from protocols.fields import (
    Decoded,
    DecodeLimits,
    check_alternatives,
    check_ids,
    check_prompt_scores,
    read,
    refuse,
    refuse_unsupported,
)
from protocols.structure import check_constraint

_UNSUPPORTED: Final[Mapping[str, tuple[object, ...]]] = {
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": (),
    "thinking_token_budget": (),
    "return_token_timestamps": (False,),
}


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    """What CompletionEncoder needs of the body. `logprobs`: alternatives of the arrays, None for no arrays;
    `prompt_logprobs`: alternatives of the choices' prompt_logprobs, None for none."""

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    logprobs: int | None = None
    as_token_ids: bool = False
    token_ids: bool = False
    prompt_logprobs: int | None = None

    @property
    def echo_entries(self) -> bool:
        return self.echo and self.logprobs is not None


def decode(body: Mapping[str, Any], limits: DecodeLimits) -> Decoded:
    """Raises InvalidRequest for anything malformed, over a limit, unsupported or combined against the rules."""
    fields = read(CompletionFields, body)
    refuse_unsupported(body, _UNSUPPORTED)
    options = _options(fields)
    n = fields.n or 1
    if fields.best_of is not None and fields.best_of != n:
        raise refuse("best_of", f"must equal n ({n}): ranked sampling is not supported")
    prompts = _prompts(fields.prompt, fields.add_special_tokens is not False, limits)
    if len(prompts) * n > limits.max_group:
        raise refuse("prompt", f"{len(prompts)} prompts with n {n} exceed the limit of {limits.max_group} choices")
    stops = fields.stops(fields.stop or [], limits)
    constraint = fields.constraint()
    check_constraint(constraint, stops=stops, ignore_eos=bool(fields.ignore_eos), continuation=False)
    request = GenerationRequest(
        api="completions",
        prompts=prompts,
        n=n,
        sampling=fields.overrides(),
        max_tokens=fields.max_tokens,
        min_tokens=fields.min_tokens or 0,
        ignore_eos=bool(fields.ignore_eos),
        stops=stops,
        output=_observations(fields, options, limits),
        constraint=constraint,
        echo=options.echo,
        stream=options.stream,
    )
    return Decoded(request, options, prompt_ids=options.token_ids or options.echo_entries)


def _options(fields: CompletionFields) -> CompletionOptions:
    stream = bool(fields.stream)
    if fields.stream_options is not None and not stream:
        raise refuse("stream_options", "is only allowed with stream: true")
    if fields.prompt_logprobs is not None and stream:
        raise refuse("prompt_logprobs", "is not available with stream: true")
    asked = fields.stream_options
    echo = bool(fields.echo)
    inferred = fields.logprobs if echo and not stream else None
    return CompletionOptions(
        stream=stream,
        include_usage=asked is not None and bool(asked.include_usage),
        continuous_usage=asked is not None and bool(asked.include_usage) and bool(asked.continuous_usage_stats),
        echo=echo,
        logprobs=fields.logprobs,
        as_token_ids=bool(fields.return_tokens_as_token_ids),
        token_ids=bool(fields.return_token_ids),
        prompt_logprobs=inferred if fields.prompt_logprobs is None else fields.prompt_logprobs,
    )


def _observations(fields: CompletionFields, options: CompletionOptions, limits: DecodeLimits) -> OutputOptions:
    """Echo with logprobs scores the prompt; the engine computes enough alternatives for both uses of the scores."""
    check_alternatives(fields.logprobs, "logprobs", limits)
    check_prompt_scores(fields.prompt_logprobs, "prompt_logprobs", limits)
    if options.echo_entries:
        check_prompt_scores(fields.logprobs, "logprobs", limits)
    scored = [fields.prompt_logprobs, fields.logprobs if options.echo_entries else None]
    return OutputOptions(
        logprobs=fields.logprobs,
        logprob_token_ids=fields.explicit_ids(fields.logprobs is not None, "logprobs", limits),
        prompt_logprobs=max((count for count in scored if count is not None), default=None),
    )


def _prompts(value: Any, specials: bool, limits: DecodeLimits) -> tuple[TextPrompt | TokenPrompt, ...]:
    """A string, an array of strings, an array of token ids, or an array of such arrays."""
    if isinstance(value, str):
        return (TextPrompt(value, specials),)
    if not isinstance(value, list):
        raise refuse(
            "prompt", "must be a string, an array of strings, an array of token ids or an array of such arrays"
        )
    if not value:
        raise refuse("prompt", "must not be empty")
    if type(value[0]) is int:
        return (_ids(value, "prompt", limits),)
    if isinstance(value[0], list):
        for index, item in enumerate(value):
            if not isinstance(item, list):
                raise refuse(f"prompt[{index}]", "must be an array of token ids, as the first entry is")
        return tuple(_ids(item, f"prompt[{index}]", limits) for index, item in enumerate(value))
    for index, item in enumerate(value):
        if not isinstance(item, str):
            raise refuse(
                f"prompt[{index}]", "must be a string" if index else "must be a string, an integer or an array"
            )
    return tuple(TextPrompt(item, specials) for item in value)


def _ids(values: Sequence[Any], at: str, limits: DecodeLimits) -> TokenPrompt:
    if not values:
        raise refuse(at, "must not be an empty array of token ids")
    for index, id in enumerate(values):
        if type(id) is not int:
            raise refuse(f"{at}[{index}]", "must be an integer")
    check_ids(values, at, limits.vocab_size)
    return TokenPrompt(tuple(values))
