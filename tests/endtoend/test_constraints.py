"""Output constraints through the whole stack, over what a reasoning model writes of its own accord: reasoning, its end,
a blank line, the answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import jsonschema
import pytest

from tests.support.inline_server import Site
from tests.support.qwen_vocabulary import qwen_tokenizer_json
from tests.support.scripted import script, spelled, token, turn
from tests.support.shown import PATHS, ask, streamed, whole

ANSWER: Final = '{"city": "Paris", "days": 3}'
SCHEMA: Final = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
CLOSE: Final = token("</think>")
TOOL: Final = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL: Final = (
    token("<tool_call>"),
    "\n<function=lookup>\n<parameter=city>\nParis\n</parameter>\n</function>\n",
    token("</tool_call>"),
)
TURNS: Final = (
    turn("so\n", CLOSE, "\n\n", ANSWER, when="a blank line"),
    turn("so\n", CLOSE, ANSWER, when="nothing between"),
    turn("so\n", CLOSE, "\n\n", token("<think>"), "again", when="think again"),
    turn("so\n", CLOSE, "\n\n", *CALL, when="call first"),
    turn("so\n", CLOSE, "\n\nyes", when="plain words"),
    turn(spelled("so </think> {} "), when="spelled out", then="repeat"),
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("constraints")
    tokenizer = {"path": str(qwen_tokenizer_json(directory))}
    source = script(directory, TURNS, recipe="qwen38", tokenizer=tokenizer, context=2048)
    with Site(source, cache=directory / "cache") as site:
        yield site


def chat_format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


FORMATS: Final = (
    {"response_format": {"type": "json_object"}},
    chat_format(SCHEMA),
    {"guided_json": SCHEMA},
    {"structured_outputs": {"json": SCHEMA}},
)


@pytest.mark.parametrize("fields", FORMATS)
@pytest.mark.parametrize("when", ["a blank line", "nothing between"])
def test_the_blank_line_before_a_json_answer_on_chat(site: Site, when: str, fields: dict[str, Any]) -> None:
    answer = site.chat(when, logprobs=True, **fields)
    (choice,) = answer["choices"]
    message = choice["message"]
    assert (message["content"], message["reasoning"], choice["finish_reason"]) == (ANSWER, "so", "stop")
    shown = "".join(entry["token"] for entry in choice["logprobs"]["content"])
    assert shown == f"so\n</think>{'' if when == 'nothing between' else chr(10) * 2}{ANSWER}"
    stream = site.stream("/v1/chat/completions", {"messages": [{"role": "user", "content": when}], **fields})
    deltas = [chunk["delta"] for chunk in stream.choices()]
    assert "".join(delta.get("content") or "" for delta in deltas) == ANSWER
    assert stream.done


@pytest.mark.parametrize("when", ["a blank line", "nothing between"])
def test_the_blank_line_before_a_json_answer_on_messages_and_responses(site: Site, when: str) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    body: dict[str, Any] = {"model": "local", "max_tokens": 99, "messages": [{"role": "user", "content": when}]}
    reply = site.send(
        "POST",
        "/v1/messages",
        {**body, "output_config": {"format": form}},
        [("anthropic-version", "2023-06-01")],
    )
    assert reply.status == 200, reply.body.decode()
    blocks = reply.json["content"]
    assert [block.get("text", block.get("thinking")) for block in blocks] == ["so", ANSWER]
    whole = site.post(
        "/v1/responses", {"model": "local", "input": when, "text": {"format": {**form, "name": "answer"}}}
    )
    (message,) = [item for item in whole["output"] if item["type"] == "message"]
    assert message["content"][0]["text"] == ANSWER


def test_reasoning_is_not_opened_again_before_the_answer(site: Site) -> None:
    answer = site.chat("think again", logprobs=True, **chat_format({"const": 7}))
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("7", "so")
    assert [entry["token"] for entry in choice["logprobs"]["content"]][-2:] == ["\n\n", "7"]


def test_a_call_may_stand_behind_the_blank_line(site: Site) -> None:
    tool = {"type": "function", "function": {"name": "lookup", "parameters": TOOL}}
    answer = site.chat("call first", tools=[tool], **chat_format(SCHEMA))
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls" and not choice["message"]["content"]
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({"guided_choice": ["yes", "no"]}, {"yes", "no"}),
        ({"guided_regex": r"\n\n(yes|no)"}, {"\n\nyes"}),
        ({"grammar": 'start: /\\s*/ "yes"'}, {"\n\nyes"}),
    ],
)
def test_other_answers_keep_their_own_whitespace(site: Site, fields: dict[str, Any], content: set[str]) -> None:
    assert site.chat("plain words", **fields)["choices"][0]["message"]["content"] in content


@pytest.mark.parametrize("stream", [False, True])
def test_a_close_in_ordinary_pieces_ends_no_reasoning_so_the_limit_comes_without_an_answer(
    site: Site, stream: bool
) -> None:
    body = ask("chat", "spelled out", limit=50, **chat_format(SCHEMA), stream=stream)
    (reply,) = site.together([(PATHS["chat"], body)])
    shown = (streamed if stream else whole)("chat", reply)
    assert (shown.text, shown.calls, shown.end) == ("", (), "limit")
    assert shown.reasoning.startswith("so </think> {} so </think>")


SMALL: Final = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 9},
        "kind": {"enum": ["town", "village", None]},
        "tags": {"type": "array", "maxItems": 2, "items": {"type": "string", "pattern": "^[a-z]{1,4}$"}},
        "size": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 99}, {"type": "boolean"}]},
    },
    "required": ["city", "kind", "tags", "size"],
    "additionalProperties": False,
}


def test_a_real_model_always_answers_with_what_the_schema_allows(demo: Site) -> None:
    """Sampled hot, without any hint of what is wanted on the raw route; one that is cut is the beginning of such."""
    question = "Tell me about a place."
    hot = {"temperature": 1.5, "max_tokens": 44, "model": "any"}
    requests: list[tuple[str, dict[str, Any]]] = [
        (PATHS["chat"], {**ask("chat", question, schema=SMALL), **hot, "seed": seed}) for seed in range(1)
    ]
    requests += [
        ("/v1/completions", {"prompt": question, "guided_json": SMALL, **hot, "seed": seed}) for seed in range(3)
    ]
    finished = 0
    for reply in demo.together(requests):
        (choice,) = reply.json["choices"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert text.startswith("{")
        if choice["finish_reason"] == "stop":
            finished += 1
            jsonschema.validate(json.loads(text), SMALL)
    assert finished
