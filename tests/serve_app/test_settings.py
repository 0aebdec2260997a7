"""Where settings come from, what they refuse, and what of them is shown."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from engine.recipes.recipe import SamplingTable
from serve_app.settings import Settings, SettingsError, cores, load, parse_arguments

ROOT = Path(__file__).resolve().parents[2]


def test_defaults() -> None:
    settings = load()
    assert (settings.server.host, settings.server.port) == ("127.0.0.1", 8000)
    assert settings.server.max_body_bytes == 32 * 2**20
    assert settings.server.api_key == ""
    assert settings.model.source == "builtin:smollm2"
    assert settings.server.thinking_token_budget is None


def test_toml_then_overrides(tmp_path: Path) -> None:
    path = tmp_path / "flare.toml"
    path.write_text(
        '[server]\nport = 9000\napi_key = "sk-file"\naliases = ["a", "b/c"]\n[engine]\ncontext = 4096\n'
        "[sampling.ranges]\ntemperature = [0.1, 1.5]\n"
    )
    settings = load({"config": str(path), "port": "9001", "engine.page_tokens": "32", "model": "scripted:x.json"})
    assert (settings.server.port, settings.engine.context, settings.engine.page_tokens) == (9001, 4096, 32)
    assert settings.server.aliases == ("a", "b/c")
    assert settings.server.api_key == "sk-file"
    assert settings.model.source == "scripted:x.json"
    assert settings.sampling.ranges == {"temperature": (0.1, 1.5)}


def test_nested_sections_of_yaml_arguments() -> None:
    settings = load({"server": {"port": 8123}, "engine": {"tensor_parallel": 2}, "logprobs.max_top": 5})
    assert (settings.server.port, settings.engine.tensor_parallel, settings.logprobs.max_top) == (8123, 2, 5)


def test_command_line_text_becomes_values() -> None:
    given = parse_arguments(
        ["aliases=one,two", "prefix_cache=false", "temperature=0.5", 'sampling.ranges={"top_p":[0.5,1]}', "seed=7"]
    )
    settings = load(given)
    assert settings.server.aliases == ("one", "two")
    assert settings.engine.prefix_cache is False
    assert settings.sampling.temperature == 0.5
    assert settings.sampling.ranges == {"top_p": (0.5, 1.0)}
    assert settings.sampling.seed == 7
    assert load({"aliases": '["x y", "z"]'}).server.aliases == ("x y", "z")
    assert load({"thinking_token_budget": "null"}).server.thinking_token_budget is None


@pytest.mark.parametrize("given", ["a, b", ' ["a", "b"]'.strip(), ",a,,b", ["", "a", " ", "b"], "[]", "", []])
def test_empty_names_are_left_out(given: object) -> None:
    assert load({"aliases": given}).server.aliases == (("a", "b") if len(given) > 2 else ())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lyout": "1"}, ["'lyout'", "'layout'"]),
        ({"engine.contxt": "1"}, ["'engine.contxt'", "'engine.context'"]),
        ({"nothing.port": "1"}, ["'nothing.port'"]),
        ({"port": "0"}, ["server.port"]),
        ({"port": "http"}, ["server.port", "'http'"]),
        ({"layout": "wide"}, ["graph.layout", "'wide'"]),
        ({"pace_seconds": "-0.1"}, ["server.pace_seconds", "-0.1"]),
        ({"pace_seconds": "1.5"}, ["server.pace_seconds", "1.5"]),
        ({"pace_seconds": "nan"}, ["server.pace_seconds"]),
        ({"thinking_token_budget": "0"}, ["server.thinking_token_budget"]),
        ({"thinking_token_budget": str(2**31)}, ["server.thinking_token_budget"]),
        ({"max_top": "21"}, ["logprobs.max_top"]),
        ({"temperature": "0"}, ["sampling.temperature"]),
        ({"sampling.ranges": '{"temperature":[0,1]}'}, ["sampling.ranges.temperature"]),
        ({"sampling.ranges": '{"top_p":[0.9,0.2]}'}, ["sampling.ranges.top_p", "above maximum"]),
        ({"sampling.ranges": "{"}, ["sampling.ranges", "JSON"]),
        ({"sampling.ranges": "{temperature:[0,1]}"}, ["sampling.ranges", '{"key":[0,1]}', "character 2"]),
        ({"aliases": "[a,b]"}, ["server.aliases", "a,b", '["a","b"]', "'[a,b]'"]),
        ({"aliases": '["a",b]'}, ["server.aliases", '["a","b"]', "character 6"]),
        ({"server": {"aliases": ["a", 1]}}, ["server.aliases.1", "1"]),
        ({"server": {"aliases": 3}}, ["server.aliases", "3"]),
        ({"step_tokens": "8"}, ["engine.step_tokens", "engine.max_requests"]),
        ({"server": {"prot": 1}}, ["'server.prot'", "server.port"]),
        ({"config": "/nowhere/flare.toml"}, ["config", "/nowhere/flare.toml"]),
        ({"api_key_file": "/nowhere/key"}, ["api_key_file"]),
    ],
)
def test_errors_name_the_key(given: dict[str, object], words: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        load(given)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_toml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "flare.toml"
    path.write_text("[server\n")
    with pytest.raises(SettingsError, match="not valid TOML"):
        load({"config": str(path)})
    path.write_text("[sever]\nport = 1\n")
    with pytest.raises(SettingsError, match=r"\[sever\]"):
        load({"config": str(path)})


def test_a_bad_key_is_never_echoed(tmp_path: Path) -> None:
    path = tmp_path / "flare.toml"
    path.write_text("[server]\napi_key = 123456789\n")
    with pytest.raises(SettingsError) as caught:
        load({"config": str(path)})
    assert "server.api_key" in str(caught.value)
    assert "123456789" not in str(caught.value)


def test_key_file_beats_the_file_and_an_empty_one_opens(tmp_path: Path) -> None:
    toml, key = tmp_path / "flare.toml", tmp_path / "key"
    toml.write_text('[server]\napi_key = "old"\n')
    key.write_text("new\n")
    assert load({"config": str(toml)}, api_key_file=key).server.api_key == "new"
    key.write_text("\n")
    assert load({"config": str(toml)}, api_key_file=key).server.api_key == ""
    key.write_text("third")
    assert load({"config": str(toml), "api_key_file": str(key)}).server.api_key == "third"


def test_arguments_need_a_value_once() -> None:
    with pytest.raises(SettingsError, match="key=value"):
        parse_arguments(["port"])
    with pytest.raises(SettingsError, match="twice"):
        parse_arguments(["port=1", "port=2"])


def test_layout_follows_the_machine() -> None:
    assert load({"layout": "full"}).layout == "full"
    assert load().layout == ("compact" if cores() < 8 else "full")


def test_engine_config_has_explicit_threads(tmp_path: Path) -> None:
    config = load({"tensor_parallel": "2", "kv_bytes": "1000000", "logprobs.prompt": "true"}).engine_config(tmp_path)
    assert config.threads == max(1, cores() // 2)
    assert (config.prepared, config.tensor_parallel, config.kv_bytes) == (tmp_path, 2, 1000000)
    assert config.logprobs.prompt is True
    assert load({"threads": "3"}).engine_config(tmp_path, "cpu").threads == 3


def test_operator_sampling_wins_and_must_fit_its_range() -> None:
    recipe = SamplingTable(temperature=1.0, top_p=0.95, ranges={"temperature": (0.7, 1.0)})
    table = load({"top_p": "0.5", "seed": "3"}).sampling_table(recipe)
    assert (table.temperature, table.top_p, table.seed) == (1.0, 0.5, 3)
    assert table.ranges == {"temperature": (0.7, 1.0)}
    with pytest.raises(SettingsError, match=r"sampling\.temperature.*0\.5.*outside"):
        load({"temperature": "0.5"}).sampling_table(recipe)
    wider = load({"temperature": "0.5", "sampling.ranges": '{"temperature":[0.1,2]}'}).sampling_table(recipe)
    assert wider.ranges["temperature"] == (0.1, 2.0)


def test_published_values_hold_no_key_and_no_path(tmp_path: Path) -> None:
    settings = load({"api_key": "sk-secret", "cache_dir": str(tmp_path), "model": str(tmp_path / "m")})
    published = settings.published(device="cpu", numerics="fast")
    assert "sk-secret" not in repr(published)
    assert str(tmp_path) not in repr(published)
    assert "sk-secret" not in repr(settings)
    assert (published["max_http_requests"], published["numerics"]) == (settings.server.max_http_requests, "fast")
    assert not {"host", "port", "api_key", "source", "cache_dir", "address"} & set(published)


def test_settings_are_frozen_and_picklable() -> None:
    import pickle

    settings = load({"port": "8123"})
    with pytest.raises(ValueError, match="frozen"):
        settings.server.port = 1
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert isinstance(settings, Settings)


def test_the_environment_changes_nothing() -> None:
    """Only the launcher may touch the environment, to hand Ray its own flags; it reads none."""
    for path in sorted((ROOT / "serve_app").rglob("*.py")) + sorted((ROOT / "cluster").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr == "getenv":
                raise AssertionError(f"{path.name}:{node.lineno} reads the environment")
            if not isinstance(node, ast.Subscript) or not isinstance(node.ctx, ast.Load):
                continue
            if isinstance(node.value, ast.Attribute) and node.value.attr == "environ":
                raise AssertionError(f"{path.name}:{node.lineno} reads the environment")
