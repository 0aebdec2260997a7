"""Preparing a model source in a process of its own, since only that process may load torch and transformers.

Every node's first process to need a model prepares it; a lock in the cache directory makes the others wait for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from serve_app.settings import ModelSettings, SettingsError


def prepare(model: ModelSettings) -> Path:
    """The prepared directory of `model.source`, written now if needed. Raises SettingsError with one line of cause."""
    question = {
        "source": model.source,
        "recipe": model.recipe,
        "name": model.name,
        "cache_dir": None if model.cache_dir is None else str(model.cache_dir),
    }
    # The child finds the package where this process found it, wherever it was started.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-m", "serve_app.preparation"],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        cause = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise SettingsError(f"model.source: preparing {model.source!r} failed: {cause}")
    answer = json.loads(lines[-1])
    if "error" in answer:
        raise SettingsError(f"model.source: {answer['error']}")
    return Path(answer["prepared"])


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Holds the cache directory's lock."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Reads the question from stdin, answers with one JSON line on stdout."""
    from engine.prepare import ModelSourceError, default_cache_dir, prepare

    question = json.load(sys.stdin)
    directory = Path(question["cache_dir"]) if question["cache_dir"] else default_cache_dir()
    answer: dict[str, str]
    try:
        with locked(directory):
            prepared = prepare(question["source"], directory, recipe=question["recipe"], model_id=question["name"])
        answer = {"prepared": str(prepared)}
    except ModelSourceError as error:
        answer = {"error": str(error)}
    except OSError as error:
        answer = {"error": f"cache directory {directory}: {error}"}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
