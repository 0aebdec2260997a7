"""One scorer for System One and Decisions: questions over a common state, each answered by one generated token.

Owns the prompts, the labels and the distribution read from them. A question's options get synthetic labels, each
verified to be one token of its own directly after the complete rendered prompt; the label log probabilities of the
first generated token are the answer. What confidence means is each protocol's own business.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, Protocol

from engine.types.conversation import Conversation, Image, Message, Text
from engine.types.events import EngineEnd, TokenRecord, Update
from engine.types.request import (
    Api,
    GenerationRequest,
    OutputOptions,
    PreparedRequest,
    ReasoningOptions,
    RequestError,
)
from protocols.errors import ExecutionFailed, InvalidRequest, ProtocolError, Unavailable
from protocols.fields import MAX_LOGPROB_TOKEN_IDS, DecodeLimits

Kind = Literal["predicate", "choice", "score"]
Content = tuple[str | Image, ...]
"""Text with images in it, in order."""

MAX_QUESTIONS: Final = 64
MAX_OPTIONS: Final = MAX_LOGPROB_TOKEN_IDS
MAX_LEVELS: Final = 10

_DEFAULTS: Final[dict[Kind, str]] = {
    "predicate": "Does this hold for the material above?",
    "choice": "Which option fits the material above best?",
    "score": "Which level fits the material above best?",
}
_CUE: Final = "Reply with the label of exactly one option.\nAnswer:"
_UPPER: Final = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
_DIGITS: Final = tuple("0123456789")
_LETTERS: Final = (*_UPPER, *map(str.lower, _UPPER))
_PAIRS: Final = tuple(a + b for alphabet in (_UPPER, tuple(map(str.lower, _UPPER))) for a in alphabet for b in alphabet)


@dataclass(frozen=True, slots=True)
class Question:
    """`options` in label order; of a predicate, what false means and then what true means."""

    kind: Kind
    instructions: Content
    options: tuple[Content, ...]


@dataclass(frozen=True, slots=True)
class Distribution:
    """What the model thinks of the options. `probabilities` are normalised over the labels, `mass` is the labels'
    share of the whole vocabulary, `top` the first of the most probable options."""

    probabilities: tuple[float, ...]
    mass: float

    @property
    def top(self) -> int:
        return max(range(len(self.probabilities)), key=self.probabilities.__getitem__)

    @property
    def expectation(self) -> float:
        """The mean index."""
        return math.fsum(index * p for index, p in enumerate(self.probabilities))


@dataclass(frozen=True, slots=True)
class Scored:
    """All answers in question order, and the token counts of all children."""

    answers: tuple[Distribution, ...]
    input_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Read:
    """The one token generated for a child, and the prompt tokens it reused."""

    record: TokenRecord
    cached: int


class Prompts(Protocol):
    """What the scorer asks of the preprocessor."""

    async def prepare(self, request: GenerationRequest) -> PreparedRequest:
        """Lowers a request. Raises RequestError."""
        ...

    async def label_ids(self, request: GenerationRequest, labels: Sequence[str]) -> tuple[int | None, ...]:
        """For each label the token that it is directly after the request's complete rendered prompt; None where it
        isn't exactly one token, or changes the prompt's own. Raises RequestError."""
        ...


Reader = Callable[[PreparedRequest], Awaitable[Read]]
"""Runs one child to its end. Raises ProtocolError."""


def check_capability(limits: DecodeLimits) -> None:
    """Raises InvalidRequest when the loaded model can't report the log probabilities of given token ids."""
    if not limits.logprob_token_ids or limits.max_top_logprobs == 0:
        raise InvalidRequest(
            "the loaded model was prepared without explicit-id log probabilities, which this route needs; re-export it"
            " with logprobs.token_ids enabled"
        )


def distribution(logprobs: Sequence[float]) -> Distribution:
    """Softmax over the labels' log probabilities. Raises ExecutionFailed when no label has a probability."""
    top = max(logprobs)
    if not math.isfinite(top):
        raise ExecutionFailed("the model gives none of the labels a probability")
    weights = [math.exp(value - top) for value in logprobs]
    total = math.fsum(weights)
    return Distribution(tuple(weight / total for weight in weights), min(1.0, total * math.exp(top)))


def joined(*contents: str | Image | Content) -> Content:
    """Contents in a row, neighbouring texts merged."""
    merged: list[str | Image] = []
    for content in contents:
        for piece in content if isinstance(content, tuple) else (content,):
            if isinstance(piece, str) and merged and isinstance(merged[-1], str):
                merged[-1] += piece
            elif piece != "":
                merged.append(piece)
    return tuple(merged)


def final_turn(question: Question, labels: Sequence[str]) -> Content:
    """The last user turn: the question, its options by label, and the cue."""
    instructions = question.instructions or (_DEFAULTS[question.kind],)
    options = [joined(f"{label}: ", option, "\n") for label, option in zip(labels, question.options, strict=True)]
    return joined(instructions, "\n\nOptions:\n", *options, "\n" + _CUE)


def conversation(state: Content, question: Question, labels: Sequence[str], *, one_turn: bool = False) -> Conversation:
    """The state, the same for all questions of a request, and then the question. `one_turn`: both in one user message,
    for templates that don't take two in a row; the common prefix stays."""
    asked = _parts(final_turn(question, labels))
    if one_turn:
        return Conversation((Message("user", (*_parts(state), *asked)),))
    return Conversation((Message("user", _parts(state)), Message("user", asked)))


def _parts(content: Content) -> tuple[Text | Image, ...]:
    return tuple(Text(piece) if isinstance(piece, str) else piece for piece in content)


def label_pool(kind: Kind, options: int) -> tuple[str, ...]:
    """Candidate labels, best first; pairs of letters only where single ones may not do."""
    singles = (*_DIGITS, *_LETTERS) if kind == "score" else (*_LETTERS, *_DIGITS)
    return singles if options <= len(_UPPER) else (*singles, *_PAIRS)


class DecisionScorer:
    """Scores the questions of one request after another, so that all but the first find the state in the prefix
    cache. Cancelling the task that awaits `score` cancels the child that runs."""

    def __init__(self, prompts: Prompts, read: Reader) -> None:
        self._prompts = prompts
        self._read = read

    async def score(self, api: Api, state: Content, questions: Sequence[Question]) -> Scored:
        """Every question is prepared and checked before the first is run. Raises RequestError and ProtocolError."""
        compiled = await self._compile(api, state, questions)
        answers: list[Distribution] = []
        cached = 0
        for prepared, ids in compiled:
            read = await self._read(prepared)
            answers.append(_answer(read.record, ids))
            cached += read.cached
        tokens = sum(len(prepared.children[0].token_ids) for prepared, _ in compiled)
        return Scored(tuple(answers), tokens, cached, len(compiled))

    async def _compile(
        self, api: Api, state: Content, questions: Sequence[Question]
    ) -> list[tuple[PreparedRequest, tuple[int, ...]]]:
        one_turn = await self._needs_one_turn(api, state, questions[0])
        work = (self._compiled(api, state, question, one_turn) for question in questions)
        compiled = []
        for found in await asyncio.gather(*work, return_exceptions=True):
            if isinstance(found, BaseException):
                raise found
            compiled.append(found)
        return compiled

    async def _compiled(
        self, api: Api, state: Content, question: Question, one_turn: bool
    ) -> tuple[PreparedRequest, tuple[int, ...]]:
        request, ids = await self._labelled(api, state, question, one_turn)
        return await self._prompts.prepare(request), ids

    async def _needs_one_turn(self, api: Api, state: Content, question: Question) -> bool:
        """Whether the template refuses two user messages in a row but takes one."""
        try:
            await self._ids(api, state, question, one_turn=False)
        except RequestError as refused:
            if refused.code is not None:
                raise
            try:
                await self._ids(api, state, question, one_turn=True)
            except RequestError:
                raise refused from None
            return True
        return False

    async def _ids(self, api: Api, state: Content, question: Question, *, one_turn: bool) -> None:
        labels = label_pool(question.kind, len(question.options))[: len(question.options)]
        await self._prompts.label_ids(_request(api, conversation(state, question, labels, one_turn=one_turn)), ())

    async def _labelled(
        self, api: Api, state: Content, question: Question, one_turn: bool
    ) -> tuple[GenerationRequest, tuple[int, ...]]:
        """The request whose labels hold after its own prompt, and their ids."""
        wanted = len(question.options)
        pool = label_pool(question.kind, wanted)
        labels = pool[:wanted]
        for _ in range(len(pool)):
            request = _request(api, conversation(state, question, labels, one_turn=one_turn))
            found = await self._prompts.label_ids(request, labels)
            chosen = tuple(dict.fromkeys(id for id in found if id is not None))
            if len(chosen) == wanted:
                return replace(request, output=OutputOptions(logprobs=0, logprob_token_ids=chosen)), chosen
            others = tuple(label for label in pool if label not in labels)
            ids = dict(zip((*labels, *others), (*found, *await self._prompts.label_ids(request, others)), strict=True))
            usable = _distinct([label for label in pool if ids[label] is not None], ids)
            if len(usable) < wanted:
                raise InvalidRequest(
                    f"a question has {wanted} options, but the loaded model has only {len(usable)} labels of one token"
                )
            pool = tuple(label for label in pool if label in usable)
            labels = tuple(usable[:wanted])
        raise InvalidRequest("no labels of one token hold after the rendered prompt")


def _distinct(labels: Sequence[str], ids: dict[str, int | None]) -> list[str]:
    """The first label of each id."""
    first: dict[int | None, str] = {}
    for label in labels:
        first.setdefault(ids[label], label)
    return list(first.values())


def _request(api: Api, prompt: Conversation) -> GenerationRequest:
    """One token, whatever it is: an end-of-sequence token is read like any other. It is the first of the answer:
    thinking is off where the template can do that, else the prompt ends where reasoning has ended."""
    return GenerationRequest(
        api=api,
        prompts=(prompt,),
        max_tokens=1,
        ignore_eos=True,
        output=OutputOptions(logprobs=0),
        reasoning=ReasoningOptions(enabled=False, closed=True),
    )


def _answer(record: TokenRecord, ids: Sequence[int]) -> Distribution:
    found = dict(record.alternatives)
    if record.logprob is not None:
        found.setdefault(record.id, record.logprob)
    try:
        return distribution([found[id] for id in ids])
    except KeyError as missing:
        raise ExecutionFailed(f"the log probability of token {missing} was not reported") from None


async def read_one(updates: AsyncIterable[Sequence[Update]]) -> Read:
    """The token of a child that generates one. Raises ProtocolError when it ends without."""
    record: TokenRecord | None = None
    cached = 0
    async for batch in updates:
        for update in batch:
            if update.cached_tokens is not None:
                cached = update.cached_tokens
            if update.records and record is None:
                record = update.records[0]
            if update.end is not None and (record is None or update.end.cause in ("failed", "cancelled")):
                raise _ended(update.end)
    if record is None:
        raise ExecutionFailed("generation ended without a token")
    return Read(record, cached)


def _ended(end: EngineEnd) -> ProtocolError:
    message = end.message or "generation ended without a token"
    return Unavailable(message) if end.kind == "unavailable" else ExecutionFailed(message)
