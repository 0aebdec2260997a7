"""Every request that instructor 1.17 and pydantic-ai 2.38 sent in real round trips against a scripted model, answered
as they need it.

library_requests.json has them as recorded, ids numbered and prose replaced: tools, JSON and JSON Schema modes,
parallel calls, iterables, streamed partial answers, repairs of invalid arguments and second turns with tool results;
Chat, Messages and Responses; pydantic-ai with its switch against strict tools. The libraries themselves are not
installed here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.inline_server import Site
from tests.support.qwen_vocabulary import qwen_tokenizer_json
from tests.support.scripted import Piece, script, token, turn
from tests.support.shown import HEADERS, PATHS, Shown, streamed, whole

RECORDED: Final = json.loads((Path(__file__).parent / "library_requests.json").read_text(encoding="utf-8"))
PARIS: Final = {"city": "Paris", "days": 3}
ROME: Final = {"city": "Rome", "days": 2}
TWO: Final = {"tasks": [PARIS, ROME]}
CLOSE: Final = token("</think>")
CALLS: Final[dict[str, list[tuple[str, dict[str, Any]]]]] = {
    "Call Town.": [("Town", PARIS)],
    "Call Town badly.": [("Town", {"city": "Paris"})],
    "Wrong: call Town.": [("Town", PARIS)],
    "Call PartialTown.": [("PartialTown", PARIS)],
    "Call Town twice.": [("Town", PARIS), ("Town", ROME)],
    "Call IterableTown.": [("IterableTown", TWO)],
    "Call final_result.": [("final_result", PARIS)],
    "Call final_result badly.": [("final_result", {"city": "Paris"})],
    "Wrong: call final_result.": [("final_result", PARIS)],
    "Call get_weather.": [("get_weather", {"city": "Paris"})],
    "Call get_weather twice.": [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})],
    "sunny in Paris": [("final_result", PARIS)],
}
TEXTS: Final = {
    "Write JSON.": json.dumps(PARIS),
    "Write two.": json.dumps(TWO),
    "Write fenced.": f"```json\n{json.dumps(PARIS)}\n```",
    "sunny in Rome": "It is sunny.",
    "Say hello.": "Hello there.",
}


def markup(name: str, arguments: dict[str, Any]) -> list[Piece]:
    values = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return [token("<tool_call>"), f"\n<function={name}>\n{values}</function>\n", token("</tool_call>")]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("libraries")
    turns = [
        turn("so\n", CLOSE, "\n\n", *[piece for call in calls for piece in (*markup(*call), "\n")][:-1], when=when)
        for when, calls in CALLS.items()
    ]
    turns += [turn("so\n", CLOSE, "\n\n", text, when=when) for when, text in TEXTS.items()]
    tokenizer = {"path": str(qwen_tokenizer_json(directory))}
    with Site(script(directory, turns, recipe="qwen38", tokenizer=tokenizer), cache=directory / "cache") as site:
        yield site


def expected(body: dict[str, Any]) -> Shown:
    """By what was said last."""
    said = json.dumps(body.get("messages", body.get("input")))
    last = max((*CALLS, *TEXTS), key=lambda words: said.rfind(f'"{words}"'))
    if last in TEXTS:
        return Shown(TEXTS[last], "so", (), "done")
    return Shown("", "so", tuple(CALLS[last]), "calls")


@pytest.mark.parametrize("library", sorted({record["library"] for record in RECORDED}))
def test_every_recorded_request_is_answered(site: Site, library: str) -> None:
    found = [record for record in RECORDED if record["library"] == library]
    assert {record["path"] for record in found} == set(PATHS.values())
    replies = site.together([(f"{record['path']}?{record['query']}", record["body"]) for record in found], HEADERS)
    for record, reply in zip(found, replies, strict=True):
        protocol = next(name for name, path in PATHS.items() if path == record["path"])
        assert reply.status == 200, (reply.body, record)
        read = streamed if record["body"].get("stream") else whole
        assert read(protocol, reply) == expected(record["body"]), record


@pytest.mark.parametrize("strict", [True, False, None])
def test_strict_tools_are_refused_on_every_api(site: Site, strict: bool | None) -> None:
    """What pydantic-ai sends without its switch."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    function = {"name": "Town", "parameters": schema, "strict": strict}
    chat = {
        "messages": [{"role": "user", "content": "Call Town."}],
        "tools": [{"type": "function", "function": function}],
    }
    responses = {"input": "Call Town.", "tools": [{"type": "function", **function}]}
    tool = {"name": "Town", "input_schema": schema, "strict": strict}
    messages = {"messages": chat["messages"], "tools": [tool], "max_tokens": 99}
    for protocol, body in (("chat", chat), ("responses", responses), ("messages", messages)):
        reply = site.send("POST", PATHS[protocol], {"model": "local", **body}, HEADERS)  # type: ignore[index]
        if strict:
            assert reply.status == 400 and "strict" in reply.json["error"]["message"]
        else:
            assert whole(protocol, reply).calls == (("Town", PARIS),)  # type: ignore[arg-type]
