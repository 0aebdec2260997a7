"""Tiny random checkpoints as whole model sources (config, weights, tokenizer, template), and float64 log probabilities
of transformers to hold a server's observations against."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.synthetic_tokenizer import synthetic_definition

VOCAB = 1024
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "initializer_range": 0.15,
    "pad_token_id": None,
}
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_source(directory: Path, edit: Callable[[Any], None] | None = None, *, seed: int = 11) -> tuple[str, Any]:
    """Writes a llama checkpoint into `directory`; (its source, transformers' model). `edit` changes the weights
    first."""
    import transformers

    definition = synthetic_definition(SPECIALS)
    ids = {entry["content"]: entry["id"] for entry in definition["added_tokens"]}
    config = transformers.LlamaConfig(**CONFIG, bos_token_id=ids["<|im_start|>"], eos_token_id=ids["<|im_end|>"])
    torch.manual_seed(seed)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(torch.rand_like(parameter) * 0.4 - 0.2)
        if edit is not None:
            edit(model)
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(model.config.to_json_string(use_diff=False))
    (directory / "tokenizer.json").write_text(json.dumps(definition))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(directory), model


def log_softmax(model: Any, ids: Sequence[int]) -> Tensor:
    """Float64 log probabilities [positions, vocab] of what follows each position of `ids`."""
    with torch.inference_mode():
        logits = model(torch.tensor([list(ids)])).logits[0]
    return torch.as_tensor(logits).double().log_softmax(-1)
