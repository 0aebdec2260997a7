"""Scripted models: a model source that emits given tokens, so that a whole stack can be shown what no weights would.

A file `scripted:FILE` is one JSON object:

    model_id    checkpoint identifier (default: the file's stem)
    recipe      recipe name (default "generic")
    context     prompt plus output tokens (default 4096)
    tokenizer   {"builtin": "smollm2"} | {"path": "tokenizer.json"} | {"synthetic": {"specials": [...], "added": [...]}}
                (default: synthetic with "<|endoftext|>")
    vocab_size  rows of the output head (default: as many as the tokenizer has)
    eos         spellings of tokens that end generation (default: the recipe's stop tokens that exist, else the first
                special); bos   spelling of the BOS token (default none)
    chat_template   template text (default: the recipe's own)
    image_profile, generation_config    as in a checkpoint's files
    turns       the answers, see below

A turn: "when" is null or a text; of the turns whose text occurs in the rendered prompt, the one whose occurrence ends
last answers (the first listed of equals), a turn without "when" if none does. "output" is a list of pieces: a string
or {"text": …} is encoded without control tokens, {"spelled": …} one token a byte, {"token": "<x>"} is that token and
{"id": n} that id; any object may have "times". After the output comes EOS; with "then": "repeat" the output again,
without end. "delay_ms" passes before each decode step, "prefill_delay_ms" before the prompt's last chunk. "fail_at": n
gives the n-th output position logits that aren't finite. "logits" maps output positions to {"piece or #id": logit}
for alternatives; the scripted token has CHOSEN_LOGIT, all others 0.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

CHOSEN_LOGIT: Final = 500.0
"""Far enough above the rest that sampling takes it at any temperature and penalty over any vocabulary."""

Encode = Callable[[str], list[int]]
TokenId = Callable[[str], int | None]


class ScriptError(ValueError):
    """A script that isn't well formed. The message names the field."""


@dataclass(frozen=True, slots=True)
class ScriptTurn:
    """One answer, resolved to token ids. `logits`: output position → (id, logit) pairs."""

    tokens: tuple[int, ...]
    when: str | None = None
    then: Literal["eos", "repeat"] = "eos"
    delay_ms: float = 0.0
    prefill_delay_ms: float = 0.0
    fail_at: int | None = None
    logits: Mapping[int, tuple[tuple[int, float], ...]] = field(default_factory=dict)

    def token_at(self, position: int, eos: int) -> int:
        """The token at output `position` (0-based)."""
        if self.then == "repeat" and self.tokens:
            return self.tokens[position % len(self.tokens)]
        return self.tokens[position] if position < len(self.tokens) else eos


@dataclass(frozen=True, slots=True)
class Script:
    """What prepare leaves of a script for the rank: `turns` in file order and the id after an answer's end."""

    turns: tuple[ScriptTurn, ...]
    eos: int

    def select(self, prompt: str) -> ScriptTurn:
        """The turn that answers the rendered `prompt` text; an empty one if nothing matches."""
        best, best_end = ScriptTurn(()), -2
        for turn in self.turns:
            at = prompt.rfind(turn.when) if turn.when is not None else -1
            end = at + len(turn.when) if turn.when is not None and at >= 0 else -1
            if (turn.when is None or at >= 0) and end > best_end:
                best, best_end = turn, end
        return best

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Script:
        value = json.loads(path.read_text(encoding="utf-8"))
        turns = []
        for turn in value["turns"]:
            logits = {int(place): tuple((i, x) for i, x in pairs) for place, pairs in turn.pop("logits").items()}
            turns.append(ScriptTurn(**{**turn, "tokens": tuple(turn["tokens"]), "logits": logits}))
        return cls(tuple(turns), value["eos"])


def resolve_turn(value: Any, where: str, encode: Encode, token_id: TokenId) -> ScriptTurn:
    """A turn of the file with its pieces as ids. Raises ScriptError naming the field below `where`."""
    if not isinstance(value, Mapping):
        raise ScriptError(f"{where} must be an object")
    known = {"when", "output", "then", "delay_ms", "prefill_delay_ms", "fail_at", "logits"}
    unknown = sorted(set(value) - known)
    if unknown:
        raise ScriptError(f"{where}.{unknown[0]} is not a field of a turn; fields: {', '.join(sorted(known))}")
    when, then = value.get("when"), value.get("then", "eos")
    if not (when is None or isinstance(when, str)):
        raise ScriptError(f"{where}.when must be a string or null")
    if then not in ("eos", "repeat"):
        raise ScriptError(f"{where}.then must be 'eos' or 'repeat'")
    pieces = value.get("output", [])
    if not isinstance(pieces, list):
        raise ScriptError(f"{where}.output must be a list of pieces")
    tokens: list[int] = []
    for index, piece in enumerate(pieces):
        tokens += _piece(piece, f"{where}.output[{index}]", encode, token_id)
    fail_at = value.get("fail_at")
    return ScriptTurn(
        tokens=tuple(tokens),
        when=when,
        then=then,
        delay_ms=float(value.get("delay_ms", 0)),
        prefill_delay_ms=float(value.get("prefill_delay_ms", 0)),
        fail_at=None if fail_at is None else int(fail_at),
        logits=_logits(value.get("logits", {}), f"{where}.logits", encode, token_id),
    )


def _piece(piece: Any, where: str, encode: Encode, token_id: TokenId) -> list[int]:
    if isinstance(piece, str):
        return encode(piece)
    if not isinstance(piece, Mapping):
        raise ScriptError(f"{where} must be a string or an object")
    times = int(piece.get("times", 1))
    if "id" in piece:
        return [int(piece["id"])] * times
    if "token" in piece:
        return [_known(str(piece["token"]), where, token_id)] * times
    if "spelled" in piece:
        spelled = [number for byte in str(piece["spelled"]).encode() for number in _byte(byte, where, token_id)]
        return spelled * times
    if "text" in piece:
        return encode(str(piece["text"])) * times
    raise ScriptError(f"{where} needs one of text, spelled, token, id")


def _known(token: str, where: str, token_id: TokenId) -> int:
    number = token_id(token)
    if number is None:
        raise ScriptError(f"{where}: the tokenizer has no token {token!r}")
    return number


def _byte(byte: int, where: str, token_id: TokenId) -> list[int]:
    from engine.text.tokenizer import byte_alphabet

    letters = {value: letter for letter, value in byte_alphabet().items()}
    found = token_id(letters[byte])
    if found is None:
        found = token_id(f"<0x{byte:02X}>")
    if found is None:
        raise ScriptError(f"{where}: the tokenizer has no token for the byte {byte:#04x}")
    return [found]


def _logits(value: Any, where: str, encode: Encode, token_id: TokenId) -> dict[int, tuple[tuple[int, float], ...]]:
    if not isinstance(value, Mapping):
        raise ScriptError(f"{where} must be an object of output positions")
    result = {}
    for place, given in value.items():
        pairs = []
        for name, logit in given.items():
            if name.startswith("#"):
                number = int(name[1:])
            else:
                single = token_id(name)
                ids = [single] if single is not None else encode(name)
                if len(ids) != 1:
                    raise ScriptError(f"{where}.{place}: {name!r} is not one token")
                number = ids[0]
            pairs.append((number, float(logit)))
        result[int(place)] = tuple(pairs)
    return result
