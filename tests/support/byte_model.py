"""A model without weights whose tokenizer has one token per byte and one per control token.

Stands in for a prepared model wherever text, not weights, is what is tested: any recipe, any template, and token ids
that can be read back.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from engine.config import Manifest
from engine.recipes.catalog import RECIPES
from engine.recipes.recipe import Recipe


@dataclass(frozen=True)
class ByteTokenizer:
    """Ids 0..255 are bytes; control tokens follow in the given order."""

    control: tuple[str, ...] = ()
    bos: str | None = None

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        words = sorted(self.control, key=len, reverse=True)
        return re.compile("|".join(re.escape(word) for word in words) or r"(?!)")

    def encode(self, text: str, *, specials: bool, add_special_tokens: bool = False) -> list[int]:
        ids = [self._id(self.bos)] if add_special_tokens and self.bos is not None else []
        if not specials:
            return ids + list(text.encode())
        start = 0
        for found in self._pattern.finditer(text):
            ids += text[start : found.start()].encode()
            ids.append(self._id(found[0]))
            start = found.end()
        return ids + list(text[start:].encode())

    def encode_segments(self, segments: Sequence[tuple[str, bool]]) -> list[int]:
        return [token for text, trusted in segments for token in self.encode(text, specials=trusted)]

    def token_id(self, text: str) -> int | None:
        if text in self.control:
            return self._id(text)
        data = text.encode()
        return data[0] if len(data) == 1 else None

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.data(token) for token in ids).decode(errors="replace")

    def data(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else self.control[token - 256].encode()

    def _id(self, word: str) -> int:
        return 256 + self.control.index(word)


@dataclass(frozen=True)
class ByteTokens:
    tokenizer: ByteTokenizer

    @property
    def vocab_size(self) -> int:
        return 256 + len(self.tokenizer.control)

    def bytes(self, token: int) -> bytes:
        return self.tokenizer.data(token)

    def text(self, token: int) -> str:
        return self.tokenizer.data(token).decode(errors="replace")

    def is_special(self, token: int) -> bool:
        return token >= 256

    def is_control(self, token: int) -> bool:
        return token >= 256


@dataclass(frozen=True)
class ByteModel:
    """Control tokens must include every delimiter that the recipe's family has as one token."""

    recipe: Recipe
    control: tuple[str, ...]
    template: str | None = None
    bos: str | None = None
    eos: tuple[str, ...] = ()
    context: int = 100_000
    config: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def tokenizer(self) -> ByteTokenizer:
        return ByteTokenizer(self.control, self.bos)

    @property
    def tokens(self) -> ByteTokens:
        return ByteTokens(self.tokenizer)

    @cached_property
    def manifest(self) -> Manifest:
        ids = {word: 256 + index for index, word in enumerate(self.control)}
        return Manifest(
            model_id="tests/byte-model",
            recipe=self.recipe.name,
            format="scripted",
            config=self.config,
            weights=[],
            context=self.context,
            vocab_size=self.tokens.vocab_size,
            bos_id=None if self.bos is None else ids[self.bos],
            eos_ids=[ids[word] for word in self.eos],
            sampling={},
            digest="0" * 64,
        )


CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

SMOLLM2_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def smollm2(**changes: Any) -> ByteModel:
    """The demo model's template over bytes."""
    options: dict[str, Any] = {
        "recipe": RECIPES["llama"],
        "control": CHATML,
        "template": SMOLLM2_TEMPLATE,
        "bos": "<|im_start|>",
        "eos": ("<|im_end|>",),
    }
    return ByteModel(**{**options, **changes})
