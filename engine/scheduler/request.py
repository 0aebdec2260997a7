"""Request: the only mutable per-request state of the scheduler, and the group it came with.

Counters, no phases: `computed` positions chase the tokens that are known or in flight. What is committed never
changes; what is computed may be thrown away and computed again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from engine.scheduler.guide import Guide, banned_ids
from engine.scheduler.step import SlotSetup
from engine.types.events import EndCause, Update
from engine.types.request import PreparedPrompt

Sink = Callable[[list[Update]], None]


@dataclass(slots=True, eq=False)
class Group:
    """Choices that were submitted together. `live`: children that have not ended."""

    id: str
    sink: Sink | None
    children: list[Request] = field(default_factory=list)
    live: int = 0


class Request:
    """One choice.

    `tokens`: prompt and committed output. `inflight`: output tokens that steps in flight will sample. `computed`:
    positions whose KV is computed or scheduled. `prefill_end`: positions to compute before the first decode of this
    residency. `slot`, `pages`: what it holds on the device while running. `keys`: names of its complete pages;
    `published` of them can be reused by others, and up to `promised` will be. `awaits`: a key that another request
    promised. `opening`: the guide, while it is being compiled. `strikes`: groups of ranks that failed while they
    computed it. `scored`: prompt positions whose scores were delivered. `cached_tokens`: prompt tokens reused at its
    first admission. `announced`: its first update was told.
    """

    __slots__ = (
        "announced",
        "arrival",
        "awaits",
        "cached_tokens",
        "child",
        "computed",
        "ended",
        "group",
        "guide",
        "inflight",
        "keys",
        "limit",
        "opening",
        "pages",
        "prefill_end",
        "promised",
        "prompt",
        "prompt_length",
        "published",
        "scored",
        "scoring",
        "slot",
        "stops",
        "strikes",
        "tokens",
    )

    def __init__(self, group: Group, child: int, prompt: PreparedPrompt, context: int) -> None:
        self.group = group
        self.child = child
        self.prompt = prompt
        self.arrival = 0
        self.tokens = array("i", np.ascontiguousarray(prompt.token_ids, dtype=np.int32).tobytes())
        self.prompt_length = len(self.tokens)
        self.tokens.extend(record.id for record in prompt.committed)
        self.limit = max(min(prompt.max_tokens, context - self.prompt_length), 0)
        self.keys: list[bytes] = list(prompt.page_keys)
        self.stops = TokenStops(prompt.stop_sequences)
        self.scoring = prompt.output.prompt_logprobs is not None and not prompt.committed
        self.scored = 0
        self.cached_tokens: int | None = prompt.first_cached
        self.announced = False
        self.ended = False
        self.guide: Guide | None = None
        self.opening: Future[Guide] | None = None
        self.awaits: bytes | None = None
        self.inflight = 0
        self.strikes = 0
        self.leave()

    def leave(self) -> None:
        """Forgets the residency: nothing is computed, nothing held."""
        self.slot = -1
        self.pages: list[int] = []
        self.computed = 0
        self.prefill_end = 0
        self.published = 0
        self.promised = 0

    @property
    def unscored(self) -> bool:
        """Prompt scores are wanted and not all delivered: the prompt must be computed from its first token."""
        return self.scoring and self.scored < self.prompt_length

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def decoding(self) -> bool:
        """Its prefill is scheduled whole."""
        return self.computed >= self.prefill_end

    @property
    def wants_more(self) -> bool:
        """Another token may be sampled after those in flight."""
        return self.generated + self.inflight < self.limit

    def verdict(self) -> EndCause | None:
        """Why the last committed token ends the output, or None. EOS and stops win over the limit."""
        generated = self.generated
        prompt = self.prompt
        if generated:
            token = self.tokens[-1]
            if token in prompt.eos_ids and not prompt.ignore_eos:
                return "eos"
            if generated >= prompt.min_tokens and self.stops.match(self.tokens, generated):
                return "token_stop"
        return "limit" if generated >= self.limit else None

    def setup(self, length: int, *, with_prompt: bool) -> SlotSetup:
        """Binds the request to its slot, `length` positions restored."""
        prompt = self.prompt
        sampling = prompt.sampling
        penalised = (
            sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        )
        banned = prompt.min_tokens > 0 and prompt.constraint is None
        return SlotSetup(
            self.slot,
            sampling,
            length,
            self.prompt_length,
            prompt=self.tokens.tobytes() if penalised or with_prompt else b"",
            banned_until=self.prompt_length + prompt.min_tokens if banned else 0,
            banned_ids=banned_ids(prompt) if banned else (),
            logprobs=prompt.output.logprobs,
            logprob_ids=prompt.output.logprob_token_ids,
        )


class TokenStops:
    """Token sequences that end the output when it ends with one."""

    __slots__ = ("_by_last",)

    def __init__(self, sequences: Sequence[tuple[int, ...]]) -> None:
        self._by_last: dict[int, list[array[int]]] = {}
        for sequence in sequences:
            self._by_last.setdefault(sequence[-1], []).append(array("i", sequence))

    def match(self, tokens: array[int], generated: int) -> bool:
        """Whether the last `generated` of `tokens` end with a sequence."""
        if not self._by_last:
            return False
        for sequence in self._by_last.get(tokens[-1], ()):
            size = len(sequence)
            if size <= generated and tokens[-size:] == sequence:
                return True
        return False
