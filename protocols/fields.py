"""Strict request fields shared by the protocol families, and what a decoder hands on.

Owns the wire types (nothing is coerced: "20" is no number, true no integer), the rules about sampling, stops and
observations that the families share, and their error texts: plain words naming the field and the limit. Leaves
message shapes to each family, tools to `tools`, output constraints to `structure`, images to `images`. Clamping
belongs to the lowering: a sampling number out of range passes here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from engine.types.nesting import MAX_DEPTH, deeper_than
from engine.types.request import GenerationRequest, SamplingOverrides, Stops
from protocols.errors import InvalidRequest

MAX_STOP_STRINGS: Final = 4
MAX_STOP_BYTES: Final = 4096
MAX_STOP_SEQUENCES: Final = 16
MAX_STOP_SEQUENCE_IDS: Final = 64
MAX_LOGPROBS: Final = 20
MAX_LOGPROB_TOKEN_IDS: Final = 128
MAX_CHOICES: Final = 128
INT32_MAX: Final = 2**31 - 1
UINT64_MASK: Final = 2**64 - 1


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """What the loaded model and its settings allow. `max_top_logprobs`: natural alternatives, 0 when generation
    logprobs are off. `logprob_token_ids`, `prompt_logprobs`, `vision`: capabilities. `max_group`: choices
    (prompts × n) that one request may ask for."""

    vocab_size: int
    max_top_logprobs: int = MAX_LOGPROBS
    logprob_token_ids: bool = True
    prompt_logprobs: bool = False
    vision: bool = False
    max_group: int = 4096


@dataclass(frozen=True, slots=True)
class Decoded:
    """A decoded body. `options` is the family's own type: what its encoder needs of the body. `prompt_ids`: the
    encoder needs ResponseContext.prompt_ids."""

    request: GenerationRequest
    options: Any
    prompt_ids: bool = False


class Fields(BaseModel):
    """Base of every wire model: strict types, unknown fields ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


Number = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
PositiveCount = Annotated[int, Field(ge=1)]
Budget = Annotated[int, Field(ge=1, le=INT32_MAX)]
Seed = Annotated[int, Field(ge=-(2**63), le=UINT64_MASK)]
Choices = Annotated[int, Field(ge=1, le=MAX_CHOICES)]
Alternatives = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
StringList = Annotated[list[str], BeforeValidator(_listed)]

Model = TypeVar("Model", bound=BaseModel)


def read(model: type[Model], body: Mapping[str, Any], at: str = "") -> Model:
    """Validates `body`, which stands at field `at` of the request. Raises InvalidRequest naming the first offending
    field."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise invalid(error, at) from None


def refuse(field: str, problem: str) -> InvalidRequest:
    """The 400 for `field`: raise what this returns."""
    return InvalidRequest(f"{field}: {problem}", field=field)


def invalid(error: ValidationError, at: str = "") -> InvalidRequest:
    first = error.errors(include_url=False, include_input=False)[0]
    loc = (at, *first["loc"]) if at else first["loc"]
    return refuse(path(loc) or "body", _plain(first))


def json_object(text: str, field: str, otherwise: str) -> dict[str, Any]:
    """The object of a JSON text that a request holds at `field`. Raises InvalidRequest, which says `otherwise` of
    other values."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise too_deep(field) from None
    except ValueError as error:
        raise refuse(field, f"is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise refuse(field, otherwise)
    if deeper_than(value, MAX_DEPTH):
        raise too_deep(field)
    return value


def too_deep(field: str) -> InvalidRequest:
    """The 400 for a `field` that is nested too deeply: raise what this returns."""
    return refuse(field, f"is nested deeper than {MAX_DEPTH} levels")


def path(loc: Sequence[int | str]) -> str:
    """`messages[0].content` for a pydantic location. Union tags, written <like this>, are left out."""
    text = ""
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        elif not part.startswith("<"):
            text += f".{part}" if text else part
    return text


_PLAIN: Final[Mapping[str, str]] = {
    "missing": "is required",
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "list_type": "must be an array",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "finite_number": "must be a finite number",
    "none_required": "must be null",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be greater than {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "too_long": "may have at most {max_length} entries, got {actual_length}",
    "too_short": "must have at least {min_length} entries, got {actual_length}",
    "string_too_long": "may have at most {max_length} characters",
    "string_too_short": "must have at least {min_length} characters",
    "literal_error": "must be one of {expected}",
    "union_tag_not_found": "must be an object of a supported type",
    "union_tag_invalid": "is of the unsupported type {tag:.60}",
    "extra_forbidden": "is not a known field",
}


def _plain(error: ErrorDetails) -> str:
    context = error.get("ctx", {})
    if error["type"] == "value_error":
        return str(context.get("error", error["msg"]))
    template = _PLAIN.get(error["type"])
    return template.format(**context) if template else error["msg"]


class SamplingFields(Fields):
    """Sampling of Chat, Completions and, with the endpoint's own names beside, of Messages and Responses."""

    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    seed: Seed | None = None

    def overrides(self) -> SamplingOverrides:
        return SamplingOverrides(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=-1 if self.top_k == 0 else self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=None if self.seed is None else self.seed & UINT64_MASK,
        )


class TokenStopFields(Fields):
    """Endings that every family takes beside its own spelling of string stops."""

    stop_token_ids: list[int] | None = None
    stop_token_sequences: list[list[int]] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None

    def stops(self, strings: Sequence[str], limits: DecodeLimits, *, field: str = "stop") -> Stops:
        """`field` names the family's string stops. Raises InvalidRequest for the limits and for a combination."""
        sequences = self._sequences(limits)
        if strings and sequences:
            raise refuse(field, "string stops can't be combined with stop_token_ids or stop_token_sequences")
        if len(strings) > MAX_STOP_STRINGS:
            raise refuse(field, f"may have at most {MAX_STOP_STRINGS} strings, got {len(strings)}")
        if any(not text for text in strings):
            raise refuse(field, "must not contain an empty string")
        size = sum(len(text.encode("utf-8", "surrogatepass")) for text in strings)
        if size > MAX_STOP_BYTES:
            raise refuse(field, f"may have at most {MAX_STOP_BYTES} UTF-8 bytes in total, got {size}")
        return Stops(tuple(strings), sequences, bool(self.include_stop_str_in_output))

    def _sequences(self, limits: DecodeLimits) -> tuple[tuple[int, ...], ...]:
        single = self.stop_token_ids or []
        longer = self.stop_token_sequences or []
        count = len(single) + len(longer)
        if count > MAX_STOP_SEQUENCES:
            field = "stop_token_sequences" if longer else "stop_token_ids"
            both = " together with stop_token_ids" if longer and single else ""
            raise refuse(field, f"may have at most {MAX_STOP_SEQUENCES} sequences{both}, got {count}")
        check_ids(single, "stop_token_ids", limits.vocab_size)
        for index, sequence in enumerate(longer):
            name = f"stop_token_sequences[{index}]"
            if not sequence:
                raise refuse(name, "must not be empty")
            if len(sequence) > MAX_STOP_SEQUENCE_IDS:
                raise refuse(name, f"may have at most {MAX_STOP_SEQUENCE_IDS} token ids, got {len(sequence)}")
            check_ids(sequence, name, limits.vocab_size)
        return (*((id,) for id in single), *map(tuple, longer))


def check_ids(ids: Sequence[int], field: str, vocab_size: int) -> None:
    """Raises InvalidRequest unless every id is in the vocabulary."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        index, bad = next((i, id) for i, id in enumerate(ids) if not 0 <= id < vocab_size)
        raise refuse(f"{field}[{index}]", f"token id {bad} is outside the vocabulary [0, {vocab_size - 1}]")


class LogprobFields(Fields):
    """Observation extensions of Chat, Completions and Responses."""

    logprob_token_ids: list[int] | None = None
    return_tokens_as_token_ids: bool | None = None

    def explicit_ids(self, enabled: bool, switch: str, limits: DecodeLimits) -> tuple[int, ...]:
        """The ids without repetitions, in the caller's order. `switch` names what turns logprobs on here."""
        ids = self.logprob_token_ids
        if not ids:
            return ()
        name = "logprob_token_ids"
        if not limits.logprob_token_ids:
            raise refuse(
                name,
                "the loaded model was prepared without explicit-id log probabilities; re-export it with"
                " logprobs.token_ids enabled",
            )
        if len(ids) > MAX_LOGPROB_TOKEN_IDS:
            raise refuse(name, f"may have at most {MAX_LOGPROB_TOKEN_IDS} token ids, got {len(ids)}")
        check_ids(ids, name, limits.vocab_size)
        if not enabled:
            raise refuse(name, f"needs generation log probabilities: set {switch}")
        return tuple(dict.fromkeys(ids))


def check_alternatives(wanted: int | None, field: str, limits: DecodeLimits) -> None:
    """Raises InvalidRequest when `wanted` natural alternatives (None: no logprobs) exceed the loaded capacity."""
    if wanted is None:
        return
    if limits.max_top_logprobs == 0:
        raise refuse(field, "the loaded model was prepared without generation log probabilities")
    if wanted > limits.max_top_logprobs:
        raise refuse(field, f"must be at most {limits.max_top_logprobs}, the capacity of the loaded model")


def check_prompt_scores(wanted: int | None, field: str, limits: DecodeLimits) -> None:
    """Raises InvalidRequest when prompt scores are asked of a model without them, or too many alternatives."""
    if wanted is None:
        return
    if not limits.prompt_logprobs:
        raise refuse(field, "the loaded model was prepared without prompt log probabilities (logprobs.prompt)")
    if wanted > limits.max_top_logprobs:
        raise refuse(field, f"must be at most {limits.max_top_logprobs}, the capacity of the loaded model")


class StreamOptions(Fields):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def refuse_effort_score(body: Mapping[str, Any], named: str) -> None:
    """Raises InvalidRequest for a top-level reasoning_effort that is no name: scores belong to Chat. `named`: the
    endpoint's own field for a level."""
    if not isinstance(body.get("reasoning_effort"), str | None):
        raise refuse("reasoning_effort", f"must not be a number here: give a named level as {named}")


# Fields that would change the output if they were honoured, with the values that change nothing.
_UNSUPPORTED: Final[Mapping[str, tuple[object, ...]]] = {
    "logit_bias": ({}, []),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "truncate_prompt_tokens": (),
    "skip_special_tokens": (True,),
    "cache_salt": (),
    "repetition_detection": (),
    "logits_processors": ([],),
    "prompt_embeds": (),
    **dict.fromkeys(("json_schema", "regex", "ebnf"), ()),  # constraints as other servers spell them
}


def refuse_unsupported(body: Mapping[str, Any], more: Mapping[str, tuple[object, ...]] = {}) -> None:
    """Raises InvalidRequest for a known field that can't be honoured. `more`: the endpoint's own, with the values
    that change nothing."""
    for table in (_UNSUPPORTED, more):
        for field, neutral in table.items():
            value = body.get(field)
            if value is not None and not any(type(value) is type(n) and value == n for n in neutral):
                raise refuse(field, "is not supported")
