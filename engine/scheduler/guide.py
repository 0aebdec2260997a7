"""Guide: what a request's reasoning budget and output constraint demand of its next token.

One guide a request that has either; it sees committed tokens only, so recomputation, a new group of ranks or a dropped
row never confuse it. Owns the rule of when a close is forced; the syntax machine and the constraint are others'
(`engine.syntax`, `engine.constrained`).
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, cast

from engine.syntax.piece import Segment, Syntax
from engine.types.request import PreparedPrompt

if TYPE_CHECKING:
    from engine.constrained import StructuredSyntax
    from engine.prepared import PreparedModel


class Matcher(Protocol):
    """A constraint's state after the output so far. It is told of every token that doesn't end the output, and knows
    itself what of it the constraint governs (`engine.constrained`)."""

    def mask(self) -> bytes | None:
        """Allowed next tokens: uint32 words, little-endian, a set bit allows. None: any."""
        ...

    def advance(self, token: int) -> bool:
        """Takes a committed token. False: the constraint doesn't allow it."""
        ...

    def allows(self, token: int) -> bool: ...


class GuideFailed(RuntimeError):
    """A committed token that the grammar refuses: the constraint was not enforced."""


class Segments:
    """Token ids to the text that each releases, characters spread over several tokens included."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._count = 0

    def next(self, token: int) -> Segment:
        whole = not self._decoder.getstate()[0]
        text = self._decoder.decode(self._bytes(token))
        whole = whole and not self._decoder.getstate()[0]
        self._count += 1
        return Segment(self._count - 1, token if whole else None, text)


class Guide:
    """`budget`: reasoning tokens after which `close` is forced; needs `syntax` and `segments`. `banned`: ids that may
    not come before `min_tokens` tokens; with a matcher the guide sees to it, since only the constraint knows when
    nothing else is allowed."""

    def __init__(
        self,
        *,
        budget: int | None = None,
        close: int | None = None,
        syntax: Syntax | None = None,
        segments: Segments | None = None,
        matcher: Matcher | None = None,
        banned: Sequence[int] = (),
        min_tokens: int = 0,
        vocab_size: int = 0,
    ) -> None:
        self.cut = False
        """The budget has forced the close."""
        self._close = close
        self._syntax = syntax
        self._segments = segments
        self._matcher = matcher
        self._banned = tuple(banned)
        self._min_tokens = min_tokens
        self._vocab_size = vocab_size
        self._count = 0
        self._budget = budget if close is not None and syntax is not None and syntax.reasoning_open else None

    def gated(self, index: int) -> bool:
        """Whether sampling output token `index` must wait for late inputs."""
        return self._matcher is not None or (self._budget is not None and index >= self._budget)

    def forced(self) -> int | None:
        """The close token when the budget is used up, reasoning is unambiguously open and the constraint has no
        objection; the caller knows that there is room for one more token."""
        syntax, close = self._syntax, self._close
        if self._budget is None or self._count < self._budget or syntax is None or close is None:
            return None
        if not syntax.reasoning_open or syntax.tool_pending:
            return None
        return close if self._matcher is None or self._matcher.allows(close) else None

    def mask(self) -> bytes | None:
        """Allowed ids of the next token, None when all are."""
        if self._matcher is None:
            return None
        mask = self._matcher.mask()
        return self._without_banned(mask) if self._count < self._min_tokens else mask

    def commit(self, token: int, *, forced: bool = False) -> None:
        """Takes a committed token that doesn't end the output. Raises GuideFailed."""
        if self._matcher is not None and not self._matcher.advance(token):
            raise GuideFailed(f"the output constraint does not allow token {token}")
        self._count += 1
        if forced:
            self.cut = True
            self._budget = None
        if self._budget is not None and self._syntax is not None and self._segments is not None:
            self._syntax.feed(self._segments.next(token))
            if not self._syntax.reasoning_open:
                self._budget = None

    def _without_banned(self, mask: bytes | None) -> bytes:
        """`mask` minus the ids that min_tokens forbids, unless nothing else would be left."""
        words = -(-self._vocab_size // 32) * 4
        edited = bytearray(mask if mask is not None else b"\xff" * words)
        for token in self._banned:
            if token // 8 < len(edited):
                edited[token // 8] &= ~(1 << (token % 8)) & 0xFF
        return bytes(edited) if any(edited) or mask is None else mask


OpenGuide = Callable[[PreparedPrompt], Guide]
"""May be slow with a constraint (it is compiled); raises RequestError when it can't be."""


def banned_ids(prompt: PreparedPrompt) -> tuple[int, ...]:
    """Ids that would end the output at once: EOS, unless ignored, and stops of one token."""
    eos = () if prompt.ignore_eos else prompt.eos_ids
    return (*eos, *(sequence[0] for sequence in prompt.stop_sequences if len(sequence) == 1))


class ModelGuides:
    """OpenGuide with the model's own syntax machine and grammars."""

    def __init__(self, model: PreparedModel) -> None:
        from engine.grammar import Grammars

        self._recipe, self._tokens = model.recipe, model.tokens
        self._vocab_size = model.manifest.vocab_size
        self._grammars = Grammars(model.tokenizer_json, self._vocab_size, model.manifest.eos_ids)
        self._close: int | None = None
        if model.recipe.reasoning is not None and model.recipe.reasoning.single_token_close:
            self._close = model.tokenizer.token_id(model.recipe.reasoning.close)

    def warm(self) -> None:
        """Prepares for constraints in the background, so that the first one doesn't wait for it."""
        self._grammars.warm()

    def __call__(self, prompt: PreparedPrompt) -> Guide:
        from engine.constrained import ConstrainedDecoding

        matcher: Matcher | None = None
        if prompt.constraint is not None:
            structured = cast("StructuredSyntax | None", self._machine(prompt))
            matcher = ConstrainedDecoding(self._grammars, prompt.constraint, structured, self._tokens, prompt.eos_ids)
        return Guide(
            budget=prompt.reasoning_budget,
            close=self._close,
            syntax=self._machine(prompt) if prompt.reasoning_budget is not None else None,
            segments=Segments(self._tokens.bytes),
            matcher=matcher,
            banned=banned_ids(prompt),
            min_tokens=prompt.min_tokens,
            vocab_size=self._vocab_size,
        )

    def _machine(self, prompt: PreparedPrompt) -> Syntax | None:
        from engine.syntax import open_syntax

        if prompt.opening is None:
            return None
        constraint = prompt.constraint
        return open_syntax(
            self._recipe,
            self._tokens,
            opening=prompt.opening,
            tools_active=prompt.tools_active,
            structured=constraint is not None,
            padded=constraint is not None and constraint.json,
        )
