"""A custom tool's grammar over whole requests: input that breaks it fails the answer, before any call is shown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.endtoend.conftest import THINKING_TEMPLATE
from tests.support.inline_server import Site
from tests.support.scripted import script, token, turn

TOOL = {
    "type": "custom",
    "name": "dial",
    "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]{3}"},
}


def call(text: str) -> tuple[Any, ...]:
    markup = f"\n<function=dial>\n<parameter=input>\n{text}\n</parameter>\n</function>\n"
    return ("so\n", token("</think>"), "\n\n", token("<tool_call>"), markup, token("</tool_call>"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("freeform")
    turns = [turn(*call("123")), turn(*call("12x"), when="wrongly")]
    source = script(directory, turns, recipe="qwen38", chat_template=THINKING_TEMPLATE)
    with Site(source, cache=directory / "cache") as running:
        yield running


def test_valid_input_is_a_completed_call(site: Site) -> None:
    answer = site.post("/v1/responses", {"model": "m", "input": "call", "tools": [TOOL]})
    (item,) = [item for item in answer["output"] if item["type"] != "reasoning"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "dial", "123")


def test_invalid_input_fails_the_response(site: Site) -> None:
    body = {"model": "m", "input": "call wrongly", "tools": [TOOL]}
    assert "dial" in site.refused("/v1/responses", body, 500)
    frames = site.stream("/v1/responses", body).frames
    assert frames[-1]["type"] == "response.failed"
    assert "custom_tool_call" not in str(frames)
