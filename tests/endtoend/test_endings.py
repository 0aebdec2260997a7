"""Why answers end, over whole requests: EOS, stops, limits, their order, and each endpoint's word for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.endtoend.conftest import scripted_site
from tests.support.ingress import Call
from tests.support.inline_server import Site, Stream
from tests.support.shown import HEADERS, PATHS, PROTOCOLS, Protocol, ask, streamed, whole

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
VERSION = [("anthropic-version", "2023-06-01")]
TOOL = {"type": "function", "function": {"name": "lookup"}}
PLAIN = "hello world, it is the answer"


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def completion_tokens(site: Site, text: str, **fields: Any) -> int:
    count: int = site.chat(text, **fields)["usage"]["completion_tokens"]
    return count


# ---- string stops ----


def test_every_piece_of_an_answer_can_stop_it(scripted: Site) -> None:
    """The earliest end wins and is never shown; usage counts up to the token that completes it."""
    pieces = scripted.completion("plain", logprobs=0)["choices"][0]["logprobs"]["tokens"]
    ends = [sum(map(len, pieces[: place + 1])) for place in range(len(pieces))]
    for start in range(0, len(PLAIN), 2):
        for size in (1, 3, 8):
            stop = PLAIN[start : start + size]
            answer = scripted.completion("plain", stop=["zzz", stop], logprobs=0)
            choice = answer["choices"][0]
            at = PLAIN.index(stop)
            assert (choice["text"], choice["stop_reason"]) == (PLAIN[:at], stop)
            needed = next(place for place, end in enumerate(ends, 1) if end >= at + len(stop))
            assert answer["usage"]["completion_tokens"] == needed
            assert choice["finish_reason"] == "stop"
            clipped = next((place for place, end in enumerate([0, *ends]) if end >= at), 0)
            assert choice["logprobs"]["tokens"] == pieces[:clipped]


def test_the_earliest_end_wins_among_several(scripted: Site) -> None:
    for stops, stop in (
        (["world, it", "wor", "orl"], "wor"),
        (["it is the", "s th", "t i"], "t i"),
        (["answer", "is the answer"], "is the answer"),
    ):
        choice = scripted.completion("plain", stop=stops)["choices"][0]
        assert choice["stop_reason"] == stop and choice["text"] == PLAIN[: PLAIN.index(stop)]


def test_streams_never_show_the_beginning_of_a_stop(scripted: Site) -> None:
    body = {"prompt": "plain", "stop": [" it is the answer!", "the answer"]}
    chunks = scripted.stream(COMPLETIONS, body).choices()
    assert "".join(chunk["text"] for chunk in chunks) == "hello world, it is "
    assert chunks[-1]["stop_reason"] == "the answer"


def test_a_stop_is_included_when_asked(scripted: Site) -> None:
    fields: dict[str, Any] = {"include_stop_str_in_output": True}
    choice = scripted.completion("plain", stop="world", **fields)["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("hello world", "world")
    ids = scripted.model.tokenizer.encode(" world", specials=True)
    assert scripted.completion("plain", stop_token_ids=ids, **fields)["choices"][0]["text"] == "hello world"


def test_a_stop_inside_a_character_spread_over_tokens(scripted: Site) -> None:
    choice = scripted.completion("emoji", stop="🙂", logprobs=0)["choices"][0]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("a", ["a"])


@pytest.mark.parametrize(
    ("stop", "problem"),
    [
        (["a", "b", "c", "d", "e"], "at most 4"),
        ([""], "empty"),
        ("", "empty"),
        (["ü" * 2048, "x"], "4096"),
        ([1], "string"),
        ({"a": 1}, "stop"),
    ],
)
@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
def test_bad_string_stops(scripted: Site, endpoint: str, stop: Any, problem: str) -> None:
    body = {"prompt": "plain"} if endpoint == COMPLETIONS else chat("plain")
    message = scripted.refused(endpoint, {**body, "stop": stop})
    assert "stop" in message and problem in message
    assert scripted.send("POST", endpoint, {**body, "max_tokens": 1, "stop": ["ü" * 2047, "x", "y"]}).status == 200


# ---- token stops ----


def test_sequences_of_tokens(scripted: Site) -> None:
    encode = scripted.model.tokenizer.encode
    sequence = encode(" it is", specials=True)
    choice = scripted.completion("plain", stop_token_sequences=[encode(" is it", specials=True), sequence])["choices"]
    assert (choice[0]["text"], choice[0]["stop_reason"]) == ("hello world,", sequence[-1])
    chunks = scripted.stream(COMPLETIONS, {"prompt": "plain", "stop_token_sequences": [sequence]}).choices()
    assert "".join(chunk["text"] for chunk in chunks) == "hello world,"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"stop_token_ids": [1] * 10, "stop_token_sequences": [[1]] * 7}, "16"),
        ({"stop_token_sequences": [[]]}, "empty"),
        ({"stop_token_sequences": [[1] * 65]}, "64"),
        ({"stop_token_ids": [10**6]}, "vocabulary"),
        ({"stop_token_sequences": [[-1]]}, "vocabulary"),
        ({"stop_token_ids": ["1"]}, "integer"),
        ({"stop_token_ids": [1], "stop": "x"}, "combined"),
        ({"stop_token_sequences": [[1, 2]], "stop": ["x"]}, "combined"),
    ],
)
@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
def test_bad_token_stops(scripted: Site, endpoint: str, fields: dict[str, Any], problem: str) -> None:
    body = {"prompt": "plain"} if endpoint == COMPLETIONS else chat("plain")
    message = scripted.refused(endpoint, {**body, **fields})
    assert "stop" in message and problem in message


def test_the_limits_of_token_stops_themselves_pass(scripted: Site) -> None:
    size = scripted.model.manifest.vocab_size
    fields = {"stop_token_ids": [size - 1] * 8, "stop_token_sequences": [[size - 1] * 64] * 8}
    assert scripted.completion("plain", **fields)["choices"][0]["text"] == PLAIN


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": "x"},
        {"stop_token_ids": [1]},
        {"stop_token_sequences": [[1, 2]]},
        {"ignore_eos": True},
        {"continue_final_message": True, "add_generation_prompt": False},
    ],
)
def test_output_constraints_exclude_custom_endings(scripted: Site, fields: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "plain"}, {"role": "assistant", "content": "{"}]
    if "continue_final_message" not in fields:
        messages.pop()
    body = {"messages": messages, "response_format": {"type": "json_object"}, **fields}
    assert next(iter(fields)) in scripted.refused(CHAT, body)


# ---- EOS ----


def test_min_tokens_keep_eos_and_stops_away(scripted: Site) -> None:
    usage = scripted.completion("ends", min_tokens=4, max_tokens=4)["usage"]
    assert usage["completion_tokens"] == 4
    choice = scripted.completion("again", min_tokens=5, max_tokens=20, stop=" the")["choices"][0]
    assert choice["text"] == " the" * 4
    ids = scripted.model.tokenizer.encode(" the", specials=True)
    usage = scripted.completion("again", min_tokens=5, max_tokens=20, stop_token_ids=ids)["usage"]
    assert usage["completion_tokens"] == 6, "five tokens that are none, then the stop"
    assert "min_tokens" in scripted.refused(COMPLETIONS, {"prompt": "plain", "min_tokens": 5, "max_tokens": 4})


def test_a_second_end_is_reached_when_eos_is_ignored(scripted: Site) -> None:
    choice = scripted.completion("ends", ignore_eos=True, max_tokens=4)["choices"][0]
    assert choice["text"] == "one two" and choice["finish_reason"] == "length"


# ---- which cause wins ----


def test_eos_on_the_final_allowed_token_is_the_cause(scripted: Site) -> None:
    for text, endpoint in (("plain", COMPLETIONS), ("reason", CHAT)):
        body = {"prompt": text} if endpoint == COMPLETIONS else chat(text)
        whole = scripted.post(endpoint, body)
        count = whole["usage"]["completion_tokens"]
        exactly = scripted.post(endpoint, {**body, "max_tokens": count})["choices"][0]
        short = scripted.post(endpoint, {**body, "max_tokens": count - 1})["choices"][0]
        assert (exactly["finish_reason"], short["finish_reason"]) == ("stop", "length")


def test_a_string_stop_on_the_final_allowed_token_is_the_cause(scripted: Site) -> None:
    needed = scripted.completion("plain", stop="world")["usage"]["completion_tokens"]
    exactly = scripted.completion("plain", stop="world", max_tokens=needed)["choices"][0]
    assert (exactly["finish_reason"], exactly["stop_reason"], exactly["text"]) == ("stop", "world", "hello ")
    short = scripted.completion("plain", stop="world", max_tokens=needed - 1)["choices"][0]
    assert (short["finish_reason"], short["text"]) == ("length", "hello")


def test_under_ignore_eos_the_limit_is_the_cause_even_at_an_eos(scripted: Site) -> None:
    choice = scripted.completion("ends", ignore_eos=True, max_tokens=2, return_token_ids=True)["choices"][0]
    assert choice["token_ids"][-1] in scripted.model.manifest.eos_ids
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)


def test_the_limit_beats_completed_calls_on_every_endpoint(scripted: Site) -> None:
    """The limit falls on the last token of the call, so that only EOS is missing."""
    limit = completion_tokens(scripted, "call", tools=[TOOL]) - 1
    answer = scripted.chat("call", tools=[TOOL], max_tokens=limit)["choices"][0]
    assert answer["finish_reason"] == "length" and answer["message"]["tool_calls"]
    assert scripted.chat("call", tools=[TOOL])["choices"][0]["finish_reason"] == "tool_calls"

    body = {"model": "m", **chat("call"), "tools": [{"name": "lookup", "input_schema": {"type": "object"}}]}
    reasons = {}
    for allowed in (limit, 500):
        reply = scripted.send("POST", MESSAGES, {**body, "max_tokens": allowed}, VERSION)
        assert reply.status == 200, reply.body
        assert any(block["type"] == "tool_use" for block in reply.json["content"])
        reasons[allowed] = reply.json["stop_reason"]
    assert reasons == {limit: "max_tokens", 500: "tool_use"}

    tools = [{"type": "function", "name": "lookup", "parameters": {"type": "object"}}]
    ended = {
        allowed: scripted.post(RESPONSES, {"model": "m", "input": "call", "tools": tools, "max_output_tokens": allowed})
        for allowed in (limit, 500)
    }
    assert (ended[limit]["status"], ended[500]["status"]) == ("incomplete", "completed")
    assert ended[limit]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert any(item["type"] == "function_call" for item in ended[limit]["output"])


def test_a_users_stop_after_a_call_is_a_stop(scripted: Site) -> None:
    answer = scripted.chat("stops later", tools=[TOOL], stop="now")["choices"][0]
    assert answer["message"]["tool_calls"]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", "now")
    body = {"model": "m", **chat("stops later"), "max_tokens": 500, "stop_sequences": ["now"]}
    tools = [{"name": "lookup", "input_schema": {"type": "object"}}]
    reply = scripted.send("POST", MESSAGES, {**body, "tools": tools}, VERSION).json
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "now")


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("kind", ["string", "token"])
def test_a_users_stop_inside_a_call_leaves_it_out(scripted: Site, protocol: Protocol, kind: str) -> None:
    """Like the limit: the model didn't end there, so it isn't a call that came out wrong."""
    words: dict[str, Any] = {"stop_sequences" if protocol == "messages" else "stop": ["Paris"]}
    tokens = {"stop_token_sequences": [scripted.model.tokenizer.encode("city", specials=True)]}
    stop = words if kind == "string" else tokens
    body = ask(protocol, "call", tools=[("lookup", {"type": "object"})], **stop)
    buffered = whole(protocol, scripted.send("POST", PATHS[protocol], body, HEADERS))
    assert (buffered.calls, buffered.error, buffered.end) == ((), "", "done")
    assert buffered.reasoning.strip() == "so it is"
    assert streamed(protocol, scripted.send("POST", PATHS[protocol], {**body, "stream": True}, HEADERS)) == buffered
    required = {"type": "any"} if protocol == "messages" else "required"
    reply = scripted.send("POST", PATHS[protocol], {**body, "tool_choice": required}, HEADERS)
    assert reply.status == 500, "a required call that the stop left out is missing"


def test_a_token_stop_is_a_stop_on_chat_and_the_end_of_a_turn_on_messages(scripted: Site) -> None:
    stop = scripted.model.tokenizer.encode(" answer", specials=True)
    answer = scripted.chat("reason", stop_token_ids=stop)["choices"][0]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", stop[-1])
    assert answer["message"]["content"] == "the"
    body = {"model": "m", **chat("reason"), "max_tokens": 500, "stop_token_ids": stop}
    reply = scripted.send("POST", MESSAGES, body, VERSION).json
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("end_turn", None)


# ---- budgets ----


def test_a_budget_needs_reasoning_that_closes_with_one_token(demo: Site, scripted: Site) -> None:
    assert "thinking_token_budget" in demo.refused(CHAT, chat("hi", max_tokens=1, thinking_token_budget=5))
    for budget in (0, -1, 2**31, 1.0, "5", True):
        assert "thinking_token_budget" in scripted.refused(CHAT, chat("hi", thinking_token_budget=budget))
    off = scripted.chat("plain", thinking_token_budget=1, chat_template_kwargs={"enable_thinking": False})
    assert off["choices"][0]["message"]["content"] == PLAIN, "output that starts in content is accepted, and not cut"


# ---- pages ----


@pytest.fixture(scope="module")
def cramped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A pool of a few pages under a context of 2048."""
    directory = tmp_path_factory.mktemp("cramped")
    with scripted_site(directory, engine={"kv_bytes": 40_000, "max_requests": 2}) as site:
        yield site


def test_a_request_that_outgrows_the_pool_ends_with_the_limit(cramped: Site) -> None:
    pool = cramped.inline.engine.report.pages * 16
    assert 16 < pool < 500
    (card,) = cramped.send("GET", "/v1/models").json["data"]
    show = cramped.post("/api/show", {"model": card["id"]})
    assert card["max_model_len"] == card["flare"]["default_max_tokens"] == pool
    assert show["model_info"]["flare.context_length"] == pool
    for endpoint, body in ((COMPLETIONS, {"prompt": "again"}), (CHAT, chat("again"))):
        answer = cramped.post(endpoint, body)
        assert answer["choices"][0]["finish_reason"] == "length"
        usage = answer["usage"]
        assert usage["total_tokens"] == pool


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_the_pool_cant_hold_is_over_the_context(cramped: Site, stream: bool) -> None:
    pool = cramped.inline.engine.report.pages * 16
    ids = {"prompt": [5] * (pool - 1), "max_tokens": 1}
    assert cramped.post(COMPLETIONS, ids)["usage"]["total_tokens"] == pool
    long = "x " * pool
    tokens = 0
    for path, body in (
        (COMPLETIONS, {"prompt": [5] * pool}),
        (CHAT, chat(long)),
        ("/v1/messages", {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": long}]}),
        ("/v1/responses", {"model": "m", "input": long}),
    ):
        reply = cramped.send("POST", path, {**body, "stream": stream}, HEADERS)
        assert reply.status == 400, path
        error = reply.json["error"]
        tokens = pool if path == COMPLETIONS else int(error["message"].split()[4])
        assert tokens >= pool
        assert error["message"] == f"prompt is too long: {tokens} tokens > {pool - 1} maximum"
        assert error.get("code", "context_length_exceeded") == "context_length_exceeded"
    state = {"model": "m", "state": long, "questions": {"q": {"type": "noul"}}}
    assert "prompt is too long" in cramped.refused("/v1/systemone", state)
    assert cramped.service.pool.requests == 0


def test_nothing_is_lost_while_a_reader_pauses(tmp_path: Path) -> None:
    with scripted_site(tmp_path, logprobs={"prompt": True}) as site:
        body = {"prompt": "again", "max_tokens": 300, "logprobs": 20, "echo": True, "stream": True}

        async def paused() -> Stream:
            slow = asyncio.Event()
            call = Call(site.app, "POST", COMPLETIONS, json.dumps(body).encode(), slow=slow)
            while site.inline.engine.stats().active or not site.engine.generations:
                await asyncio.sleep(0.01)
            assert not call.task.done()
            slow.set()
            return Stream(await call.done())

        chunks = site.run(paused()).choices()
        entries = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["top_logprobs"]]
        assert len(entries) == 300 + len(site.model.tokenizer.encode("again", specials=True))
        assert "".join(chunk["text"] for chunk in chunks) == "again" + " the" * 300
