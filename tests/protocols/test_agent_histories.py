"""Random histories on Messages and Responses, through every recipe's template or encoder: rendered and counted alike,
or refused as the client's fault."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import pytest

from engine.recipes.catalog import RECIPES
from engine.text.lowering import Lowering, ServingLimits
from engine.types.request import RequestError
from protocols.errors import InvalidRequest
from protocols.fields import Decoded, DecodeLimits
from protocols.messages.decode import decode as messages
from protocols.messages.decode import decode_count
from protocols.messages.thinking import marker
from protocols.responses.decode import decode as responses
from tests.support.agent_asks import png
from tests.support.byte_model import CHATML, ByteModel
from tests.support.outputs import CONTROL

LIMITS = DecodeLimits(vocab_size=900, vision=True)
HISTORIES = 40
PNG = png()
HINT = {"cache_control": {"type": "ephemeral"}}
NAMES = ("Read", "fs__x", "é", "a b", "Fetch", "<think>")
IDS = ("a", "b", "c")
WORDS = (
    "",
    " ",
    "\n",
    "Hi",
    "<think>",
    "</think>",
    "<|im_end|>",
    "<tool_call>",
    "é🙂\0",
    "{{ x }}",
    "{% if %}",
    "</tool_response>",
)
SCHEMAS: tuple[dict[str, Any], ...] = (
    {},
    {"type": "object", "properties": {"a": {"type": ["integer", "null"]}, "b": {"enum": [1, None]}}, "required": ["a"]},
    {"type": "object", "properties": {"x": {"$ref": "#/$defs/y"}}, "$defs": {"y": {"type": "array", "items": {}}}},
)


class Draw:
    """Bodies of one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pick = self.rng.choice

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def text(self) -> str:
        return self.pick(WORDS) + self.pick(WORDS)

    def json(self, depth: int = 0) -> Any:
        if depth < 2 and self.chance(0.3):
            inner = [self.json(depth + 1) for _ in range(self.rng.randrange(3))]
            return inner if self.chance(0.5) else {self.text(): value for value in inner}
        return self.pick((None, True, -1, 2**70, 1.5, 1e300, self.text()))

    def names(self) -> list[str]:
        return self.rng.sample(NAMES, self.rng.randrange(len(NAMES)))

    # Messages

    def block(self, role: str) -> dict[str, Any]:
        hint = HINT if self.chance(0.3) else {}
        text = {"type": "text", "text": self.text(), **hint}
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}, **hint}
        thought = self.text()
        reference = {"type": "tool_reference", "tool_name": "Fetch"}
        blocks: dict[str, tuple[dict[str, Any], ...]] = {
            "assistant": (
                text,
                {"type": "thinking", "thinking": thought, "signature": self.pick((marker(thought), "foreign"))},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "tool_use", "id": self.pick(IDS), "name": self.pick(NAMES), "input": {"a": self.json()}},
            ),
            "system": (text, text, {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "Fetch"}}),
            "user": (
                text,
                image,
                {
                    "type": "tool_result",
                    "tool_use_id": self.pick(IDS),
                    "content": self.pick((None, self.text(), [], [text, image], [reference])),
                    "is_error": self.pick((None, True, False)),
                    **hint,
                },
            ),
        }
        return self.pick(blocks[role])

    def messages(self) -> dict[str, Any]:
        turns = []
        for _ in range(self.rng.randrange(1, 7)):
            role = self.pick(("user", "assistant", "system", "user"))
            blocks = [self.block(role) for _ in range(self.rng.randrange(4))]
            turns.append({"role": role, "content": self.text() if self.chance(0.4) else blocks})
        body: dict[str, Any] = {"model": "m", "max_tokens": 50, "messages": turns}
        deferred = {"Fetch": {"defer_loading": True}}
        if self.chance(0.8):
            body["tools"] = [
                {"name": name, "input_schema": self.pick(SCHEMAS), **deferred.get(name, {})} for name in self.names()
            ]
        if self.chance(0.3):
            body["tool_choice"] = {"type": self.pick(("any", "none", "auto"))}
        if self.chance(0.3):
            body["thinking"] = self.pick(({"type": "enabled", "budget_tokens": 6000}, {"type": "disabled"}))
        if self.chance(0.3):
            body["output_config"] = {"effort": self.pick(("low", "medium", "high", "xhigh", "max"))}
        return body

    # Responses

    def item(self) -> dict[str, Any]:
        text = {"type": "input_text", "text": self.text()}
        image = {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"}
        role = self.pick(("user", "assistant", "system", "developer"))
        arguments = self.pick(("", "{}", '{"a":1e300}', '{"a":[{"b":null}]}', '{"a":18446744073709551616}'))
        return self.pick(
            (
                {"role": role, "content": self.pick((self.text(), [text], [], [text, text]))},
                {"role": "user", "content": [text, image]},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": self.text()}]},
                {"type": "function_call", "call_id": self.pick(IDS), "name": self.pick(NAMES), "arguments": arguments},
                {"type": "custom_tool_call", "call_id": self.pick(IDS), "name": "patch", "input": self.text()},
                {"type": "function_call_output", "call_id": self.pick(IDS), "output": self.pick(("", [text, image]))},
            )
        )

    def responses(self) -> dict[str, Any]:
        items = [self.item() for _ in range(self.rng.randrange(1, 8))]
        tools: list[dict[str, Any]] = [{"type": "custom", "name": "patch"}] if self.chance(0.5) else []
        tools += [{"type": "function", "name": name, "parameters": self.pick(SCHEMAS)} for name in self.names()]
        body: dict[str, Any] = {"model": "m", "input": items, "tools": tools}
        if self.chance(0.4):
            body["instructions"] = self.text()
        if self.chance(0.3):
            body["tool_choice"] = self.pick(("required", "none", "auto"))
        if self.chance(0.4):
            body["reasoning"] = {"effort": self.pick(("none", "minimal", "low", "medium", "high", "max"))}
        return body


def accepted(decode: Callable[[Mapping[str, Any], DecodeLimits], Decoded], body: Mapping[str, Any]) -> Decoded | None:
    try:
        return decode(body, LIMITS)
    except InvalidRequest as error:
        assert error.message
        return None


@pytest.mark.parametrize("recipe", sorted(recipe for recipe in RECIPES if RECIPES[recipe].template))
def test_random_histories_are_rendered_or_refused(recipe: str) -> None:
    control = tuple(dict.fromkeys((*CHATML, *RECIPES[recipe].stop_tokens, *chain(*CONTROL.values()))))
    model = ByteModel(RECIPES[recipe], control, bos=control[0], eos=RECIPES[recipe].stop_tokens[:1])
    lowering = Lowering(model, ServingLimits(context=500_000, vision=True), lambda constraint: None)
    rendered = 0
    for seed in range(HISTORIES):
        draw = Draw(seed)
        for decode, body in ((messages, draw.messages()), (responses, draw.responses())):
            decoded = accepted(decode, body)
            if decoded is None:
                continue
            try:
                prompt = lowering.prepare(decoded.request).children[0]
            except RequestError as error:
                assert error.message
                continue
            rendered += 1
            assert all(0 < place < len(prompt.token_ids) for place in prompt.boundaries)
            if decode is messages:
                assert lowering.count(decode_count(body, LIMITS).request) == len(prompt.token_ids), body
    assert rendered > HISTORIES / 2
