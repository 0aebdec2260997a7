"""The files that point coding agents at a server, made from its model card."""

from __future__ import annotations

import json
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from serve_app.client_config import CLIENTS, Card, card_of, claude, codex, main, opencode

CARD = Card("http://127.0.0.1:9", "org/model", 131_072, images=False, reasoning=True, tools=True)
CARDS: dict[str, Any] = {
    "data": [
        {
            "id": "org/model",
            "max_model_len": 4096,
            "supports_reasoning": False,
            "supports_function_calling": True,
            "flare": {"input_modalities": ["text", "image"]},
        }
    ]
}


class Models(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        allowed = self.path == "/v1/models" and self.headers["authorization"] in ("Bearer secret", "Bearer flare")
        body = json.dumps(CARDS if allowed else {"error": {}}).encode()
        self.send_response(200 if allowed else 401)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Models) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_card_is_read_as_published() -> None:
    card = card_of("http://host", CARDS["data"][0])
    assert card == Card("http://host", "org/model", 4096, images=True, reasoning=False, tools=True)
    assert card.output == 2048 and CARD.output == 32_000


@pytest.mark.parametrize("client", sorted(CLIENTS))
def test_files_are_printed_or_written(
    client: str, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([client, "--url", url + "/v1/"]) == 0
    printed = capsys.readouterr().out
    assert main([client, "--url", url, "--key", "secret", "--write", str(tmp_path / "new")]) == 0
    written = sorted((tmp_path / "new").iterdir())
    assert written and all(path.name in printed for path in written)
    assert url in printed and "org/model" in printed


def test_a_wrong_key_and_a_missing_server_are_named(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["claude", "--url", url, "--key", "wrong"]) == 1
    assert "answered 401; give the server's key with --key" in capsys.readouterr().err
    assert main(["claude", "--url", "http://127.0.0.1:1"]) == 1
    assert "can't be read" in capsys.readouterr().err


def test_claude_is_told_the_window() -> None:
    text = claude(CARD, "it's")["claude.env"]
    assert "export ANTHROPIC_BASE_URL=http://127.0.0.1:9\n" in text
    assert "export CLAUDE_CODE_MAX_CONTEXT_TOKENS=131072\n" in text
    assert """export ANTHROPIC_API_KEY='it'"'"'s'\n""" in text
    assert "export ANTHROPIC_API_KEY=flare\n" in claude(CARD, "")["claude.env"]


def test_codex_selects_responses_without_hosted_search() -> None:
    files = codex(CARD, "")
    config = tomllib.loads(files["config.toml"])
    provider = config["model_providers"][config["model_provider"]]
    assert provider["wire_api"] == "responses" and provider["base_url"] == "http://127.0.0.1:9/v1"
    assert config["web_search"] == "disabled" and config["model_context_window"] == 131_072
    (entry,) = json.loads(files[config["model_catalog_json"]])["models"]
    assert entry["slug"] == config["model"] == "org/model"
    assert entry["context_window"] == entry["max_context_window"] == 131_072
    assert entry["apply_patch_tool_type"] == "freeform"
    assert entry["input_modalities"] == ["text"] and entry["supported_reasoning_levels"]
    assert entry["prefer_websockets"] is False


def test_opencode_knows_the_limits() -> None:
    config = json.loads(opencode(CARD, "k")["opencode.json"])
    provider, _, model = config["model"].partition("/")
    chosen = config["provider"][provider]
    assert chosen["options"] == {"baseURL": "http://127.0.0.1:9/v1", "apiKey": "k"}
    assert chosen["models"][model]["limit"] == {"context": 131_072, "output": 32_000}
    assert chosen["models"][model]["tool_call"] is True and chosen["models"][model]["reasoning"] is True
