"""The demo model against transformers, from the file's own bytes dequantised by the gguf package."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch

from engine.models.weights import gguf_name
from tests.support.smollm2 import CONFIG, smollm2, smollm2_file
from tests.support.tiny_models import Captured, Driver, tokens

IDS = tokens(90, seed=21, vocab=49000)


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    """transformers' float32 logits [positions, vocab] of IDS and six more tokens."""
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
    with torch.inference_mode():
        return torch.as_tensor(model.eval()(torch.tensor([[*IDS, *tokens(6, seed=3)]])).logits[0])


def feed(driver: Driver, more: list[int]) -> torch.Tensor:
    """Logits of IDS' last position and of `more`, each a one-token chunk."""
    captured = Captured(driver)
    driver.prefill(0, IDS, chunk=32)
    for index in range(len(more)):
        place = len(IDS) + index
        driver.prefill(0, [*IDS, *more[: index + 1]], cached=place, table=list(range(40)))
    return captured.take()


@pytest.mark.parametrize("numerics", ["invariant", "fast"])
def test_float32_equals_transformers(expected: torch.Tensor, numerics: str) -> None:
    driver = Driver.load(smollm2(), dtype="float32", numerics=numerics, kv_bytes=64 << 20)
    found = feed(driver, tokens(6, seed=3))
    assert torch.allclose(found, expected[len(IDS) - 1 :], rtol=0, atol=1e-4), (found - expected[-7:]).abs().max()


@pytest.mark.parametrize("numerics", ["invariant", "fast"])
def test_quantised_weights_stay_close(expected: torch.Tensor, numerics: str) -> None:
    found = feed(Driver.load(smollm2(), dtype="auto", numerics=numerics, kv_bytes=64 << 20), tokens(6, seed=3))
    wanted = expected[len(IDS) - 1 :].log_softmax(-1)
    divergence = (wanted.exp() * (wanted - found.log_softmax(-1))).sum(-1)
    assert divergence.max() < 0.02, divergence
