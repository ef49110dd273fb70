"""A Qwen3 of a few thousand random parameters for the consumer's tests, and gradients flattened for comparison."""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from support.consumer_groups import VOCABULARY


def tiny_qwen3(seed: int = 0, *, tied: bool = False, attention: str = "sdpa") -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    config._attn_implementation = attention
    model = Qwen3ForCausalLM(config)
    model.eval()
    return model


def flat_gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
