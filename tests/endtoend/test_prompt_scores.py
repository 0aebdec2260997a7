"""Prompt scores over whole requests: values, ranks, echo with its arrays and frames, zero tokens, caching, refusals."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from tests.endtoend.conftest import prompt_before_equals, scripted_site
from tests.support.inline_server import Site
from tests.support.smollm2 import reference
from tests.support.tiny_sources import log_softmax

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = "The quick brown fox jumps over the lazy dog — naïve, isn't it? 🙂 Yes."
LONG = "one two three four five six seven eight nine ten. " * 4


def check_scores(scores: list[Any], exact: Any, ids: list[int], alternatives: int) -> None:
    """Every position against float64 log probabilities `exact` [positions, vocab]."""
    assert len(scores) == len(ids) and scores[0] is None
    for place, entry in enumerate(scores[1:], 1):
        values = exact[place - 1]
        actual = float(values[ids[place]])
        found = entry[str(ids[place])]
        assert found["logprob"] == pytest.approx(actual, abs=1e-4)
        least = 1 + int((values > actual + 2e-4).sum())
        assert least <= found["rank"] <= 1 + int((values > actual - 2e-4).sum())
        best = values.topk(max(alternatives, 1)).values.tolist()
        others = [each for id, each in entry.items() if int(id) != ids[place] or each["rank"] <= alternatives]
        assert [each["logprob"] for each in sorted(others, key=lambda each: each["rank"])] == pytest.approx(
            best[:alternatives], abs=1e-4
        )
        assert alternatives <= len(entry) <= alternatives + 1


# ---- values ----


@pytest.mark.parametrize("alternatives", [0, 1, 20])
def test_completions_scores_are_the_raw_distribution(demo: Site, alternatives: int) -> None:
    answer = demo.completion(TEXT, max_tokens=1, prompt_logprobs=alternatives, return_token_ids=True)
    choice = answer["choices"][0]
    ids = choice["prompt_token_ids"]
    assert answer["usage"]["prompt_tokens"] == len(ids)
    check_scores(choice["prompt_logprobs"], log_softmax(reference(), ids), ids, alternatives)
    assert choice["logprobs"] is None


def test_chat_scores_stand_at_the_top_over_the_rendered_prompt(demo: Site) -> None:
    answer = demo.chat(TEXT, max_tokens=1, prompt_logprobs=3, return_token_ids=True)
    ids = answer["prompt_token_ids"]
    check_scores(answer["prompt_logprobs"], log_softmax(reference(), ids), ids, 3)
    assert "prompt_logprobs" not in answer["choices"][0]


def test_scores_do_not_depend_on_chunks(demo: Site, tiny: tuple[Site, Any]) -> None:
    """The demo's chunks have 64 tokens, the tiny model's 16."""
    site, model = tiny
    for length in (1, 2, 15, 16, 17, 33, 100):
        ids = [(7 * place) % 700 + 3 for place in range(length)]
        choice = site.completion([ids], max_tokens=0, prompt_logprobs=2)["choices"][0]
        check_scores(choice["prompt_logprobs"], log_softmax(model, ids), ids, 2)
    ids = demo.model.tokenizer.encode(LONG, specials=True)
    choice = demo.completion(LONG, max_tokens=0, prompt_logprobs=1)["choices"][0]
    check_scores(choice["prompt_logprobs"], log_softmax(reference(), ids), ids, 1)


def test_equal_values_share_a_rank_and_go_by_increasing_id(tiny: tuple[Site, Any]) -> None:
    """Ids 40, 50 and 60 have the same row in the head."""
    site, model = tiny
    prompt, rank = prompt_before_equals(model, 16)
    scores = site.completion([[*prompt, 60]], max_tokens=0, prompt_logprobs=20)["choices"][0]["prompt_logprobs"]
    entry = scores[-1]
    assert [entry[id]["rank"] for id in ("40", "50", "60")] == [rank, rank, rank]
    natural = [id for id, each in entry.items() if id != "60"]
    assert natural.index("40") + 1 == natural.index("50")
    assert {each["rank"] for each in entry.values()} >= {rank, rank + 3} and rank + 1 not in {
        each["rank"] for each in entry.values()
    }


def test_every_choice_of_every_prompt_has_its_prompts_scores(demo: Site) -> None:
    answer = demo.completion(["Paris is", "One two three four"], n=2, max_tokens=1, prompt_logprobs=1)
    scores = [choice["prompt_logprobs"] for choice in answer["choices"]]
    assert scores[0] == scores[1] != scores[2] == scores[3]
    assert [len(each) for each in scores] == [2, 2, 4, 4]
    assert demo.chat("Hi", n=2, max_tokens=1, prompt_logprobs=0)["prompt_logprobs"][0] is None


def test_a_prompt_is_scored_once_for_all_its_choices(scripted: Site) -> None:
    before = scripted.inline.engine.stats().prefill_tokens
    ids = [*b"plain" * 20]
    for fields in ({"prompt_logprobs": 2}, {"prompt_logprobs": 0, "max_tokens": 0}, {"echo": True, "logprobs": 1}):
        answer = scripted.completion([ids, ids[::-1]], n=4, **{"max_tokens": 2, **fields})
        assert [len(choice["prompt_logprobs"]) for choice in answer["choices"]] == [100] * 8
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    computed = scripted.inline.engine.stats().prefill_tokens - before
    assert computed < 3 * 200 + 4 * 3 * 2 * 16, "the other choices found the prompt in the cache"
    body = {"prompt": [ids], "n": 2, "max_tokens": 1, "echo": True, "logprobs": 0}
    stream = scripted.stream(COMPLETIONS, body)
    for index in (0, 1):
        chunks = [chunk["logprobs"]["tokens"] for chunk in stream.choices(index) if chunk["logprobs"]]
        assert len([name for names in chunks for name in names]) == 101


def test_a_scored_stream_of_zero_tokens(scripted: Site) -> None:
    body = {"prompt": [*b"plain" * 20], "max_tokens": 0, "echo": True, "logprobs": 1}
    options = {"include_usage": True}
    stream = scripted.stream(COMPLETIONS, {**body, "stream_options": options})
    chunks = stream.choices()
    assert [len(chunk["logprobs"]["tokens"]) for chunk in chunks if chunk["logprobs"]] == [16] * 6 + [4, 0]
    assert "".join(chunk["text"] for chunk in chunks) == "plain" * 20
    assert chunks[-1]["finish_reason"] == "length" and stream.frames[-1]["usage"]["completion_tokens"] == 0


def test_generation_and_prompt_scores_share_a_request(demo: Site) -> None:
    choice = demo.completion(TEXT, max_tokens=2, logprobs=2, prompt_logprobs=1, return_token_ids=True)["choices"][0]
    prompt, ids = choice["prompt_token_ids"], choice["token_ids"]
    exact = log_softmax(reference(), [*prompt, *ids])
    check_scores(choice["prompt_logprobs"], exact[: len(prompt)], prompt, 1)
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(
        [float(exact[len(prompt) - 1 + place, id]) for place, id in enumerate(ids)], abs=1e-4
    )


def test_decoded_tokens_stay_text(scripted: Site) -> None:
    choice = scripted.completion(
        "plain the world", max_tokens=1, logprobs=0, prompt_logprobs=0, return_tokens_as_token_ids=True
    )["choices"][0]
    decoded = [next(iter(entry.values()))["decoded_token"] for entry in choice["prompt_logprobs"][1:]]
    assert "".join(decoded) == "lain the world"
    assert all(name.startswith("token_id:") for name in choice["logprobs"]["tokens"])


# ---- echo ----


def test_echo_prepends_prompt_entries(demo: Site) -> None:
    choice = demo.completion(TEXT, max_tokens=3, echo=True, logprobs=2, return_token_ids=True)["choices"][0]
    prompt, ids = choice["prompt_token_ids"], choice["token_ids"]
    exact = log_softmax(reference(), [*prompt, *ids])
    arrays = choice["logprobs"]
    assert choice["text"].startswith(TEXT)
    assert {len(values) for values in arrays.values()} == {len(prompt) + 3}
    assert arrays["token_logprobs"][0] is None and arrays["top_logprobs"][0] is None
    every = [*prompt, *ids]
    assert arrays["token_logprobs"][1:] == pytest.approx(
        [float(exact[place - 1, id]) for place, id in enumerate(every)][1:], abs=1e-4
    )
    assert all(len(entries) in (2, 3) for entries in arrays["top_logprobs"][1:])


def test_echo_text_cut_at_its_offsets_gives_the_tokens(demo: Site) -> None:
    text = "A plain line of words, nothing more"
    choice = demo.completion(text, max_tokens=4, echo=True, logprobs=0, seed=1)["choices"][0]
    offsets = [*choice["logprobs"]["text_offset"], len(choice["text"])]
    pieces = [choice["text"][start:end] for start, end in itertools.pairwise(offsets)]
    assert pieces == choice["logprobs"]["tokens"]
    assert offsets[len(demo.model.tokenizer.encode(text, specials=True))] == len(text)


def test_prompt_offsets_count_decoded_strings_and_generated_ones_follow_the_text(scripted: Site) -> None:
    """Four tokens of one character decode to four replacement characters."""
    ids = [*"🙂".encode(), *b"ok plain"]
    choice = scripted.completion(ids, max_tokens=1, echo=True, logprobs=0)["choices"][0]
    assert choice["text"] == "🙂ok plainhello"
    assert choice["logprobs"]["text_offset"] == [*range(len(ids)), len("🙂ok plain")]


def test_streamed_echo_has_a_frame_a_prompt_chunk_before_generated_entries(scripted: Site) -> None:
    ids = scripted.model.tokenizer.encode("plain " * 9, specials=True)
    body = {"prompt": ids, "max_tokens": 3, "echo": True, "logprobs": 1}
    chunks = scripted.stream(COMPLETIONS, body).choices()
    counts = [len(chunk["logprobs"]["tokens"]) for chunk in chunks if chunk["logprobs"]]
    whole = math.ceil(len(ids) / 16)
    assert counts[:whole] == [16] * (whole - 1) + [len(ids) - 16 * (whole - 1)]
    buffered = scripted.post(COMPLETIONS, body)["choices"][0]
    for name, values in buffered["logprobs"].items():
        assert [value for chunk in chunks if chunk["logprobs"] for value in chunk["logprobs"][name]] == values
    assert "".join(chunk["text"] for chunk in chunks) == buffered["text"]
    assert chunks[0]["text"] == "plain " * 9, "the echoed text comes with the first entries"


def test_buffered_echo_also_carries_prompt_scores(demo: Site) -> None:
    inferred = demo.completion("Paris is in", max_tokens=1, echo=True, logprobs=5)["choices"][0]
    assert {len(entry) for entry in inferred["prompt_logprobs"][1:]} <= {5, 6}
    both = demo.completion("Paris is in", max_tokens=1, echo=True, logprobs=5, prompt_logprobs=2)["choices"][0]
    assert {len(entry) for entry in both["prompt_logprobs"][1:]} <= {2, 3}
    assert both["logprobs"]["top_logprobs"][1:] == inferred["logprobs"]["top_logprobs"][1:]
    fewer = demo.completion("Paris is in", max_tokens=1, echo=True, logprobs=1, prompt_logprobs=4)["choices"][0]
    assert {len(entry) for entry in fewer["prompt_logprobs"][1:]} <= {4, 5}
    assert {len(entry) for entry in fewer["logprobs"]["top_logprobs"][1:3]} <= {1, 2}


def test_echoed_entries_stay_natural_beside_explicit_ids(demo: Site) -> None:
    body = {"max_tokens": 0, "echo": True, "logprobs": 2}
    natural = demo.completion("Paris is in", **body)["choices"][0]["logprobs"]
    explicit = demo.completion("Paris is in", **body, logprob_token_ids=[1, 2, 3])["choices"][0]["logprobs"]
    assert explicit == natural and len(explicit["tokens"]) == 3


# ---- zero tokens, caching ----


def test_scoring_with_zero_tokens(demo: Site) -> None:
    for fields in ({"prompt_logprobs": 0}, {"echo": True, "logprobs": 0}):
        answer = demo.completion("Paris is in", max_tokens=0, **fields)
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "length"
        assert (answer["usage"]["completion_tokens"], answer["usage"]["prompt_tokens"]) == (0, 3)
        assert len(choice["prompt_logprobs"]) == 3
        assert choice["text"] == ("Paris is in" if "echo" in fields else "")


def test_scoring_starts_uncached_and_publishes(demo: Site) -> None:
    prompt = [(11 * place) % 40_000 + 5 for place in range(200)]
    fields: dict[str, Any] = {"max_tokens": 1, "temperature": 0.01}

    def cached(**more: Any) -> int:
        usage = demo.completion([prompt], **fields, **more)["usage"]
        count: int = usage["prompt_tokens_details"]["cached_tokens"]
        return count

    assert cached(prompt_logprobs=0) == 0
    assert cached() == 192, "the scored prompt can be reused"
    again = demo.completion([prompt], **fields, prompt_logprobs=1)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert len(again["choices"][0]["prompt_logprobs"]) == 200


# ---- the request pattern of evaluation harnesses ----


def test_loglikelihood_through_echo(demo: Site) -> None:
    """Batches of context + continuation ids, one generated token; the caller slices [context length, -1) of the arrays
    and calls a continuation greedy when each token's value is the greatest of its map. A whole text is scored after
    one token that begins it."""
    encode = demo.model.tokenizer.encode
    context = encode("Question: What is the capital of France?\nAnswer:", specials=True)
    endings = [encode(text, specials=True) for text in (" Paris", " Berlin", " the city of Paris", " 42")]
    body = {"model": "any", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    choices = demo.post(COMPLETIONS, {**body, "prompt": [context + ending for ending in endings]})["choices"]
    for choice, ending in zip(choices, endings, strict=True):
        exact = log_softmax(reference(), [*context, *ending])[len(context) - 1 : -1]
        values = choice["logprobs"]["token_logprobs"][len(context) : -1]
        tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
        wanted = [float(exact[place, id]) for place, id in enumerate(ending)]
        assert values == pytest.approx(wanted, abs=1e-4)
        greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
        assert greedy == (exact.argmax(1).tolist() == ending)
    sums = [sum(choice["logprobs"]["token_logprobs"][len(context) : -1]) for choice in choices]
    assert sums.index(max(sums)) == 0
    whole = [*encode("<|im_start|>", specials=True), *encode(TEXT, specials=True)]
    (choice,) = demo.post(COMPLETIONS, {**body, "prompt": [whole]})["choices"]
    exact = log_softmax(reference(), whole)
    wanted = [float(exact[place - 1, id]) for place, id in enumerate(whole)][1:]
    assert choice["logprobs"]["token_logprobs"][1:-1] == pytest.approx(wanted, abs=1e-4)


# ---- refusals ----


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (COMPLETIONS, {"prompt": "plain"}),
        (CHAT, {"messages": [{"role": "user", "content": "plain"}]}),
    ],
)
def test_streams_have_no_prompt_scores(scripted: Site, endpoint: str, body: dict[str, Any], count: int) -> None:
    assert "prompt_logprobs" in scripted.refused(endpoint, {**body, "prompt_logprobs": count, "stream": True})


def test_chat_needs_a_positive_limit_also_for_scores(scripted: Site) -> None:
    for field in ("max_tokens", "max_completion_tokens"):
        body = {"messages": [{"role": "user", "content": "plain"}], field: 0, "prompt_logprobs": 1}
        assert field in scripted.refused(CHAT, body)


def test_other_endpoints_refuse_prompt_scores(scripted: Site) -> None:
    assert "prompt_logprobs" in scripted.refused(
        "/v1/responses", {"model": "m", "input": "plain", "prompt_logprobs": 0}
    )
    messages = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "plain"}]}
    version = [("anthropic-version", "2023-06-01")]
    reply = scripted.send("POST", "/v1/messages", {**messages, "prompt_logprobs": 0}, version)
    assert reply.status == 400 and "prompt_logprobs" in reply.json["error"]["message"]


def test_the_capability_is_off_by_default(tmp_path: Path) -> None:
    with scripted_site(tmp_path) as site:
        for endpoint, body in (
            (COMPLETIONS, {"prompt": "plain", "prompt_logprobs": 0}),
            (COMPLETIONS, {"prompt": "plain", "echo": True, "logprobs": 0}),
            (CHAT, {"messages": [{"role": "user", "content": "plain"}], "prompt_logprobs": 0}),
        ):
            assert "logprobs" in site.refused(endpoint, body)
        choice = site.completion("plain", max_tokens=1, logprobs=1)["choices"][0]
        assert choice["text"] == "hello" and len(choice["logprobs"]["tokens"]) == 1
        assert site.completion("plain", max_tokens=1, echo=True)["choices"][0]["text"] == "plainhello"
