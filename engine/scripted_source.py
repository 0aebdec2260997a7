"""Reads a scripted model's file as a model source. The file's format is described in `engine.script`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from engine.checkpoint_files import ModelSourceError, read_json, token_id
from engine.prepare import Material, locate
from engine.recipes.catalog import RECIPES
from engine.script import Script, ScriptError, resolve_turn
from engine.synthetic_tokenizer import synthetic_definition
from engine.text.tokenizer import Tokenizer, build_table

_FIELDS: Final = (
    "model_id", "recipe", "context", "tokenizer", "vocab_size", "eos", "bos", "chat_template", "image_profile",
    "generation_config", "turns",
)  # fmt: skip


def dependencies(path: Path) -> list[Path]:
    """Files besides the script that its model is made from."""
    tokenizer = read_json(path).get("tokenizer")
    if not isinstance(tokenizer, Mapping):
        return []
    if "path" in tokenizer:
        return [path.parent / str(tokenizer["path"])]
    return [locate(f"builtin:{tokenizer['builtin']}").path] if "builtin" in tokenizer else []


def read_script(path: Path, model_id: str) -> Material:
    """Raises ModelSourceError naming the file and the field."""
    script = read_json(path)
    unknown = sorted(set(script) - set(_FIELDS))
    if unknown:
        raise ModelSourceError(f"{path}: {unknown[0]!r} is not a field of a script; fields: {', '.join(_FIELDS)}")
    recipe = str(script.get("recipe", "generic"))
    if recipe not in RECIPES:
        raise ModelSourceError(f"{path}: recipe {recipe!r} is not one of {', '.join(sorted(RECIPES))}")
    try:
        definition, template, eos = _tokenizer(script.get("tokenizer", {"synthetic": {}}), path)
        table = build_table(definition, int(script.get("vocab_size", 0)))
        tokenizer = Tokenizer(_text(definition), table)
        eos = _eos(script, definition, recipe, eos)
        if not eos:
            raise ScriptError("eos: the tokenizer has no token that ends generation; list one")
        turns = script.get("turns", [])
        if not isinstance(turns, list):
            raise ScriptError("turns must be a list")

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, specials=False)

        resolved = [
            resolve_turn(turn, f"turns[{index}]", encode, tokenizer.token_id) for index, turn in enumerate(turns)
        ]
        _check_ids(resolved, table.vocab_size)
    except (ScriptError, ValueError, TypeError, KeyError) as error:
        raise ModelSourceError(f"{path}: {error}") from error
    bos = script.get("bos")
    return Material(
        format="scripted",
        model_id=str(script.get("model_id", model_id)),
        config=_config(script, table.vocab_size),
        weights=(),
        tokenizer=definition,
        context=int(script.get("context", 4096)),
        vocab_size=table.vocab_size,
        bos_id=None if bos is None else token_id(definition, str(bos)),
        eos_ids=tuple(eos),
        template=script.get("chat_template", template),
        sampling=dict(script.get("generation_config", {})),
        script=Script(tuple(resolved), eos[0]),
        recipe=recipe,
    )


def _text(definition: Mapping[str, Any]) -> str:
    import json

    return json.dumps(definition, ensure_ascii=False)


def _tokenizer(value: Any, path: Path) -> tuple[dict[str, Any], str | None, list[int]]:
    """(definition, chat template, EOS ids) that the script's `tokenizer` names."""
    if not isinstance(value, Mapping) or len(value) != 1:
        raise ScriptError("tokenizer must be an object with one of builtin, path, synthetic")
    kind, choice = next(iter(value.items()))
    if kind == "builtin":
        from engine.gguf_source import read_gguf_source

        found = locate(f"builtin:{choice}")
        material = read_gguf_source(found.path, found.model_id)
        return material.tokenizer, material.template, list(material.eos_ids)
    if kind == "path":
        definition = read_json(path.parent / str(choice))
        if not definition:
            raise ScriptError(f"tokenizer.path: no file {path.parent / str(choice)}")
        return definition, None, []
    if kind == "synthetic":
        specials = choice.get("specials", ["<|endoftext|>"])
        return synthetic_definition(specials, choice.get("added", ())), None, []
    raise ScriptError(f"tokenizer.{kind} is not one of builtin, path, synthetic")


def _eos(script: Mapping[str, Any], definition: Mapping[str, Any], recipe: str, found: list[int]) -> list[int]:
    if "eos" in script:
        wanted = [str(token) for token in script["eos"]]
        ids = [token_id(definition, token) for token in wanted]
        missing = [token for token, number in zip(wanted, ids, strict=True) if number is None]
        if missing:
            raise ScriptError(f"eos: the tokenizer has no token {missing[0]!r}")
        return [number for number in ids if number is not None]
    stops = [token_id(definition, token) for token in RECIPES[recipe].stop_tokens]
    known = found or [number for number in stops if number is not None]
    specials = [int(entry["id"]) for entry in definition.get("added_tokens") or [] if entry.get("special")]
    return known or specials[:1]


def _check_ids(turns: list[Any], vocab_size: int) -> None:
    for index, turn in enumerate(turns):
        ids = [*turn.tokens, *(number for pairs in turn.logits.values() for number, _ in pairs)]
        wrong = [number for number in ids if not 0 <= number < vocab_size]
        if wrong:
            raise ScriptError(f"turns[{index}]: id {wrong[0]} is outside the vocabulary of {vocab_size}")


def _config(script: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """A config.json for the scheduler's arithmetic: one layer with one small head."""
    config = {
        "model_type": "scripted",
        "vocab_size": vocab_size,
        "max_position_embeddings": int(script.get("context", 4096)),
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "hidden_size": 8,
    }
    return config | ({"image_profile": script["image_profile"]} if "image_profile" in script else {})
