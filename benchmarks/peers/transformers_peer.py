"""transformers' generate() on the same weights (dequantised to bfloat16), batched, with a dynamic cache."""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM, LogitsProcessorList

    job: dict[str, Any] = json.load(sys.stdin)
    torch.set_num_threads(job["threads"])
    path, file = job["gguf"]
    model = AutoModelForCausalLM.from_pretrained(path, gguf_file=file, dtype=torch.bfloat16).eval()
    runs = []
    for requests in job["repeats"]:
        ids = torch.tensor([request["ids"] for request in requests])
        marks: list[float] = []

        def mark(_ids: Any, scores: Any, marks: list[float] = marks) -> Any:
            marks.append(time.perf_counter())
            return scores

        began = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_p=0.95,
                top_k=0,
                min_new_tokens=requests[0]["output"],
                max_new_tokens=requests[0]["output"],
                pad_token_id=2,
                logits_processor=LogitsProcessorList([mark]),
            )
        runs.append({"seconds": time.perf_counter() - began, "first": marks[0] - began})
    print(json.dumps(runs))


if __name__ == "__main__":
    main()
