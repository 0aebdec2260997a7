"""A constraint on generated text, in source form. Compiled by `engine.grammar`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ConstraintKind = Literal["json_object", "json_schema", "lark", "regex", "choice"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """`source` by kind: json_object "" · json_schema the schema's JSON text · lark a Lark grammar ·
    regex a regular expression · choice a JSON array of strings."""

    kind: ConstraintKind
    source: str

    @property
    def json(self) -> bool:
        """The answer is a JSON text, so that whitespace before it means nothing."""
        return self.kind in ("json_object", "json_schema")
