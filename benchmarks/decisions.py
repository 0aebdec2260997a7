"""What questions over a common state cost, beside what they would cost if every shared token were free.

    python -m benchmarks.decisions [--questions 64] [--state 2000] [--repeats 3] [--threads 2] [--page 64]

"scored": one request through the scorer (rendering, labels, tokenizing, one child after another) over a state that the
engine hasn't seen. "ideal": the state's tokens prefilled once, and then for each question as many fresh tokens as its
own text has, with a token generated each. Runs alternate; figures are medians. "warm": three questions over a state
that is in the prefix cache. Prints one JSON object a measurement.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import Sequence
from itertools import count
from typing import Any, Final

import numpy as np

from benchmarks.machine import describe
from benchmarks.observations import Taken, prompt, taken
from engine.config import EngineConfig
from engine.inline import Inline
from engine.prepare import default_cache_dir, prepare
from engine.prepared import PreparedModel
from engine.text.lowering import Lowering, ServingLimits
from engine.types.request import GenerationRequest, OutputOptions, PreparedRequest
from protocols.questions import DecisionScorer, Question, Read, Scored

SOURCE: Final = "builtin:smollm2"
WORDS: Final = ("customer", "order", "refund", "late", "invoice", "team", "billing", "account", "urgent", "request")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--state", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--page", type=int, default=64)
    asked = parser.parse_args()
    print(json.dumps({"machine": describe()}), flush=True)
    prepared = prepare(SOURCE, default_cache_dir())
    config = EngineConfig(
        prepared, device="cpu", threads=asked.threads, kv_bytes=512 << 20, context=8192, page_tokens=asked.page
    )
    with Inline(config) as inline:
        desk = Desk(inline, asked.page)
        print(json.dumps(shared(desk, asked.questions, asked.state, asked.repeats)), flush=True)
        print(json.dumps(warm(desk, asked.state, asked.repeats)), flush=True)


class Desk:
    """The scorer's two ports over an inline engine. `prompts`: token counts of the last request's children."""

    def __init__(self, inline: Inline, page: int) -> None:
        model = inline.model
        assert isinstance(model, PreparedModel)
        limits = ServingLimits(8192, sampling=model.recipe.sampling, page_tokens=page)
        self.inline, self.model = inline, model
        self.prompts: list[int] = []
        self._lowering = Lowering(model, limits)
        self._draw = np.random.default_rng(5)
        self._fresh = count()

    async def prepare(self, request: GenerationRequest) -> PreparedRequest:
        return self._lowering.prepare(request)

    async def label_ids(self, request: GenerationRequest, labels: Sequence[str]) -> tuple[int | None, ...]:
        return self._lowering.label_ids(request, labels)

    async def read(self, prepared: PreparedRequest) -> Read:
        (choice,) = await asyncio.to_thread(self.inline.choices, prepared.children)
        self.prompts.append(len(prepared.children[0].token_ids))
        return Read(choice.records[0], choice.cached_tokens)

    def state(self, tokens: int) -> str:
        """A text of about `tokens` tokens that was never used before."""
        words = " ".join(self._draw.choice(WORDS, tokens).tolist())
        ids = self.model.tokenizer.encode(f"case {next(self._fresh)}: {words}", specials=False)[:tokens]
        return self.model.tokenizer.decode(ids)

    def score(self, state: str, questions: Sequence[Question]) -> Scored:
        self.prompts = []
        return asyncio.run(DecisionScorer(self, self.read).score("decisions", (state,), questions))

    def prefill(self, tokens: int) -> None:
        """A prompt of `tokens` fresh tokens, and one generated."""
        ids = self._draw.integers(3, 40_000, tokens, dtype=np.int32)
        self.inline.generate([prompt(ids, 1, OutputOptions(logprobs=0, logprob_token_ids=(1, 2, 3)), 1)])


def questions(number: int) -> list[Question]:
    options = (("billing",), ("support",), ("sales",))
    return [Question("choice", (f"Which team takes case number {place}?",), options) for place in range(number)]


def shared(desk: Desk, number: int, tokens: int, repeats: int) -> dict[str, Any]:
    """The request beside the ideal."""
    asked = questions(number)
    found = desk.score(desk.state(tokens), asked)
    tails = [length - tokens for length in desk.prompts]
    times: dict[str, list[Taken]] = {"scored": [], "ideal": []}

    def ideal() -> None:
        desk.prefill(tokens)
        for tail in tails:
            desk.prefill(tail)

    ideal()
    for _ in range(repeats):
        state = desk.state(tokens)
        times["scored"].append(taken(lambda state=state: desk.score(state, asked)))  # type: ignore[misc]
        times["ideal"].append(taken(ideal))
    wall = {name: statistics.median(each.wall for each in each_kind) for name, each_kind in times.items()}
    cpu = {name: statistics.median(each.cpu for each in each_kind) for name, each_kind in times.items()}
    return {
        "measurement": "shared state",
        "questions": number,
        "state_tokens": tokens,
        "tail_tokens": round(statistics.mean(tails), 1),
        "computed_again": found.input_tokens - found.cached_tokens - tokens - sum(tails),
        "wall_s": {name: round(value, 3) for name, value in wall.items()},
        "cpu_s": {name: round(value, 3) for name, value in cpu.items()},
        "wall_ratio": round(wall["scored"] / wall["ideal"], 3),
        "cpu_ratio": round(cpu["scored"] / cpu["ideal"], 3),
    }


def warm(desk: Desk, tokens: int, repeats: int) -> dict[str, Any]:
    """Three other questions over a state that was asked about before."""
    state = desk.state(tokens)
    desk.score(state, questions(1))
    times = []
    for place in range(repeats):
        asked = [Question("choice", (f"Question {place}-{number}?",), (("a",), ("b",))) for number in range(3)]
        times.append(taken(lambda asked=asked: desk.score(state, asked)))  # type: ignore[misc]
    return {
        "measurement": "three warm questions",
        "wall_s": round(statistics.median(each.wall for each in times), 3),
        "cpu_s": round(statistics.median(each.cpu for each in times), 3),
    }


if __name__ == "__main__":
    main()
