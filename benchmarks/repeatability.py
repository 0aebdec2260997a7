"""Seeded answers of the demo model, token for token, whatever runs beside them and however prompts are cut.

    python -m benchmarks.repeatability [--prompts 20] [--tokens 64]

Not a timing: exits with 1 when a variant's tokens differ from each prompt's alone. The tests hold a smaller piece.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.machine import describe
from engine.config import EngineConfig
from engine.engine import Engine
from engine.prepare import default_cache_dir, prepare
from engine.prepared import PreparedModel
from engine.text.lowering import Lowering, ServingLimits
from engine.types.conversation import Conversation, Message, Text
from engine.types.request import GenerationRequest, PreparedPrompt, SamplingOverrides

TOPICS = ("rivers", "bread", "clocks", "maps", "violins", "glaciers", "beekeeping", "bridges", "chess", "comets")


def prompts(model: PreparedModel, count: int, tokens: int) -> list[PreparedPrompt]:
    """Prompts of 50 to 200 tokens with a seed each, at temperature 1."""
    lowering = Lowering(model, ServingLimits(context=1024, sampling=model.recipe.sampling))
    found: list[PreparedPrompt] = []
    for seed in range(count):
        text = f"Tell me {'something ' * (1 + 7 * (seed % 5))}about {TOPICS[seed % len(TOPICS)]}, number {seed}."
        conversation = Conversation((Message("user", (Text(text),)),))
        sampling = SamplingOverrides(seed=seed, temperature=1.0, top_p=0.95)
        request = GenerationRequest("chat", (conversation,), sampling=sampling, max_tokens=tokens, ignore_eos=True)
        found += lowering.prepare(request).children
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    path = prepare("builtin:smollm2", default_cache_dir())
    asked = prompts(PreparedModel.load(path), args.prompts, args.tokens)
    threads = int(describe()["cores"])

    def run(width: int, passes: int = 1, **settings: object) -> list[list[int]]:
        values = {"context": 1024, "kv_bytes": 128 << 20, "numerics": "invariant", "threads": threads, **settings}
        config = EngineConfig(path, **values)  # type: ignore[arg-type]
        with Engine.inline(config) as engine:
            for _ in range(passes):
                answers: list[list[int]] = []
                for start in range(0, len(asked), width):
                    answers += [choice.ids for choice in engine.choices(asked[start : start + width])]
            return answers

    alone = run(1, prefix_cache=False)
    variants = {
        "batch of 8": run(8, prefix_cache=False),
        "prefix cache, second pass": run(8, passes=2),
        "chunks of 16": run(8, prefix_cache=False, prefill_chunk=16),
        "chunks of 512": run(8, prefix_cache=False, prefill_chunk=512),
    }
    failed = False
    for name, answers in variants.items():
        same = sum(left == right for left, right in zip(alone, answers, strict=True))
        failed |= same != len(alone)
        print(f"{name}: {same} of {len(alone)} answers of {args.tokens} tokens equal to the same prompt alone")
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
