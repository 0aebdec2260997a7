"""What output constraints cost: the share of a decode step's processor time that goes into grammar masks.

    python -m benchmarks.masks [--streams 32] [--tokens 64] [--threads 1] [--prepared DIR]

Every stream of one inline engine answers under a JSON Schema. Counted as work on masks: advancing the grammars and
filling masks on the scheduler's thread, bringing them to the rank's tensors, and what sampling takes more than without
them. It is set against the processor time of the whole process in the same steps, so a busy machine changes little.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.machine import describe
from engine.config import EngineConfig
from engine.execution import runner as runner_module
from engine.execution.runner import Runner
from engine.inline import Inline
from engine.prepare import default_cache_dir, prepare
from engine.scheduler.guide import Guide
from engine.types.constraint import Constraint
from engine.types.request import PreparedPrompt, SamplingParams

SCHEMA: Final = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
        "kind": {"enum": ["novel", "play", "poem", "essay"]},
        "rating": {"type": "number"},
        "authors": {"type": "array", "minItems": 2, "items": {"$ref": "#/$defs/person"}},
        "summary": {"type": "string", "minLength": 400},
    },
    "required": ["title", "year", "kind", "rating", "authors", "summary"],
    "additionalProperties": False,
    "$defs": {
        "person": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "born": {"type": "integer"}, "alive": {"type": "boolean"}},
            "required": ["name", "born"],
        }
    },
}
COUNTED: Final[tuple[tuple[Any, str], ...]] = (
    (Guide, "commit"),
    (Guide, "mask"),
    (Runner, "_mask"),
    (runner_module, "sample"),
)


@dataclass
class Count:
    """Seconds of processor time, and calls, of one function."""

    seconds: float = 0.0
    calls: int = 0


def counted(owner: Any, name: str, count: Count) -> Callable[[], None]:
    """Counts the calls of a function until the returned function is called."""
    inner = getattr(owner, name)

    def timed(*arguments: Any, **fields: Any) -> Any:
        start = time.thread_time()
        try:
            return inner(*arguments, **fields)
        finally:
            count.seconds += time.thread_time() - start
            count.calls += 1

    setattr(owner, name, timed)
    return lambda: setattr(owner, name, inner)


def prompts(inline: Inline, streams: int, tokens: int, constraint: Constraint | None) -> list[PreparedPrompt]:
    text = "<|im_start|>user\nDescribe book number {} as JSON.<|im_end|>\n<|im_start|>assistant\n"
    return [
        PreparedPrompt(
            np.asarray(inline.model.tokenizer.encode(text.format(number), specials=True), np.int32),
            SamplingParams(0.7, 0.95, -1, 0.0, 1.0, 0.0, 0.0, number),
            tokens,
            tuple(inline.model.manifest.eos_ids),
            opening="content",
            constraint=constraint,
        )
        for number in range(streams)
    ]


def run(inline: Inline, streams: int, tokens: int, constraint: Constraint | None) -> dict[str, float]:
    """Milliseconds of processor time a step, in all and of each counted function."""
    counts = {name: Count() for _, name in COUNTED}
    steps = inline.engine.stats().steps
    restore = [counted(owner, name, counts[name]) for owner, name in COUNTED]
    start = time.process_time()
    inline.generate(prompts(inline, streams, tokens, constraint))
    seconds = time.process_time() - start
    for undo in restore:
        undo()
    taken = inline.engine.stats().steps - steps
    found = {name: count.seconds / taken * 1000 for name, count in counts.items()}
    return {"steps": taken, "step_ms": seconds / taken * 1000, **found}


def share(constrained: dict[str, float], free: dict[str, float]) -> float:
    """The part of a constrained step that is due to masks."""
    more = sum(constrained[name] - free[name] for _, name in COUNTED)
    return more / constrained["step_ms"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prepared", type=Path, default=None)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    prepared = asked.prepared or prepare("builtin:smollm2", default_cache_dir())
    config = EngineConfig(
        prepared=prepared, threads=asked.threads, max_requests=asked.streams, context=1024, kv_bytes=512 << 20
    )
    with Inline(config) as inline:
        constraint = Constraint("json_schema", json.dumps(SCHEMA))
        run(inline, asked.streams, 4, constraint)
        constrained = run(inline, asked.streams, asked.tokens, constraint)
        free = run(inline, asked.streams, asked.tokens, None)
    figures = {"constrained": constrained, "free": free, "share": round(share(constrained, free), 4)}
    print(json.dumps({"machine": describe(), "streams": asked.streams, **figures}, indent=1))


if __name__ == "__main__":
    main()
