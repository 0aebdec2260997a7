"""Starts that must fail: one clear line, a status, nothing left running."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from serve_app.__main__ import StartFailed, cause, check_port, main
from serve_app.ingress.families import FAMILIES, PREFIXES
from serve_app.settings import Settings, SettingsError
from tests.support.graph import ROOT


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "serve_app", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def refused(*words: str) -> str:
    """The one line that a refused start prints."""
    done = run(*words)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line


def test_an_unknown_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prt=8000"]) == 2
    assert "unknown setting 'prt'" in capsys.readouterr().err


def test_a_word_without_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["port"]) == 2
    assert "key=value" in capsys.readouterr().err


def test_the_key_file_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, config = tmp_path / "key", tmp_path / "flare.toml"
    config.write_text('[server]\napi_key = "old"\n')
    keys: list[str] = []

    def run(settings: Settings, began: float) -> int:
        keys.append(settings.server.api_key)
        return 0

    monkeypatch.setattr("serve_app.__main__._run", run)
    monkeypatch.setattr("serve_app.__main__.check_port", lambda host, port: None)
    monkeypatch.setattr("serve_app.__main__.supervised", lambda work: work())
    for content in ("new\n", ""):
        key.write_text(content)
        assert main(["--api-key-file", str(key), f"config={config}"]) == 0
    assert main([f"config={config}"]) == 0
    assert keys == ["new", "", "old"]


def test_a_missing_model() -> None:
    line = refused("port=18999", "model=/nowhere/model")
    assert line.startswith("flare: model.source:")
    assert "/nowhere/model" in line


def test_a_corrupt_gguf(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 64)
    line = refused("port=18999", f"model={path}", f"cache_dir={tmp_path / 'cache'}")
    assert line.startswith("flare: model.source:")
    assert "broken.gguf" in line


def test_settings_that_the_model_cannot_keep(tmp_path: Path) -> None:
    line = refused("port=18999", "thinking_token_budget=100", f"cache_dir={tmp_path}")
    assert "thinking_token_budget" in line
    line = refused("port=18999", "context=10000000", f"cache_dir={tmp_path}")
    assert "engine.context" in line


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=rf"server\.port.*127\.0\.0\.1:{port}"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)
    with pytest.raises(SettingsError, match=r"server\.host"):
        check_port("203.0.113.7", port)


def test_the_cause_is_found_in_serves_account() -> None:
    message = (
        "The deployment failed to start 1 times in a row. Error:\n"
        "\x1b[36mray::ServeReplica:flare:Engine.initialize_and_get_metadata()\x1b[39m (pid=1)\n"
        '  File "replica.py", line 1, in initialize\n    raise RuntimeError(traceback.format_exc()) from None\n'
        "RuntimeError: Traceback (most recent call last):\n"
        "engine.parallel.ranks.RankGroupFailed: rank 0: ValueError: attention 'flash' needs CUDA\n"
    )
    assert cause(message) == "rank 0: ValueError: attention 'flash' needs CUDA"
    assert cause("something else") == "something else"
    assert str(StartFailed("x")) == "x"


def test_the_shipped_config_is_what_the_settings_render() -> None:
    """`cluster/serve/local.yaml` is the full layout, and so is what --print-config prints."""
    shipped = yaml.safe_load((ROOT / "cluster/serve/local.yaml").read_text())
    done = run("--print-config", "config=flare.toml") if (ROOT / "flare.toml").exists() else run("--print-config")
    printed = yaml.safe_load(done.stdout)
    for config in (shipped, printed):
        routes = {app["name"]: app["route_prefix"] for app in config["applications"]}
        assert routes.items() >= {name: PREFIXES[name] for name in FAMILIES}.items()
        assert routes["engine"] is None
        assert config["http_options"]["host"] == "127.0.0.1"
        for app in config["applications"]:
            assert app["import_path"] == f"serve_app.app:build_{app['name']}"
