"""The live server under test: the one named by FLARE_API_TEST_URL and FLARE_API_TEST_KEY, or one started here."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.graph import start_graph


@dataclass(frozen=True, slots=True)
class Server:
    """`key` is empty for a server without authentication."""

    url: str
    key: str

    @property
    def any_key(self) -> str:
        return self.key or "any"

    def get(self, path: str) -> Any:
        request = urllib.request.Request(self.url + path, headers={"authorization": f"Bearer {self.any_key}"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    @property
    def card(self) -> dict[str, Any]:
        found: dict[str, Any] = self.get("/v1/models")["data"][0]
        return found


def named() -> Server | None:
    """The server that the environment names, if it does."""
    url = os.environ.get("FLARE_API_TEST_URL", "").rstrip("/").removesuffix("/v1")
    return Server(url, os.environ.get("FLARE_API_TEST_KEY", "")) if url else None


@contextmanager
def scripted(folder: Path, script: Mapping[str, Any], *settings: str) -> Iterator[Server]:
    """A graph with a scripted model, stopped at the end."""
    file = folder / "script.json"
    file.write_text(json.dumps(script))
    graph = start_graph(folder / "server.log", f"model=scripted:{file}", *settings)
    try:
        yield Server(graph.url, "")
    finally:
        graph.stop()
