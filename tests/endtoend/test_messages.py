"""Messages over the whole stack: histories, thinking and its budgets, continuations, hints, stops and usage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.ingress import Reply
from tests.support.inline_server import Site, Stream
from tests.support.scripted import script, times, token, turn

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
VERSION = [("anthropic-version", "2023-06-01")]
CLOSE = token("</think>")
HINT: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
READ: dict[str, Any] = {"name": "Read", "description": "Reads", "input_schema": {"type": "object", "properties": {}}}
FETCH: dict[str, Any] = {**READ, "name": "Fetch", "description": "Fetches", "defer_loading": True}
READS = (
    token("<tool_call>"),
    "\n<function=Read>\n<parameter=path>\na.txt\n</parameter>\n</function>\n",
    token("</tool_call>"),
    "\n",
    token("<tool_call>"),
    "\n<function=Read>\n<parameter=path>\nb.txt\n</parameter>\n</function>\n",
    token("</tool_call>"),
)
TURNS = (
    turn("Hm.\n", CLOSE, "\n\nYes sir."),
    turn(times(40, " so"), CLOSE, "\n\nYes.", when="Think long."),
    turn(" so", " so", " so", " so", CLOSE, "\n\nYes.", when="It is"),
    turn(" capital is Paris.", when="The"),
    turn("Hm.\n", CLOSE, "\n\nOne. END Two.", when="Count."),
    turn("Hm.\n", CLOSE, "\n\nI read.\n\n", *READS, when="Read both."),
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("messages")
    with Site(script(directory, TURNS, recipe="qwen38"), cache=directory, engine={"page_tokens": 16}) as site:
        yield site


def body(*turns: Any, **fields: Any) -> dict[str, Any]:
    messages = [turn if isinstance(turn, dict) else {"role": "user", "content": turn} for turn in turns or ("Hi",)]
    return {"model": "gpt-9", "max_tokens": 200, "messages": messages, **fields}


def send(site: Site, *turns: Any, path: str = PATH, **fields: Any) -> Reply:
    return site.send("POST", path, body(*turns, **fields), VERSION)


def message(site: Site, *turns: Any, **fields: Any) -> Any:
    reply = send(site, *turns, **fields)
    assert reply.status == 200, reply.body
    return reply.json


def refusal(site: Site, *turns: Any, **fields: Any) -> str:
    """The message of a 400, the same when only counted."""
    texts = set()
    for path in (PATH, COUNT):
        reply = send(site, *turns, path=path, **fields)
        assert reply.status == 400 and reply.json["type"] == "error", reply.body
        texts.add(reply.json["error"]["message"])
    (text,) = texts
    return str(text)


def refusal_of_generation(site: Site, **fields: Any) -> str:
    """The message of a 400 for what only generation needs."""
    reply = send(site, **fields)
    assert reply.status == 400, reply.body
    return str(reply.json["error"]["message"])


def prompt(site: Site) -> str:
    """The prompt of the request before."""
    return site.model.tokens.decode(site.engine.prepared[-1].children[0].token_ids.tolist())


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


# What every answer holds


def test_the_loaded_model_answers_whatever_is_named(site: Site) -> None:
    whole = message(site)
    assert whole["model"] == site.startup.facts.id and whole["stop_reason"] == "end_turn"
    start = Stream(send(site, stream=True)).frames[0]
    assert start["type"] == "message_start" and start["message"]["model"] == site.startup.facts.id


def test_a_warm_stream_counts_the_prompt_first_and_the_reuse_last(site: Site) -> None:
    text = "Tell me, " * 20
    counted = send(site, text, path=COUNT).json["input_tokens"]
    for reused in (False, True):
        frames = {frame["type"]: frame for frame in Stream(send(site, text, stream=True)).frames}
        first, last = frames["message_start"]["message"]["usage"], frames["message_delta"]["usage"]
        assert (first["input_tokens"], first["cache_read_input_tokens"]) == (counted, 0)
        assert last["input_tokens"] + last["cache_read_input_tokens"] == counted
        assert last["cache_creation_input_tokens"] == 0 and last["output_tokens"] > 0
        assert (last["cache_read_input_tokens"] > counted - 20) == reused


def test_only_string_stops_are_named(site: Site) -> None:
    found = message(site, "Count.", stop_sequences=["zzz", "END"])
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "END")
    ids = site.model.tokenizer.encode(" END", specials=False)
    for fields in ({"stop_token_ids": ids[-1:]}, {"stop_token_sequences": [ids]}, {}):
        found = message(site, "Count.", **fields)
        assert (found["stop_reason"], found["stop_sequence"]) == ("end_turn", None)
        assert ("Two" in found["content"][-1]["text"]) == (not fields)


# Thinking


def test_thinking_comes_signed_and_goes_back_checked(site: Site) -> None:
    thinking, text = message(site)["content"]
    omitted = {"thinking": {"type": "adaptive", "display": "omitted"}}
    assert message(site, **omitted)["content"][0] == thinking, "the marker is made from the text, which always comes"
    message(site, "Hi", assistant(thinking, text), "Count.")
    assert f"<think>\n{thinking['thinking']}\n</think>\n\n{text['text']}" in prompt(site)
    edited = {**thinking, "thinking": thinking["thinking"] + "!"}
    assert "signature" in refusal(site, "Hi", assistant(edited, text), "Count.")
    foreign = {"type": "thinking", "thinking": "Elsewhere.", "signature": "EqoBCkgIARABGAIiQL"}
    message(site, "Hi", assistant(foreign, text), "Count.")
    assert "<think>\nElsewhere.\n</think>" in prompt(site)


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking": {"type": "enabled", "budget_tokens": 6}},
        {"thinking": {"type": "adaptive", "budget_tokens": 6}},
        {"thinking_token_budget": 6},
        {"thinking_token_budget": 6, "thinking": {"type": "enabled", "budget_tokens": 6}},
    ],
)
def test_budgets_cut_the_reasoning(site: Site, fields: dict[str, Any]) -> None:
    found = message(site, "Think long.", max_tokens=30, **fields)
    assert found["usage"]["output_tokens_details"]["thinking_tokens"] in (6, 7)
    assert found["content"][0]["thinking"] == " so" * 6


def test_a_budget_starts_anew_with_each_output(site: Site) -> None:
    """A continuation inside reasoning has the whole budget, whatever was thought before."""
    before = assistant({"type": "thinking", "thinking": "It is" + " so" * 9})
    found = message(site, "Hi", before, thinking_token_budget=3, max_tokens=30)
    assert prompt(site).endswith("<think>\nIt is" + " so" * 9)
    assert found["content"][0]["thinking"] == " so" * 3


def test_a_model_without_reasoning_takes_budgets_as_hints(demo: Site) -> None:
    """Only the explicit field is refused there."""
    hint = {"thinking": {"type": "enabled", "budget_tokens": 2048}, "max_tokens": 1}
    assert message(demo, **hint)["stop_reason"] == "max_tokens"
    assert "thinking_token_budget" in refusal_of_generation(demo, thinking_token_budget=2048)


def test_budgets_beyond_any_output_never_cut(site: Site) -> None:
    found = message(site, "Think long.", thinking={"type": "enabled", "budget_tokens": 2**40})
    assert found["content"][0]["thinking"] == " so" * 40
    wrong = {"type": "enabled", "budget_tokens": 7}
    assert "thinking_token_budget" in refusal(site, thinking=wrong, thinking_token_budget=6)


def test_efforts_are_levels_of_the_template(site: Site) -> None:
    notes = {}
    asked: dict[str, dict[str, Any]] = {
        "low budget": {"thinking": {"type": "enabled", "budget_tokens": 5000}},
        "high budget": {"thinking": {"type": "enabled", "budget_tokens": 5001}},
        "low": {"output_config": {"effort": "low"}},
        "medium": {"output_config": {"effort": "medium"}},
        "max": {"output_config": {"effort": "max"}},
        "effort wins": {"thinking": {"type": "enabled", "budget_tokens": 50_000}, "output_config": {"effort": "low"}},
    }
    for name, fields in asked.items():
        message(site, **fields)
        notes[name] = prompt(site).split("<|im_start|>user")[0]
    assert notes["low budget"] == notes["low"] == notes["effort wins"]
    assert "effort is set to low" in notes["low"] and "effort is set to xhigh" in notes["max"]
    assert notes["low budget"] != notes["high budget"] and notes["medium"] == ""
    assert "output_config.effort" in refusal(site, output_config={"effort": 80})


# Histories


def test_a_replayed_answer_is_reused_token_by_token(site: Site) -> None:
    """Thinking, text and parallel calls come back as the tokens that the model generated; results in any order."""
    first = message(site, "Read both.", tools=[READ])
    calls = [block["id"] for block in first["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": id, "content": f"file {id}"} for id in reversed(calls)]
    answered = {"role": "assistant", "content": first["content"]}
    usage = message(site, "Read both.", answered, {"role": "user", "content": results}, tools=[READ])["usage"]
    text = prompt(site)
    assert text.index(f"file {calls[0]}") < text.index(f"file {calls[1]}")
    before = first["usage"]
    whole = before["input_tokens"] + before["cache_read_input_tokens"] + before["output_tokens"]
    assert usage["cache_read_input_tokens"] == whole


def test_a_prefill_is_continued(site: Site) -> None:
    found = message(site, "Name it.", {"role": "assistant", "content": "The"})
    assert prompt(site).endswith("The") and found["content"] == [
        {"type": "text", "text": " capital is Paris.", "citations": None}
    ]


def test_inline_system_text_and_control_metadata(site: Site) -> None:
    marked = {"role": "user", "content": "Hi", "output_config": {"effort": "low"}}
    plain = message(site, "Hi")
    expected = prompt(site)
    for empty in ("", [], [{"type": "text", "text": ""}]):
        message(site, marked, {"role": "system", "content": empty})
        assert prompt(site) == expected
    message(site, "Hi", {"role": "system", "content": "Be brief."})
    assert prompt(site).count("<system>Be brief.</system>") == 1
    assert plain["usage"]["output_tokens"] > 0


def test_hints_are_boundaries_and_no_text(site: Site) -> None:
    def parts(hint: dict[str, Any]) -> list[Any]:
        use = {"type": "tool_use", "id": "t", "name": "Read", "input": {}, **hint}
        result = {"type": "tool_result", "tool_use_id": "t", "content": "read", **hint}
        texts = [{"type": "text", "text": f"part {number}.", **hint} for number in range(5)]
        return [
            {"role": "user", "content": texts[:2]},
            assistant(use),
            {"role": "user", "content": [result, *texts[2:]]},
        ]

    system = [{"type": "text", "text": "You help.", **HINT}]
    message(site, *parts(HINT), system=system, tools=[{**READ, **HINT}])
    hinted, marked = prompt(site), site.engine.prepared[-1].children[0]
    message(site, *parts({}), system="You help.", tools=[READ])
    plain = site.engine.prepared[-1].children[0]
    assert prompt(site) == hinted and plain.boundaries == ()
    ends = [site.model.tokens.decode(marked.token_ids[:place].tolist())[-7:] for place in marked.boundaries]
    assert ends == ["part 0.", "part 1.", "e>\nread", "part 2."]


def test_a_deferred_tool_stands_where_it_is_referred_to(site: Site) -> None:
    message(site, tools=[READ])
    plain = prompt(site)
    message(site, tools=[FETCH, READ])
    assert prompt(site) == plain
    addition = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "Fetch"}}
    message(site, "Hi", {"role": "system", "content": [addition]}, tools=[FETCH, READ])
    text = prompt(site)
    assert text.index("Hi") < text.index("Fetches") and text.count("Fetches") == 1


def test_active_context_edits_are_refused(site: Site) -> None:
    edit: dict[str, Any] = {"type": "clear_thinking_20251015", "keep": "all"}
    message(site, context_management={"edits": [edit]})
    edit["keep"] = {"type": "thinking_turns", "value": 1}
    assert "context_management" in refusal(site, context_management={"edits": [edit]})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", True),
        ("top_logprobs", 1),
        ("return_tokens_as_token_ids", True),
        ("logprob_token_ids", [1]),
        ("prompt_logprobs", 0),
    ],
)
def test_observations_are_refused(site: Site, field: str, value: Any) -> None:
    assert refusal(site, **{field: value}).startswith(field)


@pytest.mark.parametrize("path", [PATH, COUNT])
@pytest.mark.parametrize("version", [None, "2023-01-01", ""])
def test_the_version_is_required(site: Site, path: str, version: str | None) -> None:
    headers = [] if version is None else [("anthropic-version", version)]
    reply = site.send("POST", path, body(), headers)
    assert reply.status == 400 and "anthropic-version" in reply.json["error"]["message"]


def test_counts_are_of_the_prompt(site: Site) -> None:
    fields: dict[str, Any] = {"tools": [READ, FETCH], "system": "You help.", "tool_choice": {"type": "any"}}
    use = {"type": "tool_use", "id": "t", "name": "Read", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "Fetch"}]}
    turns = ("Hi", assistant(use), {"role": "user", "content": [result]})
    uncounted = body(*turns, **fields)
    del uncounted["max_tokens"]
    counted = site.send("POST", COUNT, uncounted, VERSION).json
    assert counted.keys() == {"input_tokens"}
    send(site, *turns, **fields)
    assert counted["input_tokens"] == len(site.engine.prepared[-1].children[0].token_ids)
