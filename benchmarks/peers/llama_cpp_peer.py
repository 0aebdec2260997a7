"""llama.cpp through llama-cpp-python's low-level calls: one batch for all streams, its own sampler chain (top-p)."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def decode(lib: Any, context: Any, batch: Any, rows: list[tuple[int, int, int, bool]]) -> None:
    """Decodes rows of (token, position, sequence, wants logits)."""
    batch.n_tokens = len(rows)
    for index, (token, position, sequence, logits) in enumerate(rows):
        batch.token[index] = token
        batch.pos[index] = position
        batch.n_seq_id[index] = 1
        batch.seq_id[index][0] = sequence
        batch.logits[index] = logits
    if lib.llama_decode(context, batch) != 0:
        raise RuntimeError("llama_decode failed")


def run(lib: Any, context: Any, sampler: Any, requests: list[dict[str, Any]], chunk: int) -> dict[str, float]:
    lib.llama_memory_clear(lib.llama_get_memory(context), True)
    batch = lib.llama_batch_init(chunk, 0, 1)
    began = time.perf_counter()
    last: list[int] = []
    for sequence, request in enumerate(requests):
        ids = request["ids"]
        for start in range(0, len(ids), chunk):
            part = ids[start : start + chunk]
            rows = [(token, start + i, sequence, start + i == len(ids) - 1) for i, token in enumerate(part)]
            decode(lib, context, batch, rows)
        last.append(lib.llama_sampler_sample(sampler, context, -1))
    first = time.perf_counter() - began
    for step in range(1, requests[0]["output"]):
        rows = [(token, len(requests[s]["ids"]) + step - 1, s, True) for s, token in enumerate(last)]
        decode(lib, context, batch, rows)
        last = [lib.llama_sampler_sample(sampler, context, row) for row in range(len(rows))]
    seconds = time.perf_counter() - began
    lib.llama_batch_free(batch)
    return {"seconds": seconds, "first": first}


def main() -> None:
    import llama_cpp as lib

    job: dict[str, Any] = json.load(sys.stdin)
    lib.llama_backend_init()
    model_params = lib.llama_model_default_params()
    model = lib.llama_model_load_from_file(str(Path(*job["gguf"])).encode(), model_params)
    params = lib.llama_context_default_params()
    streams = max(len(requests) for requests in job["repeats"])
    longest = max(len(r["ids"]) + r["output"] for requests in job["repeats"] for r in requests)
    params.n_ctx = streams * (longest + 16)
    params.n_batch = params.n_ubatch = 512
    params.n_seq_max = streams
    params.n_threads = params.n_threads_batch = job["threads"]
    params.kv_unified = streams == 1
    context = lib.llama_init_from_model(model, params)
    sampler = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    lib.llama_sampler_chain_add(sampler, lib.llama_sampler_init_top_p(0.95, 1))
    lib.llama_sampler_chain_add(sampler, lib.llama_sampler_init_temp(1.0))
    lib.llama_sampler_chain_add(sampler, lib.llama_sampler_init_dist(1))
    print(json.dumps([run(lib, context, sampler, requests, 512) for requests in job["repeats"]]))


if __name__ == "__main__":
    main()
