"""The generation routes side by side: minimal bodies, the model they name, one prompt and one prefix cache for all."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from tests.support.inline_server import Site, Stream

VERSION = [("anthropic-version", "2023-06-01")]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "plain"}]},
    "/v1/completions": {"prompt": "plain"},
    "/v1/messages": {"max_tokens": 50, "messages": [{"role": "user", "content": "plain"}]},
    "/v1/responses": {"input": "plain"},
}
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("path", ROUTES)
def test_every_answer_and_event_names_the_loaded_model(scripted: Site, path: str) -> None:
    expected = {scripted.startup.facts.id}
    body = {"model": "gpt-9", **ROUTES[path]}
    whole = scripted.send("POST", path, body, VERSION)
    assert whole.status == 200 and whole.json["model"] in expected
    frames = Stream(scripted.send("POST", path, {**body, "stream": True}, VERSION)).frames
    holders = (frame.get("response") or frame.get("message") or frame for frame in frames)
    named = [holder["model"] for holder in holders if "model" in holder]
    assert named and set(named) == expected


def test_tokens_are_counted_without_generation(scripted: Site) -> None:
    body = {"model": "gpt-9", "messages": [{"role": "user", "content": "plain"}]}
    reply = scripted.send("POST", "/v1/messages/count_tokens", body, VERSION)
    assert reply.status == 200 and reply.json["input_tokens"] > 0


def test_one_conversation_is_one_prompt_on_every_route(scripted: Site) -> None:
    """A prompt that Chat computed is reused on Messages and Responses, and as the tokens of a raw prompt."""
    text = "so it is, says one route to all the others. " * 3
    turns = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "?"},
    ]
    scripted.post("/v1/chat/completions", {"messages": turns, "max_tokens": 1})
    ids = scripted.engine.prepared[-1].children[0].token_ids.tolist()
    message = scripted.send("POST", "/v1/messages", {"model": "m", "max_tokens": 1, "messages": turns}, VERSION).json
    response = scripted.post("/v1/responses", {"model": "m", "input": turns, "max_output_tokens": 1})
    raw = scripted.completion(ids, max_tokens=1)
    reused = (
        message["usage"]["cache_read_input_tokens"],
        response["usage"]["input_tokens_details"]["cached_tokens"],
        raw["usage"]["prompt_tokens_details"]["cached_tokens"],
    )
    assert reused == (len(ids) - 1,) * 3
    assert all(prepared.children[0].token_ids.tolist() == ids for prepared in scripted.engine.prepared[-3:])


def test_no_protocol_goes_through_another() -> None:
    """Each family's decoder and encoder import the shared rooms and their own, never another family's."""
    families = ("chat", "completions", "messages", "responses")
    for family in families:
        others = tuple(f"protocols.{other}" for other in families if other != family)
        for path in (ROOT / "protocols" / family).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                assert not any(name.startswith(others) for name in names), path
