"""A byte-level BPE tokenizer made from nothing: 256 bytes, merges of common words, and whatever tokens are asked for.

For scripted models of families whose own vocabulary isn't at hand. Any text round-trips, any string can be a control
token, and a word may be one token or many, as in a real vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from engine.gguf_tokenizer import bpe_model
from engine.text.tokenizer import byte_alphabet

WORDS: Final = (
    "the a an and of to in is it that for on with as this be are was not you have from or by at what which can will"
    " one all there their so if when where how who their has more about out up into than then other some time no its"
    " answer question weather city call tool name value user system assistant Paris France capital hello world yes"
)


def synthetic_definition(specials: Sequence[str] = (), added: Sequence[str] = ()) -> dict[str, Any]:
    """The content of a tokenizer.json. Ids: bytes 0–255 by value, merged words, then `specials`, then `added` tokens
    (control tokens that text output shows, such as <tool_call>)."""
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    vocabulary = {letters[byte]: byte for byte in range(256)}
    merges: list[list[str]] = []
    # Words with their space first: their merges all grow from the space, so none can break another.
    for spelled in [" " + word for word in WORDS.split()] + WORDS.split():
        text = "".join(letters[byte] for byte in spelled.encode("utf-8"))
        for end in range(2, len(text) + 1):
            if text[:end] not in vocabulary:
                vocabulary[text[:end]] = len(vocabulary)
                merges.append([text[: end - 1], text[end - 1]])
    entries = [(token, True) for token in specials] + [(token, False) for token in added]
    frame = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": len(vocabulary) + index, "content": token, **frame, "special": special}
            for index, (token, special) in enumerate(dict(entries).items())
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": bpe_model(vocabulary, merges),
    }
