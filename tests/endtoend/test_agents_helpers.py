"""What the official clients build on top of single requests: loops that run tools, answers parsed into types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pydantic
import pytest
from anthropic import beta_tool

from tests.support.inline_server import Site
from tests.support.scripted import script, token, turn

CLOSE = token("</think>")
CALL = (
    token("<tool_call>"),
    "\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n3\n</parameter>\n</function>\n",
    token("</tool_call>"),
)
TURNS = (
    turn("Hm.\n", CLOSE, "\n\n", *CALL, when="Add them."),
    turn("Hm.\n", CLOSE, "\n\nIt is 5.", when="<tool_response>\n5"),
    turn("Hm.\n", CLOSE, '{"city":"Paris","days":3}', when="Plan it."),
)
ASKED: Any = [{"role": "user", "content": "Add them."}]
PLANNED: Any = [{"role": "user", "content": "Plan it."}]


class Plan(pydantic.BaseModel):
    city: str
    days: int


@beta_tool
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("helpers")
    with Site(script(directory, TURNS, recipe="qwen38"), cache=directory) as site:
        yield site


def test_a_tool_runner_sends_the_whole_conversation_where_no_thread_is_held(
    site: Site, claude: anthropic.Anthropic
) -> None:
    """It asks for a thread at first, and would send the tool's result alone in its next request."""
    runner = claude.beta.messages.tool_runner(model="m", max_tokens=200, tools=[add], messages=ASKED)
    last = runner.until_done()
    assert [block.text for block in last.content if block.type == "text"] == ["It is 5."]
    prompt = site.model.tokens.decode(site.engine.prepared[-1].children[0].token_ids.tolist())
    assert "Add them." in prompt and prompt.count("<tool_response>") == 1


def test_a_streaming_tool_runner(claude: anthropic.Anthropic) -> None:
    runner = claude.beta.messages.tool_runner(model="m", max_tokens=200, tools=[add], messages=ASKED, stream=True)
    finals = [stream.get_final_message() for stream in runner]
    assert [final.stop_reason for final in finals] == ["tool_use", "end_turn"]


def test_threads_are_refused_by_the_code_that_clients_look_for(claude: anthropic.Anthropic) -> None:
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        with pytest.raises(anthropic.BadRequestError) as caught:
            claude.messages.create(model="m", max_tokens=9, messages=ASKED, extra_body={"thread": thread})
        body: Any = caught.value.body
        assert body["error"]["details"] == {"error_code": "thread_unsupported_request"}


def test_answers_are_parsed_into_types(claude: anthropic.Anthropic, gpt: openai.OpenAI) -> None:
    expected = Plan(city="Paris", days=3)
    assert (
        claude.messages.parse(model="m", max_tokens=99, messages=PLANNED, output_format=Plan).parsed_output == expected
    )
    with claude.messages.stream(model="m", max_tokens=99, messages=PLANNED, output_format=Plan) as stream:
        assert stream.get_final_message().parsed_output == expected
    assert gpt.responses.parse(model="m", input="Plan it.", text_format=Plan).output_parsed == expected
    with gpt.responses.stream(model="m", input="Plan it.", text_format=Plan) as events:
        assert events.get_final_response().output_parsed == expected
    found = gpt.chat.completions.parse(model="m", messages=PLANNED, response_format=Plan)
    assert found.choices[0].message.parsed == expected
