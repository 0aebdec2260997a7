"""tokenizer.json from a GGUF file's metadata: byte-level BPE with known pre-tokenizers, and SentencePiece BPE.

Owns the translation only. A pre-tokenizer it doesn't know is an error, never a guess: wrong splits would look right
and cost quality. Sources: the GGUF specification and the published tokenizers that the names stand for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
_UNKNOWN: Final = 2

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")

_BYTE_LEVEL: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_BYTES_ONLY: Final = {**_BYTE_LEVEL, "use_regex": False}


def _splitting(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _BYTES_ONLY]}


_DIGITS: Final = {"type": "Digits", "individual_digits": True}
PRE_TOKENIZERS: Final[Mapping[str, dict[str, Any]]] = {
    "default": _BYTE_LEVEL,
    "gpt-2": _BYTE_LEVEL,
    "smollm": {"type": "Sequence", "pretokenizers": [_DIGITS, _BYTE_LEVEL]},
    "qwen2": _splitting(_QWEN2),
    "llama-bpe": _splitting(_LLAMA3),
    "llama3": _splitting(_LLAMA3),
}
_ADDS_BOS: Final = ("llama-bpe", "llama3")


def tokenizer_definition(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The content of tokenizer.json for the GGUF `metadata`. Raises ValueError saying what is missing or unknown."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not kind or not tokens:
        raise ValueError("the file holds no tokenizer (tokenizer.ggml.model and tokenizer.ggml.tokens)")
    if kind == "gpt2":
        definition = _byte_level(metadata, tokens)
    elif kind == "llama":
        definition = _sentence_piece(metadata, tokens)
    else:
        raise ValueError(f"tokenizer model {kind!r} is not supported; supported: gpt2, llama")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(metadata, tokens),
    } | definition


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise ValueError(f"pre-tokenizer {pre!r} is not supported; supported: {', '.join(PRE_TOKENIZERS)}")
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise ValueError("the file's tokenizer has no merges (tokenizer.ggml.merges)")
    model = bpe_model(_numbered(tokens), [merge.split(" ", 1) for merge in merges])
    model["ignore_merges"] = pre in _ADDS_BOS
    return {
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": PRE_TOKENIZERS[pre],
        "post_processor": _frame(metadata, tokens, default=pre in _ADDS_BOS),
        "decoder": _BYTE_LEVEL,
        "model": model,
    }


def _sentence_piece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    scores = metadata.get("tokenizer.ggml.scores")
    if not scores:
        raise ValueError("the file's tokenizer has no scores (tokenizer.ggml.scores)")
    model = bpe_model(_numbered(tokens), merges_by_score(tokens, scores, _types(metadata, tokens)))
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    model |= {"unk_token": tokens[unknown], "fuse_unk": True, "byte_fallback": True}
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    normalizers = [{"type": "Prepend", "prepend": "▁"}, spaces] if prefix else [spaces]
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    decoders: list[dict[str, Any]] = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": _frame(metadata, tokens, default=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def merges_by_score(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[list[str]]:
    """BPE merges that do what SentencePiece does: of all neighbouring pairs that form a piece, the best score first.

    Every way to cut a piece into two pieces is a merge of the piece's rank. Equal scores go by id.
    """
    usable = {
        token: number
        for number, token in enumerate(tokens)
        if len(types) <= number or types[number] not in (_UNKNOWN, CONTROL, UNUSED)
    }
    ranked: list[tuple[float, int, int, list[str]]] = []
    for token, number in usable.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in usable and right in usable:
                ranked.append((-scores[number], number, cut, [left, right]))
    ranked.sort(key=lambda entry: entry[:3])
    return [pair for _, _, _, pair in ranked]


def _numbered(tokens: Sequence[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}


def bpe_model(vocabulary: Mapping[str, int], merges: list[list[str]]) -> dict[str, Any]:
    """The "model" of a tokenizer.json: plain byte-pair encoding."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": dict(vocabulary),
        "merges": merges,
    }


def _types(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Sequence[int]:
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ValueError(f"the file's tokenizer has {len(tokens)} tokens but {len(types)} token types")
    return [int(kind) for kind in types]


def _added(metadata: Mapping[str, Any], tokens: Sequence[str]) -> list[dict[str, Any]]:
    frame = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": number, "content": tokens[number], **frame, "special": kind in (_UNKNOWN, CONTROL)}
        for number, kind in enumerate(_types(metadata, tokens))
        if kind in (_UNKNOWN, CONTROL, USER_DEFINED)
    ]


def _frame(metadata: Mapping[str, Any], tokens: Sequence[str], *, default: bool) -> dict[str, Any] | None:
    """A template that adds BOS and EOS where the file says so."""
    pieces: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    specials: dict[str, Any] = {}
    for name, before, wanted in (("bos", True, default), ("eos", False, False)):
        number = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if number is None or not metadata.get(f"tokenizer.ggml.add_{name}_token", wanted):
            continue
        token = tokens[number]
        specials[token] = {"id": token, "ids": [number], "tokens": [token]}
        pieces.insert(0 if before else len(pieces), {"SpecialToken": {"id": token, "type_id": 0}})
    if not specials:
        return None
    pair = [*pieces, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": pieces, "pair": pair, "special_tokens": specials}
