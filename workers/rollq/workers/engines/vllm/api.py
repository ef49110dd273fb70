"""Converts requests to vLLM's sampling parameters, and its outputs to completions. Pure."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from rollq.buffer.errors import ImageError
from rollq.buffer.images.files import open_image
from rollq.buffer.images.processor import PlacedImages
from rollq.buffer.values.rollouts import FinishReason, Float32Array, Int32Array, VersionSpan
from rollq.workers.engines.protocol import Completion, Sampling, WeightsVersion, parse_reason
from rollq.workers.engines.version_spans import version_spans


def image_input(ids: list[int], images: PlacedImages) -> dict[str, Any]:
    """The fields of vLLM's prompt for these ids, which hold the tokens of `images`. vLLM inserts the images' tokens
    itself.

    Raises `ImageError` for ids without the images, and for files that are not images.
    """
    return {
        "prompt_token_ids": images.collapse(ids),
        "multi_modal_data": {"image": list(map(open_image, images.images.files))},
        "mm_processor_kwargs": dict(images.images.options),
    }


def images_problem(config: Any, *, on_cpu: bool) -> str | None:
    """The reason why vLLM misreads images for the model with this `ModelConfig`; None if vLLM reads them correctly.

    Some models (Gemma 3) read an image's tokens in both directions. vLLM's attention on the CPU does not: in a tiny
    model, logprobs were up to 0.43 nats off.
    """
    if on_cpu and getattr(config, "is_mm_prefix_lm", False):
        family = ", ".join(config.architectures)
        return f"vLLM reads images of {family} wrongly on the CPU: use a GPU, or [worker] engine = 'transformers'"
    return None


def check_prompt(ids: list[int], answer: Any) -> None:
    """Raise `ImageError` unless vLLM read these ids, including images: the trainer must read the same ids."""
    if answer.prompt_token_ids != ids:
        raise ImageError(
            f"vLLM placed the images differently: its prompt has {len(answer.prompt_token_ids or ())} tokens, and "
            f"{len(ids)} with the processor in the model's folder"
        )


def sampling_parameters(
    sampling: Sampling, tokens: int, eos_ids: frozenset[int], *, streamed: bool = False
) -> SamplingParams:
    """Parameters for at most `tokens` new tokens. They set every field that affects the distribution or the end.

    If `streamed`, vLLM returns tokens in several outputs while it generates them.
    """
    return SamplingParams(
        n=1,
        max_tokens=tokens,
        min_tokens=min(sampling.min_tokens, tokens),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias={int(token): bias for token, bias in sampling.logit_bias.items()} or None,
        bad_words=list(sampling.bad_words),
        structured_outputs=guide(sampling),
        seed=sampling.seed,
        stop=list(sampling.stop),
        stop_token_ids=sorted(sampling.end_ids(eos_ids)),
        include_stop_str_in_output=True,
        ignore_eos=sampling.ignore_eos,
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.DELTA if streamed else RequestOutputKind.FINAL_ONLY,
    )


def guide(sampling: Sampling) -> StructuredOutputsParams | None:
    """The schema or regular expression that guides decoding, if any."""
    if sampling.guided_json is not None:
        return StructuredOutputsParams(json=dict(sampling.guided_json))
    return None if sampling.guided_regex is None else StructuredOutputsParams(regex=sampling.guided_regex)


def scoring_parameters() -> SamplingParams:
    """Parameters for prompt logprobs and one new token, the fewest that vLLM generates."""
    return SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)


def next_token_parameters(most: int) -> SamplingParams:
    """Parameters for the logprobs of the `most` likeliest next tokens."""
    return SamplingParams(max_tokens=1, logprobs=most, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)


def token_parameters(token: int) -> SamplingParams:
    """Parameters for the logprob of `token` as the next token."""
    return SamplingParams(
        max_tokens=1, logprob_token_ids=[token], detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )


def prompt_logprobs(ids: Sequence[int], output: Any) -> Float32Array:
    """The logprobs float32 [T - 1] of a prompt's tokens except the first, from vLLM's `RequestOutput`."""
    logprobs = zip(ids[1:], output.prompt_logprobs[1:], strict=True)
    return np.array([at[token].logprob for token, at in logprobs], dtype=np.float32)


class OutputReader:
    """Reads vLLM's `CompletionOutput`s for one request. Each output continues the previous outputs."""

    def __init__(self, version: WeightsVersion) -> None:
        """All tokens get `version` if vLLM reports no versions."""
        self.tokens = 0
        self._version = version
        self._ids: list[Int32Array] = []
        self._logprobs: list[Float32Array] = []

    def add(self, output: Any) -> None:
        """Read one output. Raises `ValueError` if a token has no logprob."""
        ids = np.array(output.token_ids, dtype=np.int32)
        logprobs = np.array(output.logprobs.logprobs if len(ids) else (), dtype=np.float32)
        if logprobs.shape != ids.shape:
            raise ValueError(f"vLLM returned {len(ids)} tokens with {len(logprobs)} logprobs")
        self.tokens += len(ids)
        self._ids.append(ids)
        self._logprobs.append(logprobs)

    def final(self, last: Any, *, spans: bool) -> Completion:
        """The completion that ends with `last`, which has been added. Without `spans`, all tokens have one version.

        Raises `ValueError` when a token's version cannot be read.
        """
        reported = getattr(last, "weight_versions", None) if spans else None
        versions = tuple(span_of(span.version, span.end - span.start) for span in reported) if reported else None
        return self._completion(versions, parse_reason(last.finish_reason))

    def so_far(self, starts: Sequence[tuple[str, int]] | None) -> Completion:
        """The tokens so far. `starts` holds their weights' names, each with the index of its first token, or None if
        all tokens have one version.
        """
        if starts is None:
            return self._completion(None, FinishReason.ABORT)
        versions = [(_version_of(name), start) for name, start in starts]
        return self._completion(version_spans(versions, self.tokens), FinishReason.ABORT)

    def _completion(self, versions: tuple[VersionSpan, ...] | None, reason: FinishReason) -> Completion:
        if versions is None:
            epoch, version, _ = self._version
            versions = (VersionSpan(epoch, version, self.tokens),) if self.tokens else ()
        return Completion(np.concatenate(self._ids), np.concatenate(self._logprobs), versions, reason)


def name_of(version: WeightsVersion) -> str:
    """The name of a weights version in vLLM."""
    return f"{version.epoch}.{version.version}"


def span_of(name: str, tokens: int) -> VersionSpan:
    """A span of `tokens` tokens by the weights with this name from `name_of`."""
    version = _version_of(name)
    return VersionSpan(version.epoch, version.version, tokens)


def _version_of(name: str) -> WeightsVersion:
    epoch, _, version = name.partition(".")
    return WeightsVersion(int(epoch), int(version), "")
