"""The official clients over the whole stack: what they accumulate from streams is what they get in one piece, on every
protocol that agents speak, for every way an answer can go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import anthropic
import openai
import pytest

from engine.text.lowering import Lowering
from tests.support.agent_asks import (
    Answer,
    Ask,
    ask_chat,
    ask_messages,
    ask_responses,
    chat_body,
    messages_body,
    responses_body,
)
from tests.support.inline_server import InlinePreprocessor, Site
from tests.support.scripted import CHATML, script, times, token, turn

CLOSE = token("</think>")
CALLED = ("lookup", {"city": "Paris"}), ("lookup", {"city": "Rome"})


def call(city: str) -> tuple[Any, ...]:
    markup = f"\n<function=lookup>\n<parameter=city>\n{city}\n</parameter>\n</function>\n"
    return (token("<tool_call>"), markup, token("</tool_call>"))


TURNS = (
    turn("Hello there.", when="Answer at once."),
    turn("It is so.\n", CLOSE, "\n\nHello there.", when="Think first."),
    turn("It is so.\n", CLOSE, "\n\nI look.\n", *call("Paris"), "\n", *call("Rome"), when="Look twice."),
    turn("I see it.\n", CLOSE, "\n\nA teal square.", when="What is it?"),
    turn("It is so.\n", CLOSE, "\n\n", times(60, " the"), when="Go on."),
    turn(times(60, " so"), CLOSE, "\n\nYes.", when="Think long."),
    turn("It is so.\n", CLOSE, "\n\nI look.\n", *call(" the" * 60), when="Look far."),
    turn("It is so.\n", CLOSE, "\n\nOne. END Two.", when="Count."),
    turn("It is so.\n", CLOSE, "\n\nOne, two, three.", when="Break.", fail_at=9),
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A scripted Qwen that declares an image profile. It takes images as a model with vision does, without their
    features: a scripted model looks at no pixel."""
    directory = tmp_path_factory.mktemp("agents")
    vision = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
    tokenizer = {"synthetic": {**CHATML["synthetic"], "added": [*CHATML["synthetic"]["added"], *vision]}}
    source = script(directory, TURNS, recipe="qwen38", tokenizer=tokenizer, image_profile={"type": "qwen"})
    with Site(source, cache=directory / "cache", engine={"page_tokens": 16, "prefill_chunk": 64}) as site:
        limits = replace(site.startup.serving_limits, vision=True)
        seeing = InlinePreprocessor(Lowering(site.model, limits, site.startup.grammars.check))
        site.service.limits = replace(site.service.limits, vision=True)
        site.service.preprocessor = seeing
        yield site
        seeing.close()


Put = Callable[..., Answer]


@pytest.fixture(params=["messages", "responses", "chat"])
def put(request: pytest.FixtureRequest, claude: anthropic.Anthropic, gpt: openai.OpenAI) -> Put:
    """Puts an Ask to one protocol through its client."""
    ways: dict[str, Put] = {
        "messages": lambda ask, **how: ask_messages(claude, ask, **how),
        "responses": lambda ask, **how: ask_responses(gpt, ask, **how),
        "chat": lambda ask, **how: ask_chat(gpt, ask, **how),
    }
    return ways[request.param]


ASKS: dict[str, tuple[Ask, dict[str, Any]]] = {
    "text": (Ask("Answer at once.", thinking=False), {"text": "Hello there.", "end": "done"}),
    "reasoning": (Ask("Think first."), {"reasoning": "It is so.", "text": "Hello there.", "end": "done"}),
    "parallel calls": (Ask("Look twice."), {"text": "I look.", "calls": CALLED, "end": "calls"}),
    "an image in a result": (Ask("What is it?", picture=True), {"text": "A teal square.", "end": "done"}),
    "text cut by the limit": (Ask("Go on.", limit=30), {"reasoning": "It is so.", "end": "limit"}),
    "reasoning cut by the limit": (Ask("Think long.", limit=20), {"reasoning": " so" * 20, "text": "", "end": "limit"}),
    "a call cut by the limit": (Ask("Look far.", limit=60), {"text": "I look.", "calls": (), "end": "limit"}),
    "a stop": (Ask("Count.", stop="END"), {"reasoning": "It is so.", "text": "One. ", "end": "stop"}),
}


@pytest.mark.parametrize("name", ASKS)
def test_what_a_client_accumulates_is_what_it_gets_whole(put: Put, name: str) -> None:
    ask, expected = ASKS[name]
    streamed, whole = (put(ask, stream=stream) for stream in (True, False))
    assert streamed == whole
    if ask.stop is not None and whole.end == "done":
        expected = {**expected, "end": "done"}  # only Messages tells a matched stop from an end of its own
    assert {key: getattr(whole, key) for key in expected} == expected


def test_protocols_agree(claude: anthropic.Anthropic, gpt: openai.OpenAI) -> None:
    for ask, _ in ASKS.values():
        answers = [
            ask_messages(claude, ask, stream=True),
            ask_responses(gpt, ask, stream=True),
            ask_chat(gpt, ask, stream=True),
        ]
        one, *others = (replace(answer, end="done" if answer.end == "stop" else answer.end) for answer in answers)
        assert all(other == one for other in others), ask


def test_an_image_reaches_the_prompt_in_its_result(site: Site, put: Put) -> None:
    put(Ask("What is it?", picture=True), stream=False)
    prompt = site.model.tokens.decode(site.engine.prepared[-1].children[0].token_ids.tolist())
    assert prompt.count("<|image_pad|>") == 1
    places = [prompt.rindex(text) for text in ("Show me.", "here", "<|image_pad|>", "What is it?")]
    assert places == sorted(places)


FAILURES = {
    "the device fails": (Ask("Break."), "It is so."),
    "a second call": (Ask("Look twice.", single=True), "I look."),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_in_the_middle_of_messages(claude: anthropic.Anthropic, name: str) -> None:
    ask, before = FAILURES[name]
    kinds: list[str] = []
    with (
        pytest.raises(anthropic.APIStatusError) as caught,
        claude.messages.stream(**messages_body(ask)) as stream,
    ):
        kinds += (event.type for event in stream)
    assert caught.value.body["error"]["type"] == "api_error"  # type: ignore[index]
    shown = stream.current_message_snapshot
    assert before in str(shown.content) and shown.stop_reason is None
    with pytest.raises(anthropic.InternalServerError):
        ask_messages(claude, ask, stream=False)


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_in_the_middle_of_responses(gpt: openai.OpenAI, name: str) -> None:
    ask, before = FAILURES[name]
    with gpt.responses.stream(**responses_body(ask)) as stream:
        seen: list[Any] = list(stream)
    assert seen[-1].type == "response.failed"
    assert seen[-1].response.error.code == "server_error"
    assert before in "".join(event.delta for event in seen if event.type.endswith("text.delta"))
    with pytest.raises(openai.InternalServerError):
        ask_responses(gpt, ask, stream=False)


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_in_the_middle_of_chat(gpt: openai.OpenAI, name: str) -> None:
    ask, before = FAILURES[name]
    text = ""
    with pytest.raises(openai.APIError):
        for chunk in gpt.chat.completions.create(**chat_body(ask), stream=True):
            assert chunk.choices[0].finish_reason is None
            delta: Any = chunk.choices[0].delta
            text += (delta.content or "") + ((delta.model_extra or {}).get("reasoning") or "")
    assert before in text
    with pytest.raises(openai.InternalServerError):
        ask_chat(gpt, ask, stream=False)
