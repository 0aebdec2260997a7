"""The requests that instructor 1.17 and pydantic-ai 2.38 send, prose left out, with strict tools switched off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.support.inline_server import Site
from tests.support.scripted import script, token, turn

TOWN: Final = {
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "type": "object",
}
ANSWER: Final = {"city": "Paris", "days": 3}


def town(name: str) -> dict[str, Any]:
    parameters = "<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    call = (token("<tool_call>"), f"\n<function={name}>\n{parameters}</function>\n", token("</tool_call>"))
    return turn("so\n", token("</think>"), "\n\n", *call, when=f"Call {name}.")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("libraries")
    with Site(script(directory, [town("Town"), town("final_result")], recipe="qwen38"), cache=directory) as site:
        yield site


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "A town", "parameters": TOWN, **fields}}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("Town", {"tool_choice": {"type": "function", "function": {"name": "Town"}}}),
        ("Town", {"tool_choice": "auto"}),
        ("final_result", {"tool_choice": "required", "parallel_tool_calls": True}),
    ],
)
@pytest.mark.parametrize("strict", [{}, {"strict": False}])
def test_answers_as_calls(site: Site, name: str, fields: dict[str, Any], strict: dict[str, Any]) -> None:
    answer = site.chat(f"Call {name}.", model="local", tools=[function(name, **strict)], **fields)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == name and json.loads(call["function"]["arguments"]) == ANSWER


def test_strict_tools_are_refused(site: Site) -> None:
    body = {"messages": [{"role": "user", "content": "Call Town."}], "tools": [function("Town", strict=True)]}
    assert "strict" in site.refused("/v1/chat/completions", body)
