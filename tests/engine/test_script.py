"""Scripted models: pieces, the choice of a turn, and what a script may get wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.prepare import ModelSourceError, prepare
from engine.prepared import PreparedModel
from engine.script import Script, ScriptTurn
from tests.support.scripted import CHATML, Piece, prepared, script, spelled, times, token, turn


def test_pieces_become_ids(tmp_path: Path) -> None:
    output: list[Piece] = ["Hello <think>", token("<think>"), spelled("é"), {"id": 7}, times(2, " the")]
    model = prepared(tmp_path, [turn(*output)], recipe="qwen38", context=1_000_000)
    assert model.script is not None
    ids, encode = model.script.turns[0].tokens, model.tokenizer
    think, the = encode.token_id("<think>"), encode.token_id("Ġthe")
    text = encode.encode("Hello <think>", specials=False)
    assert list(ids) == [*text, think, 0xC3, 0xA9, 7, the, the]
    assert think not in text
    manifest = model.manifest
    assert (manifest.format, manifest.recipe, manifest.context, manifest.model_id) == (
        "scripted",
        "qwen38",
        1_000_000,
        "scripted",
    )
    assert manifest.eos_ids == [encode.token_id("<|im_end|>"), encode.token_id("<|endoftext|>")]
    assert model.script.eos == manifest.eos_ids[0]
    assert manifest.vocab_size == model.tokens.vocab_size


def test_the_text_that_occurs_last_answers(tmp_path: Path) -> None:
    turns = [turn("a"), turn("b", when="weather"), turn("c", when="result: 3"), turn("d", when="er")]
    model = prepared(tmp_path, turns)
    chosen = model.script
    assert chosen is not None

    def answer(prompt: str) -> str:
        return model.tokens.decode(chosen.select(prompt).tokens)

    assert answer("nothing") == "a"
    assert answer("the weather?") == "b"
    assert answer("the weather? result: 3") == "c"
    assert answer("result: 3 and the weather again") == "b"
    assert answer("other") == "d"
    assert Script((), 0).select("x") == ScriptTurn(())


def test_after_the_output_comes_eos_or_the_output_again() -> None:
    assert [ScriptTurn((1, 2)).token_at(place, 9) for place in range(4)] == [1, 2, 9, 9]
    assert [ScriptTurn((1, 2), then="repeat").token_at(place, 9) for place in range(4)] == [1, 2, 1, 2]
    assert ScriptTurn((), then="repeat").token_at(0, 9) == 9


def test_the_rank_reads_what_was_resolved(tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "delay_ms": 5,
        "prefill_delay_ms": 20,
        "fail_at": 3,
        "then": "repeat",
        "logits": {"0": {" the": 499.0, "#65": 498.5, "<think>": 1}},
    }
    model = prepared(tmp_path, [turn("x", when="go", **fields)])
    assert model.script is not None
    resolved = model.script.turns[0]
    the, think = model.tokenizer.token_id("Ġthe"), model.tokenizer.token_id("<think>")
    assert resolved.logits == {0: ((the, 499.0), (65, 498.5), (think, 1.0))}
    assert (resolved.delay_ms, resolved.prefill_delay_ms, resolved.fail_at, resolved.then) == (5, 20, 3, "repeat")


def test_real_tokenizers_and_larger_heads(tmp_path: Path) -> None:
    built_in = prepared(tmp_path, [turn(token("<|im_end|>"))], tokenizer={"builtin": "smollm2"}, vocab_size=60_000)
    assert built_in.script is not None and built_in.script.turns[0].tokens == (2,)
    assert built_in.manifest.vocab_size == built_in.tokens.vocab_size == 60_000
    assert built_in.manifest.eos_ids == [2, 0]
    assert built_in.template is not None
    assert built_in.tokenizer.encode("Hello world", specials=False) == [19556, 905]
    path = built_in.tokenizer_json
    by_path = prepared(tmp_path, [turn("Hello world")], name="other", tokenizer={"path": str(path)}, eos=["<|im_end|>"])
    assert by_path.script is not None and by_path.script.turns[0].tokens == (19556, 905)
    assert by_path.template is None


def test_a_changed_script_is_prepared_anew(tmp_path: Path) -> None:
    first = prepared(tmp_path, [turn("one")])
    assert prepared(tmp_path, [turn("one")]).path == first.path
    second = prepared(tmp_path, [turn("two")])
    assert second.path != first.path and second.manifest.digest != first.manifest.digest


def test_template_generation_config_and_profile_pass_through(tmp_path: Path) -> None:
    model = prepared(
        tmp_path,
        [],
        chat_template="T",
        generation_config={"temperature": 0.5},
        image_profile="qwen",
        bos="<|im_start|>",
    )
    assert model.template == "T" and model.manifest.config["image_profile"] == "qwen"
    assert model.recipe.sampling.temperature == 0.5
    assert model.manifest.bos_id == model.tokenizer.token_id("<|im_start|>")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"turns": [{"output": [{"token": "<nope>"}]}]},
            r"turns\[0\].output\[0\]: the tokenizer has no token '<nope>'",
        ),
        ({"turns": [{"output": [3]}]}, r"turns\[0\].output\[0\] must be a string or an object"),
        ({"turns": [{"output": [{"x": 1}]}]}, "needs one of text, spelled, token, id"),
        ({"turns": [{"output": [{"id": 10**6}]}]}, "id 1000000 is outside the vocabulary"),
        ({"turns": [{"output": "text"}]}, "output must be a list"),
        ({"turns": [{"when": 3}]}, "when must be a string or null"),
        ({"turns": [{"then": "stop"}]}, "then must be 'eos' or 'repeat'"),
        ({"turns": [{"answer": []}]}, "answer is not a field of a turn"),
        ({"turns": [{"logits": {"0": {"two words": 1}}}]}, "is not one token"),
        ({"turns": 5}, "turns must be a list"),
        ({"turns": [5]}, r"turns\[0\] must be an object"),
        ({"recipe": "gpt"}, "recipe 'gpt' is not one of"),
        ({"tokenizer": {"x": 1}}, "tokenizer.x is not one of"),
        ({"tokenizer": {"path": "none.json"}}, "none.json"),
        ({"eos": ["<nope>"]}, "eos: the tokenizer has no token '<nope>'"),
        ({"tokenizer": {"synthetic": {"specials": []}}}, "no token that ends generation"),
        ({"contxt": 5}, "'contxt' is not a field of a script"),
    ],
)
def test_mistakes_name_the_field(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(json.dumps({"tokenizer": CHATML, **fields}))
    with pytest.raises(ModelSourceError, match=message) as caught:
        prepare(f"scripted:{path}", tmp_path / "cache")
    assert str(tmp_path) in str(caught.value)


def test_a_script_without_a_tokenizer_gets_a_synthetic_one(tmp_path: Path) -> None:
    path = tmp_path / "bare.json"
    path.write_text("{}")
    model = PreparedModel.load(prepare(f"scripted:{path}", tmp_path / "cache"))
    assert model.manifest.model_id == "bare"
    assert model.tokens.text(model.manifest.eos_ids[0]) == "<|endoftext|>"
    assert script(tmp_path, []).startswith("scripted:")
