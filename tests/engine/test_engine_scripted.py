"""Budgets and constraints with the model's own syntax machine and grammars, over scripted models on a real rank."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.inline import Choice, Inline
from engine.prepared import PreparedModel
from engine.types.constraint import Constraint
from engine.types.events import EngineEnd
from engine.types.request import OutputOptions, PreparedPrompt, SamplingParams
from tests.support.scripted import Piece, prepared, times, token, turn
from tests.support.tiny_models import engine_config

SAMPLING = SamplingParams(1.0, 1.0, -1, 0.0, 1.0, 0.0, 0.0, 5)
SCHEMA = json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
OBJECT = Constraint("json_schema", SCHEMA)
CLOSE = token("</think>")


class Bench:
    def __init__(self, model: PreparedModel, inline: Inline) -> None:
        self.model, self.inline = model, inline

    def prompt(self, text: str = "hello", **fields: Any) -> PreparedPrompt:
        ids = self.model.tokenizer.encode(text, specials=False)
        values: dict[str, Any] = {
            "max_tokens": 60,
            "eos_ids": tuple(self.model.manifest.eos_ids),
            "opening": "reasoning",
            **fields,
        }
        return PreparedPrompt(np.array(ids, dtype=np.int32), SAMPLING, **values)

    def run(self, *prompts: PreparedPrompt) -> list[Choice]:
        return self.inline.choices(prompts)

    def text(self, choice: Choice) -> str:
        return b"".join(self.model.tokens.bytes(record.id) for record in choice.records).decode()

    def forced(self, choice: Choice) -> list[int]:
        return [place for place, record in enumerate(choice.records) if record.forced]


@contextmanager
def scripted(directory: Path, *output: Piece, **changes: Any) -> Iterator[Bench]:
    model = prepared(directory, [turn(*output)], recipe="qwen38")
    config = engine_config(prepared=model.path, context=256, kv_bytes=None, max_requests=4, **changes)
    with Inline(config, model=model) as inline:
        yield Bench(model, inline)


def test_the_close_is_forced_once_the_budget_is_used_up(tmp_path: Path) -> None:
    with scripted(tmp_path, times(30, "a")) as bench:
        options = OutputOptions(logprobs=2)
        cut, free = bench.run(
            bench.prompt(reasoning_budget=7, max_tokens=20, output=options), bench.prompt(max_tokens=20)
        )
        assert bench.forced(cut) == [7] and bench.text(cut).startswith("aaaaaaa</think>")
        assert cut.end == EngineEnd("limit", budget_cut=True) and len(cut.records) == 20
        assert cut.records[7].logprob is None and cut.records[6].logprob is not None
        assert bench.forced(free) == [] and free.end == EngineEnd("limit")
        assert bench.inline.engine.stats().reasoning_budget_cuts == 1


def test_reasoning_that_ends_in_time_is_not_cut(tmp_path: Path) -> None:
    with scripted(tmp_path, times(5, "a"), CLOSE, times(9, "b")) as bench:
        exact, early = bench.run(bench.prompt(reasoning_budget=6), bench.prompt(reasoning_budget=5))
        assert bench.forced(exact) == [] and exact.end == EngineEnd("eos")
        assert bench.text(exact).startswith("aaaaa</think>bbbbbbbbb")
        assert bench.forced(early) == [5], "the model's own close would have been the sixth token"


def test_a_call_that_begins_at_the_cap_is_left_alone(tmp_path: Path) -> None:
    call = "\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n"
    with scripted(tmp_path, times(4, "a"), token("<tool_call>"), call, token("</tool_call>")) as bench:
        (choice,) = bench.run(bench.prompt(reasoning_budget=6, tools_active=True))
        assert bench.forced(choice) == [] and choice.end == EngineEnd("eos")
        assert not bench.inline.engine.stats().reasoning_budget_cuts


def test_an_answer_that_starts_in_content_or_is_raw_has_no_budget(tmp_path: Path) -> None:
    with scripted(tmp_path, times(12, "a")) as bench:
        for opening in ("content", None):
            (choice,) = bench.run(bench.prompt(reasoning_budget=3, opening=opening))
            assert bench.forced(choice) == [] and choice.end == EngineEnd("eos")


@pytest.mark.parametrize("opening", ["content", None])
def test_a_constraint_lets_nothing_follow_the_object(tmp_path: Path, opening: str | None) -> None:
    with scripted(tmp_path, '{"n": 7}', times(20, "b")) as bench:
        (choice,) = bench.run(bench.prompt(constraint=OBJECT, opening=opening))
        assert choice.end == EngineEnd("eos")
        text = bench.text(choice).removesuffix(bench.model.tokens.text(choice.records[-1].id))
        assert json.loads(text) == {"n": 7}


def test_a_raw_answer_obeys_its_constraint_from_the_first_token(tmp_path: Path) -> None:
    """The script asks for prose; what comes is the beginning of an object all the same."""
    with scripted(tmp_path, "no object at all") as bench:
        (choice,) = bench.run(bench.prompt(constraint=OBJECT, opening=None))
        assert bench.text(choice).lstrip().startswith("{")


def test_reasoning_is_free_and_a_cut_brings_the_constraint(tmp_path: Path) -> None:
    with scripted(tmp_path, times(5, "a"), '{"n": 1}') as bench:
        (choice,) = bench.run(bench.prompt(constraint=OBJECT, reasoning_budget=4, max_tokens=40))
        assert bench.forced(choice) == [4]
        assert bench.text(choice).startswith('aaaa</think>{"n": 1}')
        assert choice.end == EngineEnd("eos", budget_cut=True)


def test_a_scripted_object_passes_the_constraint_whole(tmp_path: Path) -> None:
    with scripted(tmp_path, "hm", CLOSE, '{"n": 42}') as bench:
        many = bench.run(*[bench.prompt(f"hello {number}", constraint=OBJECT) for number in range(6)])
        for choice in many:
            assert bench.text(choice).startswith('hm</think>{"n": 42}') and choice.end == EngineEnd("eos")


def test_a_schema_that_can_not_be_compiled_fails_its_choice(tmp_path: Path) -> None:
    with scripted(tmp_path, "a") as bench:
        bad = bench.prompt(constraint=Constraint("lark", "start: nowhere"), opening="content")
        good = bench.prompt(opening="content")
        failed, fine = bench.run(bad, good)
        assert (failed.end.cause, failed.end.kind) == ("failed", "execution")
        assert "constraint" in failed.end.message
        assert fine.end == EngineEnd("eos")


def test_logits_that_are_not_finite_fail_one_choice(tmp_path: Path) -> None:
    model = prepared(tmp_path, [turn(times(9, "a"), fail_at=3), turn(times(9, "a"), when="sound")], recipe="qwen38")
    with Inline(engine_config(prepared=model.path, context=256, kv_bytes=None, max_requests=4), model=model) as inline:
        bench = Bench(model, inline)
        failed, fine = bench.run(bench.prompt("hello"), bench.prompt("sound"))
        assert (failed.end.cause, failed.end.kind, len(failed.records)) == ("failed", "execution", 3)
        assert "finite" in failed.end.message
        assert fine.end == EngineEnd("eos")


def test_a_script_goes_on_after_preemption(tmp_path: Path) -> None:
    """Penalties, prompts and output positions are set up anew with each residency."""
    page = 2 * 64 * 4 * 16
    with scripted(tmp_path, times(90, "a"), "done") as bench:
        bytes_of_page = bench.inline.engine.report.page_bytes
        assert bytes_of_page == page
    model = bench.model
    with Inline(
        engine_config(prepared=model.path, context=256, kv_bytes=9 * page, max_requests=4), model=model
    ) as inline:
        bench = Bench(model, inline)
        choices = bench.run(*[bench.prompt(f"{number}", max_tokens=100, opening="content") for number in range(3)])
        for choice in choices:
            assert bench.text(choice).startswith("a" * 90 + "done") and choice.end == EngineEnd("eos")
        assert inline.engine.stats().preemptions > 0
