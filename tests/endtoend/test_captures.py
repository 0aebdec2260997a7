"""What real coding agents sent, over the whole stack: answered, counted, reused turn by turn, and refused in the right
words when something in it is broken. Long prose is cut; tests/server sends it whole to a live server."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import captures
from tests.support.agent_script import CONTEXT, script
from tests.support.ingress import Reply
from tests.support.inline_server import Site
from tests.support.scripted import script as write

VERSION = [("anthropic-version", "2023-06-01")]
MESSAGES = captures.names("/v1/messages")
TURNS = (
    ("claude-code-2.1.332_messages_turn1", "claude-code-2.1.332_messages_turn2_tool_result"),
    ("claude-code-2.1.332_bare_messages_turn1", "claude-code-2.1.332_bare_messages_turn2_tool_result"),
    ("codex-0.171.0_responses_turn1_catalog_apply_patch", "codex-0.171.0_responses_turn2_custom_tool_call_output"),
    ("opencode-1.18.33_chat_turn1", "opencode-1.18.33_chat_turn2_tool_result"),
)
FAULTS = 25
"""Broken copies of each capture with one fault, and as many with two."""


def agents_site(directory: Path) -> Site:
    source = write(directory, **script())
    engine = {"context": CONTEXT, "prefill_chunk": 256}
    return Site(source, cache=directory / "cache", engine=engine)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with agents_site(tmp_path_factory.mktemp("captures")) as site:
        yield site


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One that has computed nothing but what a test of reuse asks it."""
    with agents_site(tmp_path_factory.mktemp("turns")) as site:
        yield site


def post(site: Site, name: str, **changes: Any) -> Reply:
    path = captures.path(name).split("?")[0]
    return site.send("POST", path, {**captures.trimmed(captures.body(name)), **changes}, VERSION)


def usage(site: Site, name: str) -> tuple[int, int]:
    """Prompt tokens and how many of them were reused, of the buffered answer."""
    reply = post(site, name, stream=False, **({"stream_options": None} if "chat" in name else {}))
    assert reply.status == 200, reply.body
    found = reply.json["usage"]
    if "cache_read_input_tokens" in found:
        cached = found["cache_read_input_tokens"]
        return found["input_tokens"] + cached, cached
    if "prompt_tokens" in found:
        return found["prompt_tokens"], found["prompt_tokens_details"]["cached_tokens"]
    return found["input_tokens"], found["input_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("name", captures.all_names())
def test_every_capture_is_answered(site: Site, name: str) -> None:
    reply = post(site, name)
    assert reply.status == 200, reply.body
    if reply.header("content-type") == "application/json":
        assert reply.json["input_tokens"] > 0
    else:
        last = "message_stop" if "messages" in name else "response.completed" if "responses" in name else "[DONE]"
        assert last in reply.frames[-1]


@pytest.mark.parametrize(("first", "second"), TURNS, ids=[first.split("_turn")[0] for first, _ in TURNS])
def test_a_second_turn_reuses_95_percent_of_the_first(cold: Site, first: str, second: str) -> None:
    prompt, _ = usage(cold, first)
    longer, reused = usage(cold, second)
    assert longer > prompt and reused >= 0.95 * prompt


@pytest.mark.parametrize("name", MESSAGES)
def test_counts_are_the_prompt_cold_and_warm(site: Site, name: str) -> None:
    reply = site.send("POST", "/v1/messages/count_tokens", captures.trimmed(captures.body(name)), VERSION)
    counted = reply.json["input_tokens"]
    assert [usage(site, name)[0] for _ in range(2)] == [counted, counted]


def test_counting_takes_no_slot(site: Site) -> None:
    before = len(site.engine.generations)
    assert post(site, "claude-code-2.1.332_count_tokens_probe").status == 200
    assert len(site.engine.generations) == before


def check(reply: Reply, path: str, change: str) -> None:
    """An answer, or a refusal in the words of the route's family."""
    assert reply.status in (200, 400), (change, reply.status, reply.body[-500:])
    if reply.status == 400:
        error = reply.json["error"]
        assert error["type"] == "invalid_request_error" and error["message"], change
        if path.startswith("/v1/messages"):
            assert reply.json["type"] == "error" and error.keys() == {"type", "message"}, change
        else:
            assert error.keys() == {"type", "message", "param", "code"}, change
    elif reply.header("content-type") != "application/json":
        assert not any('"error":{"' in frame for frame in reply.frames), (change, reply.frames[-1])


BROKEN = [(captures.path(name).split("?")[0], name) for name in captures.all_names()]
BROKEN += [("/v1/messages/count_tokens", name) for name in MESSAGES]


@pytest.mark.parametrize("faults", [1, 2])
@pytest.mark.parametrize(("path", "name"), BROKEN)
def test_broken_captures_are_answered_or_refused(site: Site, path: str, name: str, faults: int) -> None:
    rng = random.Random(f"{path} {name} {faults}")
    statuses = set()
    for _ in range(FAULTS):
        body, changes = captures.trimmed(captures.body(name)), []
        for _ in range(faults):
            change, body = captures.broken(body, rng)
            changes.append(change)
        reply = site.send("POST", path, captures.text(body), VERSION)
        check(reply, path, "; ".join(changes))
        statuses.add(reply.status)
    assert statuses == {200, 400}
