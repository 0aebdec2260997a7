"""What a server is started with: settings, the prepared model, and everything derived from the two.

Owns the checks that need the model, so that a setting the model can't honour ends the start with one line. Every
process of the graph gets the same Startup; nothing here loads torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

from engine.cache.keys import cache_seed
from engine.config import EngineConfig
from engine.grammar import Grammars
from engine.prepared import PreparedModel
from engine.text.lowering import Lowering, ServingLimits
from engine.text.output import OutputPipeline, Validator
from engine.types.conversation import Conversation
from engine.types.request import GenerationRequest, PreparedPrompt
from protocols.fields import DecodeLimits
from serve_app.discovery import ModelFacts
from serve_app.preparation import prepare
from serve_app.settings import Settings, SettingsError

ResolvedDevice = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Startup:
    """Picklable. `device` and `numerics` are resolved; `hub` names the server's telemetry hub."""

    settings: Settings
    prepared: Path
    device: ResolvedDevice
    hub: str

    @cached_property
    def model(self) -> PreparedModel:
        """The prepared model, prepared again first on a node that doesn't have it."""
        path = self.prepared
        if not (path / "manifest.json").exists():
            path = prepare(self.settings.model)
        return PreparedModel.load(path)

    def on(self, device: ResolvedDevice) -> Startup:
        """The same on the cluster's device. Raises SettingsError when CUDA was asked for and isn't there."""
        if self.settings.engine.device == "cuda" and device != "cuda":
            raise SettingsError("engine.device: cuda was asked for, but the Ray cluster has too few GPUs")
        return replace(self, device=device)

    def __getstate__(self) -> dict[str, object]:
        return {name: self.__dict__[name] for name in ("settings", "prepared", "device", "hub")}

    @property
    def numerics(self) -> str:
        asked = self.settings.engine.numerics
        return asked if asked != "auto" else "fast" if self.device == "cuda" else "invariant"

    @property
    def published(self) -> dict[str, str | int | bool]:
        """See Settings.published."""
        return self.settings.published(device=self.device, numerics=self.numerics)

    @property
    def context(self) -> int:
        """Prompt plus output tokens."""
        return self.settings.engine.context or self.model.manifest.context

    @property
    def engine_config(self) -> EngineConfig:
        return self.settings.engine_config(self.prepared, self.device)

    @property
    def cache_seed(self) -> bytes:
        """The start of every page key that a preprocessor names and a router reads."""
        engine = self.settings.engine
        return cache_seed(
            self.model.manifest, dtype=engine.dtype, numerics=self.numerics, page_tokens=engine.page_tokens
        )

    @property
    def digest(self) -> str:
        """Names the model and the settings on which ingress, preprocessor and engine must agree."""
        settings = self.settings
        told = {
            "model": self.model.manifest.digest,
            "context": self.context,
            "budgets": [settings.server.default_max_tokens, settings.server.thinking_token_budget],
            "max_top": settings.logprobs.max_top,
            "sampling": settings.sampling.model_dump(),
            **self.published,
            "layout": None,  # may differ between clients of one engine
        }
        return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()

    @property
    def serving_limits(self) -> ServingLimits:
        settings = self.settings
        return ServingLimits(
            context=self.context,
            default_max_tokens=settings.server.default_max_tokens,
            thinking_token_budget=settings.server.thinking_token_budget,
            sampling=settings.sampling_table(self.model.recipe.sampling),
            logprobs=settings.logprob_limits,
            page_tokens=settings.engine.page_tokens,
            prefix_cache=settings.engine.prefix_cache,
            vocab_size=self.model.manifest.vocab_size,
            cache_seed=self.cache_seed,
        )

    @property
    def decode_limits(self) -> DecodeLimits:
        logprobs = self.settings.logprobs
        return DecodeLimits(
            vocab_size=self.model.manifest.vocab_size,
            max_top_logprobs=logprobs.max_top,
            logprob_token_ids=logprobs.token_ids,
            prompt_logprobs=logprobs.prompt,
        )

    @property
    def facts(self) -> ModelFacts:
        """What discovery tells of the model."""
        server, engine, recipe = self.settings.server, self.settings.engine, self.model.recipe
        return ModelFacts(
            identifier=self.model.manifest.model_id,
            context=self.context,
            vocab_size=self.model.manifest.vocab_size,
            aliases=server.aliases,
            max_top_logprobs=self.settings.logprobs.max_top,
            max_concurrency=engine.max_requests * self.settings.graph.engines,
            prefill_chunk_size=engine.prefill_chunk,
            default_max_tokens=server.default_max_tokens,
            thinking_token_budget=server.thinking_token_budget,
            sampling=self.settings.sampling_table(recipe.sampling),
            tools=recipe.tools,
            thinking=recipe.reasoning is not None,
            modes=self.published,
        )

    @cached_property
    def grammars(self) -> Grammars:
        """This process's grammar compiler, with its bounded pool."""
        manifest, workers = self.model.manifest, self.settings.graph.workers
        return Grammars(self.model.tokenizer_json, manifest.vocab_size, tuple(manifest.eos_ids), workers=workers)

    def lowering(self, *, warm: bool = False) -> Lowering:
        """`warm`: reads the tokenizer now, not under the first request, and prepares for constraints in the background.
        Raises SettingsError when a setting can't be kept with this model."""
        if warm:
            self.grammars.warm()
            self.model.tokenizer.encode("", specials=True)
        try:
            return Lowering(self.model, self.serving_limits, self.grammars.check)
        except ValueError as error:
            raise SettingsError(str(error)) from None

    def open_pipeline(
        self, prompt: PreparedPrompt, request: GenerationRequest, call_id: Callable[[], str]
    ) -> OutputPipeline:
        """The output of one choice; `call_id` draws ids for its calls."""
        return OutputPipeline(self.model, prompt, request, call_id=call_id, validators=self._validators(request))

    def _validators(self, request: GenerationRequest) -> dict[str, Validator]:
        """The input checks of freeform tools, by name. Compiled already, when the request was lowered."""
        conversation = request.prompts[0]
        if not isinstance(conversation, Conversation):
            return {}
        formats = {tool.name: tool.input_format for tool in conversation.tools if tool.input_format is not None}
        return {name: partial(self.grammars.validate, input_format) for name, input_format in formats.items()}


def start(settings: Settings, *, hub: str) -> Startup:
    """Prepares the model and checks the settings against it; the device is settled by `Startup.on`, once the cluster
    is known. Raises SettingsError."""
    startup = Startup(settings, prepare(settings.model), "cpu", hub)
    manifest, recipe = startup.model.manifest, startup.model.recipe
    if settings.engine.context is not None and settings.engine.context > manifest.context:
        asked, has = settings.engine.context, manifest.context
        raise SettingsError(f"engine.context: {asked} is more than the {has} tokens of {manifest.model_id}")
    if recipe.module is None and manifest.format != "scripted":
        raise SettingsError(f"model.source: the engine has no module for models of the recipe {recipe.name!r}")
    startup.lowering()
    return startup
