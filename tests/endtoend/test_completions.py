"""Raw completions over whole requests: prompt shapes, special tokens, choices, seeds, echo, zero tokens, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.inline_server import Site
from tests.support.scripted import script, turn

COMPLETIONS = "/v1/completions"


def test_four_prompt_shapes_give_the_same_tokens(tiny: tuple[Site, Any]) -> None:
    site, _ = tiny
    text = "the capital of France"
    ids = site.model.tokenizer.encode(text, specials=True)
    answers = [
        site.completion(shape, max_tokens=3, seed=1, return_token_ids=True)["choices"]
        for shape in (text, [text], ids, [ids])
    ]
    assert all(answer == answers[0] for answer in answers)
    assert answers[0][0]["prompt_token_ids"] == ids
    odd = [900, 0, 255, 900]
    kept = site.completion(odd, max_tokens=1, return_token_ids=True)["choices"][0]
    assert kept["prompt_token_ids"] == odd, "ids are preserved even where text would tokenize otherwise"


def test_text_follows_the_tokenizers_special_token_policy(scripted: Site) -> None:
    answer = scripted.completion("<|im_start|>plain", max_tokens=1, return_token_ids=True)
    ids = answer["choices"][0]["prompt_token_ids"]
    assert ids[0] == scripted.model.tokenizer.token_id("<|im_start|>") and len(ids) == 5


def test_delimiters_in_raw_output_are_text(scripted: Site) -> None:
    choice = scripted.completion("delimiters", logprobs=0)["choices"][0]
    assert choice["text"] == "plain<think> text<tool_call> more"
    assert "<think>" in choice["logprobs"]["tokens"]


def test_empty_text_needs_a_bos(scripted: Site, tmp_path: Path) -> None:
    answer = scripted.completion("", max_tokens=1, return_token_ids=True)
    assert answer["choices"][0]["prompt_token_ids"] == [scripted.model.tokenizer.token_id("<|im_start|>")]
    assert answer["usage"]["prompt_tokens"] == 1
    with Site(script(tmp_path, [turn("x")]), cache=tmp_path / "cache") as site:
        assert "BOS" in site.refused(COMPLETIONS, {"prompt": ""})
        assert "BOS" in site.refused(COMPLETIONS, {"prompt": ["x", ""]})


@pytest.mark.parametrize("prompt", [[], [[]], [[1], []], None, 5, [True], [1, "a"], [[1.0]], {"a": 1}])
def test_bad_prompts(scripted: Site, prompt: Any) -> None:
    assert "prompt" in scripted.refused(COMPLETIONS, {"prompt": prompt})


def test_ids_outside_the_vocabulary(scripted: Site) -> None:
    size = scripted.model.manifest.vocab_size
    for prompt in ([size], [[0], [size]], [-1]):
        assert "vocabulary" in scripted.refused(COMPLETIONS, {"prompt": prompt})
    assert scripted.completion([size - 1], max_tokens=0)["usage"]["prompt_tokens"] == 1


def test_choices_are_ordered_by_prompt_and_their_seeds_advance(tiny: tuple[Site, Any]) -> None:
    site, _ = tiny
    fields: dict[str, Any] = {"max_tokens": 6, "temperature": 1.5, "top_p": 1, "return_token_ids": True}
    answer = site.completion(["one a", "two b"], n=2, seed=2**64 - 2, **fields)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    for index, choice in enumerate(answer["choices"]):
        alone = site.completion(("one a", "two b")[index // 2], seed=(2**64 - 2 + index) % 2**64, **fields)
        assert choice["token_ids"] == alone["choices"][0]["token_ids"]
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) == 4


def test_streams_may_interleave_but_hold_the_same_choices(tiny: tuple[Site, Any]) -> None:
    site, _ = tiny
    body = {"prompt": ["one a", "two b", "three"], "n": 3, "seed": 5, "max_tokens": 8, "temperature": 1.2}
    stream = site.stream(COMPLETIONS, body)
    assert stream.done
    for choice in site.post(COMPLETIONS, body)["choices"]:
        chunks = stream.choices(choice["index"])
        assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
        assert [chunk["finish_reason"] for chunk in chunks][-1] == choice["finish_reason"]


def test_echo_gives_the_original_text_or_the_decoded_tokens(scripted: Site) -> None:
    assert scripted.completion("plain<|im_end|>", max_tokens=1, echo=True)["choices"][0]["text"].startswith(
        "plain<|im_end|>"
    )
    ids = list("naïve plain".encode())
    assert scripted.completion(ids, max_tokens=1, echo=True)["choices"][0]["text"] == "naïve plainhello"
    chunks = scripted.stream(COMPLETIONS, {"prompt": "plain", "max_tokens": 2, "echo": True}).choices()
    assert "".join(chunk["text"] for chunk in chunks) == "plainhello world"


def test_zero_tokens_need_no_engine(scripted: Site) -> None:
    body = {"prompt": ["plain", "emoji"], "n": 2, "max_tokens": 0, "echo": True}
    submitted = len(scripted.engine.generations)
    scripted.inline.engine.pause()
    try:
        answer = scripted.post(COMPLETIONS, body)
        stream = scripted.stream(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
        assert scripted.send("POST", COMPLETIONS, {"prompt": "plain"}).status == 503
    finally:
        scripted.inline.engine.resume()
    assert len(scripted.engine.generations) == submitted
    assert [choice["text"] for choice in answer["choices"]] == ["plain", "plain", "emoji", "emoji"]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (8, 0)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert stream.frames[-1]["usage"] == usage and stream.done


def test_prompts_count_once_and_cached_tokens_are_the_first_choices(tiny: tuple[Site, Any]) -> None:
    site, _ = tiny
    prompts = [[(3 * place + start) % 700 + 3 for place in range(50)] for start in (100, 300)]
    cold = site.completion(prompts, n=4, max_tokens=2)["usage"]
    assert cold["prompt_tokens"] == 100 and cold["completion_tokens"] == 16
    assert cold["prompt_tokens_details"]["cached_tokens"] == 0, "choices that shared the prefill don't count"
    warm = site.completion(prompts, n=4, max_tokens=2)["usage"]
    assert warm["prompt_tokens_details"]["cached_tokens"] == 2 * 48
    assert warm["total_tokens"] == 116


def test_every_child_is_prepared_before_any_runs(scripted: Site) -> None:
    submitted = len(scripted.engine.generations)
    message = scripted.refused(COMPLETIONS, {"prompt": ["plain", "plain", "too long " * 2000], "max_tokens": 1})
    assert "context" in message
    assert len(scripted.engine.generations) == submitted


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 2),
        ("suffix", "end"),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "auto"),
        ("thinking_token_budget", 5),
    ],
)
def test_what_raw_completions_refuse(scripted: Site, field: str, value: Any) -> None:
    assert field in scripted.refused(COMPLETIONS, {"prompt": "plain", field: value})


def test_best_of_may_equal_n(scripted: Site) -> None:
    assert len(scripted.completion("plain", n=3, best_of=3, max_tokens=1)["choices"]) == 3
    assert "best_of" in scripted.refused(COMPLETIONS, {"prompt": "plain", "n": 3, "best_of": 2})


def test_the_sdk_parses_every_shape(scripted: Site) -> None:
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="any", max_retries=0) as client:
        whole = client.completions.create(
            model="m", prompt=["emoji", "plain"], n=2, echo=True, logprobs=2, max_tokens=12, seed=1
        )
        assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
        arrays = whole.choices[0].logprobs
        assert arrays is not None and arrays.tokens is not None and arrays.text_offset is not None
        assert len(arrays.tokens) == len(arrays.text_offset) == 4 + 11
        parts = client.completions.create(
            model="m", prompt="emoji", stream=True, max_tokens=12, stream_options={"include_usage": True}
        )
        chunks = list(parts)
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "a🙂b the end"
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 12
        chat = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "reason"}], logprobs=True, top_logprobs=2, n=2
        )
        entries = chat.choices[1].logprobs
        assert entries is not None and entries.content is not None
        assert bytes(entries.content[0].bytes or []) == b"so" and len(entries.content[0].top_logprobs) == 2
        with pytest.raises(openai.BadRequestError, match="suffix"):
            client.completions.create(model="m", prompt="plain", suffix="x")
