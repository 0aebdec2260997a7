"""Decoded bodies through the real lowering and output pipeline into the encoders: any tokens, cut into any updates."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.prepare import prepare
from engine.prepared import PreparedModel
from engine.text.lowering import Lowering, ServingLimits
from engine.text.output import OutputPipeline
from engine.types.conversation import Conversation
from engine.types.events import EngineEnd, PositionScore, PromptScores, TokenRecord, Update
from engine.types.request import PreparedRequest
from protocols.chat.decode import decode as decode_chat
from protocols.chat.encode import ChatEncoder
from protocols.completions.decode import decode as decode_completion
from protocols.completions.encode import CompletionEncoder
from protocols.encoder import Encoder, ResponseContext
from protocols.fields import Decoded, DecodeLimits
from protocols.tools import ToolRules
from tests.support.openai_streams import chunks

LIMITS = DecodeLimits(vocab_size=49152, prompt_logprobs=True)
CHECKS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    return PreparedModel.load(prepare("builtin:smollm2", tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def lowering(model: PreparedModel) -> Lowering:
    return Lowering(model, ServingLimits(context=4096))


class Case:
    """One body served twice, buffered and streamed, from the same updates."""

    def __init__(self, model: PreparedModel, lowering: Lowering, body: dict[str, Any], *, chat: bool) -> None:
        self.model, self.chat, self.body = model, chat, body
        self.decoded = self._decode(body)
        self.prepared = lowering.prepare(self.decoded.request)

    def _decode(self, body: dict[str, Any]) -> Decoded:
        return decode_chat(body, LIMITS) if self.chat else decode_completion(body, LIMITS)

    def buffered(self, updates: Sequence[Update]) -> dict[str, Any]:
        encoder, frames = self._serve(self.decoded, updates)
        assert frames == []
        found: dict[str, Any] = json.loads(json.dumps(encoder.result()))
        return found

    def streamed(self, updates: Sequence[Update]) -> list[dict[str, Any]]:
        encoder, frames = self._serve(self._decode({**self.body, "stream": True}), updates)
        return chunks(frames + encoder.finish())

    def _serve(self, decoded: Decoded, updates: Sequence[Update]) -> tuple[Encoder, list[bytes]]:
        encoder: Encoder = (ChatEncoder if self.chat else CompletionEncoder)(
            _context(self.model, self.prepared), decoded
        )
        (child,) = self.prepared.children
        numbers = itertools.count()
        pipeline = OutputPipeline(self.model, child, decoded.request, call_id=lambda: f"call_{next(numbers)}")
        (prompt,) = decoded.request.prompts
        rules = ToolRules(prompt) if isinstance(prompt, Conversation) else None
        frames: list[bytes] = []
        for update in updates:
            events = pipeline.push(update)
            frames += encoder.feed(0, rules.apply(events) if rules else events)
        return encoder, frames


def _context(model: PreparedModel, prepared: PreparedRequest) -> ResponseContext:
    return ResponseContext(
        request_id="1",
        model="m",
        created=1,
        token_bytes=model.tokens.bytes,
        prompt_tokens=tuple(len(child.token_ids) for child in prepared.children),
        prompt_ids=tuple(tuple(child.token_ids.tolist()) for child in prepared.children),
        echo_texts=prepared.echo_texts,
    )


def updates(data: st.DataObject, ids: Sequence[int], *, scored: Sequence[int] = ()) -> list[Update]:
    """The tokens in updates of any size, ended by the limit; before them the scores of the prompt's chunks."""
    found = [Update(0, cached_tokens=0)]
    for start in range(0, len(scored), 3):
        part = scored[start : start + 3]
        entries = tuple(None if start + i == 0 else PositionScore(id, -1.0, 1) for i, id in enumerate(part))
        found.append(Update(0, scores=PromptScores(start, entries)))
    records = [TokenRecord(id, -0.5 - index, ((id, -0.5 - index),)) for index, id in enumerate(ids)]
    while records:
        size = data.draw(st.integers(1, len(records)))
        found.append(Update(0, tuple(records[:size])))
        del records[:size]
    return [*found, Update(0, end=EngineEnd("limit"))]


def texts(model: PreparedModel) -> st.SearchStrategy[list[int]]:
    """Token ids: of text with characters spread over tokens, or any at all."""
    written = st.text(alphabet="ab é😀END\n<|_>", max_size=12).map(
        lambda text: model.tokenizer.encode(text, specials=False)
    )
    return st.lists(written | st.lists(st.integers(0, 49151), max_size=4), max_size=4).map(
        lambda parts: list(itertools.chain(*parts))
    )


def text_of(parts: Sequence[dict[str, Any]], key: str) -> str:
    return "".join((c["delta"].get(key, "") if "delta" in c else c[key]) for part in parts for c in part["choices"])


@CHECKS
@given(data=st.data())
def test_chat_entries_are_the_returned_tokens(model: PreparedModel, lowering: Lowering, data: st.DataObject) -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "hi"}],
        "logprobs": True,
        "top_logprobs": 1,
        "return_token_ids": True,
        "ignore_eos": data.draw(st.booleans()),
    }
    stop = data.draw(st.sampled_from([None, "END", ["é", "ab"]]))
    case = Case(model, lowering, {**body, "stop": stop}, chat=True)
    fed = updates(data, data.draw(texts(model)))
    whole, parts = case.buffered(fed), case.streamed(fed)
    (choice,) = whole["choices"]
    entries = choice["logprobs"]["content"]
    assert [model.tokens.bytes(id) for id in choice["token_ids"]] == [bytes(entry["bytes"]) for entry in entries]
    assert text_of(parts, "content") == choice["message"]["content"]
    assert [e for p in parts for c in p["choices"] for e in (c["logprobs"] or {"content": []})["content"]] == entries
    assert parts[-1]["usage"] == whole["usage"]
    ended = parts[-1]["choices"][0]
    assert (ended["finish_reason"], ended["stop_reason"]) == (choice["finish_reason"], choice["stop_reason"])
    unseen = whole["usage"]["completion_tokens"] - len(entries)
    assert unseen >= 0 and (unseen == 0 or choice["finish_reason"] == "stop")
    if stop is not None and choice["stop_reason"] is None:
        assert not any(each in choice["message"]["content"] for each in ([stop] if isinstance(stop, str) else stop))


@CHECKS
@given(data=st.data())
def test_completion_offsets_cut_the_text_at_its_tokens(
    model: PreparedModel, lowering: Lowering, data: st.DataObject
) -> None:
    echo = data.draw(st.booleans())
    body = {"prompt": "The capital of France is", "logprobs": 1, "echo": echo, "ignore_eos": True}
    case = Case(model, lowering, body, chat=False)
    prompt = case.prepared.children[0].token_ids.tolist() if echo else []
    fed = updates(data, data.draw(texts(model)), scored=prompt)
    whole, parts = case.buffered(fed), case.streamed(fed)
    (choice,) = whole["choices"]
    assert text_of(parts, "text") == choice["text"]
    arrays = choice["logprobs"]
    folded = {
        key: [item for part in parts for c in part["choices"] for item in (c["logprobs"] or {key: []})[key]]
        for key in arrays
    }
    assert folded == arrays
    assert arrays["text_offset"] == sorted(arrays["text_offset"])
    offsets = [*arrays["text_offset"], len(choice["text"])]
    for token, (start, end) in zip(arrays["tokens"], itertools.pairwise(offsets), strict=True):
        if "\ufffd" not in token and not token.startswith("<"):  # alone not a character, or hidden
            assert choice["text"][start:end].startswith(token)
    assert arrays["token_logprobs"][: 1 if prompt else 0] == ([None] if prompt else [])
