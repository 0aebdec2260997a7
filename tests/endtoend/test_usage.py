"""Usage and token observations over whole requests: what is counted, where it rides, and when."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.inline_server import Site

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "lookup"}}


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def body(endpoint: str, text: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": text, **fields} if endpoint == COMPLETIONS else chat(text, **fields)


def test_cached_tokens_are_always_there(tiny: tuple[Site, Any]) -> None:
    site, _ = tiny
    text = "".join(f"one{place} " for place in range(60))
    for endpoint in (COMPLETIONS, CHAT):
        cold = site.post(endpoint, body(endpoint, text, max_tokens=1))["usage"]
        warm = site.post(endpoint, body(endpoint, text, max_tokens=1))["usage"]
        assert cold["prompt_tokens_details"]["cached_tokens"] == 0
        reused = warm["prompt_tokens_details"]["cached_tokens"]
        assert reused == warm["prompt_tokens"] - 1
        assert warm["total_tokens"] == warm["prompt_tokens"] + 1


def test_a_prompt_of_whole_pages_leaves_a_token_to_compute(tiny: tuple[Site, Any]) -> None:
    site, _ = tiny
    ids = [(5 * place) % 600 + 9 for place in range(64)]
    for cached in (0, 63, 63):
        usage = site.completion(ids, max_tokens=1)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached


def test_reasoning_tokens_on_chat_and_responses_but_not_on_completions(scripted: Site) -> None:
    answer = scripted.chat("reason", logprobs=True)
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    assert scripted.chat("plain", chat_template_kwargs={"enable_thinking": False})["usage"][
        "completion_tokens_details"
    ] == {"reasoning_tokens": 0}
    assert "completion_tokens_details" not in scripted.completion("reason")["usage"]
    usage = scripted.post("/v1/responses", {"model": "m", "input": "reason"})["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 3}
    assert usage["input_tokens_details"]["cached_tokens"] >= 0


def test_control_tokens_and_the_terminating_eos_are_counted(scripted: Site) -> None:
    answer = scripted.chat("call", tools=[TOOL], return_token_ids=True)
    assert answer["usage"]["completion_tokens"] == len(answer["choices"][0]["token_ids"]) + 1
    named = {"type": "function", "function": {"name": "lookup"}}
    omitted = scripted.chat("stops later", tools=[TOOL], tool_choice=named)
    assert omitted["choices"][0]["message"]["content"] is None
    assert omitted["usage"]["completion_tokens"] > answer["usage"]["completion_tokens"]


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
def test_the_usage_chunk(scripted: Site, endpoint: str) -> None:
    plain = scripted.stream(endpoint, body(endpoint, "reason"))
    assert plain.done and all("usage" not in frame for frame in plain.frames)
    asked = scripted.stream(endpoint, body(endpoint, "reason", stream_options={"include_usage": True}))
    assert [frame["usage"] for frame in asked.frames[:-1]] == [None] * (len(asked.frames) - 1)
    assert asked.frames[-1]["choices"] == []
    whole = scripted.post(endpoint, body(endpoint, "reason"))["usage"]
    last = asked.frames[-1]["usage"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last[name] == whole[name]
    message = scripted.refused(endpoint, body(endpoint, "plain", stream_options={"include_usage": True}))
    assert "stream_options" in message


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
def test_continuous_usage_is_cumulative_and_ends_at_the_total(scripted: Site, endpoint: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = scripted.stream(endpoint, body(endpoint, "reason", stream_options=options))
    counts = [frame["usage"]["completion_tokens"] for frame in stream.frames]
    assert counts == sorted(counts) and all(frame["usage"]["prompt_tokens"] > 0 for frame in stream.frames)
    assert stream.frames[-2]["usage"] == stream.frames[-1]["usage"], "the terminal chunk already has the total"
    assert stream.frames[-1]["choices"] == []
    ignored = scripted.stream(endpoint, body(endpoint, "reason", stream_options={"continuous_usage_stats": True}))
    assert all("usage" not in frame for frame in ignored.frames)


def test_usage_rides_on_the_terminal_chat_chunk_with_token_ids(scripted: Site) -> None:
    stream = scripted.stream(CHAT, chat("reason", return_token_ids=True))
    carriers = [frame for frame in stream.frames if frame.get("usage")]
    assert carriers == [stream.frames[-1]]
    assert carriers[0]["choices"][0]["finish_reason"] == "stop"
    assert carriers[0]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    both = scripted.stream(CHAT, chat("reason", return_token_ids=True, stream_options={"include_usage": True}))
    assert [bool(frame["usage"]) for frame in both.frames] == [False] * (len(both.frames) - 1) + [True]


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
def test_token_ids_are_the_returned_tokens(scripted: Site, endpoint: str) -> None:
    buffered = scripted.post(endpoint, body(endpoint, "reason", return_token_ids=True))
    ids = buffered["choices"][0]["token_ids"]
    assert scripted.model.tokens.decode(ids) == "so it is\n</think>\n\nthe answer is yes"
    chunks = scripted.stream(endpoint, body(endpoint, "reason", return_token_ids=True)).choices()
    assert [id for chunk in chunks for id in chunk.get("token_ids") or ()] == ids


def test_one_timestamp_for_each_returned_token(scripted: Site) -> None:
    before = time.time()
    choice = scripted.chat("reason", return_token_timestamps=True, return_token_ids=True)["choices"][0]
    times = choice["token_timestamps"]
    assert len(times) == len(choice["token_ids"])
    assert before <= times[0] and times == sorted(times) and times[-1] <= time.time()
    chunks = scripted.stream(CHAT, chat("reason", return_token_timestamps=True)).choices()
    assert sum(len(chunk.get("token_timestamps") or ()) for chunk in chunks) == len(times)


def test_choices_share_the_prompt_count(scripted: Site) -> None:
    one, three = (scripted.chat("reason", n=n)["usage"] for n in (1, 3))
    assert three["prompt_tokens"] == one["prompt_tokens"]
    assert three["completion_tokens"] == 3 * one["completion_tokens"]
    assert three["completion_tokens_details"]["reasoning_tokens"] == 9
