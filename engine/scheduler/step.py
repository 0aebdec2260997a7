"""Step, LateInputs and StepResult: what the scheduler tells ranks and what they answer.

Plain data, encoded as msgpack by `engine.parallel.step_link`. Ranks obey; they never decide. Steps are pipelined
two deep: step N+1 is sent before the tokens of step N are read, so a decode row takes its input token and its
position from the slot, where the rank left them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.types.request import SamplingParams


@dataclass(slots=True)
class SlotSetup:
    """Binds a request to a slot before its first row.

    `length`: positions already restored from the prefix cache. `prompt`: int32 ids of prompt and committed tokens
    (little-endian), present only when penalties or a scripted model need them. `prompt_length` is the number of
    ids that count as prompt. `banned_until`: while the sampled position is below it, `banned_ids` (EOS under
    min_tokens) can't be sampled. `logprobs`/`logprob_ids` as in OutputOptions.
    """

    slot: int
    sampling: SamplingParams
    length: int
    prompt_length: int
    prompt: bytes = b""
    banned_until: int = 0
    banned_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    logprob_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class Row:
    """`count` tokens of one slot in this step.

    A prefill chunk gives `tokens` (int32 little-endian) and `start`, the position of its first token. A decode row
    has `tokens` empty, `start` -1 and `count` 1: the rank takes the slot's last sampled token and length.
    `sample`: sample the token after the last position. `score`: alternatives per position when the chunk's prompt
    scores are wanted (position p scores token p; the chunk's first row needs the logits kept from the chunk
    before), else None. `gated`: sampling waits for this step's LateInputs.
    """

    slot: int
    count: int
    start: int = -1
    tokens: bytes = b""
    sample: bool = True
    score: int | None = None
    gated: bool = False


@dataclass(slots=True)
class Step:
    """One forward pass. `tables`: (slot, index of the first page, page ids) that extend the slots' page tables.
    `copies`: (source page, destination page), done before the forward. `release`: slots whose state ends
    before this step's setups. Rows are decodes first, then prefill chunks."""

    number: int
    rows: list[Row] = field(default_factory=list)
    setups: list[SlotSetup] = field(default_factory=list)
    tables: list[tuple[int, int, list[int]]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    release: list[int] = field(default_factory=list)


@dataclass(slots=True)
class LateInputs:
    """For gated rows of the step with this number. `masks`: slot → llguidance bitmask (uint32 words, little-endian,
    bit set = allowed). `forced`: slot → token id to commit instead of sampling."""

    number: int
    masks: dict[int, bytes] = field(default_factory=dict)
    forced: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class SampledRow:
    """What a sampling row produced. `logprob` and `alternatives` (id, logprob) are present when the slot asked.
    `failure` is set instead when the row's logits weren't finite."""

    slot: int
    id: int
    logprob: float | None = None
    alternatives: list[tuple[int, float]] = field(default_factory=list)
    failure: str = ""


@dataclass(slots=True)
class ScoredRow:
    """Prompt scores of one chunk: for each position from `start`, (id, logprob, rank, alternatives as (id, logprob,
    rank))."""

    slot: int
    start: int
    entries: list[tuple[int, float, int, list[tuple[int, float, int]]]] = field(default_factory=list)


@dataclass(slots=True)
class StepResult:
    """`sampled` in row order. `seconds`: the rank's own time for the step, waits for late inputs excluded."""

    number: int
    sampled: list[SampledRow] = field(default_factory=list)
    scored: list[ScoredRow] = field(default_factory=list)
    seconds: float = 0.0
    failure: str = ""


@dataclass(slots=True)
class RankReport:
    """What rank 0 knows after loading.

    `pages`: usable pages of the per-rank pool (the padding page excluded). `page_bytes`: bytes of one page over all
    layers of one rank. `weight_bytes`: bytes of weights that one decode step reads, over all ranks. `device`,
    `attention`, `numerics`, `dtype`: the choices in force, for logs, the model card and metrics. `kernels`: what the
    matrix products run on.
    """

    pages: int
    page_bytes: int
    weight_bytes: int
    vocab_size: int
    device: str
    attention: str
    numerics: str
    dtype: str
    kernels: str = "torch"
