"""Tool choices over the whole stack: what each allows, omits and fails, on the three APIs that hold conversations,
whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import pytest

from tests.support.inline_server import Site, Stream
from tests.support.scripted import Piece, script, token, turn
from tests.support.shown import HEADERS, PATHS, PROTOCOLS, Protocol, Shown, ask, streamed, whole

SCHEMA: Final = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS: Final = (("look", SCHEMA), ("book", SCHEMA))
PARIS: Final = ("look", {"city": "Paris"})
ROME: Final = ("book", {"city": "Rome", "days": 3})
CLOSE: Final = token("</think>")


def call(name: str, *parameters: tuple[str, str]) -> list[Piece]:
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return [token("<tool_call>"), f"\n<function={name}>\n{values}</function>\n", token("</tool_call>")]


LOOK: Final = call("look", ("city", "Paris"))
BOOK: Final = call("book", ("city", "Rome"), ("days", "3"))
TURNS: Final = (
    turn("so\n", CLOSE, "\n\nI look.\n", *LOOK, when="Look."),
    turn("so\n", CLOSE, "\n\nI look.\n", *LOOK, "\n", *BOOK, when="Look and book."),
    turn("so\n", CLOSE, "\n\nNo need.", when="Talk."),
    turn("so\n", CLOSE, "\n\nI fly.\n", *call("fly", ("days", "3")), when="Fly."),
    turn("so\n", CLOSE, "\n\n", *call("", ("days", "3")), when="Call nobody."),
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("choices")
    with Site(script(directory, TURNS, recipe="qwen38"), cache=directory / "cache") as site:
        yield site


def choice(protocol: Protocol, mode: str) -> dict[str, Any]:
    """`mode`: auto, none, required, or the name of a tool."""
    if mode in ("auto", "none", "required"):
        spelled = "any" if (protocol, mode) == ("messages", "required") else mode
        return {"tool_choice": {"type": spelled} if protocol == "messages" else mode}
    named: Mapping[Protocol, Any] = {
        "chat": {"type": "function", "function": {"name": mode}},
        "messages": {"type": "tool", "name": mode},
        "responses": {"type": "function", "name": mode},
    }
    return {"tool_choice": named[protocol]}


def single(protocol: Protocol, mode: str) -> dict[str, Any]:
    """The same, with one call at most."""
    fields = choice(protocol, mode)
    if protocol == "messages":
        return {"tool_choice": {**fields["tool_choice"], "disable_parallel_tool_use": True}}
    return {**fields, "parallel_tool_calls": False}


BOTH: Final = Shown("I look.", "so", (PARIS, ROME), "calls")
ONE: Final = Shown("I look.", "so", (PARIS,), "calls")
RULES: Final[Sequence[tuple[str, str, bool, Shown]]] = (
    ("Look and book.", "auto", False, BOTH),
    ("Look and book.", "required", False, BOTH),
    ("Look.", "look", False, replace(ONE, text="")),
    ("Look.", "required", True, ONE),
    ("Look.", "auto", True, ONE),
    ("Talk.", "auto", False, Shown("No need.", "so", (), "done")),
    ("Talk.", "none", False, Shown("No need.", "so", (), "done")),
    ("Fly.", "auto", False, Shown("I fly.", "so", (("fly", {"days": "3"}),), "calls")),
    ("Talk.", "required", False, Shown(error="completed no call to a declared tool")),
    ("Talk.", "look", False, Shown(error="no call to the selected tool 'look'")),
    ("Fly.", "required", False, Shown(error="completed no call to a declared tool")),
    ("Fly.", "look", False, Shown(error="called 'fly' instead of the selected tool 'look'")),
    ("Look and book.", "look", False, Shown(error="called 'book' instead of the selected tool 'look'")),
    ("Look and book.", "auto", True, Shown(error="second tool call")),
    ("Look and book.", "required", True, Shown(error="second tool call")),
    ("Call nobody.", "auto", False, Shown(error="empty name")),
)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_each_choice_makes_of_what_is_generated(site: Site, protocol: Protocol) -> None:
    bodies = [
        ask(protocol, text, tools=TOOLS, **(single if lone else choice)(protocol, mode))
        for text, mode, lone, _ in RULES
    ]
    requests = [(PATHS[protocol], {**body, "stream": stream}) for body in bodies for stream in (False, True)]
    replies = iter(site.together(requests, HEADERS))
    for text, mode, lone, wanted in RULES:
        buffered, shown = whole(protocol, next(replies)), streamed(protocol, next(replies))
        assert buffered == shown, (text, mode, lone)
        if wanted.error:
            assert wanted.error in shown.error, (text, mode, lone)
        else:
            assert shown == wanted, (text, mode, lone)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("mode", ["required", "look"])
def test_output_that_the_limit_cuts_before_its_call_fails(site: Site, protocol: Protocol, mode: str) -> None:
    body = ask(protocol, "Look.", tools=TOOLS, limit=20, **choice(protocol, mode))
    replies = site.together([(PATHS[protocol], {**body, "stream": stream}) for stream in (False, True)], HEADERS)
    assert "no call to" in whole(protocol, replies[0]).error
    assert "no call to" in streamed(protocol, replies[1]).error


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_usage_counts_the_answer_text_that_a_named_choice_omits(site: Site, protocol: Protocol) -> None:
    used = [
        site.post(PATHS[protocol], ask(protocol, "Look.", tools=TOOLS, **choice(protocol, mode)), HEADERS)["usage"]
        for mode in ("auto", "look")
    ]
    counted = "completion_tokens" if protocol == "chat" else "output_tokens"
    assert used[0][counted] == used[1][counted] > 40


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_first_call_is_streamed_before_the_second_fails(site: Site, protocol: Protocol) -> None:
    body = ask(protocol, "Look and book.", tools=TOOLS, **single(protocol, "auto"))
    (reply,) = site.together([(PATHS[protocol], {**body, "stream": True})], HEADERS)
    sent = Stream(reply).frames[:-1] if protocol != "responses" else Stream(reply).frames
    text = str(sent)
    assert "Paris" in text and "'look'" in text
    assert "Rome" not in text and "'book'" not in str([frame for frame in sent if "tools" not in str(frame)])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_choices_that_cannot_be_kept_are_refused(site: Site, protocol: Protocol) -> None:
    for tools, mode in ((TOOLS, "fly"), ((), "required"), ((), "look")):
        reply = site.send(
            "POST", PATHS[protocol], ask(protocol, "Look.", tools=tools, **choice(protocol, mode)), HEADERS
        )
        assert reply.status == 400 and "tool" in reply.json["error"]["message"], (mode, reply.body)
