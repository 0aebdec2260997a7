"""Grammars of custom tools: compiled before admission, and the completed input held to them byte for byte."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest

from engine.grammar import Grammars
from engine.prepared import PreparedModel
from engine.recipes.catalog import RECIPES
from engine.text.lowering import Lowering, ServingLimits
from engine.types.conversation import Conversation
from engine.types.events import Terminated, ToolCallCompleted
from engine.types.request import RequestError
from protocols.fields import DecodeLimits
from protocols.responses.decode import decode
from tests.support import captures
from tests.support.byte_model import CHATML, ByteModel
from tests.support.qwen_answers import CALL, END_CALL, THINK, generated, ids
from tests.support.scripted import prepared

LIMITS = DecodeLimits(vocab_size=10_000)
PATCH = "*** Begin Patch\n*** Update File: made.txt\n-made by hand\n+made by tool\n*** End Patch"
TOOL: dict[str, Any] = {"type": "custom", "name": "apply_patch"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    return prepared(tmp_path_factory.mktemp("scripted"), [{"output": ["x"]}], recipe="qwen38")


@pytest.fixture(scope="module")
def grammars(model: PreparedModel) -> Grammars:
    return Grammars(model.tokenizer_json, model.manifest.vocab_size, tuple(model.manifest.eos_ids), workers=1)


@pytest.fixture(scope="module")
def lowering(grammars: Grammars) -> Lowering:
    control = (*CHATML, "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    byte_model = ByteModel(RECIPES["qwen38"], control, eos=("<|im_end|>",))
    return Lowering(byte_model, ServingLimits(context=200_000, vocab_size=300), grammars.check)


def grammar(syntax: str, definition: str) -> dict[str, Any]:
    return {**TOOL, "format": {"type": "grammar", "syntax": syntax, "definition": definition}}


def lower(lowering: Lowering, *tools: dict[str, Any]) -> str:
    request = decode({"model": "m", "input": "Hi", "tools": list(tools)}, LIMITS).request
    ids = lowering.prepare(request).children[0].token_ids.tolist()
    return bytes(id for id in ids if id < 256).decode()


def test_the_grammar_of_a_real_agent_compiles_and_is_shown_to_the_model(lowering: Lowering) -> None:
    body = captures.body("codex-0.171.0_responses_turn1_catalog_apply_patch")
    ids = lowering.prepare(decode(body, LIMITS).request).children[0].token_ids.tolist()
    assert "*** Begin Patch" in bytes(id for id in ids if id < 256).decode()


def test_good_grammars_are_shown(lowering: Lowering) -> None:
    assert "start: WORD+" in lower(lowering, grammar("lark", "start: WORD+\nWORD: /[a-z]+/"))
    assert "[0-9]{3}" in lower(lowering, grammar("regex", "[0-9]{3}"))


@pytest.mark.parametrize(
    ("syntax", "definition"), [("lark", "start: missing"), ("lark", "start: ("), ("regex", "("), ("regex", "a{1,")]
)
def test_bad_grammars_are_refused_before_admission(lowering: Lowering, syntax: str, definition: str) -> None:
    with pytest.raises(RequestError, match="apply_patch") as caught:
        lower(lowering, grammar(syntax, definition))
    assert caught.value.field == "tools"


def test_grammars_need_a_compiler() -> None:
    control = (*CHATML, "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    plain = Lowering(ByteModel(RECIPES["qwen38"], control, eos=("<|im_end|>",)), ServingLimits(context=9000))
    with pytest.raises(RequestError, match="apply_patch"):
        lower(plain, grammar("regex", "a"))
    assert "apply_patch" in lower(plain, TOOL)


@pytest.mark.parametrize(
    ("text", "valid"),
    [(PATCH, True), (PATCH + "\n", True), ("please patch", False), (PATCH[:-3], False), (PATCH + "\nmore", False)],
)
def test_completed_input_is_held_to_the_bytes(grammars: Grammars, text: str, valid: bool) -> None:
    prompt = decode(captures.body("codex-0.171.0_responses_turn1_catalog_apply_patch"), LIMITS).request.prompts[0]
    assert isinstance(prompt, Conversation)
    (tool,) = [tool for tool in prompt.tools if tool.freeform]
    assert tool.input_format is not None
    assert (grammars.validate(tool.input_format, text) is None) == valid


@pytest.mark.parametrize(("digits", "valid"), [("123", True), ("12", False), ("123 ", False)])
def test_an_invalid_input_fails_the_answer_without_a_call(
    model: PreparedModel, grammars: Grammars, digits: str, valid: bool
) -> None:
    request = decode({"model": "m", "input": "Hi", "tools": [grammar("regex", "[0-9]{3}")]}, LIMITS).request
    prompt = request.prompts[0]
    assert isinstance(prompt, Conversation)
    validators = {
        tool.name: partial(grammars.validate, tool.input_format) for tool in prompt.tools if tool.input_format
    }
    markup = f"\n<function=apply_patch>\n<parameter=input>\n{digits}\n</parameter>\n</function>\n"
    tokens = ids(model, "Hm.\n", THINK, CALL, markup, END_CALL)
    events = list(itertools.chain(*generated(model, request, tokens, validators=validators)))
    end = events[-1]
    assert isinstance(end, Terminated)
    completed = [event for event in events if isinstance(event, ToolCallCompleted)]
    if valid:
        assert len(completed) == 1 and end.cause == "eos"
    else:
        assert not completed and (end.cause, end.failure) == ("failed", "output")
