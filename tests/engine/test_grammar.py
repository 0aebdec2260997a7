"""Constraints: what compiles, what is refused and how fast, and what may be generated under them."""

from __future__ import annotations

import json
import random
import threading
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest

from engine.grammar import MAX_SOURCE, GrammarMatcher, Grammars
from engine.synthetic_tokenizer import synthetic_definition
from engine.text.tokenizer import Tokenizer, build_table
from engine.types.constraint import Constraint
from engine.types.request import RequestError

DEFINITION = synthetic_definition(["<eos>", "<|im_end|>"], ["<think>", "</think>", "<tool_call>"])
TEXT = json.dumps(DEFINITION)
TOKENS = build_table(DEFINITION, 0)
TOKENIZER = Tokenizer(TEXT, TOKENS)
EOS = TOKENIZER.token_id("<eos>")
GRAMMARS = Grammars(TEXT, TOKENS.vocab_size, [EOS or 0])


def schema(value: Any) -> Constraint:
    return Constraint("json_schema", json.dumps(value))


ENDING = [ord(char) for char in '"}],']


def generate(matcher: GrammarMatcher, seed: int, limit: int = 300) -> str | None:
    """A random answer that would rather end; None when it hasn't within `limit` tokens."""
    draw = random.Random(seed)
    ids: list[int] = []
    for _ in range(limit):
        bits = np.unpackbits(np.frombuffer(matcher.mask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        assert allowed
        if EOS in allowed:
            if len(allowed) == 1 or draw.random() < 0.5:
                return TOKENS.decode(ids)
            allowed.remove(EOS)
        ending = [token for token in ENDING if bits[token]]
        token = draw.choice(ending if ending and draw.random() < 0.5 else allowed)
        assert matcher.advance(token)
        ids.append(token)
    return None


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        (Constraint("json_object", ""), '{"a": [1, null, "x"]}', "[1]"),
        (schema(True), '[{"a": null}]', "[}"),
        (schema({"type": "integer", "minimum": 3, "maximum": 12}), "12", "13"),
        (schema({"enum": ["a b", 3, None]}), '"a b"', '"a"'),
        (schema({"type": ["string", "null"]}), "null", "1"),
        (Constraint("lark", 'start: "a" b+\nb: "x" | "y"'), "axyx", "a"),
        (Constraint("lark", 'start: "</think>" /[0-9]+/'), "</think>7", "1"),
        (Constraint("regex", "^[a-c]{2,3}$"), "abc", "abca"),
        (Constraint("choice", json.dumps(["yes", "no way", 'q"\\n\n', "日本"])), "日本", "no"),
    ],
)
def test_each_kind(constraint: Constraint, good: str, bad: str) -> None:
    GRAMMARS.check(constraint)
    assert GRAMMARS.validate(constraint, good) is None
    assert GRAMMARS.validate(constraint, bad) is not None


def test_masks_are_words_of_the_vocabulary() -> None:
    matcher = GRAMMARS.matcher(Constraint("choice", '["a"]'))
    assert len(matcher.mask()) == -(-TOKENS.vocab_size // 32) * 4
    assert matcher.allows(ord("a"))
    assert not matcher.allows(ord("b"))
    assert not matcher.allows(10**6)
    before = matcher.finished
    assert matcher.advance(ord("a"))
    assert (before, matcher.finished) == (False, True)
    assert [token for token in range(TOKENS.vocab_size) if matcher.allows(token)] == [EOS]


def test_a_token_that_the_grammar_refuses_is_noticed() -> None:
    matcher = GRAMMARS.matcher(Constraint("choice", '["ab"]'))
    assert not matcher.advance(ord("x"))


def test_copies_are_independent() -> None:
    constraint = Constraint("regex", "ab|cd")
    first, second = GRAMMARS.matcher(constraint), GRAMMARS.matcher(constraint)
    assert first.advance(ord("a"))
    assert second.allows(ord("c"))
    assert not first.allows(ord("c"))


def test_an_answer_may_hold_the_closing_token_as_text() -> None:
    matcher = GRAMMARS.matcher(Constraint("lark", 'start: "</think>" "a"'))
    close = TOKENIZER.token_id("</think>")
    assert close is not None
    assert matcher.allows(close)
    assert matcher.advance(close)
    assert matcher.allows(ord("a"))
    inside = GRAMMARS.matcher(schema({"type": "string"}))
    assert inside.advance(ord('"'))
    assert inside.allows(close)


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (Constraint("json_schema", "{"), "not valid JSON"),
        (Constraint("json_schema", "[]"), "must be an object or a boolean"),
        (Constraint("json_schema", "[" * 100_000), "not valid JSON"),
        (
            Constraint("json_schema", '{"items":' * 200 + "{}" + "}" * 200),
            "the JSON Schema is nested deeper than 120 levels",
        ),
        (Constraint("json_schema", r'{"const":"\ud800"}'), "the JSON Schema can't be read"),
        (schema({"type": "wibble"}), "Invalid type"),
        (schema({"$ref": "#/$defs/none"}), "does not exist"),
        (schema({"$ref": "https://example.com/schema"}), "not present"),
        (schema(False), "nothing can match"),
        (schema({"$ref": "#"}), "the JSON Schema"),
        (Constraint("lark", "start: ("), "Lark grammar"),
        (Constraint("lark", "start: start"), "Lark grammar"),
        (Constraint("lark", "x: /a/"), "Lark grammar"),
        (Constraint("regex", "("), "regular expression"),
        (Constraint("regex", "(?=a)b"), "regular expression"),
        (Constraint("choice", "[]"), "nonempty list"),
        (Constraint("choice", "[1]"), "nonempty list"),
        (Constraint("choice", "nope"), "not valid JSON"),
        (Constraint("choice", json.dumps([str(n) for n in range(10_001)])), "limit is 10000"),
        (Constraint("lark", "start: " + '"a" ' * 20_000), "the limit is"),
        (schema({"properties": {f"f{i}": {} for i in range(1001)}}), "1001 entries; the limit is 1000"),
        (Constraint("json_schema", " " * (MAX_SOURCE["json_schema"] + 1)), "the limit is"),
    ],
)
def test_bad_constraints_are_refused(constraint: Constraint, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        GRAMMARS.check(constraint)


@pytest.mark.parametrize(
    "value",
    [
        {"type": "array", "contains": {}},
        {"type": "array", "uniqueItems": True},
        {"type": "array", "unevaluatedItems": False},
        {"not": {"type": "integer"}},
        {"if": {}, "then": {}},
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        {"type": "object", "dependentSchemas": {"a": {}}},
        {"type": "object", "propertyNames": {"pattern": "^a"}},
        {"type": "object", "unevaluatedProperties": False},
        {"type": "string", "format": "wibble"},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"$dynamicRef": "#a"},
        {"x-guidance": {"lenient": True, "coerce_one_of": True}, "not": {"type": "integer"}},
        {"type": "object", "properties": {"a": {"x-guidance": {"lenient": True}, "not": {}}}},
    ],
)
def test_keywords_that_cant_be_enforced_are_refused_never_ignored(value: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="the JSON Schema"):
        GRAMMARS.check(schema(value))


def doubling(keyword: str) -> dict[str, Any]:
    definitions: dict[str, Any] = {f"n{i}": {keyword: [{"$ref": f"#/$defs/n{i + 1}"}] * 2} for i in range(40)}
    return {"$ref": "#/$defs/n0", "$defs": {**definitions, "n40": {"type": "integer"}}}


@pytest.mark.parametrize(
    "constraint",
    [
        schema({"type": "object", "properties": {f"f{i}": {"type": "string"} for i in range(10_000)}}),
        schema({"enum": [f"value {i}" for i in range(30_000)]}),
        schema({"type": "string", "pattern": "^(([a-z]{1,1000}){1,1000}){1,100}$"}),
        schema({"type": "array", "minItems": 10**9, "items": {"type": "string", "maxLength": 10**9}}),
        schema(doubling("allOf")),
        schema(doubling("anyOf")),
        schema({"allOf": [{"anyOf": [{"required": [f"k{i}{j}"]} for j in range(6)]} for i in range(12)]}),
        Constraint("json_schema", '{"type":"array","items":' * 20_000 + "{}" + "}" * 20_000),
        Constraint("lark", 'start: e\ne: e e | e e e | "a" | '),
        Constraint("lark", "start: " + '("a"? "b"? "c"?)' * 3000),
        Constraint("lark", 'start: ("a"~1..100000)~1..100000'),
        Constraint("regex", "(.{0,1000}a){0,1000}"),
        Constraint("regex", "(x+x+)+y"),
    ],
)
def test_exploding_constraints_end_within_the_limits(constraint: Constraint) -> None:
    """Refused or compiled, neither hanging; a compiled one keeps to what it allows."""
    try:
        matcher = GRAMMARS.matcher(constraint)
    except RequestError:
        return
    assert any(matcher.mask())


def test_the_next_mask_of_an_exploding_grammar_fails_the_answer_not_the_engine() -> None:
    """The cost of a step is bounded: once it is over, no token is allowed and `advance` says so."""
    matcher = GRAMMARS.matcher(Constraint("lark", "start: " + '("a"? "b"? "c"?)' * 180))
    outcomes = [matcher.advance(ord("c")) for _ in range(3)]
    assert outcomes[0] in (True, False)
    assert any(matcher.mask()) == outcomes[-1]


def test_a_compilation_over_the_time_limit_is_given_up() -> None:
    impatient = Grammars(TEXT, TOKENS.vocab_size, [EOS or 0], seconds=1e-6)
    wide = schema({"type": "object", "properties": {f"f{i}": {"type": "string"} for i in range(300)}})
    with pytest.raises(RequestError, match="takes longer than 1e-06 s"):
        impatient.check(wide)
    patient = Grammars(TEXT, TOKENS.vocab_size, [EOS or 0], workers=1, seconds=100)
    threads = [threading.Thread(target=patient.check, args=(wide,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    patient.check(wide)


def test_warming_builds_the_tokenizer_once_and_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    begun, allowed = threading.Event(), threading.Event()

    def slow(*arguments: Any, **fields: Any) -> Any:
        built.append(1)
        begun.set()
        assert allowed.wait(60)
        return real(*arguments, **fields)

    real = llguidance.LLTokenizer
    monkeypatch.setattr("engine.grammar.LLTokenizer", slow)
    grammars = Grammars(TEXT, TOKENS.vocab_size, [EOS or 0], seconds=100)
    grammars.warm()  # returns, although the tokenizer isn't there yet
    assert begun.wait(60)
    threads = [threading.Thread(target=grammars.check, args=(schema({"const": n}),)) for n in range(3)]
    for thread in threads:
        thread.start()
    allowed.set()
    for thread in threads:
        thread.join()
    assert grammars.matcher(schema({"const": 1})).allows(ord("1"))
    assert built == [1]


@pytest.mark.parametrize(
    ("constraint", "text", "problem"),
    [
        (
            Constraint("lark", 'start: "*** Begin" NL /[^*]+/ "*** End" NL\nNL: /\\r?\\n/'),
            "*** Begin\nx\n*** End\n",
            None,
        ),
        (Constraint("lark", 'start: "*** Begin" NL'), "*** Begin", "Lark|No|ends|rule|compiled|unknown"),
        (Constraint("regex", "é+"), "éé", None),
        (Constraint("regex", "é+"), "e", "unexpected text at byte 0"),
        (Constraint("regex", "ab"), "a", "ends too early"),
        (Constraint("regex", "ab"), "abc", "unexpected text at byte 2"),
        (Constraint("regex", "<think>"), "<think>", None),
    ],
)
def test_completed_text_is_validated_byte_for_byte(constraint: Constraint, text: str, problem: str | None) -> None:
    found = GRAMMARS.validate(constraint, text)
    if problem is None:
        assert found is None
    else:
        assert found is not None
        assert any(part in found for part in problem.split("|"))


def random_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """A satisfiable schema over the keywords that are enforced."""
    if depth >= 3 or draw.random() < 0.4:
        return draw.choice([_integer, _number, _string, _enum, _const])(draw)
    kind = draw.choice(["object", "object", "array", "tuple", "anyOf", "oneOf", "allOf", "$ref", "types"])
    inner = [random_schema(draw, depth + 1) for _ in range(draw.randint(1, 3))]
    if kind == "array":
        low = draw.randint(0, 2)
        return {"type": "array", "items": inner[0], "minItems": low, "maxItems": low + draw.randint(0, 2)}
    if kind == "tuple":
        return {"type": "array", "prefixItems": inner, "items": False, "minItems": len(inner)}
    if kind == "anyOf":
        return {"anyOf": inner}
    if kind == "oneOf":
        tagged = [{"type": "object", "properties": {"k": {"const": f"tag {i}"}, "v": s}} for i, s in enumerate(inner)]
        return {"oneOf": [{**value, "required": ["k", "v"], "additionalProperties": False} for value in tagged]}
    if kind == "allOf":
        parts = [{"type": "object", "properties": {f"p{i}": s}, "required": [f"p{i}"]} for i, s in enumerate(inner)]
        return {"allOf": parts}
    if kind == "$ref":
        return {"$ref": "#/$defs/shared", "$defs": {"shared": inner[0]}} if depth == 0 else inner[0]
    if kind == "types":
        return {"type": draw.sample(["integer", "string", "boolean", "null"], draw.randint(1, 3))}
    return _object(draw, inner)


def _object(draw: random.Random, inner: list[dict[str, Any]]) -> dict[str, Any]:
    names = [draw.choice(["a", "b c", 'd"e', "é", "</think>"]) + str(index) for index in range(len(inner))]
    value: dict[str, Any] = {"type": "object", "properties": dict(zip(names, inner, strict=True))}
    value["required"] = [name for name in names if draw.random() < 0.6]
    extra = draw.choice(["closed", "typed", "pattern", "counted"])
    if extra == "closed":
        value["additionalProperties"] = False
    elif extra == "typed":
        value["additionalProperties"] = {"type": "integer"}
    elif extra == "pattern":
        value["patternProperties"] = {"^x_[a-z]+$": {"type": "boolean"}}
        value["additionalProperties"] = False
    else:
        value |= {"required": names, "additionalProperties": {"type": "null"}, "maxProperties": len(names) + 1}
    return value


def _integer(draw: random.Random) -> dict[str, Any]:
    low = draw.randint(-50, 50)
    bounds = draw.choice([{}, {"minimum": low}, {"exclusiveMinimum": low, "maximum": low + 20}, {"multipleOf": 7}])
    return {"type": "integer", **bounds}


def _number(draw: random.Random) -> dict[str, Any]:
    low = draw.randint(-50, 50) / 4
    return {"type": "number", **draw.choice([{}, {"minimum": low}, {"exclusiveMaximum": low, "minimum": low - 9}])}


def _string(draw: random.Random) -> dict[str, Any]:
    low = draw.randint(0, 3)
    options: list[dict[str, Any]] = [
        {"minLength": low, "maxLength": low + draw.randint(0, 5)},
        {"pattern": "^[a-c]+(-[0-9]{2})?$"},
        {"pattern": "^[a-z]+$", "maxLength": 6},
        {"format": draw.choice(["ipv4", "uuid", "email"])},
    ]
    return {"type": "string", **draw.choice(options)}


def _enum(draw: random.Random) -> dict[str, Any]:
    return {"enum": draw.sample(["a", "b\n", 1, 2.5, None, True, {"k": [1]}, [], "é"], draw.randint(1, 4))}


def _const(draw: random.Random) -> dict[str, Any]:
    return {"const": draw.choice(["only", 7, None, {"a": {"b": []}}])}


def test_answers_under_generated_schemas_validate() -> None:
    finished = 0
    for seed in range(500):
        value = random_schema(random.Random(seed))
        answer = generate(GRAMMARS.matcher(schema(value)), seed)
        if answer is None:
            continue
        finished += 1
        try:
            jsonschema.validate(json.loads(answer), value, format_checker=jsonschema.FormatChecker())
        except (ValueError, jsonschema.ValidationError) as error:
            pytest.fail(f"seed {seed}: {answer!r} under {value}: {error}")
    assert finished > 400
