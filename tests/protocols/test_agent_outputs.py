"""Damaged outputs of every family through the pipeline into Messages and Responses: an answer that folds from its
stream, or a failure that says what is wrong with the output; never another exception, and never what isn't JSON."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from engine.prepared import PreparedModel
from engine.recipes.catalog import RECIPES
from engine.types.conversation import Conversation
from protocols.encoder import Encoder, ResponseContext
from protocols.errors import OutputInvalid
from protocols.exact_json import dumps
from protocols.fields import Decoded, DecodeLimits
from protocols.messages.decode import decode as decode_messages
from protocols.messages.encode import MessagesEncoder
from protocols.responses.decode import decode as decode_responses
from protocols.responses.encode import ResponsesEncoder
from protocols.tools import ToolRules
from tests.support.agent_folds import ResponseFold, fold_message
from tests.support.family_outputs import OUTPUTS
from tests.support.outputs import CONTROL, WEATHER
from tests.support.qwen_answers import PROMPT, SAMPLING, generated
from tests.support.scripted import prepared

LIMITS = DecodeLimits(vocab_size=100_000)
DAMAGES = 60
WEIRD = (
    *("\\ud83d", "\\u0000", "\\x", "\\", "NaN", "Infinity", "1e400", "-0", "7" * 5000, '"a":1,"a":2', '"input":5'),
    *('{"', '"', '""', "'", "{", "}", "[", "]", ",", ":", "<", "</", ">", "|", "\0", "\n\n", "\t", "é🙂", "\ufffd"),
)
SCHEMAS = {"w": WEATHER.parameters, "z": {"type": "object", "properties": {}}}
MESSAGE = decode_messages(
    {
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"name": name, "input_schema": dict(schema)} for name, schema in SCHEMAS.items()],
    },
    LIMITS,
)
FUNCTIONS = [{"type": "function", "name": name, "parameters": dict(schema)} for name, schema in SCHEMAS.items()]
RESPONSE = decode_responses(
    {"model": "m", "input": "Hi", "tools": [*FUNCTIONS, {"type": "custom", "name": "patch"}]}, LIMITS
)


def model_of(recipe: str, directory: Path) -> PreparedModel:
    """One with a synthetic vocabulary that has the family's control tokens."""
    stops = RECIPES[recipe].stop_tokens
    tokenizer = {"synthetic": {"specials": [*stops, "<|end|>"], "added": list(CONTROL[recipe])}}
    return prepared(directory, [{"output": ["x"]}], recipe=recipe, tokenizer=tokenizer)


def damaged(recipe: str, rng: random.Random) -> str:
    """An output of the family with values and pieces of it replaced, perhaps as a call to a freeform tool."""
    texts = [output.text for output in OUTPUTS if output.recipe == recipe]
    text = rng.choice(texts)
    for value in ("Paris", "3"):
        if rng.random() < 0.5:
            text = text.replace(value, rng.choice(WEIRD), 1)
    for _ in range(rng.choice((0, 0, 0, 1, 2, 3))):
        start = rng.randrange(len(text) + 1)
        end = start + rng.choice((0, 0, 1, 3, 10))
        text = text[:start] + rng.choice((*WEIRD, *CONTROL[recipe], rng.choice(texts))) + text[end:]
    return text.replace("w", "patch", 1) if rng.random() < 0.2 else text


def run(encoder: Encoder, decoded: Decoded, model: PreparedModel, ids: list[int], rng: random.Random) -> list[bytes]:
    (conversation,) = decoded.request.prompts
    assert isinstance(conversation, Conversation)
    rules = ToolRules(conversation)
    frames: list[bytes] = []
    for found in generated(model, decoded.request, ids, cause=rng.choice(("eos", "limit")), cuts=rng):
        frames += encoder.feed(0, rules.apply(found))
    return frames + encoder.finish()


@pytest.mark.parametrize("recipe", sorted(set(CONTROL) & set(RECIPES)))
def test_damaged_outputs_are_answers_or_invalid(recipe: str, tmp_path: Path) -> None:
    model = model_of(recipe, tmp_path)
    context = ResponseContext("1", "m", 1, model.tokens.bytes, (PROMPT,), sampling=SAMPLING)
    rng = random.Random(recipe)
    answered = 0
    for _ in range(DAMAGES):
        text = damaged(recipe, rng)
        ids = model.tokenizer.encode(text, specials=True)
        pairs: tuple[tuple[Encoder, Decoded], ...] = (
            (MessagesEncoder(context, MESSAGE), MESSAGE),
            (ResponsesEncoder(context, RESPONSE), RESPONSE),
        )
        for encoder, decoded in pairs:
            frames = run(encoder, decoded, model, ids, rng)
            try:
                whole: Any = encoder.result()
            except OutputInvalid as error:
                assert error.message
                continue
            answered += 1
            assert dumps(whole)
            assert (fold_message(frames) if decoded is MESSAGE else ResponseFold(frames).final) == whole, text
    assert answered > DAMAGES / 3
