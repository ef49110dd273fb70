"""Tiny models of many families, with random weights."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES: Mapping[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
ROUTED: Mapping[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
DENSE: Mapping[str, Mapping[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "llama tied": {"tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": True},
    "gemma2": {"sliding_window": 32},
    "gemma3_text": {"sliding_window": 32},
    "phi3": {},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32},  # fused in files, too
}
FUSED: Mapping[str, Mapping[str, Any]] = {
    "qwen3_moe": {**ROUTED, "num_experts": 4, "tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **ROUTED, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
        "v_head_dim": 16, "num_key_value_heads": 4,
    },
    "olmoe": {**ROUTED, "num_experts": 4},
}  # fmt: skip
FAMILIES = {**DENSE, **FUSED}


def make_model(family: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> PreTrainedModel:
    torch.manual_seed(3)
    config = AutoConfig.for_model(family.split()[0], **{**SIZES, **FAMILIES[family]})
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model
