"""Flare's engine as a contender: scheduler and one rank inline, no HTTP and no Ray."""

from __future__ import annotations

import gc
import json
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workloads import Request, Workload
from engine.config import EngineConfig, Manifest
from engine.engine import Engine
from engine.inline import Inline
from engine.prepare import default_cache_dir, prepare
from engine.types.request import OutputOptions, PreparedPrompt, SamplingParams

DUMMY_SEED = 0


def prepared_shape(config: dict[str, Any]) -> Path:
    """A prepared directory for a bare shape: a manifest without tokenizer and weights."""
    folder = Path(tempfile.mkdtemp(prefix="flare-shape-"))
    manifest = Manifest(
        model_id="shape",
        recipe="llama",
        format="safetensors",
        config=config,
        weights=[],
        context=int(config["max_position_embeddings"]),
        vocab_size=int(config["vocab_size"]),
        bos_id=None,
        eos_ids=[],
        sampling={},
        digest="0" * 64,
    )
    (folder / "manifest.json").write_text(json.dumps(asdict(manifest)))
    return folder


class FlareContender:
    """One engine configuration; each workload gets a fresh engine, its repeats share it."""

    def __init__(
        self, model: dict[str, Any], engine: dict[str, Any], numerics: str, attention: str, device: str, threads: int
    ) -> None:
        shape = model.get("config")
        self.prepared = prepared_shape(shape) if shape else prepare(model["source"], default_cache_dir())
        self.settings: dict[str, Any] = {
            "numerics": numerics,
            "attention": attention,
            "device": device,
            "threads": threads,
            "dtype": engine["dtype"] if shape else "auto",
            "weights_seed": DUMMY_SEED if shape else None,
            "tensor_parallel": engine["tensor_parallel"],
        }
        if shape:
            self.settings |= {"context": engine["max_model_len"], "prefill_chunk": 4096, "step_tokens": 8192}

    def run(self, workload: Workload, repeats: list[list[Request]]) -> list[dict[str, float | None]]:
        gc.collect()  # the engine before it may still hold its memory
        widest = max(len(requests) for requests in repeats)
        slots = min(widest, 256)
        config = EngineConfig(self.prepared, max_requests=slots, queue=max(widest, 256), **self.settings)
        with Engine.inline(config) as engine:
            return [time_run(engine, workload, requests) for requests in repeats]


def prompt_of(request: Request, sampling: dict[str, Any], seed: int) -> PreparedPrompt:
    params = SamplingParams(
        temperature=max(float(sampling["temperature"]), 0.01),
        top_p=float(sampling["top_p"]),
        top_k=-1,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        seed=seed,
    )
    return PreparedPrompt(
        token_ids=np.asarray(request.ids, np.int32),
        sampling=params,
        max_tokens=request.output,
        eos_ids=(),
        ignore_eos=True,
        output=OutputOptions(logprobs=sampling.get("logprobs")),
    )


def time_run(engine: Inline, workload: Workload, requests: list[Request]) -> dict[str, float | None]:
    """Wall clock from the first submission to the last token; "first" is when every request had its first token."""
    prompts = [prompt_of(request, workload.sampling, seed) for seed, request in enumerate(requests)]
    began = time.perf_counter()
    if any(request.arrival for request in requests):
        return _poisson(engine, requests, prompts, began)
    waiting = set(range(len(prompts)))
    first = 0.0
    for update in engine.stream(prompts):
        if waiting and update.records:
            waiting.discard(update.child)
            first = time.perf_counter() - began if not waiting else 0.0
    return {"seconds": time.perf_counter() - began, "first": first}


def _poisson(
    engine: Inline, requests: list[Request], prompts: list[PreparedPrompt], began: float
) -> dict[str, float | None]:
    """Requests arrive on their own clock; "first" is the median time to the first token of a request."""
    firsts = [0.0] * len(requests)

    def follow(index: int) -> None:
        started = time.perf_counter()
        for update in engine.stream([prompts[index]]):
            if update.records and not firsts[index]:
                firsts[index] = time.perf_counter() - started

    threads = []
    for index, request in enumerate(requests):
        time.sleep(max(0.0, began + request.arrival - time.perf_counter()))
        threads.append(threading.Thread(target=follow, args=(index,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return {"seconds": time.perf_counter() - began, "first": float(np.median(firsts))}
