"""vLLM's offline LLM class (CPU or GPU build, as installed) on dequantised bfloat16 weights or dummy weights."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def checkpoint(job: dict[str, Any]) -> tuple[str, str]:
    """(model path, load format): a shape with dummy weights, or the GGUF converted to a bfloat16 checkpoint."""
    if "config" in job:
        folder = Path(tempfile.mkdtemp())
        (folder / "config.json").write_text(json.dumps(job["config"]))
        return str(folder), "dummy"
    import torch
    from transformers import AutoModelForCausalLM

    folder = Path(tempfile.mkdtemp())
    path, file = job["gguf"]
    read = AutoModelForCausalLM.from_pretrained(path, gguf_file=file, dtype=torch.bfloat16)
    if hasattr(read.config, "quantization_config"):  # of the file, not of these weights; saving refuses it
        del read.config.quantization_config
    plain = AutoModelForCausalLM.from_config(read.config, dtype=torch.bfloat16)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)
    return str(folder), "auto"


def main() -> None:
    job: dict[str, Any] = json.load(sys.stdin)
    # Left to itself the CPU build keeps a core free for the front, and so computes with fewer threads than its peers.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{job['threads'] - 1}")
    from vllm import LLM, SamplingParams

    path, load_format = checkpoint(job)
    longest = max(len(r["ids"]) + r["output"] for requests in job["repeats"] for r in requests)
    llm = LLM(
        model=path, load_format=load_format, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=longest + 8
    )
    runs = []
    for requests in job["repeats"]:
        params = [
            SamplingParams(temperature=1.0, top_p=0.95, ignore_eos=True, max_tokens=r["output"], detokenize=False)
            for r in requests
        ]
        began = time.perf_counter()
        llm.generate([{"prompt_token_ids": r["ids"]} for r in requests], params, use_tqdm=False)
        runs.append({"seconds": time.perf_counter() - began, "first": None})
    print(json.dumps(runs))


if __name__ == "__main__":
    main()
