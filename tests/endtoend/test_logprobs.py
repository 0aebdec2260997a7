"""Generation log probabilities over whole requests: values, order, entries, bytes, offsets, ids, capabilities."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.endtoend.conftest import prompt_before_equals, scripted_site
from tests.support.inline_server import Site
from tests.support.smollm2 import reference
from tests.support.tiny_sources import log_softmax

PROMPT = "The capital of France is"
TOOLS = [{"type": "function", "function": {"name": "lookup"}}]
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


def asked(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


# ---- values ----


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 2.0, "top_p": 0.3, "seed": 5},
        {"top_k": 1, "repetition_penalty": 1.8, "presence_penalty": 2.0, "frequency_penalty": 1.5},
    ],
)
def test_values_are_the_raw_distribution_whatever_the_sampling(demo: Site, sampling: dict[str, Any]) -> None:
    answer = demo.completion(PROMPT, max_tokens=6, logprobs=20, return_token_ids=True, **sampling)["choices"][0]
    prompt, ids = answer["prompt_token_ids"], answer["token_ids"]
    exact = log_softmax(reference(), [*prompt, *ids])[len(prompt) - 1 :]
    arrays = answer["logprobs"]
    for place, id in enumerate(ids):
        assert arrays["token_logprobs"][place] == pytest.approx(float(exact[place, id]), abs=1e-4)
        values = list(arrays["top_logprobs"][place].values())[:20]
        assert values == pytest.approx(exact[place].topk(len(values)).values.tolist(), abs=1e-4)
        assert values == sorted(values, reverse=True)


def test_chat_entries_are_the_raw_distribution(demo: Site) -> None:
    answer = demo.chat("Name a colour.", max_tokens=4, logprobs=True, top_logprobs=5, return_token_ids=True)
    prompt, ids = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
    exact = log_softmax(reference(), [*prompt, *ids])[len(prompt) - 1 :]
    for place, entry in enumerate(answer["choices"][0]["logprobs"]["content"]):
        best = exact[place].topk(5)
        assert entry["logprob"] == pytest.approx(float(exact[place, ids[place]]), abs=1e-4)
        assert [other["logprob"] for other in entry["top_logprobs"]] == pytest.approx(best.values.tolist(), abs=1e-4)
        names = [demo.model.tokens.text(id) for id in best.indices.tolist()]
        assert [other["token"] for other in entry["top_logprobs"]] == names


def test_a_constraint_changes_no_value(demo: Site) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [4, 7]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "number", "schema": schema}}
    answer = demo.chat(
        "Two plus two?", max_tokens=20, response_format=form, logprobs=True, top_logprobs=3, return_token_ids=True
    )
    choice = answer["choices"][0]
    prompt, ids = answer["prompt_token_ids"], choice["token_ids"]
    exact = log_softmax(reference(), [*prompt, *ids])[len(prompt) - 1 :]
    entries = choice["logprobs"]["content"]
    assert len(entries) == len(ids) > 3 and choice["message"]["content"].startswith("{")
    for place, entry in enumerate(entries):
        assert entry["logprob"] == pytest.approx(float(exact[place, ids[place]]), abs=1e-4)
        best = exact[place].topk(3).values.tolist()
        assert [other["logprob"] for other in entry["top_logprobs"]] == pytest.approx(best, abs=1e-4)
    assert any(entry["logprob"] < entry["top_logprobs"][-1]["logprob"] for entry in entries), (
        "the mask forced no token that the model wouldn't have said"
    )


def test_explicit_ids_have_full_vocabulary_values(demo: Site) -> None:
    ids = [49_000, 5, 260, 5, 0]
    answer = demo.completion(
        PROMPT, max_tokens=1, logprobs=0, logprob_token_ids=ids, return_tokens_as_token_ids=True, return_token_ids=True
    )["choices"][0]
    exact = log_softmax(reference(), answer["prompt_token_ids"])[-1]
    found = answer["logprobs"]["top_logprobs"][0]
    chosen = answer["token_ids"][0]
    assert list(found) == [f"token_id:{id}" for id in (49_000, 5, 260, 0, chosen)]
    assert list(found.values()) == pytest.approx([float(exact[id]) for id in (49_000, 5, 260, 0, chosen)], abs=1e-4)


def test_equal_values_go_by_increasing_id(tiny: tuple[Site, Any]) -> None:
    site, model = tiny
    prompt, rank = prompt_before_equals(model, 18)
    place = rank - 1
    answer = site.completion(prompt, max_tokens=1, logprobs=20, return_tokens_as_token_ids=True)["choices"][0]
    names = list(answer["logprobs"]["top_logprobs"][0])
    assert names[place : place + 3][: 20 - place] == ["token_id:40", "token_id:50", "token_id:60"][: 20 - place]
    values = list(answer["logprobs"]["top_logprobs"][0].values())
    assert values[place] == values[place + 1]
    cut = site.completion(prompt, max_tokens=1, logprobs=place + 1, return_tokens_as_token_ids=True)["choices"][0]
    natural = list(cut["logprobs"]["top_logprobs"][0])[: place + 1]
    assert natural[-1] == "token_id:40"


def test_asking_changes_no_token(demo: Site) -> None:
    fields: dict[str, Any] = {"max_tokens": 8, "temperature": 1.5, "seed": 77, "return_token_ids": True}
    plain = demo.completion(PROMPT, **fields)["choices"][0]["token_ids"]
    for more in ({"logprobs": 20}, {"logprobs": 0, "logprob_token_ids": [1, 2]}, {"logprobs": 3, "echo": True}):
        assert demo.completion(PROMPT, **fields, **more)["choices"][0]["token_ids"] == plain


def test_a_continuation_is_scored_by_one_token(demo: Site) -> None:
    body = {
        "messages": [
            {"role": "user", "content": "Is Paris in France? Answer yes or no."},
            {"role": "assistant", "content": "Answer:"},
        ],
        "max_tokens": 1,
        "continue_final_message": True,
        "add_generation_prompt": False,
        "logprobs": True,
        "top_logprobs": 20,
        "return_token_ids": True,
    }
    answer = demo.post(CHAT, body)
    (entry,) = answer["choices"][0]["logprobs"]["content"]
    exact = log_softmax(reference(), answer["prompt_token_ids"])[-1]
    assert demo.model.tokens.decode(answer["prompt_token_ids"]).endswith("assistant\nAnswer:")
    values = [other["logprob"] for other in entry["top_logprobs"]]
    assert values == pytest.approx(exact.topk(20).values.tolist(), abs=1e-4)


# ---- which tokens have entries ----


def test_every_returned_token_has_an_entry_calls_and_reasoning_too(scripted: Site) -> None:
    answer = scripted.chat("call", max_tokens=200, tools=TOOLS, logprobs=True, return_token_ids=True)
    choice = answer["choices"][0]
    entries = choice["logprobs"]["content"]
    assert choice["finish_reason"] == "tool_calls"
    names = [entry["token"] for entry in entries]
    assert len(entries) == len(choice["token_ids"]) == answer["usage"]["completion_tokens"] - 1  # EOS has none
    assert names[:3] == ["so", " it", " is"] and "</think>" in names and "</tool_call>" in names
    for entry in entries:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}


def test_a_forced_close_of_reasoning_has_no_entry_but_counts(scripted: Site) -> None:
    plain, cut = (
        scripted.chat("reason", logprobs=True, return_token_ids=True, thinking_token_budget=budget)
        for budget in (50, 2)
    )
    close = scripted.model.tokenizer.token_id("</think>")
    ids = cut["choices"][0]["token_ids"]
    assert ids[:3] == [*plain["choices"][0]["token_ids"][:2], close]
    names = [entry["token"] for entry in cut["choices"][0]["logprobs"]["content"]]
    assert len(names) == len(ids) - 1 and names[:2] == ["so", " it"] and names[2] != "</think>"
    assert cut["usage"]["completion_tokens"] == len(ids) + 1


@pytest.mark.parametrize("text", ["emoji", "faces", "broken", "call", "reason", "plain"])
@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
def test_streamed_entries_concatenate_to_the_buffered_ones(scripted: Site, endpoint: str, text: str) -> None:
    body: dict[str, Any] = {"max_tokens": 120, "seed": 1, "logprobs": True, **asked(text)}
    if endpoint == COMPLETIONS:
        body = {"max_tokens": 120, "seed": 1, "logprobs": 1, "prompt": text}
    buffered = scripted.post(endpoint, body)["choices"][0]
    chunks = scripted.stream(endpoint, body).choices()
    if endpoint == CHAT:
        entries = [entry for chunk in chunks for entry in (chunk["logprobs"] or {"content": []})["content"]]
        assert entries == buffered["logprobs"]["content"]
        text = "".join(chunk["delta"].get("content") or "" for chunk in chunks)
        assert text == (buffered["message"]["content"] or "")
        return
    for name, whole in buffered["logprobs"].items():
        assert [value for chunk in chunks if chunk["logprobs"] for value in chunk["logprobs"][name]] == whole
    assert "".join(chunk["text"] for chunk in chunks) == buffered["text"]


def test_a_character_cut_by_the_limit_keeps_its_tokens(scripted: Site) -> None:
    for cut in range(1, 8):
        choice = scripted.completion("faces", max_tokens=cut, logprobs=0)["choices"][0]
        whole, part = divmod(cut, 4)
        assert choice["text"] == "🙂" * whole + "\N{REPLACEMENT CHARACTER}" * (part > 0)
        assert choice["logprobs"]["text_offset"] == [place // 4 for place in range(cut)]


def test_entries_hold_exact_bytes_and_replacement_characters(scripted: Site) -> None:
    answer = scripted.chat("reason", max_tokens=40, logprobs=True)["choices"][0]
    spelled = b"".join(bytes(entry["bytes"]) for entry in answer["logprobs"]["content"])
    assert spelled == b"so it is\n</think>\n\nthe answer is yes"
    faces = scripted.post(CHAT, asked("faces", max_tokens=20, logprobs=True))["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in faces) == "🙂🙂".encode()
    assert {entry["token"] for entry in faces} == {"\N{REPLACEMENT CHARACTER}"}


@pytest.mark.parametrize(
    ("ignore", "names"), [(False, ["one"]), (True, ["one", "<|im_end|>", " t", "wo", "<|im_end|>"])]
)
def test_an_ending_eos_has_no_entry_and_an_ignored_one_has(scripted: Site, ignore: bool, names: list[str]) -> None:
    answer = scripted.completion("ends", max_tokens=5, logprobs=0, ignore_eos=ignore)
    choice = answer["choices"][0]
    assert choice["logprobs"]["tokens"] == names
    assert choice["finish_reason"] == ("length" if ignore else "stop")
    assert answer["usage"]["completion_tokens"] == (5 if ignore else 2)


def test_a_token_stop_has_no_entry_and_ends_before_its_text(scripted: Site) -> None:
    stop = scripted.model.tokenizer.encode(" it", specials=False)
    choice = scripted.completion("plain", logprobs=0, stop_token_ids=stop)["choices"][0]
    assert choice["text"] == "hello world," and choice["logprobs"]["tokens"] == ["hello", " world", ","]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop[-1])


def test_a_clipped_token_keeps_its_entry_and_what_follows_has_none(scripted: Site) -> None:
    choice = scripted.completion("plain", logprobs=0, stop="rld")["choices"][0]
    assert choice["text"] == "hello wo"
    assert choice["logprobs"]["tokens"] == ["hello", " world"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "rld")


# ---- completions' arrays ----


def test_zero_alternatives_still_give_arrays(scripted: Site) -> None:
    arrays = scripted.completion("plain", max_tokens=2, logprobs=0)["choices"][0]["logprobs"]
    assert arrays["top_logprobs"] == [{"hello": 0.0}, {" world": 0.0}]
    assert {name: len(values) for name, values in arrays.items()} == dict.fromkeys(
        ("tokens", "token_logprobs", "top_logprobs", "text_offset"), 2
    )
    assert scripted.completion("plain", max_tokens=2)["choices"][0]["logprobs"] is None


def test_offsets_count_characters_also_inside_a_span(scripted: Site) -> None:
    choice = scripted.completion("emoji", max_tokens=20, logprobs=0)["choices"][0]
    assert choice["text"] == "a🙂b the end"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 1, 2, 3, 7, 8, 9, 10]


def test_the_first_of_equal_strings_stays(scripted: Site) -> None:
    """Ids 240 to 242 are lone bytes that all decode to the replacement character."""
    body = {"prompt": "broken", "max_tokens": 1, "logprobs": 0, "logprob_token_ids": [242, 241, 240]}
    found = scripted.post(COMPLETIONS, body)["choices"][0]["logprobs"]["top_logprobs"][0]
    apart = scripted.post(COMPLETIONS, {**body, "return_tokens_as_token_ids": True})["choices"][0]["logprobs"]
    values = apart["top_logprobs"][0]
    assert list(values) == ["token_id:242", "token_id:241", "token_id:240"]
    assert found == {"\N{REPLACEMENT CHARACTER}": values["token_id:242"]}
    assert values["token_id:241"] - values["token_id:242"] == pytest.approx(1.0, abs=1e-6)


def test_what_is_not_finite_is_a_number(scripted: Site) -> None:
    fields: dict[str, Any] = {"max_tokens": 1, "logprobs": 0, "logprob_token_ids": [7], "seed": 1}
    found = scripted.completion("broken", **fields)["choices"][0]["logprobs"]["top_logprobs"][0]
    assert found[scripted.model.tokens.text(7)] == -9999.0


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS, RESPONSES])
def test_tokens_as_ids_on_three_endpoints(scripted: Site, endpoint: str) -> None:
    ids = {"return_tokens_as_token_ids": True}
    if endpoint == COMPLETIONS:
        arrays = scripted.completion("plain", max_tokens=1, logprobs=1, **ids)["choices"][0]["logprobs"]
        assert arrays["tokens"] == list(arrays["top_logprobs"][0])
        assert arrays["tokens"][0].startswith("token_id:")
        return
    if endpoint == CHAT:
        answer = scripted.chat("reason", max_tokens=2, logprobs=True, top_logprobs=1, **ids)
        entry = answer["choices"][0]["logprobs"]["content"][1]
    else:
        include = ["message.output_text.logprobs"]
        answer = scripted.post(
            RESPONSES, {"model": "m", "input": "reason", "include": include, "top_logprobs": 1, **ids}
        )
        message = next(item for item in answer["output"] if item["type"] == "message")
        entry = message["content"][0]["logprobs"][1]
    id = int(entry["token"].removeprefix("token_id:"))
    assert bytes(entry["bytes"]) == scripted.model.tokens.bytes(id)
    assert entry["top_logprobs"][0]["token"] == entry["token"]


# ---- options ----


def test_chat_needs_logprobs_for_positive_alternatives_only(scripted: Site) -> None:
    assert "top_logprobs" in scripted.refused(CHAT, asked("plain", top_logprobs=1))
    assert "top_logprobs" in scripted.refused(CHAT, asked("plain", logprobs=False, top_logprobs=3))
    none = scripted.chat("plain", max_tokens=2, top_logprobs=0)
    assert none["choices"][0]["logprobs"] is None
    some = scripted.chat("plain", max_tokens=2, logprobs=True, top_logprobs=0)["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in some] == [[], []]


def test_explicit_ids_replace_alternatives_in_the_callers_order(scripted: Site) -> None:
    ids = list(range(300, 250, -1))
    entry = scripted.chat("plain", max_tokens=1, logprobs=True, top_logprobs=1, logprob_token_ids=[*ids, *ids])
    names = [other["token"] for other in entry["choices"][0]["logprobs"]["content"][0]["top_logprobs"]]
    chosen = scripted.chat("plain", max_tokens=1, return_token_ids=True)["choices"][0]["token_ids"][0]
    assert names == [scripted.model.tokens.text(id) for id in [*ids, *([] if chosen in ids else [chosen])]]


def test_at_most_129_entries_with_the_sampled_token(scripted: Site) -> None:
    chosen = scripted.chat("plain", max_tokens=1, return_token_ids=True)["choices"][0]["token_ids"][0]
    others = [id for id in range(130) if id != chosen][:128]
    for ids, count in ((others, 129), ([chosen, *others[:127]], 128)):
        answer = scripted.chat("plain", max_tokens=1, logprobs=True, logprob_token_ids=ids)
        assert len(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == count


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS, RESPONSES])
@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        ([7] * 129, "128"),
        ([-1], "vocabulary"),
        ([10**9], "vocabulary"),
        (["7"], "integer"),
        ([True], "integer"),
        ([1.0], "integer"),
        (7, "array"),
    ],
)
def test_bad_explicit_ids(scripted: Site, endpoint: str, ids: Any, problem: str) -> None:
    bodies = {
        CHAT: asked("plain", logprobs=True),
        COMPLETIONS: {"prompt": "plain", "logprobs": 0},
        RESPONSES: {"model": "m", "input": "plain", "include": ["message.output_text.logprobs"]},
    }
    message = scripted.refused(endpoint, {**bodies[endpoint], "logprob_token_ids": ids})
    assert "logprob_token_ids" in message and problem in message


@pytest.mark.parametrize("ids", [None, []])
def test_no_explicit_ids_are_an_omission(scripted: Site, ids: Any) -> None:
    assert scripted.completion("plain", max_tokens=1, logprob_token_ids=ids)["choices"][0]["logprobs"] is None
    assert scripted.chat("plain", max_tokens=1, logprob_token_ids=ids)["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (CHAT, asked("plain")),
        (COMPLETIONS, {"prompt": "plain"}),
        (RESPONSES, {"model": "m", "input": "plain"}),
        (RESPONSES, {"model": "m", "input": "plain", "include": ["reasoning.encrypted_content"]}),
    ],
)
def test_explicit_ids_need_the_endpoints_own_logprobs(scripted: Site, endpoint: str, body: dict[str, Any]) -> None:
    assert "logprob_token_ids" in scripted.refused(endpoint, {**body, "logprob_token_ids": [1]})


@pytest.mark.parametrize(
    ("endpoint", "field", "value"),
    [
        (COMPLETIONS, "logprobs", 21),
        (COMPLETIONS, "logprobs", -1),
        (COMPLETIONS, "logprobs", True),
        (COMPLETIONS, "logprobs", 1.0),
        (COMPLETIONS, "logprobs", "1"),
        (COMPLETIONS, "prompt_logprobs", 21),
        (CHAT, "top_logprobs", 21),
        (CHAT, "top_logprobs", "5"),
        (CHAT, "prompt_logprobs", -1),
        (CHAT, "logprobs", 1),
    ],
)
def test_counts_out_of_range_and_wrong_types(scripted: Site, endpoint: str, field: str, value: Any) -> None:
    body = {"prompt": "plain"} if endpoint == COMPLETIONS else asked("plain", logprobs=True)
    assert field in scripted.refused(endpoint, {**body, field: value})


# ---- capabilities ----


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Five alternatives, no explicit ids, no prompt scores."""
    with scripted_site(tmp_path_factory.mktemp("five"), logprobs={"max_top": 5, "token_ids": False}) as site:
        yield site


def test_the_loaded_capacity_bounds_requests(five: Site) -> None:
    assert five.startup.facts.max_top_logprobs == 5
    for endpoint, body in (
        (COMPLETIONS, {"prompt": "plain", "logprobs": 6}),
        (CHAT, asked("plain", logprobs=True, top_logprobs=6)),
        (RESPONSES, {"model": "m", "input": "plain", "include": ["message.output_text.logprobs"], "top_logprobs": 6}),
    ):
        assert "5" in five.refused(endpoint, body)
    assert len(five.completion("plain", max_tokens=1, logprobs=5)["choices"][0]["logprobs"]["top_logprobs"][0]) >= 5


def test_explicit_ids_need_their_capability(five: Site) -> None:
    submitted = len(five.engine.generations)
    for endpoint, body in ((COMPLETIONS, {"prompt": "plain", "logprobs": 0}), (CHAT, asked("plain", logprobs=True))):
        assert "re-export" in five.refused(endpoint, {**body, "logprob_token_ids": [1]})
        assert five.send("POST", endpoint, {**body, "max_tokens": 1, "logprob_token_ids": []}).status == 200
    assert len(five.engine.generations) == submitted + 2


def test_a_model_without_logprobs_says_so_and_refuses(tmp_path: Path) -> None:
    with scripted_site(tmp_path, logprobs={"max_top": 0}) as site:
        card = site.send("GET", "/v1/models").json["data"][0]
        assert card["permission"][0]["allow_logprobs"] is False and card["flare"]["max_top_logprobs"] == 0
        assert "logprobs" in site.refused(COMPLETIONS, {"prompt": "plain", "logprobs": 0})
        assert "logprobs" in site.refused(CHAT, asked("plain", logprobs=True))
        assert site.completion("plain", max_tokens=2)["choices"][0]["text"] == "hello world"
