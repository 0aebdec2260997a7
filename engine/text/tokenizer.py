"""Text to token ids, and token ids to their exact bytes.

Tokenizer wraps the `tokenizers` library and decides who may write control tokens. TokenTable is the id → bytes map,
built once at preparation and mapped from disk by every process. Leaves characters spread over tokens to
`engine.text.detokenize`.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from tokenizers import Tokenizer as LibraryTokenizer

from engine.text.pieces import Pieces

Segment = tuple[str, bool]
"""Text, and whether control tokens spelled in it are to be recognised."""

_MAGIC: Final = b"FLTOKENS1\n"
_SPECIAL: Final = 1
_CONTROL: Final = 2
_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_HTML: Final = re.compile(
    r"</?(?:table|caption|thead|tbody|tfoot|tr|th|td|h[1-6]|blockquote|strong|em|b|i|u|s|sub|sup|code|a|p|br|ul|ol|li)>"
)


class TokenTable:
    """Every id's exact bytes. Ids without a token (a padded output head) have none."""

    def __init__(self, pieces: Sequence[bytes], flags: bytes) -> None:
        self._pieces = list(pieces)
        self._flags = flags
        self.bytes = self._pieces.__getitem__
        """`bytes(id)`: the token's exact bytes. A bound method of a list: the output pipeline calls it per token."""

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    def text(self, token: int) -> str:
        """The token's bytes as text, U+FFFD where they aren't UTF-8."""
        return self._pieces[token].decode("utf-8", "replace")

    @cached_property
    def whole(self) -> list[str | None]:
        """Each token's text, None where its bytes alone aren't UTF-8."""
        return [_strict(piece) for piece in self._pieces]

    @cached_property
    def specials(self) -> frozenset[int]:
        return frozenset(number for number, flags in enumerate(self._flags) if flags & _SPECIAL)

    @cached_property
    def controls(self) -> frozenset[int]:
        return frozenset(number for number, flags in enumerate(self._flags) if flags & _CONTROL)

    def is_special(self, token: int) -> bool:
        """Declared special by the tokenizer: hidden from text where special tokens are skipped."""
        return bool(self._flags[token] & _SPECIAL)

    def is_control(self, token: int) -> bool:
        """Never produced by untrusted text: special tokens, and other added tokens that look like markup of a
        prompt format, such as <tool_call> (whitespace runs and HTML tags are ordinary text)."""
        return bool(self._flags[token] & _CONTROL)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, specials included; U+FFFD for what isn't UTF-8."""
        return b"".join(map(self.bytes, ids)).decode("utf-8", "replace")

    def save(self, path: Path) -> None:
        """Writes magic, count, byte offsets (uint32, count + 1), flags and all bytes."""
        offsets = np.zeros(len(self._pieces) + 1, "<u4")
        offsets[1:] = np.cumsum([len(piece) for piece in self._pieces])
        head = _MAGIC + struct.pack("<I", len(self._pieces))
        path.write_bytes(head + offsets.tobytes() + self._flags + b"".join(self._pieces))

    @classmethod
    def load(cls, path: Path) -> TokenTable:
        """Raises ValueError for a file that isn't a whole token table."""
        data = path.read_bytes()
        start = len(_MAGIC) + 4
        if not data.startswith(_MAGIC) or len(data) < start:
            raise ValueError(f"{path} is not a token table")
        count = struct.unpack_from("<I", data, len(_MAGIC))[0]
        flags_at = start + 4 * (count + 1)
        offsets = np.frombuffer(data, "<u4", count + 1, start).tolist() if len(data) >= flags_at else [0]
        blob = data[flags_at + count :]
        if len(offsets) != count + 1 or offsets[-1] != len(blob):
            raise ValueError(f"{path} is a truncated token table")
        pieces = [blob[begin:end] for begin, end in pairwise(offsets)]
        return cls(pieces, data[flags_at : flags_at + count])


def _strict(piece: bytes) -> str | None:
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return None


def build_table(definition: Mapping[str, Any], vocab_size: int) -> TokenTable:
    """The table of a tokenizer.json `definition`, `vocab_size` ids long or as long as the tokenizer needs.

    Byte-level BPE tokens are spelled in a 256-letter alphabet; SentencePiece ones write a space as U+2581 and single
    bytes as <0xHH>; added tokens are spelled as they are. Raises ValueError for another kind of decoder.
    """
    pieces: dict[int, bytes] = {}
    kind = _spelling(definition)
    for token, number in _vocabulary(definition):
        pieces[number] = _byte_level(token) if kind == "byte-level" else _sentence_piece(token)
    size = max(vocab_size, *(number + 1 for number in pieces))
    added = definition.get("added_tokens") or []
    size = max(size, *(int(entry["id"]) + 1 for entry in added)) if added else size
    flags = bytearray(size)
    for entry in added:
        number, content = int(entry["id"]), str(entry["content"])
        pieces[number] = content.encode("utf-8")
        flags[number] = _SPECIAL * bool(entry.get("special")) | _CONTROL * is_control(entry)
    return TokenTable([pieces.get(number, b"") for number in range(size)], bytes(flags))


def is_control(entry: Mapping[str, Any]) -> bool:
    """Whether an entry of `added_tokens` is a control token (see TokenTable.is_control)."""
    content = str(entry["content"])
    return bool(entry.get("special")) or not (content.isspace() or _HTML.fullmatch(content))


class Tokenizer:
    """Encodes text. `tokens` is the same model's table, for decoding."""

    def __init__(self, definition: str, tokens: TokenTable) -> None:
        self._definition = definition
        self._tokens = tokens
        self._full = LibraryTokenizer.from_str(definition)
        self._full.no_padding()
        self._full.no_truncation()

    @cached_property
    def _trusted(self) -> Pieces:
        added = json.loads(self._definition).get("added_tokens") or []
        return Pieces(self._full, added, _contents([entry for entry in added if is_control(entry)]))

    @cached_property
    def _plain(self) -> Pieces:
        """The same tokenizer without control tokens, so that no text can produce one. Made when a text spells one."""
        definition = json.loads(self._definition)
        definition.setdefault("added_tokens", [])
        kept = [entry for entry in definition["added_tokens"] if not is_control(entry)]
        if isinstance(definition["model"].get("vocab"), dict):
            # The library numbers added tokens anew unless the model knows them.
            definition["model"]["vocab"].update({entry["content"]: entry["id"] for entry in kept})
        _drop_merges(definition["model"], _contents(definition["added_tokens"]) - _contents(kept))
        plain = LibraryTokenizer.from_str(json.dumps({**definition, "added_tokens": kept, "post_processor": None}))
        plain.no_padding()
        plain.no_truncation()
        return Pieces(plain, kept)

    def encode(self, text: str, *, specials: bool, add_special_tokens: bool = False) -> list[int]:
        """Ids of `text`. `specials`: control tokens spelled in it become control tokens. `add_special_tokens`: the
        tokenizer's own frame (BOS and the like) is added."""
        if specials and add_special_tokens:
            return list(self._full.encode(text, add_special_tokens=True).ids)
        ids = self._trusted.encode(text)
        if specials:
            return ids
        if not self._tokens.controls.isdisjoint(ids):
            ids = self._plain.encode(text)
        return self._framed(ids) if add_special_tokens else ids

    def encode_segments(self, segments: Sequence[Segment]) -> list[int]:
        """Ids of the joined segments, each encoded by its own trust; nothing is added around them."""
        ids: list[int] = []
        for text, trusted in segments:
            ids += self.encode(text, specials=trusted)
        return ids

    def token_id(self, text: str) -> int | None:
        """The id of the token spelled exactly `text` (an added token, or a piece in the tokenizer's own alphabet)."""
        found = self._full.token_to_id(text)
        return int(found) if found is not None else None

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokens.decode(ids)

    def _framed(self, ids: list[int]) -> list[int]:
        """`ids` inside the tokenizer's frame, learned from an empty text: what comes before stays before."""
        frame = self._full.encode("", add_special_tokens=True).ids
        marked = self._full.encode("a", add_special_tokens=True).ids
        before = 0
        while before < len(frame) and frame[before] == marked[before]:
            before += 1
        return [*frame[:before], *ids, *frame[before:]]


def _contents(entries: Sequence[Mapping[str, Any]]) -> set[str]:
    return {str(entry["content"]) for entry in entries}


def _drop_merges(model: dict[str, Any], spellings: set[str]) -> None:
    """Takes out of a BPE `model` the merges that would spell a control token."""
    if "merges" in model:
        pairs = ((merge, merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in model["merges"])
        model["merges"] = [merge for merge, (left, right) in pairs if left + right not in spellings]
    model.pop("ignore_merges", None)


def _vocabulary(definition: Mapping[str, Any]) -> list[tuple[str, int]]:
    vocabulary = definition["model"].get("vocab") or {}
    if isinstance(vocabulary, Mapping):
        return [(str(token), int(number)) for token, number in vocabulary.items()]
    return [(str(entry[0]), number) for number, entry in enumerate(vocabulary)]  # Unigram: (piece, score)


def _spelling(definition: Mapping[str, Any]) -> str:
    kinds = set(_kinds(definition.get("decoder")))
    if "ByteLevel" in kinds:
        return "byte-level"
    if kinds & {"ByteFallback", "Metaspace"} or "▁" in json.dumps(definition.get("decoder"), ensure_ascii=False):
        return "sentence-piece"
    raise ValueError(f"the tokenizer's decoder {sorted(kinds)} is neither byte-level nor SentencePiece")


def _kinds(part: Any) -> list[str]:
    """Type names of a component and of the sequence in it."""
    if not isinstance(part, Mapping):
        return []
    inner = [kind for entry in part.get("decoders") or [] for kind in _kinds(entry)]
    return [str(part.get("type")), *inner]


@lru_cache(maxsize=1)
def byte_alphabet() -> dict[str, int]:
    """Letter → byte of byte-level BPE: printable Latin-1 stands for itself, the other bytes for U+0100 onwards, in
    order. Source: GPT-2's encoder."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain}
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(rest)}


def _byte_level(token: str) -> bytes:
    alphabet = byte_alphabet()
    try:
        return bytes([alphabet[letter] for letter in token])
    except KeyError:  # a token outside the alphabet is spelled as it is
        return token.encode("utf-8")


def _sentence_piece(token: str) -> bytes:
    byte = _BYTE_PIECE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode("utf-8")
