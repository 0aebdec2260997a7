"""Responses over the whole stack: what is echoed, observed, restored and refused, and how streams end."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import captures
from tests.support.inline_server import Site, Stream
from tests.support.scripted import script, spelled, times, token, turn

PATH = "/v1/responses"
LOGPROBS: dict[str, Any] = {"include": ["message.output_text.logprobs", "reasoning.encrypted_content", "anything"]}
CLOSE = token("</think>")
PATCH = "*** Begin Patch\n*** Update File: a.txt\n-old\n+new\n*** End Patch"
GRAMMAR = next(
    tool["format"]
    for tool in captures.body("codex-0.171.0_responses_turn1_catalog_apply_patch")["tools"]
    if tool["type"] == "custom"
)
APPLY: dict[str, Any] = {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": GRAMMAR}
SPACE: dict[str, Any] = {
    "type": "namespace",
    "name": "fs",
    "tools": [{"type": "function", "name": "read", "parameters": {"type": "object", "properties": {}}}],
}


def call(name: str, **arguments: str) -> tuple[Any, ...]:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return (token("<tool_call>"), f"\n<function={name}>\n{parameters}</function>\n", token("</tool_call>"))


TURNS = (
    turn("Hm.\n", CLOSE, "\n\nYes sir."),
    turn("Hm.\n", CLOSE, "\n\n", *call("apply_patch", input=PATCH), when="Mend it."),
    turn("Hm.\n", CLOSE, "\n\nHere.", *call("apply_patch", input="please mend it"), when="Beg for it."),
    turn("Hm.\n", CLOSE, "\n\n", *call("fs__read"), *call("fs__write"), when="Read it."),
    turn("Hm.\n", CLOSE, "\n\n", *call("note", o=r'{"a": "\ud83d", "b": 18446744073709551616}'), when="Escape it."),
    turn("Hm.\n", CLOSE, "\n\nSay", spelled(" </think>"), " twice.", when="Spell it."),
    turn("Hm.\n", CLOSE, "\n\n", spelled("é🙂"), "!", when="Smile."),
    turn("Hm.\n", CLOSE, "\n\n", times(50, " the"), when="Go on."),
    turn("Hm.\n", CLOSE, "\n\nOne, two, three.", when="Break.", fail_at=6),
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("responses")
    with Site(script(directory, TURNS, recipe="qwen38"), cache=directory, engine={"page_tokens": 16}) as site:
        yield site


def respond(site: Site, text: Any = "Hi", **fields: Any) -> Any:
    return site.post(PATH, {"model": "gpt-9", "input": text, **fields})


def stream(site: Site, text: Any = "Hi", **fields: Any) -> Stream:
    return site.stream(PATH, {"model": "gpt-9", "input": text, **fields})


def entries(response: Any) -> list[Any]:
    messages = [item for item in response["output"] if item["type"] == "message"]
    return [entry for item in messages for part in item["content"] for entry in part["logprobs"]]


# Observations


@pytest.mark.parametrize("text", ["Hi", "Spell it.", "Smile."])
def test_entries_are_of_the_answer_alone_and_fold_from_the_deltas(site: Site, text: str) -> None:
    """A spelled delimiter is answer text; the real one, and the blank line after it, have no entries."""
    whole = respond(site, text, **LOGPROBS, top_logprobs=2, seed=1)
    answer = whole["output"][-1]["content"][0]["text"]
    assert bytes(itertools.chain(*(entry["bytes"] for entry in entries(whole)))) == answer.encode()
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries(whole))
    frames = stream(site, text, **LOGPROBS, top_logprobs=2, seed=1).frames
    deltas = [frame for frame in frames if frame["type"] == "response.output_text.delta"]
    assert list(itertools.chain(*(frame["logprobs"] for frame in deltas))) == entries(whole)
    assert entries(respond(site, text)) == []


def test_tokens_are_named_by_id_and_keep_their_bytes(site: Site) -> None:
    plain, named = (
        entries(respond(site, "Smile.", **LOGPROBS, top_logprobs=1, return_tokens_as_token_ids=asked))
        for asked in (False, True)
    )
    assert [entry["bytes"] for entry in named] == [entry["bytes"] for entry in plain]
    for entry in named:
        for each in (entry, *entry["top_logprobs"]):
            id = int(each["token"].removeprefix("token_id:"))
            assert list(site.model.tokens.bytes(id)) == each["bytes"]


def test_explicit_ids_replace_the_alternatives_in_the_callers_order(site: Site) -> None:
    """The generated token follows them where it isn't one of them."""
    ids = [90, 70, 89, 90, 80]
    found = entries(respond(site, **LOGPROBS, top_logprobs=1, logprob_token_ids=ids, return_tokens_as_token_ids=True))
    assert len({entry["token"] for entry in found}) > 2
    for entry in found:
        expected = list(dict.fromkeys([*(f"token_id:{id}" for id in ids), entry["token"]]))
        assert [other["token"] for other in entry["top_logprobs"]] == expected
    assert "logprob_token_ids" in site.refused(PATH, {"model": "m", "input": "Hi", "logprob_token_ids": ids})


def test_a_token_that_spans_a_delimiter_and_the_answer_has_no_entry(tmp_path: Path) -> None:
    """DeepSeek's delimiters are read as text, so one token may end the reasoning and begin the answer."""
    specials = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]
    tokenizer = {"synthetic": {"specials": specials, "added": ["<think>", "think>Yes"]}}
    turns = [turn("Hm.", "</", token("think>Yes"), " sir")]
    source = script(tmp_path, turns, recipe="deepseek4", tokenizer=tokenizer)
    with Site(source, cache=tmp_path) as site:
        found = respond(site, **LOGPROBS)
    assert found["output"][-1]["content"][0]["text"] == "Yes sir"
    assert bytes(itertools.chain(*(entry["bytes"] for entry in entries(found)))) == b" sir"


# Tools


def test_a_patch_goes_around(site: Site) -> None:
    """A freeform call comes back as what was written, and its replay as the same tokens."""
    tools = {"tools": [APPLY]}
    first = respond(site, "Mend it.", **tools)
    reasoning, item = first["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", PATCH)
    history = [{"role": "user", "content": "Mend it."}, reasoning, item]
    output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "Done."}
    second = respond(site, [*history, output], **tools)
    cached = second["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached == first["usage"]["total_tokens"]
    prompt = site.model.tokens.decode(site.engine.prepared[-1].children[0].token_ids.tolist())
    assert prompt.rindex(PATCH) < prompt.rindex("Done.")


def test_a_patch_that_breaks_its_grammar_fails_the_response(site: Site) -> None:
    """Generation isn't held to the grammar: the model wrote it all, and only the call is refused."""
    frames = stream(site, "Beg for it.", tools=[APPLY]).frames
    assert frames[-1]["type"] == "response.failed" and "apply_patch" in frames[-1]["response"]["error"]["message"]
    kinds = [item["type"] for item in frames[-1]["response"]["output"]]
    assert kinds == ["reasoning", "message"]
    assert not any("custom_tool_call" in frame["type"] for frame in frames)
    reply = site.send("POST", PATH, {"model": "m", "input": "Beg for it.", "tools": [APPLY]})
    assert reply.status == 500 and reply.json["error"]["type"] == "server_error"
    plain = respond(site, "Beg for it.", tools=[{"type": "custom", "name": "apply_patch"}])
    assert plain["output"][-1]["input"] == "please mend it"


def test_a_grammar_that_does_not_compile_is_refused_before_admission(site: Site) -> None:
    before = len(site.engine.generations)
    bad = {**APPLY, "format": {**GRAMMAR, "definition": "start: missing"}}
    assert "apply_patch" in site.refused(PATH, {"model": "m", "input": "Mend it.", "tools": [bad]})
    assert len(site.engine.generations) == before


def test_namespaces_come_back_on_declared_calls(site: Site) -> None:
    calls = [item for item in respond(site, "Read it.", tools=[SPACE])["output"] if item["type"] == "function_call"]
    assert [(item["name"], item.get("namespace")) for item in calls] == [("read", "fs"), ("fs__write", None)]
    assert len({item["call_id"] for item in calls}) == 2


def test_arguments_are_what_every_reader_of_json_takes(site: Site) -> None:
    """A lone surrogate, which a model may write as an escape, can't be sent as it is."""
    schema = {"type": "object", "properties": {"o": {"type": "object"}}}
    tool = {"type": "function", "name": "note", "parameters": schema}
    for found in (
        respond(site, "Escape it.", tools=[tool]),
        stream(site, "Escape it.", tools=[tool]).frames[-1]["response"],
    ):
        assert json.loads(found["output"][-1]["arguments"]) == {"o": {"a": "\ufffd", "b": 2**64}}


# Endings and life cycle


ENDINGS = {"Hi": "response.completed", "Go on.": "response.incomplete", "Break.": "response.failed"}


@pytest.mark.parametrize(("text", "last"), ENDINGS.items())
def test_streams_end_once_in_their_own_event(site: Site, text: str, last: str) -> None:
    reply = site.send("POST", PATH, {"model": "m", "input": text, "stream": True, "max_output_tokens": 30})
    assert b"[DONE]" not in reply.body
    names = [line for line in reply.body.decode().splitlines() if line.startswith("event: ")]
    found = Stream(reply).frames
    assert [f"event: {frame['type']}" for frame in found] == names
    assert [frame["sequence_number"] for frame in found] == list(range(len(found)))
    assert [frame["type"] for frame in found if frame["type"] in ENDINGS.values()] == [last]
    final = found[-1]["response"]
    assert {frame["response"]["id"] for frame in found if "response" in frame} == {final["id"]}
    assert {frame["response"]["model"] for frame in found if "response" in frame} == {site.startup.facts.id}
    added = [frame["item"]["id"] for frame in found if frame["type"] == "response.output_item.added"]
    done = [frame["item"] for frame in found if frame["type"] == "response.output_item.done"]
    assert [item["id"] for item in final["output"]] == added == list(dict.fromkeys(added))
    assert final["output"][: len(done)] == done


def test_the_folded_stream_is_the_buffered_response(site: Site) -> None:
    for text in ("Hi", "Mend it.", "Read it.", "Smile."):
        fields: dict[str, Any] = {"tools": [APPLY, SPACE], **LOGPROBS, "metadata": {"a": "b"}}
        whole, final = respond(site, text, **fields), stream(site, text, **fields).frames[-1]["response"]
        for found in (whole, final):
            named = json.dumps(found).replace(found["id"].removeprefix("resp_"), "ID")
            for item in found["output"]:
                named = named.replace(item.get("call_id", "-none-"), "CALL")
            found.clear()
            found |= json.loads(named)
            found["usage"]["input_tokens_details"] = found["completed_at"] = found["created_at"] = None
        assert whole == final


# State


def test_nothing_is_stored(site: Site) -> None:
    made = respond(site)
    assert made["store"] is False
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        reply = site.send(method, f"{PATH}/{made['id']}{path}")
        assert reply.status == 404 and reply.json["error"]["message"]


def test_readable_reasoning_replays_and_opaque_reasoning_is_refused(site: Site) -> None:
    reasoning, message = respond(site)["output"]
    assert reasoning["summary"] == [] and "encrypted_content" not in reasoning
    history = [{"role": "user", "content": "Hi"}, reasoning, message, {"role": "user", "content": "Go on."}]
    assert respond(site, history, max_output_tokens=5)["status"] == "incomplete"
    prompt = site.model.tokens.decode(site.engine.prepared[-1].children[0].token_ids.tolist())
    assert reasoning["content"][0]["text"] in prompt
    opaque = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}
    refusal = site.refused(PATH, {"model": "m", "input": [opaque, {"role": "user", "content": "Hi"}]})
    assert "encrypted_content" in refusal
