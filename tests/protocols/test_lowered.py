"""Decoded Messages and Responses through the real lowering: equal tokens, growing prompts, budgets, hostile bodies."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import pytest

from engine.recipes.catalog import RECIPES
from engine.text.lowering import Lowering, ServingLimits
from engine.types.request import RequestError
from protocols.chat.decode import decode as chat
from protocols.errors import InvalidRequest
from protocols.fields import Decoded, DecodeLimits
from protocols.messages.decode import decode as messages
from protocols.messages.decode import decode_count
from protocols.responses.decode import decode as responses
from tests.support import captures
from tests.support.byte_model import CHATML, ByteModel, smollm2
from tests.support.outputs import CONTROL

LIMITS = DecodeLimits(vocab_size=300)
HINT: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
CONTEXT = 200_000
SAMPLE = 150
"""Mutations lowered of each captured request; all of them are decoded elsewhere."""
QWEN = ByteModel(
    RECIPES["qwen38"],
    (*CHATML, "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    eos=("<|im_end|>",),
)

Decoder = Callable[[Mapping[str, Any], DecodeLimits], Decoded]


@pytest.fixture(scope="module", params=["smollm2", "qwen38"])
def lowering(request: pytest.FixtureRequest) -> Lowering:
    model = smollm2() if request.param == "smollm2" else QWEN
    return Lowering(model, ServingLimits(context=CONTEXT, vocab_size=300), lambda constraint: None)


def ids(lowering: Lowering, decoder: Decoder, body: Mapping[str, Any]) -> list[int]:
    found: list[int] = lowering.prepare(decoder(body, LIMITS).request).children[0].token_ids.tolist()
    return found


def message(*turns: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 9, "messages": list(turns), **fields}


USER = {"role": "user", "content": "Hi"}


def test_inline_system_text_has_the_same_tokens_in_both_forms(lowering: Lowering) -> None:
    forms: tuple[Any, ...] = ("Note.", [{"type": "text", "text": "Note.", **HINT}])
    found = [ids(lowering, messages, message(USER, {"role": "system", "content": form})) for form in forms]
    assert found[0] == found[1] != ids(lowering, messages, message(USER))


def test_hints_never_change_the_prompt(lowering: Lowering) -> None:
    name = "claude-code-2.1.332_messages_turn2_tool_result"
    body = captures.body(name)
    assert ids(lowering, messages, body) == ids(lowering, messages, _without(body, "cache_control"))


def test_an_attribution_that_changes_leaves_the_prompt(lowering: Lowering) -> None:
    def body(tag: str) -> dict[str, Any]:
        texts = (f"x-anthropic-billing-header: cch={tag};", "You help.")
        return message(USER, system=[{"type": "text", "text": text} for text in texts])

    assert ids(lowering, messages, body("1")) == ids(lowering, messages, body("2"))


TURNS: tuple[tuple[Decoder, str, str], ...] = (
    (messages, "claude-code-2.1.332_messages_turn1", "claude-code-2.1.332_messages_turn2_tool_result"),
    (messages, "claude-code-2.1.332_bare_messages_turn1", "claude-code-2.1.332_bare_messages_turn2_tool_result"),
    (
        responses,
        "codex-0.171.0_responses_turn1_catalog_apply_patch",
        "codex-0.171.0_responses_turn2_custom_tool_call_output",
    ),
    (chat, "opencode-1.18.33_chat_turn1", "opencode-1.18.33_chat_turn2_tool_result"),
)


@pytest.mark.parametrize("recipe", sorted(recipe for recipe in RECIPES if RECIPES[recipe].template))
def test_a_second_turn_extends_the_first_with_every_template(recipe: str) -> None:
    """So all that the first turn computed can be reused."""
    control = tuple(dict.fromkeys((*CHATML, *RECIPES[recipe].stop_tokens, *chain(*CONTROL.values()))))
    model = ByteModel(RECIPES[recipe], control, bos=control[0], eos=RECIPES[recipe].stop_tokens[:1])
    lowering = Lowering(model, ServingLimits(context=CONTEXT), lambda constraint: None)
    for decoder, first, second in TURNS:
        one, two = (ids(lowering, decoder, captures.trimmed(captures.body(name))) for name in (first, second))
        assert two[: len(one)] == one and len(two) > len(one), first


@pytest.mark.parametrize("name", captures.names("/v1/messages"))
def test_counted_tokens_are_the_prepared_prompt(lowering: Lowering, name: str) -> None:
    body = captures.body(name)
    assert lowering.count(decode_count(body, LIMITS).request) == len(ids(lowering, messages, body))


def test_prefill_continues_without_a_new_turn(lowering: Lowering) -> None:
    prefilled = ids(lowering, messages, message(USER, {"role": "assistant", "content": "The"}))
    assert bytes(token for token in prefilled[-3:]) == b"The"
    whole = ids(lowering, messages, message(USER))
    assert prefilled != whole


@pytest.mark.parametrize("recipe", ["deepseek4", "deepseek41"])
def test_prefill_is_refused_where_the_encoder_has_none(recipe: str) -> None:
    control = (
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<think>",
        "</think>",
    )
    model = ByteModel(RECIPES[recipe], control, bos=control[0], eos=control[1:2])
    lowering = Lowering(model, ServingLimits(context=CONTEXT, vocab_size=300))
    assert ids(lowering, messages, message(USER))
    with pytest.raises(RequestError, match="continu"):
        ids(lowering, messages, message(USER, {"role": "assistant", "content": "The"}))


def test_a_thinking_budget_is_only_a_hint_where_no_cap_exists() -> None:
    lowering = Lowering(smollm2(), ServingLimits(context=CONTEXT, vocab_size=300))
    hinted = message(USER, thinking={"type": "enabled", "budget_tokens": 2048})
    assert lowering.prepare(messages(hinted, LIMITS).request).children[0].reasoning_budget is None
    with pytest.raises(RequestError, match="thinking_token_budget"):
        lowering.prepare(messages(message(USER, thinking_token_budget=2048), LIMITS).request)


def test_a_thinking_budget_caps_where_it_can() -> None:
    lowering = Lowering(QWEN, ServingLimits(context=CONTEXT, vocab_size=300, thinking_token_budget=7))

    def budget(**fields: Any) -> int | None:
        return lowering.prepare(messages(message(USER, **fields), LIMITS).request).children[0].reasoning_budget

    assert budget(thinking={"type": "enabled", "budget_tokens": 2048}) == 2048
    assert budget(thinking={"type": "adaptive", "budget_tokens": 2048}) == 2048
    assert budget(thinking_token_budget=100) == 100
    assert budget() == budget(thinking_token_budget=None) == 7
    assert budget(thinking={"type": "disabled"}) is None
    unreachable = budget(thinking={"type": "enabled", "budget_tokens": 2**40})
    assert unreachable is None or unreachable > CONTEXT


def test_deferred_tools_leave_the_tokens_before_them(lowering: Lowering) -> None:
    """A deferred tool more changes no token of the prompt; a reference adds its definition at its own place."""
    tool = {"name": "Read", "description": "d", "input_schema": {"type": "object"}}
    later = {**tool, "name": "Fetch", "description": "FETCHES", "defer_loading": True}
    plain = ids(lowering, messages, message(USER, tools=[tool]))
    assert ids(lowering, messages, message(USER, tools=[later, tool])) == plain
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "Read", "input": {}}]}
    found = [{"type": "tool_reference", "tool_name": "Fetch"}]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": found}]}
    text = QWEN.tokenizer.decode(ids(lowering, messages, message(USER, call, result, tools=[later, tool])))
    assert text.count("FETCHES") == 1 and text.index("FETCHES") > text.index("Hi")


@pytest.mark.parametrize("name", [*captures.names("/v1/messages"), *captures.names("/v1/responses")])
def test_any_changed_field_lowers_or_is_refused(lowering: Lowering, name: str) -> None:
    decoder = messages if "messages" in name else responses
    changes = list(captures.mutations(captures.body(name)))
    lowered = 0
    for change, body in random.Random(name).sample(changes, SAMPLE):
        try:
            decoded = decoder(body, LIMITS)
            lowering.prepare(decoded.request)
            lowered += 1
        except (InvalidRequest, RequestError) as error:
            assert error.message, change
    assert lowered > SAMPLE // 4


def _without(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return {name: _without(inner, key) for name, inner in value.items() if name != key}
    return [_without(inner, key) for inner in value] if isinstance(value, list) else value
