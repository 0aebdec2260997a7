"""Tokens' exact bytes, who may write control tokens, and tokenizers rebuilt from GGUF metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models, normalizers, trainers

from engine.gguf_tokenizer import tokenizer_definition
from engine.synthetic_tokenizer import synthetic_definition
from engine.text.tokenizer import Tokenizer, TokenTable, build_table, byte_alphabet

DEFINITION = synthetic_definition(["<|endoftext|>", "<|im_start|>"], ["<think>", "</think>", "\n\n", "<table>"])
TABLE = build_table(DEFINITION, 0)
TOKENIZER = Tokenizer(json.dumps(DEFINITION), TABLE)


@settings(deadline=None)
@given(st.text())
def test_any_text_round_trips_through_exact_bytes(text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    for specials in (False, True):
        ids = TOKENIZER.encode(text, specials=specials)
        assert b"".join(map(TABLE.bytes, ids)) == text.encode()
        assert TOKENIZER.decode(ids) == text


def test_control_tokens_come_only_from_trusted_text() -> None:
    think, start = TOKENIZER.token_id("<think>"), TOKENIZER.token_id("<|im_start|>")
    assert think is not None and start is not None
    assert TOKENIZER.encode("<|im_start|><think>", specials=True) == [start, think]
    spelled = TOKENIZER.encode("<|im_start|><think>", specials=False)
    assert not {think, start} & set(spelled)
    assert TOKENIZER.decode(spelled) == "<|im_start|><think>"
    mixed = TOKENIZER.encode_segments([("<think>", True), ("<think>", False), ("", True), ("<|im_start|>", True)])
    assert mixed[0] == think and mixed[-1] == start and think not in mixed[1:]


def test_merges_cannot_spell_a_control_token_either() -> None:
    definition = synthetic_definition([], ["xy"])
    definition["model"]["vocab"]["xy"] = definition["added_tokens"][0]["id"]
    definition["model"]["merges"].append(["x", "y"])
    tokenizer = Tokenizer(json.dumps(definition), build_table(definition, 0))
    assert tokenizer.encode("xy", specials=True) == [tokenizer.token_id("xy")]
    assert tokenizer.encode("xy", specials=False) == [ord("x"), ord("y")]


def test_ordinary_added_tokens_stay_ordinary() -> None:
    blank, table = TOKENIZER.token_id("\n\n"), TOKENIZER.token_id("<table>")
    assert TOKENIZER.encode("a\n\n<table>", specials=False)[1:] == [blank, table]
    assert blank is not None and not TABLE.is_control(blank)


def test_special_and_control_differ() -> None:
    end, think = TOKENIZER.token_id("<|endoftext|>"), TOKENIZER.token_id("<think>")
    assert end is not None and think is not None
    assert TABLE.is_special(end) and TABLE.is_control(end)
    assert not TABLE.is_special(think) and TABLE.is_control(think)
    assert not TABLE.is_control(0)
    assert TABLE.text(end) == "<|endoftext|>"
    assert TOKENIZER.token_id("<nothing>") is None


def test_a_partial_character_shows_as_a_replacement() -> None:
    assert TABLE.bytes(0xF0) == b"\xf0"
    assert TABLE.text(0xF0) == "\ufffd"


def test_the_table_survives_the_disk_and_refuses_what_is_not_one(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    padded = build_table(DEFINITION, TABLE.vocab_size + 5)
    padded.save(path)
    loaded = TokenTable.load(path)
    assert loaded.vocab_size == TABLE.vocab_size + 5
    for token in range(padded.vocab_size):
        assert loaded.bytes(token) == padded.bytes(token)
        assert loaded.is_special(token) == padded.is_special(token)
        assert loaded.is_control(token) == padded.is_control(token)
    assert loaded.bytes(TABLE.vocab_size + 1) == b""
    data = path.read_bytes()
    for broken in (b"", b"something else", data[:12], data[:500], data[:-1], data + b"x"):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match="token table"):
            TokenTable.load(path)


def test_the_byte_alphabet_is_a_bijection() -> None:
    assert sorted(byte_alphabet().values()) == list(range(256))
    assert byte_alphabet()["Ġ"] == 0x20 and byte_alphabet()["Ċ"] == 0x0A


def test_an_unknown_decoder_is_refused() -> None:
    with pytest.raises(ValueError, match="WordPiece"):
        build_table({**DEFINITION, "decoder": {"type": "WordPiece"}}, 0)


# SentencePiece


def _sentence_piece(**more: Any) -> tuple[dict[str, Any], LibraryTokenizer]:
    """Metadata of a small vocabulary, and the tokenizer it was trained with."""
    trained = LibraryTokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    corpus = ["the cat sat on the mat and the dog sat on the log"] * 3 + ["a banana and another banana bread"] * 2
    trained.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=80, show_progress=False))
    vocabulary = sorted(trained.get_vocab().items(), key=lambda entry: entry[1])
    frame = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = [piece for piece, _ in vocabulary]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*frame, *pieces, "<turn>"],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces), 4],
        "tokenizer.ggml.scores": [0.0] * len(frame) + [-float(index) for index in range(len(pieces))] + [0.0],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": False,
        **more,
    }
    return metadata, trained


@pytest.mark.parametrize("text", ["the cat sat", "banana bread and the dog", "nanana", "on the  mat"])
def test_sentence_piece_merges_by_score(text: str) -> None:
    metadata, trained = _sentence_piece()
    definition = tokenizer_definition(metadata)
    tokenizer = Tokenizer(json.dumps(definition), build_table(definition, 0))
    tokens = [metadata["tokenizer.ggml.tokens"][token] for token in tokenizer.encode(text, specials=True)]
    assert tokens == trained.encode(text).tokens
    assert tokenizer.decode(tokenizer.encode(text, specials=True)) == text


def test_sentence_piece_falls_back_to_bytes_and_frames_with_bos() -> None:
    metadata, _ = _sentence_piece()
    definition = tokenizer_definition(metadata)
    table = build_table(definition, 0)
    tokenizer = Tokenizer(json.dumps(definition), table)
    ids = tokenizer.encode("cat é<turn>", specials=True, add_special_tokens=True)
    assert ids[0] == 1 and ids[-1] == tokenizer.token_id("<turn>")
    assert [table.bytes(token) for token in ids[-3:-1]] == [b"\xc3", b"\xa9"]
    plain = tokenizer.encode("<turn>", specials=False, add_special_tokens=True)
    assert plain[0] == 1 and tokenizer.token_id("<turn>") not in plain
    assert tokenizer.encode("", specials=True, add_special_tokens=True) == [1]


def test_a_space_prefix_is_added_where_the_file_asks() -> None:
    metadata, _ = _sentence_piece(**{"tokenizer.ggml.add_space_prefix": True, "tokenizer.ggml.add_bos_token": False})
    definition = tokenizer_definition(metadata)
    tokenizer = Tokenizer(json.dumps(definition), build_table(definition, 0))
    assert tokenizer.decode(tokenizer.encode("the cat", specials=True, add_special_tokens=True)) == " the cat"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer model 'bert'"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer"),
        ({"tokenizer.ggml.scores": None}, "no scores"),
        ({"tokenizer.ggml.token_type": [1]}, "token types"),
        ({"tokenizer.ggml.model": "gpt2"}, "no merges"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "tekken"}, "pre-tokenizer 'tekken'"),
    ],
)
def test_what_a_file_lacks_is_named(change: dict[str, Any], message: str) -> None:
    metadata, _ = _sentence_piece(**change)
    with pytest.raises(ValueError, match=message):
        tokenizer_definition(metadata)


@pytest.mark.parametrize(
    ("pre", "parts"),
    [
        ("gpt-2", ["Ġabc", "Ġ", "Ġ12345", "Ġx", "'s", "ĊĊ"]),
        ("smollm", ["Ġabc", "ĠĠ", "1", "2", "3", "4", "5", "Ġx", "'s", "ĊĊ"]),
        ("qwen2", ["Ġabc", "Ġ", "Ġ", "1", "2", "3", "4", "5", "Ġx", "'s", "ĊĊ"]),
        ("llama-bpe", ["Ġabc", "Ġ", "Ġ", "123", "45", "Ġx", "'s", "ĊĊ"]),
    ],
)
def test_each_pre_tokenizer_splits_as_published(pre: str, parts: list[str]) -> None:
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [letters[byte] for byte in range(256)],
        "tokenizer.ggml.token_type": [1] * 256,
        "tokenizer.ggml.merges": [],
    }
    definition = tokenizer_definition(metadata)
    library = LibraryTokenizer.from_str(json.dumps(definition))
    assert library.pre_tokenizer is not None
    split = [part for part, _ in library.pre_tokenizer.pre_tokenize_str(" abc  12345 x's\n\n")]
    assert split == parts
