"""Preparation: every kind of source, the cache, concurrency, and a clear error for each thing that can be wrong."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import prepare as module
from engine.gguf_config import config_of
from engine.models.gguf import read_gguf
from engine.prepare import ModelSourceError, default_cache_dir, prepare
from engine.prepared import PreparedModel
from engine.synthetic_tokenizer import synthetic_definition
from tests.support.gguf_files import CONTROL, NORMAL, write_gguf

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def letters() -> list[str]:
    return [token for token, number in synthetic_definition()["model"]["vocab"].items() if number < 256]


def tiny_gguf(path: Path, **changes: Any) -> Path:
    tokens = [*letters(), "ab", *SPECIALS]
    fields: dict[str, Any] = {
        "tokens": tokens,
        "types": [NORMAL] * 257 + [CONTROL] * 3,
        "merges": ["a b"],
        "numbers": {"tokenizer.ggml.eos_token_id": 259, "tokenizer.ggml.bos_token_id": 258},
    }
    return write_gguf(path, **{**fields, **changes})


def safetensors(path: Path, size: int = 8) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))


def checkpoint(directory: Path, **changes: Any) -> Path:
    directory.mkdir(exist_ok=True)
    config = {"model_type": "qwen2", "vocab_size": 700, "max_position_embeddings": 256, "eos_token_id": 3}
    files: dict[str, Any] = {
        "config.json": config,
        "tokenizer.json": synthetic_definition(SPECIALS),
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "bos_token": None, "chat_template": "{{ messages }}"},
        "generation_config.json": {"eos_token_id": [5, 3], "temperature": 0.4, "top_k": 7},
    }
    for name, value in {**files, **changes}.items():
        if value is None:
            (directory / name).unlink(missing_ok=True)
        else:
            (directory / name).write_text(value if isinstance(value, str) else json.dumps(value))
    safetensors(directory / "model.safetensors")
    return directory


# Sources


def test_the_built_in_model(tmp_path: Path) -> None:
    model = PreparedModel.load(prepare("builtin:smollm2", tmp_path))
    manifest = model.manifest
    assert (manifest.model_id, manifest.recipe, manifest.format) == (
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "llama",
        "gguf",
    )
    assert (manifest.context, manifest.vocab_size, manifest.bos_id, manifest.eos_ids) == (8192, 49152, 1, [2, 0])
    assert {key: manifest.config[key] for key in ("hidden_size", "num_key_value_heads", "head_dim", "rope_theta")} == {
        "hidden_size": 576,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rope_theta": 100000.0,
    }
    assert manifest.config["tie_word_embeddings"] and manifest.config["rms_norm_eps"] == 1e-5
    assert (model.recipe.sampling.temperature, model.recipe.sampling.top_p) == (0.2, 0.9)
    assert model.template is not None and "SmolLM" in model.template
    ids = model.tokenizer.encode("<|im_start|>user\nI'd like 2024 apples, naïve 😀<|im_end|>", specials=True)
    assert ids == SMOLLM2_IDS
    assert model.tokenizer.decode(ids) == "<|im_start|>user\nI'd like 2024 apples, naïve 😀<|im_end|>"
    assert model.script is None


SMOLLM2_IDS = [1, 4093, 198, 57, 6737, 702, 216, 34, 32, 34, 36, 13855, 28, 15486, 46494, 40303, 218, 2]
"""As transformers tokenizes it."""


def test_a_checkpoint_directory(tmp_path: Path) -> None:
    model = PreparedModel.load(prepare(str(checkpoint(tmp_path / "tiny-model")), tmp_path / "cache"))
    manifest = model.manifest
    end = model.tokenizer.token_id("<|im_end|>")
    text_end = model.tokenizer.token_id("<|endoftext|>")
    assert (manifest.model_id, manifest.recipe, manifest.format) == ("tiny-model", "qwen2", "safetensors")
    # the tokenizer's EOS, generation_config's, config's, then the recipe's stop tokens
    assert manifest.eos_ids == [end, 5, 3, text_end]
    assert manifest.bos_id is None
    assert manifest.weights == [str(tmp_path / "tiny-model" / "model.safetensors")]
    assert (model.recipe.sampling.temperature, model.recipe.sampling.top_k) == (0.4, 7)
    assert model.template == "{{ messages }}"
    assert model.tokens.vocab_size == manifest.vocab_size == 700


def test_a_template_file_beats_the_settings_and_lists_name_a_default(tmp_path: Path) -> None:
    settings = {"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}
    source = checkpoint(tmp_path / "m", **{"tokenizer_config.json": settings})
    assert PreparedModel.load(prepare(str(source), tmp_path / "cache")).template == "D"
    (source / "chat_template.jinja").write_text("J")
    assert PreparedModel.load(prepare(str(source), tmp_path / "cache")).template == "J"


def test_bos_is_added_where_the_settings_ask(tmp_path: Path) -> None:
    settings = {"bos_token": {"content": "<|im_start|>"}, "add_bos_token": True}
    source = checkpoint(tmp_path / "m", **{"tokenizer_config.json": settings})
    model = PreparedModel.load(prepare(str(source), tmp_path / "cache"))
    bos = model.tokenizer.token_id("<|im_start|>")
    assert model.manifest.bos_id == bos
    assert model.tokenizer.encode("a", specials=True, add_special_tokens=True) == [bos, ord("a")]


def test_added_tokens_beyond_the_head_are_left_out(tmp_path: Path) -> None:
    definition = synthetic_definition(SPECIALS, ["<image>"])
    beyond = definition["added_tokens"][-1]["id"]
    config = {"model_type": "qwen2", "vocab_size": beyond, "max_position_embeddings": 64}
    source = checkpoint(tmp_path / "m", **{"tokenizer.json": definition, "config.json": config})
    model = PreparedModel.load(prepare(str(source), tmp_path / "cache"))
    assert model.tokenizer.token_id("<image>") is None
    assert model.tokens.vocab_size == beyond


def test_a_gguf_file_and_a_directory_with_one(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "tiny.Q4.gguf")
    model = PreparedModel.load(prepare(str(path), tmp_path / "cache"))
    assert (model.manifest.model_id, model.manifest.context, model.manifest.vocab_size) == ("tiny.Q4", 128, 260)
    assert model.manifest.eos_ids == [259, 257]
    assert model.manifest.sampling == {} and model.template is None
    other = PreparedModel.load(prepare(str(tmp_path), tmp_path / "cache", model_id="renamed"))
    assert other.manifest.model_id == "renamed"
    assert other.manifest.digest == model.manifest.digest


def test_architectures_in_config_terms(tmp_path: Path) -> None:
    weights = {
        "token_embd.weight": np.zeros((260, 32), np.float32),
        "output.weight": np.zeros((260, 32), np.float32),
        "blk.0.attn_q.bias": np.zeros(32, np.float32),
        "blk.0.attn_q_norm.weight": np.zeros(8, np.float32),
    }
    path = tiny_gguf(
        tmp_path / "q.gguf",
        architecture="qwen3",
        tensors=weights,
        floats={"qwen3.rope.freq_base": 5e5, "qwen3.rope.scaling.factor": 4.0},
        strings={"qwen3.rope.scaling.type": "linear"},
    )
    config = config_of(read_gguf(path))
    assert config["model_type"] == "qwen3" and config["head_dim"] == 8
    assert config["attention_bias"] and config["qk_norm"] and not config["tie_word_embeddings"]
    assert config["rope_theta"] == 5e5 and config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    gemma = config_of(read_gguf(tiny_gguf(tmp_path / "g.gguf", architecture="gemma3")))
    assert gemma["model_type"] == "gemma3_text" and gemma["hidden_act"] == "gelu_pytorch_tanh"
    assert gemma["layer_types"] == ["sliding_attention"] * 2 and gemma["rope_local_base_freq"] == 1e4


def test_a_recipe_override(tmp_path: Path) -> None:
    source = str(tiny_gguf(tmp_path / "tiny.gguf"))
    assert PreparedModel.load(prepare(source, tmp_path / "cache", recipe="qwen2")).recipe.name == "qwen2"
    with pytest.raises(ModelSourceError, match="'nope' is not one of"):
        prepare(source, tmp_path / "cache", recipe="nope")


# The cache


def test_a_second_start_reads_no_weights_and_a_changed_source_is_prepared_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_gguf(tmp_path / "tiny.gguf")
    first = prepare(str(source), tmp_path / "cache")
    with monkeypatch.context() as patched:
        patched.setattr(module, "_read", lambda located: pytest.fail("read again"))
        assert prepare(str(source), tmp_path / "cache") == first
    os.utime(source, ns=(1, 1))
    second = prepare(str(source), tmp_path / "cache")
    assert second != first
    assert PreparedModel.load(second).manifest.digest == PreparedModel.load(first).manifest.digest


def test_contents_change_the_digest(tmp_path: Path) -> None:
    one = PreparedModel.load(prepare(str(tiny_gguf(tmp_path / "a.gguf")), tmp_path / "cache"))
    changed = {"token_embd.weight": np.ones((260, 32), np.float32)}
    (tmp_path / "b").mkdir()
    two = PreparedModel.load(prepare(str(tiny_gguf(tmp_path / "b/a.gguf", tensors=changed)), tmp_path / "cache"))
    assert one.manifest.digest != two.manifest.digest


@pytest.mark.parametrize("damage", ["manifest.json", "tokens.bin"])
def test_a_damaged_directory_is_prepared_anew(tmp_path: Path, damage: str) -> None:
    source = str(tiny_gguf(tmp_path / "tiny.gguf"))
    prepared = prepare(source, tmp_path / "cache")
    (prepared / damage).unlink()
    assert prepare(source, tmp_path / "cache") == prepared
    assert PreparedModel.load(prepared).tokens.vocab_size == 260
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [prepared.name]


def test_concurrent_preparers_agree(tmp_path: Path) -> None:
    source = str(tiny_gguf(tmp_path / "tiny.gguf"))
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(prepare(source, tmp_path / "cache"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [found[0].name]


def test_torch_and_transformers_are_not_imported(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "tiny.gguf")
    code = (
        "import sys; from pathlib import Path; from engine.prepare import prepare;"
        "from engine.prepared import PreparedModel;"
        f"m = PreparedModel.load(prepare({str(tmp_path / 'tiny.gguf')!r}, Path({str(tmp_path / 'cache')!r})));"
        "m.tokens, m.tokenizer; assert not {'torch', 'transformers', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_default_cache_is_in_the_home_directory() -> None:
    assert default_cache_dir() == Path.home() / ".cache" / "flare"


# What can be wrong


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def cut_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:500])


def not_gguf(path: Path) -> None:
    path.write_bytes(b"PK\x03\x04" + bytes(100))


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncated, "truncated: tensor token_embd.weight"),
        (cut_header, "truncated"),
        (not_gguf, "isn't a GGUF file"),
        (empty, "isn't a GGUF file"),
    ],
)
def test_a_damaged_gguf(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf")
    damage(path)
    with pytest.raises(ModelSourceError, match=message) as caught:
        prepare(str(path), tmp_path / "cache")
    assert "tiny.gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba' is not supported"),
        ({"pre": "tekken"}, "pre-tokenizer 'tekken'"),
        ({"model": "bert"}, "tokenizer model 'bert'"),
        ({"tensors": {"other": np.zeros((2, 32), np.float32)}}, "token_embd.weight is missing"),
        ({"tensors": {"token_embd.weight": np.zeros((100, 32), np.float32)}}, "output head of 100 rows"),
        (
            {"tensors": {"token_embd.weight": np.zeros((260, 32), np.int16)}},
            "token_embd.weight has unsupported type I16",
        ),
        ({"tokens": ["a", "a"], "types": [1, 1]}, "2 tokens"),
        ({"merges": ["q z"]}, "tokenizer can't be loaded"),
        ({"numbers": {"split.count": 3}}, "one of 3 parts"),
    ],
)
def test_a_gguf_that_cannot_be_served(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf", **changes)
    with pytest.raises(ModelSourceError, match=message) as caught:
        prepare(str(path), tmp_path / "cache")
    assert "tiny" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config.json": None}, "has no config.json"),
        ({"config.json": "{"}, "config.json can't be read as JSON"),
        ({"config.json": "[]"}, "config.json must hold a JSON object"),
        ({"config.json": {"vocab_size": 700}}, "no positive max_position_embeddings"),
        ({"config.json": {"max_position_embeddings": 8, "vocab_size": "x"}}, "no positive vocab_size"),
        ({"config.json": {"max_position_embeddings": 8, "vocab_size": 100}}, "tokenizer has ids up to"),
        ({"tokenizer.json": None}, "has no tokenizer"),
        ({"tokenizer.json": "{}"}, "has no tokenizer"),
        ({"tokenizer.json": {"model": 3}}, "tokenizer.json is not a tokenizer"),
        ({"model.safetensors.index.json": {"weight_map": {"w": "part-1.safetensors"}}}, "lacks part-1.safetensors"),
    ],
)
def test_a_checkpoint_that_cannot_be_served(tmp_path: Path, changes: Mapping[str, Any], message: str) -> None:
    source = checkpoint(tmp_path / "model", **changes)
    with pytest.raises(ModelSourceError, match=message) as caught:
        prepare(str(source), tmp_path / "cache")
    assert str(tmp_path / "model") in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a whole safetensors file"),
        (struct.pack("<Q", 1 << 40) + bytes(100), "not a whole safetensors file"),
        (struct.pack("<Q", 5) + b"hello" + bytes(10), "corrupt safetensors header"),
        (struct.pack("<Q", 9) + b'{"w": {}}' + bytes(10), "corrupt safetensors header"),
    ],
)
def test_damaged_safetensors(tmp_path: Path, data: bytes, message: str) -> None:
    source = checkpoint(tmp_path / "model")
    (source / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelSourceError, match=message):
        prepare(str(source), tmp_path / "cache")
    safetensors(source / "model.safetensors", size=4)
    with pytest.raises(ModelSourceError, match="truncated: tensor w ends"):
        prepare(str(source), tmp_path / "cache")


def test_sources_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for source, message in (
        (str(tmp_path / "nothing"), "no model at"),
        ("builtin:gpt5", "no built-in model 'gpt5'; built in: smollm2"),
        (f"scripted:{tmp_path / 'x.json'}", "scripted model: no file"),
        (str(tmp_path), "holds no weights"),
    ):
        with pytest.raises(ModelSourceError, match=message):
            prepare(source, tmp_path / "cache")
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ModelSourceError, match=r"a file must be a \.gguf"):
        prepare(str(tmp_path / "a.txt"), tmp_path / "cache")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelSourceError, match=r"several .gguf files \(a.gguf, b.gguf\)"):
        prepare(str(tmp_path), tmp_path / "cache")


def test_the_hub_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(repository: str, **_: Any) -> str:
        raise LocalEntryNotFoundError(f"{repository}: no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelSourceError, match="can't download 'some/model' from the hub"):
        prepare("some/model", tmp_path)


def test_a_hub_snapshot_keeps_its_identifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    source = checkpoint(tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repository, **_: str(source))
    assert PreparedModel.load(prepare("some/model", tmp_path / "cache")).manifest.model_id == "some/model"


def test_loading_what_was_not_prepared(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match="not a prepared model"):
        PreparedModel.load(tmp_path)
    (tmp_path / "manifest.json").write_text('{"model_id": "x"}')
    with pytest.raises(ModelSourceError, match="not a prepared model"):
        PreparedModel.load(tmp_path)
