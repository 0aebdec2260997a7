"""Configuration that points a coding agent at a running server: `python -m serve_app.client_config claude`.

Reads the server's model card and prints (or writes) the client's own files. Owns what each client needs to know of
the model; imports nothing of the server, so it runs on a machine that has only Python.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

DEFAULT_URL: Final = "http://127.0.0.1:8000"
KEY_VARIABLE: Final = "FLARE_API_KEY"
ANY_KEY: Final = "flare"
"""What clients send when the server has no key: they refuse to start without one."""
OUTPUT_TOKENS: Final = 32_000
TIMEOUT: Final = 10.0
_EFFORTS: Final = ("low", "medium", "high")
_CLAUDE: Final = """# Source this file, then run: claude --permission-mode default
# (the mode that some versions start in judges every command with a long prompt of its own to the same model)
"""


class CardError(Exception):
    """The server's model card can't be had."""


@dataclass(frozen=True, slots=True)
class Card:
    """What clients are told: the model's id, its context in tokens, what it takes and whether it reasons."""

    url: str
    model: str
    context: int
    images: bool
    reasoning: bool
    tools: bool

    @property
    def output(self) -> int:
        """Tokens that a client should reserve for one answer: at most half of the context."""
        return min(OUTPUT_TOKENS, self.context // 2)


def fetch(url: str, key: str) -> Card:
    """Reads the model card. Raises CardError saying what is wrong."""
    root = url.rstrip("/").removesuffix("/v1")
    request = urllib.request.Request(f"{root}/v1/models", headers={"authorization": f"Bearer {key or ANY_KEY}"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            hint = "; give the server's key with --key" if error.code == 401 else ""
            raise CardError(f"{root}/v1/models answered {error.code}{hint}") from None
    except (OSError, ValueError) as error:
        raise CardError(f"{root}/v1/models can't be read: {error}") from None
    try:
        return card_of(root, found["data"][0])
    except (KeyError, IndexError, TypeError):
        raise CardError(f"{root}/v1/models holds no model card") from None


def card_of(root: str, card: Mapping[str, Any]) -> Card:
    """Raises KeyError for a card without the fields that every server has."""
    return Card(
        url=root,
        model=card["id"],
        context=card["max_model_len"],
        images="image" in card.get("flare", {}).get("input_modalities", ()),
        reasoning=bool(card.get("supports_reasoning")),
        tools=card.get("supports_function_calling") is not False,
    )


def claude(card: Card, key: str) -> dict[str, str]:
    """Environment variables for Claude Code; the window is named, since it can't know an unknown model's."""
    variables = {
        "ANTHROPIC_BASE_URL": card.url,
        "ANTHROPIC_API_KEY": key or ANY_KEY,
        "ANTHROPIC_MODEL": card.model,
        "ANTHROPIC_SMALL_FAST_MODEL": card.model,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": card.model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": card.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": card.model,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(card.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(card.output),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    }
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    return {"claude.env": _CLAUDE + "\n".join(lines) + "\n"}


def codex(card: Card, key: str) -> dict[str, str]:
    """Codex's config.toml and model catalog: HTTP Responses, no hosted search, freeform apply_patch."""
    config = f"""# Put both files into $CODEX_HOME (~/.codex) and set {KEY_VARIABLE}{"" if key else " to anything"}.
model = {json.dumps(card.model)}
model_provider = "flare"
model_context_window = {card.context}
model_catalog_json = "catalog.json"
web_search = "disabled"

[model_providers.flare]
name = "Flare"
base_url = {json.dumps(card.url + "/v1")}
wire_api = "responses"
env_key = "{KEY_VARIABLE}"
"""
    return {"config.toml": config, "catalog.json": json.dumps({"models": [catalog_entry(card)]}, indent=2) + "\n"}


def catalog_entry(card: Card) -> dict[str, Any]:
    """The model as Codex's catalog describes one."""
    efforts = _EFFORTS if card.reasoning else ()
    return {
        "slug": card.model,
        "display_name": card.model,
        "description": "Served by Flare",
        "context_window": card.context,
        "max_context_window": card.context,
        "apply_patch_tool_type": "freeform",
        "shell_type": "shell_command",
        "input_modalities": ["text", "image"] if card.images else ["text"],
        "supported_reasoning_levels": [{"effort": effort, "description": effort} for effort in efforts],
        "default_reasoning_level": "medium" if efforts else None,
        "supports_reasoning_summaries": False,
        "default_reasoning_summary": "none",
        "supports_parallel_tool_calls": True,
        "support_verbosity": False,
        "default_verbosity": None,
        "truncation_policy": {"mode": "bytes", "limit": 10_000},
        "tool_mode": None,
        "use_responses_lite": False,
        "prefer_websockets": False,
        "web_search_tool_type": "text",
        "supports_search_tool": False,
        "supports_image_detail_original": False,
        "experimental_supported_tools": [],
        "visibility": "list",
        "supported_in_api": True,
        "priority": 0,
        "availability_nux": None,
        "upgrade": None,
        "minimal_client_version": "0.0.0",
        "base_instructions": INSTRUCTIONS,
        "model_messages": None,
    }


INSTRUCTIONS: Final = (
    "You are a coding agent in a terminal. Read files before you change them, change them with apply_patch, run the"
    " tests, and say briefly what you did."
)


def opencode(card: Card, key: str) -> dict[str, str]:
    """OpenCode's opencode.json, with the model's limits."""
    model = {
        "name": card.model,
        "tool_call": card.tools,
        "reasoning": card.reasoning,
        "attachment": card.images,
        "limit": {"context": card.context, "output": card.output},
    }
    config = {
        "$schema": "https://opencode.ai/config.json",
        "model": f"flare/{card.model}",
        "small_model": f"flare/{card.model}",
        "provider": {
            "flare": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "Flare",
                "options": {"baseURL": f"{card.url}/v1", "apiKey": key or ANY_KEY},
                "models": {card.model: model},
            }
        },
    }
    return {"opencode.json": json.dumps(config, indent=2) + "\n"}


CLIENTS: Final[Mapping[str, Callable[[Card, str], dict[str, str]]]] = {
    "claude": claude,
    "codex": codex,
    "opencode": opencode,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m serve_app.client_config", description=__doc__)
    parser.add_argument("client", choices=sorted(CLIENTS))
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the server (default {DEFAULT_URL})")
    parser.add_argument("--key", default="", help="the server's key, when it has one")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the files there instead of printing them")
    asked = parser.parse_args(arguments)
    try:
        card = fetch(asked.url, asked.key)
    except CardError as error:
        print(f"client_config: {error}", file=sys.stderr)
        return 1
    files = CLIENTS[asked.client](card, asked.key)
    if asked.write is None:
        print("\n".join(f"# ---- {name}\n{text}" for name, text in files.items()), end="")
        return 0
    asked.write.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (asked.write / name).write_text(text)
        print(asked.write / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
