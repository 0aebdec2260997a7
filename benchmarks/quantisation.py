"""What a quantised format loses, and what computing with it here adds: relative root mean square errors.

    python -m benchmarks.quantisation [--rows 512] [--width 2048] [--out FILE]

Per format, over random blocks as a file holds them: "format" is the format's own rounding (a step over the square root
of twelve); "own" how far the weights of our own products (float16 scales and zeros) lie from the file's; "torch" the
same of torch's kernels, which run where ours can't: int4 products with bfloat16 scales where the format can be packed,
else a bfloat16 copy. Our products round activations too, to a 64,516th of their group's greatest. No figure here
depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from engine.models import quantized
from engine.models.gguf import FACTORS, QUANTIZED, Grouped, read_gguf


def blocks(name: str, rows: int, width: int, path: Path) -> Grouped:
    """A matrix of random codes under random factors, written to a file and read back."""
    kind = gguf.GGMLQuantizationType[name]
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 256, (rows * width // size, nbytes), dtype=np.uint8)
    for at in FACTORS[name]:
        factor = rng.uniform(0.5, 1.5, len(raw)).astype(np.float16)
        raw[:, at : at + 2] = factor.view(np.uint8).reshape(-1, 2)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", raw.reshape(rows, -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_gguf(path).blocks("w")


def errors(weight: Grouped) -> dict[str, Any]:
    """Errors relative to the root mean square of the weights."""
    exact = torch.from_numpy(weight.dequantize())
    packed = quantized.packable(weight)
    halves = {name: getattr(weight, name).astype(np.float16).astype(np.float32) for name in ("scales", "zeros")}
    ours = torch.from_numpy(replace(weight, **halves).dequantize())

    def error(used: torch.Tensor) -> float:
        return round(float((used - exact).square().mean().sqrt()) / size, 6)

    used = quantized.effective(weight) if packed else exact.to(torch.bfloat16).float()
    size = float(exact.square().mean().sqrt())
    step = float(np.sqrt(np.mean(np.square(weight.scales)) / 12))
    return {
        "torch_kernel": f"{len(quantized.pack(weight))} int4" if packed else "bfloat16",
        "bits": weight.bits,
        "group": weight.group,
        "format": round(step / size, 6),
        "own": error(ours),
        "torch": error(used),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    table = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in QUANTIZED:
            table[name] = errors(blocks(name, args.rows, args.width, Path(folder) / f"{name}.gguf"))
            print(name.ljust(6), json.dumps(table[name]))
    if args.out:
        args.out.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
