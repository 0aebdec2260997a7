"""The scorer: prompts, labels, distributions, and how a child is read."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.types.conversation import Image, Text
from engine.types.events import EngineEnd, TokenRecord, Update
from engine.types.request import PreparedRequest, ReasoningOptions, RequestError
from protocols.errors import ExecutionFailed, InvalidRequest, ProtocolError, Unavailable
from protocols.fields import DecodeLimits
from protocols.questions import (
    DecisionScorer,
    Question,
    Read,
    Scored,
    check_capability,
    conversation,
    distribution,
    final_turn,
    joined,
    label_pool,
    read_one,
)
from tests.support.scorer import ScriptedScorer, rendered

CHOICE = Question("choice", ("Which team?",), (("billing - Payments",), ("support",)))
PREDICATE = Question("predicate", (), (("no",), ("yes",)))
SCORE = Question("score", ("How urgent?",), (("Routine",), ("Soon",), ("Urgent",)))
IMAGE = Image(b"...", "image/png")


def score(
    scripted: ScriptedScorer, *questions: Question, state: tuple[str | Image, ...] = ("Charged twice",)
) -> Scored:
    return asyncio.run(DecisionScorer(scripted, scripted.read).score("systemone", state, questions))


def test_the_state_comes_first_and_the_cue_last() -> None:
    prompts = [rendered(conversation(("state",), q, label_pool(q.kind, 3)[: len(q.options)])) for q in (CHOICE, SCORE)]
    assert [prompt[0] for prompt in prompts] == ["state", "state"]
    assert prompts[0][1].startswith("Which team?\n\nOptions:\nA: billing - Payments\nB: support\n")
    assert "0: Routine\n1: Soon\n2: Urgent\n" in prompts[1][1]
    assert all(prompt[-1].endswith("\nAnswer:") for prompt in prompts)


def test_a_question_without_instructions_still_asks_something() -> None:
    text = final_turn(PREDICATE, "AB")[0]
    assert isinstance(text, str) and "A: no\nB: yes\n" in text and not text.startswith("\n")


def test_images_keep_their_place() -> None:
    question = Question("choice", ("Is ", IMAGE, " it?"), (("a", IMAGE), ("b",)))
    messages = conversation(("before ", IMAGE), question, "AB").messages
    assert messages[0].parts == (Text("before "), IMAGE)
    assert [type(part) for part in messages[1].parts] == [Text, Image, Text, Image, Text]


def test_one_turn_keeps_the_common_prefix() -> None:
    (message,) = conversation(("state",), CHOICE, "AB", one_turn=True).messages
    assert message.parts[0] == Text("state") and rendered(conversation(("state",), CHOICE, "AB", one_turn=True))[
        0
    ].endswith("\nAnswer:")


def test_requests_read_one_token_with_thinking_off() -> None:
    scripted = ScriptedScorer(lambda _: {"A": 0.5, "B": 0.25})
    score(scripted, CHOICE)
    (request,) = scripted.requests
    assert (request.api, request.max_tokens, request.n, request.ignore_eos) == ("systemone", 1, 1, True)
    assert request.reasoning == ReasoningOptions(enabled=False, closed=True)
    assert request.output.logprob_token_ids == (1000, 1001) and request.output.logprobs == 0


def test_questions_run_in_order_and_usage_sums_all_children() -> None:
    scripted = ScriptedScorer(
        lambda turn: {"A": 0.8, "B": 0.1} if "Which team" in turn else {"A": 0.1, "B": 0.3, "1": 0.2}
    )
    found = score(scripted, CHOICE, PREDICATE, SCORE)
    assert [answer.top for answer in found.answers] == [0, 1, 1]
    assert found.input_tokens == sum(len("\n".join(prompt)) for prompt in scripted.prompts)
    assert (found.output_tokens, found.cached_tokens) == (3, 0 + 10 + 20)


def test_every_question_is_checked_before_the_first_runs() -> None:
    scripted = ScriptedScorer(labels="AB")
    with pytest.raises(InvalidRequest, match="a question has 3 options, but the loaded model has only 2 labels"):
        score(scripted, CHOICE, SCORE)
    assert scripted.reads == 0


def test_labels_that_are_not_one_token_are_passed_over() -> None:
    scripted = ScriptedScorer(lambda _: {"B": 0.1, "D": 0.3}, labels="BDE")
    found = score(scripted, CHOICE)
    assert "B: billing" in scripted.prompts[0][1] and "D: support" in scripted.prompts[0][1]
    assert found.answers[0].probabilities == pytest.approx((0.25, 0.75))


def test_labels_of_one_token_together_are_used_once() -> None:
    class Folding(ScriptedScorer):
        async def label_ids(self, request: object, labels: Sequence[str]) -> tuple[int | None, ...]:
            firsts = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
            return tuple(1000 + firsts.index(label[0].upper()) if label.isalpha() else None for label in labels)

    scripted = Folding(lambda _: dict.fromkeys("ABCDEFGHIJKLMNOPQRSTUVWXYZ", 0.03))
    many = Question("choice", (), tuple((str(i),) for i in range(26)))
    assert len(set(score(scripted, many).answers[0].probabilities)) == 1
    with pytest.raises(InvalidRequest, match="has only 26 labels"):
        score(scripted, Question("choice", (), tuple((str(i),) for i in range(27))))


@pytest.mark.parametrize("options", [1, 2, 26, 27, 62, 63, 128])
def test_any_number_of_options_gets_distinct_labels(options: int) -> None:
    pool = label_pool("choice", options)
    assert len(set(pool)) == len(pool) >= options
    scripted = ScriptedScorer(lambda _: {pool[options - 1]: 0.5}, labels=pool)
    found = score(scripted, Question("choice", (), tuple((str(i),) for i in range(options))))
    assert found.answers[0].top == options - 1


def test_pairs_of_letters_fill_in_where_single_ones_are_missing() -> None:
    labels = [*"ABCDEFGHIJKLMNOPQRSTUVWXYZ", *(f"A{letter}" for letter in "BDFH")]
    scripted = ScriptedScorer(lambda _: {"AH": 0.5}, labels=labels)
    assert score(scripted, Question("choice", (), tuple((str(i),) for i in range(30)))).answers[0].top == 29
    with pytest.raises(InvalidRequest, match="31 options"):
        score(scripted, Question("choice", (), tuple((str(i),) for i in range(31))))


def test_templates_that_want_alternating_roles_get_one_turn() -> None:
    scripted = ScriptedScorer(lambda _: {"A": 0.5}, alternate=True)
    score(scripted, CHOICE, PREDICATE)
    assert [len(prompt) for prompt in scripted.prompts] == [1, 1]
    assert all(prompt[0].startswith("Charged twice") for prompt in scripted.prompts)


def test_a_template_that_takes_neither_is_refused_with_its_own_words() -> None:
    class Never(ScriptedScorer):
        async def label_ids(self, request: object, labels: Sequence[str]) -> tuple[int | None, ...]:
            raise RequestError("no user messages")

    with pytest.raises(RequestError, match="no user messages"):
        score(Never(), CHOICE)


def test_a_prompt_over_the_context_is_not_tried_twice() -> None:
    class Long(ScriptedScorer):
        calls = 0

        async def label_ids(self, request: object, labels: Sequence[str]) -> tuple[int | None, ...]:
            self.calls += 1
            raise RequestError("too long", code="context_length_exceeded")

    scripted = Long()
    with pytest.raises(RequestError, match="too long"):
        score(scripted, CHOICE)
    assert scripted.calls == 1


def test_a_label_that_was_not_reported_fails() -> None:
    async def read(_: PreparedRequest) -> Read:
        return Read(TokenRecord(1000, -0.5), 0)

    scorer = DecisionScorer(ScriptedScorer(), read)
    with pytest.raises(ExecutionFailed, match="token 1001"):
        asyncio.run(scorer.score("decisions", ("s",), (CHOICE,)))


def test_cancelling_stops_at_the_child_that_runs() -> None:
    scripted = ScriptedScorer()
    started, cancelled = asyncio.Event(), []

    async def read(_: PreparedRequest) -> Read:
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        raise AssertionError

    async def main() -> None:
        task = asyncio.create_task(DecisionScorer(scripted, read).score("systemone", ("s",), (CHOICE, CHOICE)))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert cancelled == [True]


def test_distributions_are_a_softmax_over_the_labels() -> None:
    found = distribution([math.log(p) for p in (0.60, 0.20, 0.10)])
    assert found.probabilities == pytest.approx((0.6 / 0.9, 0.2 / 0.9, 0.1 / 0.9), abs=1e-12)
    assert found.mass == pytest.approx(0.9) and found.top == 0
    assert distribution([-math.inf, -1000.0]).probabilities == (0.0, 1.0)
    with pytest.raises(ExecutionFailed):
        distribution([-math.inf, -math.inf])


def test_the_first_of_equal_options_wins() -> None:
    assert distribution([-2.0, -1.0, -1.0]).top == 1


@given(st.lists(st.floats(-50, 0), min_size=1, max_size=128))
def test_probabilities_sum_to_one(logprobs: list[float]) -> None:
    found = distribution(logprobs)
    assert math.fsum(found.probabilities) == pytest.approx(1.0, abs=1e-12)
    assert 0 <= found.mass <= 1 and 0 <= found.expectation <= len(logprobs) - 1 + 1e-9


def test_joining_merges_text_and_drops_nothing_else() -> None:
    assert joined("a", ("b", IMAGE), "", IMAGE, "c") == ("ab", IMAGE, IMAGE, "c")
    assert joined("") == ()


@pytest.mark.parametrize("limits", [DecodeLimits(10, logprob_token_ids=False), DecodeLimits(10, max_top_logprobs=0)])
def test_the_capability_is_needed(limits: DecodeLimits) -> None:
    check_capability(DecodeLimits(10))
    with pytest.raises(InvalidRequest, match="re-export"):
        check_capability(limits)


async def updates(*batches: Update) -> AsyncIterator[tuple[Update, ...]]:
    for update in batches:
        yield (update,)


def read(*batches: Update) -> Read:
    return asyncio.run(read_one(updates(*batches)))


def test_reading_a_child() -> None:
    record = TokenRecord(5, -0.5)
    apart = read(Update(0, cached_tokens=9), Update(0, (record,)), Update(0, end=EngineEnd("limit")))
    assert apart == read(Update(0, (record,), cached_tokens=9, end=EngineEnd("limit"))) == Read(record, 9)


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (EngineEnd("failed", "unavailable", "lost"), Unavailable),
        (EngineEnd("failed", "execution", "lost"), ExecutionFailed),
        (EngineEnd("cancelled", message="lost"), ExecutionFailed),
    ],
)
def test_a_child_that_fails(end: EngineEnd, error: type[ProtocolError]) -> None:
    for batch in (Update(0, end=end), Update(0, (TokenRecord(1),), end=end)):
        with pytest.raises(error, match="lost"):
            read(batch)


def test_a_child_without_a_token() -> None:
    for batches in ((), (Update(0, end=EngineEnd("eos")),)):
        with pytest.raises(ExecutionFailed, match="without a token"):
            read(*batches)
