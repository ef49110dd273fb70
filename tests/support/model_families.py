"""Tiny models of many families, with random weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollq.cli.demo.tiny_model import make_tokenizer

VOCABULARY = 258
SHAPE: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "llama tied": {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": 32},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, "hidden_size": 128},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "gemma2": {"model_type": "gemma2", "sliding_window": 32, "query_pre_attn_scalar": 32},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 32, "query_pre_attn_scalar": 32},
    "phi3": {"model_type": "phi3", "hidden_size": 128},
    "olmo2": {"model_type": "olmo2", "hidden_size": 128},
    "gpt_oss": {
        "model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 32,
        "intermediate_size": 64, "tie_word_embeddings": False,
    },
    "qwen3_moe": {"model_type": "qwen3_moe", **EXPERTS, "tie_word_embeddings": False},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    "olmoe": {"model_type": "olmoe", **EXPERTS, "norm_topk_prob": False, "hidden_size": 128},
}  # fmt: skip


def make_model(folder: Path, family: str, seed: int, **changes: Any) -> Path:
    """A random model of a family with a byte-level tokenizer, in `folder`."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**{**SHAPE, **FAMILIES[family], **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases: from_config leaves them at one or zero
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
