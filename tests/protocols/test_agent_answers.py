"""Generated tokens through the real output pipeline into Messages and Responses: regions, entries, calls, folds."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.prepared import PreparedModel
from engine.types.conversation import Conversation
from engine.types.events import EndCause
from protocols.encoder import Encoder, ResponseContext
from protocols.errors import OutputInvalid
from protocols.fields import DecodeLimits
from protocols.messages.decode import decode as decode_messages
from protocols.messages.encode import MessagesEncoder
from protocols.messages.thinking import marker
from protocols.responses.decode import decode as decode_responses
from protocols.responses.encode import ResponsesEncoder
from protocols.tools import ToolRules
from tests.support.qwen_answers import CACHED, CALL, END_CALL, PROMPT, SAMPLING, THINK, generated, ids
from tests.support.scripted import prepared
from tests.support.sdk import events

LIMITS = DecodeLimits(vocab_size=10_000)
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
READ = (CALL, "\n<function=Read>\n<parameter=path>\na.py\n</parameter>\n</function>\n", END_CALL)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    folder: Path = tmp_path_factory.mktemp("scripted")
    return prepared(folder, [{"output": ["x"]}], recipe="qwen38")


def serve(
    model: PreparedModel,
    encoder_of: Any,
    decoded: Any,
    tokens: Sequence[int],
    *,
    cause: EndCause = "eos",
    cuts: random.Random | None = None,
) -> tuple[Encoder, list[bytes]]:
    """Runs one choice as an ingress does, the tokens cut into updates."""
    (conversation,) = decoded.request.prompts
    assert isinstance(conversation, Conversation)
    rules = ToolRules(conversation)
    context = ResponseContext("1", "m", 1, model.tokens.bytes, (PROMPT,), sampling=SAMPLING)
    encoder: Encoder = encoder_of(context, decoded)
    frames: list[bytes] = []
    for found in generated(model, decoded.request, tokens, cause=cause, cuts=cuts):
        frames += encoder.feed(0, rules.apply(found))
    return encoder, frames + encoder.finish()


def message(**fields: Any) -> Any:
    tools = [{"name": "Read", "input_schema": SCHEMA}]
    messages = [{"role": "user", "content": "Hi"}]
    return decode_messages({"model": "m", "max_tokens": 99, "messages": messages, "tools": tools, **fields}, LIMITS)


def response(**fields: Any) -> Any:
    tools = [
        {"type": "function", "name": "Read", "parameters": SCHEMA},
        {"type": "custom", "name": "apply_patch"},
        {"type": "namespace", "name": "fs", "tools": [{"type": "function", "name": "Read", "parameters": SCHEMA}]},
    ]
    logprobs = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    return decode_responses({"model": "m", "input": "Hi", "tools": tools, **logprobs, **fields}, LIMITS)


def blocks(encoder: Encoder) -> list[tuple[Any, ...]]:
    shown: list[tuple[Any, ...]] = []
    for block in encoder.result()["content"]:
        match block["type"]:
            case "text":
                shown.append(("text", block["text"]))
            case "thinking":
                assert block["signature"] == marker(block["thinking"])
                shown.append(("thinking", block["thinking"]))
            case _:
                shown.append((block["name"], block["input"]))
    return shown


ANSWER = ("I look.\n", THINK, "\n\nLooking.", *READ, *READ)


@pytest.mark.parametrize("seed", range(8))
def test_any_cut_of_the_tokens_gives_the_same_message(model: PreparedModel, seed: int) -> None:
    tokens = ids(model, *ANSWER)
    encoder, frames = serve(model, MessagesEncoder, message(), tokens, cuts=random.Random(seed))
    call = ("Read", {"path": "a.py"})
    assert blocks(encoder) == [("thinking", "I look."), ("text", "Looking."), call, call]
    result = encoder.result()
    assert result["stop_reason"] == "tool_use"
    usage = result["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (PROMPT - CACHED, CACHED)
    assert usage["output_tokens"] == len(tokens) and usage["output_tokens_details"]["thinking_tokens"] > 0
    starts = [data["content_block"]["type"] for name, data in events(frames) if name == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use", "tool_use"]


def test_a_call_cut_by_the_limit_leaves_no_trace(model: PreparedModel) -> None:
    tokens = ids(model, "Hm.\n", THINK, "\n\nLooking.", CALL, "\n<function=Read>\n<parameter=path>\na")
    for encoder_of, decoded, reason in (
        (MessagesEncoder, message(), "max_tokens"),
        (ResponsesEncoder, response(), "incomplete"),
    ):
        encoder, frames = serve(model, encoder_of, decoded, tokens, cause="limit")
        result = encoder.result()
        assert result.get("stop_reason", result.get("status")) == reason
        assert b"a.py" not in b"".join(frames) and b"call_0" not in b"".join(frames)


def test_an_undeclared_call_is_returned(model: PreparedModel) -> None:
    invented = (CALL, "\n<function=Invented>\n<parameter=x>\n1\n</parameter>\n</function>\n", END_CALL)
    tokens = ids(model, "Hm.\n", THINK, *invented)
    encoder, _ = serve(model, MessagesEncoder, message(), tokens)
    assert blocks(encoder)[-1][0] == "Invented" and encoder.result()["stop_reason"] == "tool_use"
    encoder, _ = serve(model, ResponsesEncoder, response(), tokens)
    assert encoder.result()["output"][-1]["name"] == "Invented"


def test_a_second_call_fails_when_calls_are_not_parallel(model: PreparedModel) -> None:
    """The first call was delivered; the second one's beginning ends the stream with an error."""
    single = message(tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    tokens = ids(model, *ANSWER)
    for encoder_of, decoded, last in (
        (MessagesEncoder, single, "error"),
        (ResponsesEncoder, response(parallel_tool_calls=False), "response.failed"),
    ):
        encoder, frames = serve(model, encoder_of, decoded, tokens)
        found = events(frames)
        assert found[-1][0] == last
        assert b"call_0" in b"".join(frames) and b"call_1" not in b"".join(frames)
        with pytest.raises(OutputInvalid):
            encoder.result()


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "Read"}])
def test_a_required_call_that_is_missing_fails(model: PreparedModel, choice: Any) -> None:
    tokens = ids(model, "Hm.\n", THINK, "\n\nNo.")
    for cause in ("eos", "limit"):
        _, frames = serve(model, MessagesEncoder, message(tool_choice=choice), tokens, cause=cause)
        assert events(frames)[-1][0] == "error"


def test_a_named_choice_keeps_reasoning_and_the_call_alone(model: PreparedModel) -> None:
    tokens = ids(model, "Hm.\n", THINK, "\n\nProse.", *READ)
    encoder, _ = serve(model, MessagesEncoder, message(tool_choice={"type": "tool", "name": "Read"}), tokens)
    assert [kind for kind, _ in blocks(encoder)] == ["thinking", "Read"]
    assert encoder.result()["usage"]["output_tokens"] == len(tokens)


def test_stops_on_messages(model: PreparedModel) -> None:
    tokens = ids(model, "Hm.\n", THINK, "\n\nOne. END two.")
    encoder, _ = serve(model, MessagesEncoder, message(stop_sequences=["END"]), tokens)
    result = encoder.result()
    assert (result["stop_reason"], result["stop_sequence"]) == ("stop_sequence", "END")
    assert blocks(encoder)[-1] == ("text", "One. ")


def test_custom_and_namespaced_calls(model: PreparedModel) -> None:
    patch = "*** Begin Patch\n*** End Patch"
    custom = (CALL, f"\n<function=apply_patch>\n<parameter=input>\n{patch}\n</parameter>\n</function>\n", END_CALL)
    spaced = (CALL, "\n<function=fs__Read>\n<parameter=path>\na\n</parameter>\n</function>\n", END_CALL)
    encoder, _ = serve(model, ResponsesEncoder, response(), ids(model, "Hm.\n", THINK, *custom, *spaced))
    _, first, second = encoder.result()["output"]
    assert (first["type"], first["name"], first["input"]) == ("custom_tool_call", "apply_patch", patch)
    assert (second["type"], second["namespace"], second["name"]) == ("function_call", "fs", "Read")
    assert json.loads(second["arguments"]) == {"path": "a"}


def test_entries_belong_to_output_text_only(model: PreparedModel) -> None:
    tokens = ids(model, "Hm.\n", THINK, "Yes.", *READ)
    encoder, frames = serve(model, ResponsesEncoder, response(), tokens)
    reasoning, text, _ = encoder.result()["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    (part,) = text["content"]
    assert bytes(itertools.chain(*(entry["bytes"] for entry in part["logprobs"]))) == b"Yes."
    deltas = [data["logprobs"] for name, data in events(frames) if name == "response.output_text.delta"]
    assert list(itertools.chain(*deltas)) == part["logprobs"]


def test_a_spelled_delimiter_in_an_answer_is_text_with_entries(model: PreparedModel) -> None:
    tokens = ids(model, "Hm.\n", THINK, "Say", " </think>", " twice.")
    encoder, _ = serve(model, ResponsesEncoder, response(), tokens)
    (part,) = encoder.result()["output"][-1]["content"]
    assert part["text"] == "Say </think> twice."
    assert bytes(itertools.chain(*(entry["bytes"] for entry in part["logprobs"]))) == part["text"].encode()
