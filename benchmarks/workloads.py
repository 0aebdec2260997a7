"""Workloads as data: reads workloads.json and draws each run's requests (token ids in, token counts out)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Request:
    """Prompt ids, tokens to generate, and seconds after the start at which it arrives."""

    ids: list[int]
    output: int
    arrival: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    spec: dict[str, Any]
    sampling: dict[str, Any]

    @property
    def repeats(self) -> int:
        """Warm-ups plus counted runs."""
        return int(self.spec["warmup"]) + int(self.spec["runs"])

    def requests(self, repeat: int, vocab_size: int) -> list[Request]:
        """The requests of one repeat. Ids as the notes in workloads.json say, so no repeat hits another's prefix."""
        spec = self.spec
        rng = np.random.default_rng([spec["seed"], repeat])

        def draw(count: int) -> list[int]:
            return [int(token) for token in rng.integers(100, vocab_size - 2000, count)]

        if spec["kind"] == "prefix":
            shared = draw(spec["prefix"])
            return [Request(shared + draw(spec["unique"]), spec["output"]) for _ in range(spec["requests"])]
        if spec["kind"] == "poisson":
            gaps, clock, found = np.random.default_rng([spec["seed"], repeat]), 0.0, []
            while (clock := clock + float(gaps.exponential(1 / spec["rate"]))) < spec["duration"]:
                found.append(Request(draw(spec["input"]), spec["output"], clock))
            return found
        if "lengths" in spec:
            lengths = np.random.default_rng(spec["lengths"]["seed"])
            low, high = spec["lengths"]["input"]
            inputs = lengths.integers(low, high + 1, spec["requests"])
            low, high = spec["lengths"]["output"]
            outputs = lengths.integers(low, high + 1, spec["requests"])
            return [Request(draw(int(a)), int(b)) for a, b in zip(inputs, outputs, strict=True)]
        return [Request(draw(spec["input"]), spec["output"]) for _ in range(spec["requests"])]


def load(path: Path | None = None) -> tuple[dict[str, Any], dict[str, Workload]]:
    """(the whole document, workloads by name)."""
    document = json.loads((path or HERE / "workloads.json").read_text())
    return document, {
        name: Workload(name, spec, {**document["sampling"], **spec.get("sampling", {})})
        for name, spec in document["workloads"].items()
    }


def summarise(requests: list[Request], seconds: float, first: float | None) -> dict[str, float]:
    """Figures of one run: output and prompt tokens a second, and the time to the first token where known."""
    made = sum(request.output for request in requests)
    read = sum(len(request.ids) for request in requests)
    figures = {
        "seconds": round(seconds, 4),
        "output_tokens_per_second": round(made / seconds, 2),
        "prompt_tokens_per_second": round(read / seconds, 1),
    }
    if first is not None and made > len(requests):
        figures["first_token_s"] = round(first, 4)
        figures["decode_tokens_per_second"] = round((made - len(requests)) / (seconds - first), 2)
    return figures
