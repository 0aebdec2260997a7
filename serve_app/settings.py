"""Every setting of a server: one frozen tree, read once from `flare.toml` and `key=value` overrides.

Owns names, defaults, limits and where values come from. Leaves what depends on the loaded model (a budget on a model
without reasoning, ranges that miss a recipe's default) to the builders, which know it.
No environment variable changes a setting.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from engine.config import Attention, Device, Dtype, EngineConfig, LogprobLimits, Numerics
from engine.recipes.recipe import SAMPLING_FIELDS, SamplingField, SamplingTable

MAX_INT32 = 2**31 - 1
MAX_UINT64 = 2**64 - 1
COMPACT_BELOW_CORES = 8


class SettingsError(ValueError):
    """A setting that can't be used; the message names the key. One line, meant to be shown to the operator."""


def _from_json(value: Any) -> Any:
    """Lists and tables arrive as JSON text when they are given on a command line."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            problem = f"{error.msg[:1].lower()}{error.msg[1:]} at character {error.pos + 1}"
            hint = 'a list of names is ["a","b"] or a,b' if value[0] == "[" else 'a table is {"key":[0,1]}'
            raise ValueError(f"not valid JSON: {problem}; {hint}") from None
    return value


def _names(value: Any) -> Any:
    """A list as it is, JSON text, or names with commas between them. Empty names count as left out."""
    names = value.split(",") if isinstance(value, str) and not value.startswith("[") else _from_json(value)
    if not isinstance(names, list | tuple):
        return names
    stripped = [name.strip() if isinstance(name, str) else name for name in names]
    return [name for name in stripped if name != ""]


Port = Annotated[int, Field(ge=1, le=65535)]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Budget = Annotated[int, Field(ge=1, le=MAX_INT32)]
Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_names)]
Range = tuple[float, float]
Ranges = Annotated[dict[SamplingField, Range], BeforeValidator(_from_json)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ServerSettings(Section):
    """HTTP. `api_key`: empty disables authentication. `aliases`: names of the model; the first is its public id.
    `max_http_requests`: choices in flight or waiting for their reader, per Engine replica. `max_body_bytes` bounds
    encoded and decoded bodies. `request_pool`: bodies an ingress replica decodes or lowers at the same time.
    `pace_seconds`: the least time between two deliveries of a stream's tokens; 0 delivers every token by itself."""

    host: str = "127.0.0.1"
    port: Port = 8000
    api_key: str = Field(default="", repr=False)
    aliases: Names = ()
    max_http_requests: Positive = 256
    max_body_bytes: Positive = 32 * 2**20
    thinking_token_budget: Budget | None = None
    default_max_tokens: Budget | None = None
    keepalive_seconds: Seconds = 15.0
    pace_seconds: Annotated[float, Field(ge=0, le=1)] = 0.02
    request_pool: Positive = 256


class ModelSettings(Section):
    """`source`: `builtin:smollm2`, a directory, a .gguf file, a Hugging Face id or `scripted:FILE`. `name`: the
    checkpoint identifier to report instead of the source's own. `cache_dir`: where prepared models are kept."""

    source: Annotated[str, Field(min_length=1)] = "builtin:smollm2"
    recipe: str | None = None
    name: str | None = None
    cache_dir: Path | None = None


class EngineSettings(Section):
    """One engine; see engine.config.EngineConfig."""

    device: Device = "auto"
    dtype: Dtype = "auto"
    numerics: Numerics = "auto"
    attention: Attention = "auto"
    context: Positive | None = None
    page_tokens: Positive = 64
    kv_bytes: Positive | None = None
    max_requests: Positive = 64
    queue: Count = 256
    prefill_chunk: Positive = 512
    step_tokens: Positive = 768
    prefix_cache: bool = True
    tensor_parallel: Positive = 1
    threads: Positive | None = None
    step_timeout: Seconds = 120.0
    decode_stall: Seconds = 0.25
    weights_seed: int | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.step_tokens < self.max_requests:
            raise ValueError(
                f"engine.step_tokens {self.step_tokens} is below engine.max_requests {self.max_requests}: "
                "one step must hold a token of every running request"
            )
        return self


class SamplingSettings(Section):
    """Operator's sampling defaults and ranges; what is set here wins over the recipe's."""

    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_UINT64)] | None = None
    ranges: Ranges = Field(default_factory=dict)

    @field_validator("ranges")
    @classmethod
    def _valid(cls, ranges: dict[SamplingField, Range]) -> dict[SamplingField, Range]:
        for name, (low, high) in ranges.items():
            if low > high:
                raise ValueError(f"sampling.ranges.{name}: minimum {low} is above maximum {high}")
            for bound in (low, high):
                problem = _bad_value(name, bound)
                if problem:
                    raise ValueError(f"sampling.ranges.{name}: {bound} {problem}")
        return ranges


class LogprobSettings(Section):
    """Capabilities fixed at start. `max_top` 0: no generation logprobs."""

    max_top: Annotated[int, Field(ge=0, le=20)] = 20
    token_ids: bool = True
    prompt: bool = False


class GraphSettings(Section):
    """Ray Serve. `layout` auto: compact below 8 cores, else full. `preprocessors` 0: lowering runs in the ingress
    process (the compact default). `address`: a running Ray cluster instead of one of our own. `fast`: HAProxy and
    single-loop replicas. `dashboard`: Ray's own, on our own cluster. `drain_seconds`: how long a stopping replica waits
    for running requests. `rebuild_seconds`: how long a lost rank group may take to come back before the replica counts
    as unhealthy. `resubmit_seconds`: how long a request waits for another engine when its own is lost."""

    layout: Literal["auto", "compact", "full"] = "auto"
    engines: Positive = 1
    ingresses: Positive | None = None
    preprocessors: Count | None = None
    workers: Positive = 2
    address: str | None = None
    fast: bool = True
    dashboard: bool = False
    object_store_bytes: Annotated[int, Field(ge=80 * 2**20)] = 128 * 2**20
    drain_seconds: Annotated[float, Field(ge=0)] = 10.0
    rebuild_seconds: Seconds = 300.0
    resubmit_seconds: Seconds = 60.0
    heartbeat_seconds: Seconds = 5.0
    rank_cpus: Annotated[float, Field(gt=0)] = 0.2
    paused: bool = False


class Settings(Section):
    """The whole tree. Build it with `load`."""

    server: ServerSettings = ServerSettings()
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    sampling: SamplingSettings = SamplingSettings()
    logprobs: LogprobSettings = LogprobSettings()
    graph: GraphSettings = GraphSettings()

    @property
    def layout(self) -> Literal["compact", "full"]:
        """The layout in force on this machine."""
        if self.graph.layout == "auto":
            return "compact" if cores() < COMPACT_BELOW_CORES else "full"
        return self.graph.layout

    @property
    def logprob_limits(self) -> LogprobLimits:
        return LogprobLimits(self.logprobs.max_top, self.logprobs.token_ids, self.logprobs.prompt)

    def engine_config(self, prepared: Path, device: Device | None = None) -> EngineConfig:
        """The EngineConfig of one replica; `device` replaces "auto" once the cluster is known. Thread counts are
        always explicit, since Ray sets OMP_NUM_THREADS from a rank's small CPU share."""
        threads = self.engine.threads
        if threads is None:
            threads = max(1, cores() // (self.engine.tensor_parallel * self.graph.engines))
        values = {**self.engine.model_dump(), "threads": threads, "device": device or self.engine.device}
        return EngineConfig(prepared=prepared, logprobs=self.logprob_limits, **values)

    def sampling_table(self, recipe: SamplingTable) -> SamplingTable:
        """The recipe's defaults and ranges with the operator's over them.

        Raises SettingsError when a range in force doesn't contain its default.
        """
        given = {name: getattr(self.sampling, name) for name in (*SAMPLING_FIELDS, "seed")}
        chosen = {name: value for name, value in given.items() if value is not None}
        defaults = {name: getattr(recipe, name) for name in (*SAMPLING_FIELDS, "seed")}
        ranges = {**recipe.ranges, **self.sampling.ranges}
        table = SamplingTable(**{**defaults, **chosen}, ranges=ranges)
        for name, (low, high) in ranges.items():
            value = getattr(table, name)
            if not low <= value <= high:
                raise SettingsError(f"sampling.{name}: the default {value} is outside its range [{low}, {high}]")
        return table

    def published(self, *, device: str, numerics: str) -> dict[str, str | int | bool]:
        """The values in force that clients may see, with what "auto" came to: a named subset, never keys, paths or
        addresses. The model card adds those that it names itself."""
        engine, server = self.engine, self.server
        return {
            "device": device,
            "numerics": numerics,
            "dtype": engine.dtype,
            "attention": engine.attention,
            "tensor_parallel": engine.tensor_parallel,
            "engines": self.graph.engines,
            "layout": self.layout,
            "prefix_cache": engine.prefix_cache,
            "page_tokens": engine.page_tokens,
            "step_tokens": engine.step_tokens,
            "queue": engine.queue,
            "max_http_requests": server.max_http_requests,
            "max_body_bytes": server.max_body_bytes,
            "prompt_logprobs": self.logprobs.prompt,
            "logprob_token_ids": self.logprobs.token_ids,
        }


def cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _bad_value(name: SamplingField, value: float) -> str:
    """Why `value` isn't a legal value of the sampling field `name`; empty when it is one."""
    try:
        SamplingSettings.model_validate({name: value})
    except ValidationError as error:
        return "is not allowed: " + error.errors()[0]["msg"].lower()
    return ""


def _flat_keys() -> dict[str, list[tuple[str, str]]]:
    """Leaf name → the sections that have it."""
    keys: dict[str, list[tuple[str, str]]] = {}
    for section, field in Settings.model_fields.items():
        kind = field.annotation
        assert isinstance(kind, type) and issubclass(kind, Section)
        for leaf in kind.model_fields:
            keys.setdefault(leaf, []).append((section, leaf))
    return keys


def _unknown(key: str) -> SettingsError:
    flat = _flat_keys()
    names = sorted({*flat, *(f"{section}.{leaf}" for places in flat.values() for section, leaf in places)})
    near = difflib.get_close_matches(key, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return SettingsError(f"unknown setting {key!r}{hint}")


def _place(key: str) -> tuple[str, ...]:
    """The path of a dotted or flat key. `model` is short for `model.source`."""
    if key == "model":
        return ("model", "source")
    parts = tuple(key.split("."))
    flat = _flat_keys()
    if len(parts) == 1:
        places = flat.get(key, [])
        if len(places) == 1:
            return places[0]
        if places:
            raise SettingsError(
                f"setting {key!r} is ambiguous: write " + " or ".join(f"{s}.{leaf}" for s, leaf in places)
            )
        raise _unknown(key)
    if (parts[0], parts[1]) not in flat.get(parts[1], []):
        raise _unknown(key)
    return parts


def _merge(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for part in path[:-1]:
        inner = tree.setdefault(part, {})
        if not isinstance(inner, dict):
            raise SettingsError(f"setting {'.'.join(path)!r}: {part!r} already has a value")
        tree = inner
    tree[path[-1]] = None if isinstance(value, str) and value in ("null", "none") else value


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"config: can't read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"config: {path} is not valid TOML: {error}") from None
    for section in tree:
        if section not in Settings.model_fields:
            raise SettingsError(f"config: {path}: unknown section [{section}]")
        if not isinstance(tree[section], dict):
            raise SettingsError(f"config: {path}: {section} must be a section, not a value")
    return tree


def _message(error: ValidationError) -> str:
    """The first problem as `section.key: message`."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"] if part not in ("constrained-str", "tuple"))
    if first["type"] == "extra_forbidden":
        return str(_unknown(key))
    text = first["msg"].removeprefix("Value error, ")
    if text.startswith(key) and key:
        return text
    secret = first["loc"][-1:] == ("api_key",)
    given = first.get("input")
    shown = "" if secret or isinstance(given, dict) else f" (given {given!r})"
    return f"{key}: {text[:1].lower()}{text[1:]}{shown}"


def load(arguments: Mapping[str, Any] | None = None, *, api_key_file: Path | None = None) -> Settings:
    """Settings from `arguments`: `config` names a TOML file, every other key overrides one setting (dotted or flat;
    a nested mapping overrides a section). `api_key_file` overrides any key; an empty file disables authentication.

    Raises SettingsError naming the key.
    """
    given = dict(arguments or {})
    config = given.pop("config", None)
    tree = _read_toml(Path(str(config))) if config else {}
    key_file = given.pop("api_key_file", api_key_file)
    for key, value in given.items():
        if key in Settings.model_fields and isinstance(value, Mapping):
            for leaf, inner in value.items():
                _merge(tree, (key, str(leaf)), inner)
        else:
            _merge(tree, _place(key), value)
    if key_file is not None:
        _merge(tree, ("server", "api_key"), _read_key(Path(str(key_file))))
    try:
        return TypeAdapter(Settings).validate_python(tree)
    except ValidationError as error:
        raise SettingsError(_message(error)) from None


def _read_key(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"api_key_file: can't read {path}: {error}") from None


def parse_arguments(words: Iterable[str]) -> dict[str, str]:
    """`key=value` words of a command line. Raises SettingsError for a word without a key or a value."""
    given: dict[str, str] = {}
    for word in words:
        key, separator, value = word.partition("=")
        if not separator or not key:
            raise SettingsError(f"expected key=value, not {word!r}")
        if key in given:
            raise SettingsError(f"setting {key!r} is given twice")
        given[key] = value
    return given
