"""vLLM's sampling parameters of a request, and completions from its outputs. Pure."""

from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from rollq.buffer.rollouts import VersionSpan
from rollq.workers.engines.protocol import Completion, Sampling, WeightsVersion, parse_reason


def sampling_parameters(sampling: Sampling, tokens: int, stop_ids: list[int]) -> SamplingParams:
    """Parameters for at most `tokens` new tokens, with everything set that changes the distribution or the end."""
    return SamplingParams(
        n=1,
        max_tokens=tokens,
        min_tokens=0,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        seed=sampling.seed,
        stop=list(sampling.stop),
        stop_token_ids=stop_ids,
        include_stop_str_in_output=True,
        ignore_eos=False,
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def read_output(output: Any, version: WeightsVersion, *, spans: bool) -> Completion:
    """vLLM's `CompletionOutput` as a completion. Without `spans` all tokens are of `version`.

    Raises `ValueError` when a token lacks its logprob, or its version cannot be read.
    """
    ids = np.array(output.token_ids, dtype=np.int32)
    logprobs = np.array(output.logprobs.logprobs if len(ids) else (), dtype=np.float32)
    if logprobs.shape != ids.shape:
        raise ValueError(f"vLLM gave {len(ids)} tokens with {len(logprobs)} logprobs")
    reported = getattr(output, "weight_versions", None) if spans else None
    if reported:
        versions = tuple(span_of(span.version, span.end - span.start) for span in reported)
    else:
        versions = (VersionSpan(version.epoch, version.version, len(ids)),) if len(ids) else ()
    return Completion(ids, logprobs, versions, parse_reason(output.finish_reason))


def name_of(version: WeightsVersion) -> str:
    """The name of a weight version in vLLM."""
    return f"{version.epoch}.{version.version}"


def span_of(name: str, tokens: int) -> VersionSpan:
    """`tokens` tokens of the weights that `name_of` named."""
    epoch, _, version = name.partition(".")
    return VersionSpan(int(epoch), int(version), tokens)
