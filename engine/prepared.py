"""PreparedModel: a prepared directory as every process reads it. Torch-free; the tokenizer loads when first used."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from engine.checkpoint_files import ModelSourceError
from engine.config import Manifest
from engine.prepare import MANIFEST, SCRIPT, TEMPLATE, TOKENIZER, TOKENS
from engine.recipes.catalog import RECIPES
from engine.recipes.recipe import Recipe
from engine.recipes.sampling import table_for
from engine.script import Script
from engine.text.tokenizer import Tokenizer, TokenTable


@dataclass(frozen=True)
class PreparedModel:
    """`recipe` carries the sampling table in force for this checkpoint, an operator's override aside. `template`: the
    checkpoint's own chat template."""

    path: Path
    manifest: Manifest
    recipe: Recipe
    template: str | None

    @classmethod
    def load(cls, path: Path) -> PreparedModel:
        """Raises ModelSourceError for a directory that `prepare` didn't write."""
        try:
            manifest = Manifest(**json.loads((path / MANIFEST).read_text(encoding="utf-8")))
            recipe = RECIPES[manifest.recipe]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ModelSourceError(f"{path} is not a prepared model: {error!r}") from error
        sampling = table_for(
            recipe,
            model_id=manifest.model_id,
            config=manifest.config,
            generation=manifest.sampling,
            vocab_size=manifest.vocab_size,
        )
        template = path / TEMPLATE
        text = template.read_text(encoding="utf-8") if template.exists() else None
        return cls(path, manifest, replace(recipe, sampling=sampling), text)

    @property
    def tokenizer_json(self) -> Path:
        return self.path / TOKENIZER

    @cached_property
    def tokens(self) -> TokenTable:
        return TokenTable.load(self.path / TOKENS)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.tokenizer_json.read_text(encoding="utf-8"), self.tokens)

    @cached_property
    def script(self) -> Script | None:
        """The answers of a scripted model, None for a real one."""
        return Script.load(self.path / SCRIPT) if self.manifest.format == "scripted" else None
