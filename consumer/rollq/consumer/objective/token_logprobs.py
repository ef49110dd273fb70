"""The logprobs of a micro-batch's loss tokens under a model. Needs torch."""

from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from rollq.buffer.errors import ConfigError
from rollq.consumer.batches.micro_batch import MicroBatch

PROBE = 16
"""The number of tokens that `check_chunks` compares."""


class TokenLogprobs(NamedTuple):
    """Values of a micro-batch's n loss tokens in row order, in nats: `logprobs` and `entropy`, float32 [n].

    `others` float32 [n, k] holds the logprobs of k other tokens at each position.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor | None = None
    others: torch.Tensor | None = None


def token_logprobs(
    model: Any, micro: MicroBatch, *, entropy: bool = False, others: torch.Tensor | None = None, chunk: int = 0
) -> TokenLogprobs:
    """Compute the logprobs of the loss tokens of `micro` under logits / temperature, as the engine sampled them.

    `model` is a Hugging Face causal LM, or a callable with its signature. For packed rows, the model must find the
    sequence boundaries in `position_ids`; transformers >= 5 builds the block-diagonal mask if neither an attention mask
    nor a cache is given. `entropy` adds the entropy of each token's distribution, and `others` int64 [n, k] adds the
    logprobs of these tokens at each loss token's position.

    With `chunk`, the logits of at most `chunk` loss tokens are in memory at a time. They are computed again in the
    backward pass, which saves memory, costs time, and gives the same values. `chunk` needs a transformers model that
    passes `check_chunks`. Raises `ConfigError` for images that were not added.
    """
    if micro.lacks_images:
        raise ConfigError("the prompts have images: add them with rollq.consumer.ImageInputs before the forward pass")
    inputs = {
        "input_ids": micro.input_ids,
        "position_ids": None if micro.inputs else micro.position_ids,  # with images, the model counts positions
        "attention_mask": micro.attention_mask,
        "use_cache": False,
        **micro.inputs,
    }
    row, column = micro.loss_mask.nonzero(as_tuple=True)
    ids, temperatures = micro.input_ids[row, column], micro.temperature[row, column]
    if not chunk:
        # only the loss tokens in float32: most tokens are prompts, and the vocabulary is large
        logits = model(**inputs).logits[row, column - 1]
        return TokenLogprobs(*_of_logits(logits, _Wanted(ids, temperatures, others), entropy))
    hidden = _last_hidden(model, inputs)[row, column - 1]
    chunks = [
        checkpoint(_of_hidden, model, piece, wanted, entropy, use_reentrant=False)
        for piece, wanted in zip(
            torch.split(hidden, chunk), _Wanted(ids, temperatures, others).split(chunk), strict=True
        )
    ]
    logprobs, spreads, top = zip(*chunks, strict=True)
    return TokenLogprobs(
        torch.cat(logprobs), torch.cat(spreads) if entropy else None, None if others is None else torch.cat(top)
    )


def check_chunks(model: Any) -> None:
    """Raise `ConfigError` unless the head of `model` computes its logits from the last hidden states alone.

    Runs the model on a few tokens. On a sharded model, all ranks call it.
    """
    parameter = next(model.parameters())
    vocabulary = model.config.get_text_config().vocab_size
    ids = (torch.arange(PROBE, device=parameter.device) * 7919 % vocabulary)[None]
    with torch.no_grad():
        hidden = _last_hidden(model, {"input_ids": ids, "use_cache": False})
        chunked = _logits(model, hidden)
        whole = model(input_ids=ids, use_cache=False).logits
    if not torch.allclose(chunked.float(), whole.float(), rtol=1e-2, atol=1e-2):
        raise ConfigError(
            f"logprob_chunk: the logits of {type(model).__name__} are more than its head applied to its last hidden "
            "states, so they cannot be computed in chunks: set logprob_chunk = 0 in [trainer]"
        )


class _Wanted(NamedTuple):
    """The tokens to compute logprobs for: `ids` [n], `others` [n, k]; and the temperature of each position [n]."""

    ids: torch.Tensor
    temperatures: torch.Tensor
    others: torch.Tensor | None

    def split(self, chunk: int) -> "list[_Wanted]":
        ids, temperatures = torch.split(self.ids, chunk), torch.split(self.temperatures, chunk)
        others = [None] * len(ids) if self.others is None else torch.split(self.others, chunk)
        return [_Wanted(*piece) for piece in zip(ids, temperatures, others, strict=True)]


def _of_logits(
    logits: torch.Tensor, wanted: _Wanted, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The logprobs of `wanted.ids` under `logits` [n, V], the entropy, and the logprobs of `wanted.others`."""
    scaled = logits.float() / wanted.temperatures[:, None]
    normaliser = scaled.logsumexp(-1)
    chosen = scaled.gather(-1, wanted.ids[:, None]).squeeze(-1) - normaliser
    others = None if wanted.others is None else scaled.gather(-1, wanted.others) - normaliser[:, None]
    if not entropy:
        return chosen, None, others
    with torch.no_grad():
        spread = normaliser - (scaled.softmax(-1) * scaled).sum(-1)
    return chosen, spread, others


def _of_hidden(
    model: Any, hidden: torch.Tensor, wanted: _Wanted, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    return _of_logits(_logits(model, hidden), wanted, entropy)


def _last_hidden(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """The input of the head of `model`, [B, T, H]. The head itself runs on one token."""
    caught: list[torch.Tensor] = []

    def catch(_: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        caught.append(arguments[0])
        return (arguments[0][:1, :1], *arguments[1:])

    handle = model.get_output_embeddings().register_forward_pre_hook(catch)
    try:
        model(**inputs)
    finally:
        handle.remove()
    return caught[0]


def _logits(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The logits of hidden states [n, H], float [n, V]: the head's, scaled or capped as some families do."""
    config = model.config.get_text_config()
    logits: torch.Tensor = model.get_output_embeddings()(hidden)
    if scale := getattr(config, "logit_scale", None):  # Cohere
        logits = logits * scale
    if scale := getattr(config, "logits_scaling", None):  # Granite
        logits = logits / scale
    if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
        logits = torch.tanh(logits / cap) * cap
    return logits
