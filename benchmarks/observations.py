"""What observations and filters cost: log probabilities beside tokens, prompt scores beside a prefill, top-p rows.

    python -m benchmarks.observations [--only logprobs,scores,memory,filters] [--repeats 5] [--threads 2]

Plain and observed runs alternate in one process, so that a busy machine burdens both. Figures are medians of wall
clock and of this process's CPU time; ratios are observed over plain. Prints one JSON object a measurement.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from benchmarks.machine import describe
from engine.config import EngineConfig
from engine.inline import Inline
from engine.prepare import default_cache_dir, prepare
from engine.types.request import OutputOptions, PreparedPrompt, SamplingParams

SOURCE: Final = "builtin:smollm2"
REQUESTS: Final = 64
PROMPT, OUTPUT = 32, 32
VOCABULARY: Final = 151_936
TOP_P: Final = SamplingParams(0.8, 0.95, -1, 0.0, 1.0, 0.0, 0.0, 1)


@dataclass(frozen=True, slots=True)
class Taken:
    """Seconds by the clock and of this process's CPU."""

    wall: float
    cpu: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="logprobs,scores,memory,filters")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--long", type=int, default=8191, help="prompt tokens to score (default: the whole context)")
    parser.add_argument("--peak", choices=["plain", "scored"], help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.peak:
        print(peak(asked.peak == "scored", asked))
        return
    print(json.dumps({"machine": describe()}), flush=True)
    measurements: dict[str, Callable[[argparse.Namespace], Iterator[dict[str, Any]]]] = {
        "logprobs": logprobs,
        "scores": scores,
        "memory": memory,
        "filters": filters,
    }
    for name in asked.only.split(","):
        for found in measurements[name](asked):
            print(json.dumps({"measurement": name, **found}), flush=True)


def logprobs(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """64 requests decoded together, with 20 alternatives a token and without."""
    generator = np.random.default_rng(7)
    starts = generator.integers(3, 40_000, (REQUESTS, PROMPT), dtype=np.int32)
    with demo(asked.threads, max_requests=REQUESTS) as inline:

        def run(count: int | None) -> Taken:
            output = OutputOptions(logprobs=count)
            prompts = [prompt(ids, OUTPUT, output, seed) for seed, ids in enumerate(starts)]
            return taken(lambda: inline.generate(prompts))

        yield compared(run, {"plain": None, "twenty": 20}, asked.repeats)


def scores(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One long prompt without and with scores."""
    with demo(asked.threads, prefix_cache=False) as inline:

        def run(count: int | None) -> Taken:
            return taken(lambda: inline.generate([long_prompt(asked.long, count)]))

        inline.generate([long_prompt(100, 20)])  # warms up: a whole run is long enough not to need one of its own
        repeats = max(1, asked.repeats // 2)
        yield {"tokens": asked.long, **compared(run, {"plain": None, "twenty": 20}, repeats, warm_up=False)}


def memory(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Peak memory of a process that prefills a long prompt, without and with scores."""
    peaks = {}
    for name in ("plain", "scored"):
        command = [sys.executable, "-m", "benchmarks.observations", "--peak", name, "--threads", str(asked.threads)]
        command += ["--long", str(asked.long)]
        peaks[name] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    yield {"tokens": asked.long, "mib": peaks, "extra_mib": round(peaks["scored"] - peaks["plain"], 1)}


def peak(scored: bool, asked: argparse.Namespace) -> float:
    """This process's greatest resident size, in MiB, after one long prompt."""
    with demo(asked.threads, prefix_cache=False) as inline:
        inline.generate([long_prompt(asked.long, 20 if scored else None)])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def filters(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Milliseconds a row of sampling at a vocabulary of 152k, with top-p and without: over logits whose probabilities
    fall with their rank, as a language model's do, and over nearly flat ones, the worst case."""
    import torch

    from engine.execution.sampler import sample
    from engine.execution.sampling_state import SamplingState
    from engine.scheduler.step import SlotSetup

    torch.set_num_threads(asked.threads)
    plain = SamplingParams(0.8, 1.0, -1, 0.0, 1.0, 0.0, 0.0, 1)
    for shape in ("ranked", "flat"):
        for name, params in (("top_p", TOP_P), ("unfiltered", plain)):
            for rows in (1, 16, 64):
                logits = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(1)) / 2
                if shape == "ranked":
                    logits = -1.5 * (logits.argsort(1).argsort(1) + 1).float().log()
                state = SamplingState(rows, VOCABULARY)
                for slot in range(rows):
                    state.bind(SlotSetup(slot, params, 0, 0))
                ready = state.rows(range(rows), torch.arange(rows))
                times = [taken(partial(sample, logits, ready)) for _ in range(3 * asked.repeats)]
                best = min(time.cpu for time in times)
                middle = statistics.median(time.wall for time in times)
                yield {
                    "logits": shape,
                    "filter": name,
                    "rows": rows,
                    "ms_a_row": round(1000 * middle / rows, 3),
                    "cpu_ms_a_row": round(1000 * best / rows, 3),
                }


# ---- parts ----


def demo(threads: int, **engine: Any) -> Inline:
    prepared = prepare(SOURCE, default_cache_dir())
    return Inline(EngineConfig(prepared, device="cpu", threads=threads, kv_bytes=512 << 20, **engine))


def prompt(ids: Any, tokens: int, output: OutputOptions, seed: int) -> PreparedPrompt:
    sampling = SamplingParams(0.8, 0.95, -1, 0.0, 1.0, 0.0, 0.0, seed)
    return PreparedPrompt(np.asarray(ids, np.int32), sampling, tokens, eos_ids=(), ignore_eos=True, output=output)


def long_prompt(tokens: int, alternatives: int | None) -> PreparedPrompt:
    ids = np.random.default_rng(3).integers(3, 40_000, tokens, dtype=np.int32)
    return prompt(ids, 1, OutputOptions(prompt_logprobs=alternatives), 1)


def taken(work: Callable[[], Any]) -> Taken:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Taken(time.perf_counter() - wall, time.process_time() - cpu)


def compared(
    run: Callable[[Any], Taken], kinds: dict[str, Any], repeats: int, *, warm_up: bool = True
) -> dict[str, Any]:
    """Alternating runs of each kind, one of each first to warm up; medians and their ratios to the first kind's."""
    for kind in kinds.values() if warm_up else ():
        run(kind)
    found: dict[str, list[Taken]] = {name: [] for name in kinds}
    for _ in range(repeats):
        for name, kind in kinds.items():
            found[name].append(run(kind))
    wall = {name: statistics.median(each.wall for each in times) for name, times in found.items()}
    cpu = {name: statistics.median(each.cpu for each in times) for name, times in found.items()}
    first = next(iter(kinds))
    return {
        "wall_s": {name: round(value, 3) for name, value in wall.items()},
        "cpu_s": {name: round(value, 3) for name, value in cpu.items()},
        "wall_ratio": {name: round(value / wall[first], 3) for name, value in wall.items() if name != first},
        "cpu_ratio": {name: round(value / cpu[first], 3) for name, value in cpu.items() if name != first},
    }


if __name__ == "__main__":
    main()
