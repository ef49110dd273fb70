"""The probe that is published with weights. With it, workers detect that their engines serve other weights."""

from typing import Any

import torch

from rollq.buffer.errors import WeightsError
from rollq.buffer.weights.bit_sums import bit_sums
from rollq.buffer.weights.probe import Probe, probe_prompts


@torch.no_grad()
def probe_of(model: Any) -> Probe:
    """The probe of a Hugging Face causal LM with its current weights: a forward pass of about a hundred tokens, and the
    sums of its parameters.

    Raises `WeightsError` if its logprobs are not finite.
    """
    parameter = next(model.parameters())
    prompts = probe_prompts(model.config.get_text_config().vocab_size)
    ids = torch.tensor([prompt.tolist() for prompt in prompts], device=parameter.device)
    training = [module for module in model.modules() if module.training]  # parts may be in `eval` mode on purpose
    model.eval()
    try:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    finally:
        for module in training:
            module.training = True
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1)
    if not bool(chosen.isfinite().all()):
        raise WeightsError("the model's logprobs are not finite: resume from a checkpoint whose weights are sound")
    return Probe(str(logits.dtype).removeprefix("torch."), prompts, list(chosen.cpu().numpy()), bit_sums(model))
