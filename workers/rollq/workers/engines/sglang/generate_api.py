"""Requests and answers of SGLang's native route `/generate`. Pure: plain values in and out.

SGLang has two logprobs for each sampled token. `output_token_logprobs` belong to the logits after penalties, biases,
guides and temperature, but before top_k, top_p and min_p. `output_token_sampling_logprobs`, which come with
`return_sampling_mask`, belong to the distribution after those filters too; SGLang returns them for requests with a
top_k. Requests with a filter ask for the latter and use them; all others use the former.
"""

from typing import Any

import numpy as np
import orjson

from rollq.buffer.values.rollouts import Float32Array, Int32Array
from rollq.workers.engines.openai.dialect import NO_VERSION, PROBE_IDS, TOP_LOGPROBS
from rollq.workers.engines.openai.tokens import Part, float32_array
from rollq.workers.engines.protocol import Request, Sampling, WeightsVersion

NEEDED = "SGLang 0.5.23 is known to return them"
PROBE = Request(PROBE_IDS, Sampling(max_tokens=8, temperature=0.01, top_k=20))
"""At this temperature the filter has no effect, so SGLang's two logprobs must be equal."""
SAME_NATS = 0.01
DTYPES = {"auto": None, "half": "float16", "float": "float32"}
"""SGLang's dtype names that differ from torch's -> torch's. With `auto`, SGLang does not report its choice."""


def root_of(server: str) -> str:
    """The root address of the native routes, which are beside `/v1`."""
    return server.removesuffix("/v1")


def url_of(server: str) -> str:
    """A server's address for completions."""
    return f"{root_of(server)}/generate"


def request_body(request: Request, tokens: int, version: WeightsVersion) -> dict[str, Any]:
    """A request for at most `tokens` new tokens.

    It sets every parameter whose default may differ between servers.
    """
    sampling = request.sampling
    return {
        "input_ids": request.context,
        "sampling_params": sampling_params(sampling, tokens),
        "return_logprob": True,
        "return_sampling_mask": sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0,
        "priority": -request.priority,  # SGLang runs larger priorities first
        "extra_key": f"{version.epoch}.{version.version}",  # excludes cached keys and values of other weights
    }


def sampling_params(sampling: Sampling, tokens: int) -> dict[str, Any]:
    """The parameters under SGLang's names; None for unset parameters that have no neutral value."""
    return {
        "max_new_tokens": tokens,
        "min_new_tokens": min(sampling.min_tokens, tokens),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop": sampling.stop,
        "stop_token_ids": sampling.stop_token_ids or None,
        "ignore_eos": sampling.ignore_eos,
        "logit_bias": sampling.logit_bias or None,
        "json_schema": None if sampling.guided_json is None else orjson.dumps(sampling.guided_json).decode(),
        "regex": sampling.guided_regex,
        "sampling_seed": sampling.seed,
        "n": 1,
    }


def read_part(answer: Any, have: int) -> Part:
    """The new tokens, after `have` tokens, in an answer or in an event of a streamed answer.

    Raises `LookupError`, `TypeError` or `ValueError` if token ids or logprobs are missing.
    """
    ids, info = answer["output_ids"], answer["meta_info"]
    logprobs = info.get("output_token_sampling_logprobs")
    if logprobs is None:
        logprobs = [logprob for logprob, *_ in info["output_token_logprobs"]]
    if len(ids) != len(logprobs) or have + len(ids) != info["completion_tokens"]:
        raise ValueError(
            f"{len(ids)} token ids and {len(logprobs)} logprobs after {have} tokens, of {info['completion_tokens']}"
        )
    reason = info["finish_reason"]
    return Part(ids, logprobs, None if reason is None else reason["type"], info["weight_version"])


def status_of(event: Any) -> int | None:
    """The HTTP status of an error that a streamed event reports as its finish reason; None if there is no error."""
    try:
        status = event["meta_info"]["finish_reason"]["status_code"]
    except (LookupError, TypeError):
        return None
    return status if isinstance(status, int) and status >= 400 else None


def probe_body(most_tokens: int) -> dict[str, Any]:
    """A request whose answer shows whether logprobs belong to the sampled distribution."""
    return request_body(PROBE, min(most_tokens, PROBE.sampling.max_tokens), NO_VERSION)


def check_probe(answer: Any) -> None:
    """Raise `ValueError` unless the answer to `probe_body` has the logprobs of the sampled distribution."""
    try:
        info = answer["meta_info"]
        scaled = float32_array([logprob for logprob, *_ in info["output_token_logprobs"]])
        sampled = float32_array(info["output_token_sampling_logprobs"])
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"the server returns no output_token_logprobs or output_token_sampling_logprobs ({type(error).__name__}: "
            f"{error}): {NEEDED}; it said {answer!r:.200}"
        ) from error
    if sampled.ndim != 1 or sampled.size == 0 or scaled.shape != sampled.shape:
        raise ValueError(f"the server returned {scaled.size} and {sampled.size} logprobs, although some were requested")
    if not (np.abs(scaled - sampled) < SAME_NATS).all():
        raise ValueError(
            f"the server's logprobs are {scaled.tolist()}, but the sampled distribution's are {sampled.tolist()}: "
            "start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"
        )


def score_body(prompt: Int32Array) -> dict[str, Any]:
    """A request for the logprobs of a prompt's tokens, int32 [T]."""
    return {**request_body(Request(prompt, Sampling(max_tokens=0)), 0, NO_VERSION), "logprob_start_len": 0}


def read_scores(answer: Any, prompt: Int32Array) -> Float32Array:
    """The logprobs float32 [T - 1] in nats of a prompt's tokens except the first, NaN where SGLang has null.

    Raises `ValueError` if the answer has none.
    """
    try:
        entries = answer["meta_info"]["input_token_logprobs"]
        if [token for _, token, *_ in entries] != prompt.tolist():
            raise ValueError(f"{len(entries)} entries for {len(prompt)} tokens")
        return float32_array([logprob for logprob, *_ in entries[1:]])
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"no input_token_logprobs for every token ({type(error).__name__}: {error}) in {answer!r:.200}"
        ) from error


def fingerprint_body() -> dict[str, Any]:
    """A request whose answer identifies the weights by the largest logprobs of the token after `PROBE`'s prompt."""
    body = request_body(Request(PROBE_IDS, Sampling(max_tokens=1)), 1, NO_VERSION)
    return {**body, "top_logprobs_num": TOP_LOGPROBS, "extra_key": None}


def read_fingerprint(answer: Any) -> Float32Array:
    """The logprobs float32 [`TOP_LOGPROBS`] in nats, largest first. Raises `ValueError` if the answer has none."""
    try:
        top = answer["meta_info"]["output_top_logprobs"][0]
        largest = float32_array(sorted((logprob for logprob, *_ in top), reverse=True)[:TOP_LOGPROBS])
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"the server returns no output_top_logprobs ({type(error).__name__}: {error}): it cannot be compared with "
            "others"
        ) from error
    if not np.isfinite(largest).all():
        raise ValueError(f"the server returns senseless output_top_logprobs: {largest.tolist()}")
    return largest


def read_context(info: Any) -> int:
    """The context in tokens, from the answer of `/server_info`: the longest prompt's tokens plus one.

    Raises `ValueError` for a server that repeats all tokens in each event: an answer with 32k tokens would take
    gigabytes.
    """
    try:
        context_tokens, incremental = int(info["max_req_input_len"]) + 1, info["incremental_streaming_output"]
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"the server does not report max_req_input_len and incremental_streaming_output ({type(error).__name__}: "
            f"{error}): SGLang 0.5.23 is known to"
        ) from error
    if not incremental:
        raise ValueError(
            "the server repeats all tokens in each event: start SGLang with --incremental-streaming-output"
        )
    return context_tokens


def read_dtype(info: Any) -> str | None:
    """torch's name of the dtype, or the quantization, from the answer of `/server_info`; None if unknown."""
    if info.get("quantization"):
        return str(info["quantization"])
    dtype = str(info.get("dtype", "auto"))
    return DTYPES.get(dtype, dtype)


def read_max_sequences(info: Any) -> int | None:
    """The number of sequences that the server runs at a time, from the answer of `/server_info`; None if it is
    missing."""
    sequences = info.get("max_running_requests")
    return sequences if isinstance(sequences, int) and sequences > 0 else None
