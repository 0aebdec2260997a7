"""Numbers beyond 64 bits over whole requests: they clamp where numbers clamp, and are never another number."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.inline_server import Site

VERSION = [("anthropic-version", "2023-06-01")]
MESSAGE = [{"role": "user", "content": "plain"}]
BODIES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": MESSAGE}, "max_completion_tokens"),
    ("/v1/completions", {"prompt": "plain"}, "max_tokens"),
    ("/v1/messages", {"model": "m", "max_tokens": 9, "messages": MESSAGE}, "max_tokens"),
    ("/v1/responses", {"model": "m", "input": "plain"}, "max_output_tokens"),
]
routes = pytest.mark.parametrize(("path", "body", "limit"), BODIES, ids=[path for path, _, _ in BODIES])


@routes
def test_sampling_and_limits_clamp(scripted: Site, path: str, body: dict[str, Any], limit: str) -> None:
    huge = {"temperature": 10**300, "top_k": -(2**70), "top_p": 2**64, "frequency_penalty": -(2**64), limit: 2**70}
    shown = scripted.send("POST", path, {**body, **huge}, VERSION)
    assert shown.status == 200, shown.body


@routes
def test_seeds_and_counts_do_not(scripted: Site, path: str, body: dict[str, Any], limit: str) -> None:
    for field, value in (("seed", 2**64), ("seed", -(2**63) - 1), ("stop_token_ids", [2**64])):
        reply = scripted.send("POST", path, {**body, field: value}, VERSION)
        assert reply.status == 400
        assert field in reply.json["error"]["message"], reply.body


def test_a_limit_is_repeated_as_it_was_sent(scripted: Site) -> None:
    answer = scripted.post("/v1/responses", {"model": "m", "input": "plain", "max_output_tokens": 2**70})
    assert answer["max_output_tokens"] == 2**70
