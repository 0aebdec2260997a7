"""Constraints compiled with llguidance: checked before admission, matched token by token in the engine.

Owns limits of size and time, the refusal of what llguidance can't enforce, and a cache of compiled grammars. A compiled
grammar is copied for each request (microseconds). When a constraint binds, and what may stand before the answer, is
the business of `engine.constrained`.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer as LibraryTokenizer

from engine.text.tokenizer import build_table
from engine.types.constraint import Constraint
from engine.types.nesting import deeper_than
from engine.types.request import RequestError

COMPILE_SECONDS: Final = 2.0
MAX_SOURCE: Final = {
    "json_object": 0,
    "json_schema": 512 * 1024,
    "lark": 64 * 1024,
    "regex": 64 * 1024,
    "choice": 256 * 1024,
}
"""Characters of a constraint's source, by kind."""
MAX_CHOICES: Final = 10_000
MAX_KEYS: Final = 1000
"""Entries of one object of a JSON Schema: the cost of optional properties grows with their square."""
MAX_SCHEMA_DEPTH: Final = 120
"""Levels of a JSON Schema; llguidance reads a few more."""
MAX_VALIDATED: Final = 8 * 1024 * 1024
"""Bytes of a completed text that `validate` looks at."""
T = TypeVar("T")
_CACHED: Final = 256
_STEP_ITEMS: Final = 10_000
"""Parser items of one mask; some tens of milliseconds in the worst case, far below one in any real schema."""
_WHITESPACE: Final = r"[ \n\t]{1,40}"
"""Between the tokens of a JSON text. Bounded, as a small model would go on for ever."""


class Matcher(Protocol):
    """A grammar's state after the tokens it was advanced with."""

    @property
    def finished(self) -> bool:
        """The text is complete and nothing but the end can follow."""
        ...

    def mask(self) -> bytes | None:
        """Allowed next tokens as uint32 words, little-endian, a set bit allows; EOS is among them where the text may
        end. None: any token."""
        ...

    def advance(self, token: int) -> bool:
        """Takes a committed token. False: the grammar doesn't allow it, or no token can follow."""
        ...

    def allows(self, token: int) -> bool: ...


class GrammarMatcher:
    """Matcher over one llguidance grammar. Its mask is worked out with the token before it, so that a grammar that has
    no next token, or is too costly for one, is noticed at once."""

    def __init__(self, native: LLMatcher, mask_bytes: int) -> None:
        self._native = native
        self._mask_bytes = mask_bytes
        self._mask: bytes | None = None

    def copy(self) -> GrammarMatcher:
        copied = GrammarMatcher(self._native.deep_copy(), self._mask_bytes)
        copied._mask = self._mask
        return copied

    @property
    def finished(self) -> bool:
        return bool(self._native.is_stopped()) and not self._native.is_error()

    @property
    def accepting(self) -> bool:
        """The text may end here."""
        return bool(self._native.is_accepting())

    @property
    def error(self) -> str:
        return _first_line(self._native.get_error()) if self._native.is_error() else ""

    def mask(self) -> bytes:
        if self._mask is None:
            bits = bytes(self._native.compute_bitmask())
            self._mask = bits[: self._mask_bytes].ljust(self._mask_bytes, b"\0")
        return self._mask

    def advance(self, token: int) -> bool:
        self._mask = None
        return bool(self._native.consume_token(token)) and any(self.mask()) and not self._native.is_error()

    def advance_all(self, tokens: Sequence[int]) -> bool:
        """`advance` for several tokens."""
        self._mask = None
        return bool(self._native.consume_tokens(list(tokens))) and any(self.mask()) and not self._native.is_error()

    def takes(self, tokens: Sequence[int]) -> bool:
        """Whether all of several tokens could come next. Works out no mask, so it costs microseconds."""
        return int(self._native.validate_tokens(list(tokens))) == len(tokens)

    def allows(self, token: int) -> bool:
        mask = self.mask()
        return 0 <= token < 8 * len(mask) and bool(mask[token // 8] >> (token % 8) & 1)


class Grammars:
    """Compiles and remembers constraints for one tokenizer. Thread-safe."""

    def __init__(
        self,
        tokenizer_json: str | Path,
        vocab_size: int,
        eos_ids: Sequence[int],
        *,
        workers: int = 2,
        seconds: float = COMPILE_SECONDS,
    ) -> None:
        """`tokenizer_json`: the path of a tokenizer.json, or its text. At most `workers` compile at the same time; one
        that takes longer than `seconds` is given up, and refused."""
        self._source = tokenizer_json
        self.vocab_size = vocab_size
        self.eos_ids = tuple(eos_ids)
        self._seconds = seconds
        self._places = threading.BoundedSemaphore(workers)
        self._lock = threading.Lock()
        self._building = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._bytes: LLTokenizer | None = None
        self._known: OrderedDict[Constraint, GrammarMatcher] = OrderedDict()

    def warm(self) -> None:
        """Builds the tokenizer, a second's work for a large vocabulary, on a thread of its own, so that the first
        constraint finds it. Returns at once; what needs it meanwhile waits for it."""
        threading.Thread(target=self._tokens, name="grammar-tokenizer", daemon=True).start()

    def check(self, constraint: Constraint) -> None:
        """Raises RequestError when `constraint` can't be compiled within the limits or not wholly enforced."""
        self._compiled(constraint)

    def matcher(self, constraint: Constraint) -> GrammarMatcher:
        """A matcher at the start of the answer. Raises RequestError as `check` does."""
        return self._compiled(constraint).copy()

    def lark(self, source: str) -> GrammarMatcher:
        """A matcher for a Lark grammar of our own."""
        return self.matcher(Constraint("lark", source))

    def encode(self, text: str) -> list[int]:
        """Tokens of plain text, for a matcher that must take text instead of tokens."""
        return list(self._tokens().tokenize_bytes(text.encode()))

    def validate(self, constraint: Constraint, text: str) -> str | None:
        """Why the whole of `text`, byte for byte, doesn't match `constraint`; None when it does."""
        data = text.encode("utf-8", "surrogatepass")
        if len(data) > MAX_VALIDATED:
            return f"the text exceeds {MAX_VALIDATED} bytes"

        def job() -> str | None:
            native = LLMatcher(self._byte_tokens(), _grammar(constraint), log_level=0, limits=_limits())
            if native.is_error():
                return _first_line(native.get_error())
            taken = native.try_consume_tokens(list(data))
            if taken < len(data):
                return f"unexpected text at byte {taken}"
            return None if native.is_accepting() else "the text ends too early"

        return self._within_limits(job)

    def _compiled(self, constraint: Constraint) -> GrammarMatcher:
        with self._lock:
            known = self._known.get(constraint)
            if known is not None:
                self._known.move_to_end(constraint)
                return known
        _check_size(constraint)
        self._tokens()  # not a part of the time limit
        matcher = self._within_limits(lambda: self._compile(constraint))
        with self._lock:
            self._known[constraint] = matcher
            while len(self._known) > _CACHED:
                self._known.popitem(last=False)
        return matcher

    def _compile(self, constraint: Constraint) -> GrammarMatcher:
        native = LLMatcher(self._tokens(), _grammar(constraint), log_level=0, limits=_limits())
        matcher = GrammarMatcher(native, -(-self.vocab_size // 32) * 4)
        if not matcher.error and not any(matcher.mask()):
            raise RequestError(f"{_name(constraint)}: nothing can match it")
        if matcher.error:
            raise RequestError(f"{_name(constraint)}: {matcher.error}")
        return matcher

    def _within_limits(self, job: Callable[[], T]) -> T:
        """Runs `job` on a thread of its own, given up after the time limit. Raises what it raises, or RequestError.
        A job that was given up keeps its place until it ends; llguidance's own limits see to that."""
        outcome: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                outcome.append(job())
            except BaseException as error:  # handed to the caller's thread
                errors.append(error)
            finally:
                self._places.release()

        self._places.acquire()
        thread = threading.Thread(target=run, name="grammar", daemon=True)
        thread.start()
        thread.join(self._seconds)
        if errors:
            raise errors[0]
        if not outcome:
            raise RequestError(f"the constraint takes longer than {self._seconds:g} s to compile: simplify it")
        return outcome[0]

    def _tokens(self) -> LLTokenizer:
        with self._building:
            if self._tokenizer is None:
                source = self._source
                text = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
                if not text.lstrip().startswith("{"):
                    text = Path(text).read_text(encoding="utf-8")
                wrapped = TokenizerWrapper(_Plain(text, self.vocab_size, self.eos_ids))
                self._tokenizer = LLTokenizer(wrapped, n_vocab=self.vocab_size, eos_token=list(self.eos_ids))
            return self._tokenizer

    def _byte_tokens(self) -> LLTokenizer:
        with self._building:
            if self._bytes is None:
                self._bytes = LLTokenizer(TokenizerWrapper(_Bytes()))
            return self._bytes


class _Plain:
    """The model's tokenizer as llguidance sees it: only tokens declared special are. A reasoning delimiter that isn't
    is text that an answer may hold, and text may tokenize to it."""

    bos_token_id = None

    def __init__(self, source: str, vocab_size: int, eos_ids: Sequence[int]) -> None:
        definition = json.loads(source)
        table = build_table(definition, vocab_size)
        kept = [entry for entry in definition.get("added_tokens") or [] if not entry.get("special")]
        if isinstance(definition["model"].get("vocab"), dict):
            # The library numbers added tokens anew unless the model knows them.
            definition["model"]["vocab"].update({entry["content"]: entry["id"] for entry in kept})
        self._tokenizer = LibraryTokenizer.from_str(
            json.dumps({**definition, "added_tokens": kept, "post_processor": None})
        )
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        special = set(eos_ids) | {token for token in range(table.vocab_size) if table.is_special(token)}
        self.eos_token_id = eos_ids[0]
        self.special_token_ids = sorted(token for token in special if token < vocab_size)
        self.tokens = [table.bytes(token) for token in range(vocab_size)]

    def __call__(self, text: bytes | str) -> list[int]:
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return list(self._tokenizer.encode(plain, add_special_tokens=False).ids)


class _Bytes:
    """A tokenizer whose tokens are the bytes, for byte-exact validation."""

    eos_token_id = 256
    bos_token_id = None
    tokens: Final = [*(bytes([byte]) for byte in range(256)), b"<eos>"]
    special_token_ids: Final = [256]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def _limits() -> LLParserLimits:
    return LLParserLimits(verbose_errors=False, step_max_items=_STEP_ITEMS)


def _check_size(constraint: Constraint) -> None:
    limit = MAX_SOURCE[constraint.kind]
    if len(constraint.source) > limit and constraint.kind != "json_object":
        raise RequestError(f"{_name(constraint)} has {len(constraint.source)} characters; the limit is {limit}")


def _grammar(constraint: Constraint) -> str:
    """llguidance's form of a constraint. Raises RequestError for a source that is none."""
    match constraint.kind:
        case "json_object":
            return _json_grammar({"type": "object"})
        case "json_schema":
            return _json_grammar(_schema(constraint.source))
        case "lark":
            return str(LLMatcher.grammar_from_lark(constraint.source))
        case "regex":
            return str(LLMatcher.grammar_from_regex(constraint.source))
        case "choice":
            return str(LLMatcher.grammar_from_regex(_choice_pattern(constraint)))


def _json_grammar(schema: dict[str, Any]) -> str:
    options = {"lenient": False, "coerce_one_of": False, "whitespace_pattern": _WHITESPACE}
    try:
        return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options))
    except (ValueError, RecursionError) as error:  # too deep for it, or lone surrogates
        raise RequestError(f"the JSON Schema can't be read: {error}") from error


def _schema(source: str) -> dict[str, Any]:
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the JSON Schema is not valid JSON: {error}") from error
    if schema is False:
        raise RequestError("the JSON Schema: nothing can match it")
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise RequestError("the JSON Schema must be an object or a boolean")
    schema.pop("x-guidance", None)  # would let a client loosen what is enforced
    _check_width(schema)
    if deeper_than(schema, MAX_SCHEMA_DEPTH):
        raise RequestError(f"the JSON Schema is nested deeper than {MAX_SCHEMA_DEPTH} levels")
    return schema


def _check_width(schema: dict[str, Any]) -> None:
    pending: list[Any] = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if len(value) > MAX_KEYS:
                raise RequestError(f"the JSON Schema has an object of {len(value)} entries; the limit is {MAX_KEYS}")
            pending += value.values()
        elif isinstance(value, list):
            pending += value


def _choice_pattern(constraint: Constraint) -> str:
    try:
        choices = json.loads(constraint.source)
    except ValueError as error:
        raise RequestError(f"the choice is not valid JSON: {error}") from error
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise RequestError("the choice must be a nonempty list of strings")
    if len(choices) > MAX_CHOICES:
        raise RequestError(f"the choice has {len(choices)} entries; the limit is {MAX_CHOICES}")
    return "|".join(f"(?:{''.join(map(_escaped, choice))})" for choice in choices)


def _escaped(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):X}}}"


def _name(constraint: Constraint) -> str:
    words = {"json_schema": "the JSON Schema", "lark": "the Lark grammar", "regex": "the regular expression"}
    return words.get(constraint.kind, f"the {constraint.kind}")


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and "non-verbose" not in line]
    return " ".join(lines)[:300] if lines else "it can't be compiled"
