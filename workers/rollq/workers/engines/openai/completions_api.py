"""Requests and answers of OpenAI's completions API. Pure: plain values in and out."""

from typing import Any

import numpy as np

from rollq.buffer.values.rollouts import Float32Array, Int32Array
from rollq.workers.engines.openai.dialect import NO_LIMIT_TOKENS, NO_VERSION, PROBE_IDS, TOP_LOGPROBS
from rollq.workers.engines.openai.tokens import Part, Tokens, float32_array
from rollq.workers.engines.protocol import Completion, Request, Sampling, WeightsVersion
from rollq.workers.http.pools import read_prompt_logprobs

NEEDED = "use a server with return_token_ids, such as vLLM's"
PROBE = Request(PROBE_IDS, Sampling(max_tokens=8, top_k=1))
"""The simplest request: every server can answer it, and its logprobs are known."""


def url_of(server: str) -> str:
    """A server's address for completions."""
    return f"{server}/completions"


def request_body(request: Request, tokens: int, version: WeightsVersion) -> dict[str, Any]:
    """A request for at most `tokens` new tokens, without the model's name.

    It sets every parameter whose default may differ between servers.
    """
    sampling = request.sampling
    return {
        "prompt": request.context,
        "max_tokens": tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": sampling.stop,
        "seed": sampling.seed,
        "n": 1,
        "logprobs": 1,
        "return_token_ids": True,
        "priority": request.priority,
        "cache_salt": f"{version.epoch}.{version.version}",  # excludes cached keys and values of other weights
        **rare_fields(sampling, tokens),
    }


def rare_fields(sampling: Sampling, tokens: int) -> dict[str, Any]:
    """The rare parameters that are set, under their names in vLLM's API."""
    fields = sampling.rare()
    if "min_tokens" in fields:
        fields["min_tokens"] = min(sampling.min_tokens, tokens)
    guides = {kind: fields.pop(f"guided_{kind}") for kind in ("json", "regex") if f"guided_{kind}" in fields}
    return {**fields, "structured_outputs": guides} if guides else fields


def read_part(answer: Any, _: int) -> Part:
    """The new tokens in an answer or in an event of a streamed answer. Raises `LookupError`, `TypeError` or
    `ValueError` if token ids or logprobs are missing."""
    if not answer["choices"]:  # the event with the usage
        return Part([], [])
    choice = answer["choices"][0]
    ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
    if len(ids) != len(logprobs):
        raise ValueError(f"{len(ids)} token ids and {len(logprobs)} logprobs")
    return Part(ids, logprobs, choice["finish_reason"])


def status_of(_: Any) -> int | None:
    """The status of an error in an event; None, since servers with this API report no errors in events."""
    return None


def read_completion(answer: Any, version: WeightsVersion) -> Completion:
    """The completion in a server's answer. Raises `ValueError` when it lacks token ids or logprobs."""
    tokens = Tokens()
    try:
        tokens.add(read_part(answer, 0))
    except (LookupError, TypeError) as error:
        raise ValueError(f"no completion in {answer!r:.200} ({type(error).__name__}: {error}): {NEEDED}") from error
    return tokens.completion(version)


def probe_body(most_tokens: int) -> dict[str, Any]:
    """The simplest request, for at most `most_tokens`."""
    return request_body(PROBE, min(most_tokens, PROBE.sampling.max_tokens), NO_VERSION)


def check_probe(answer: Any) -> None:
    """Raise `ValueError` if the answer to `PROBE` lacks the logprobs of the sampled distribution."""
    check_logprobs(read_completion(answer, NO_VERSION))


def score_body(prompt: Int32Array) -> dict[str, Any]:
    """A request for the logprobs of a prompt's tokens, int32 [T]."""
    return {**request_body(Request(prompt, Sampling(max_tokens=1)), 1, NO_VERSION), "prompt_logprobs": 0}


def read_scores(answer: Any, prompt: Int32Array) -> Float32Array:
    """The logprobs float32 [T - 1] in nats of a prompt's tokens except the first. Raises `ValueError` if the answer has
    none."""
    return read_prompt_logprobs(answer, prompt, 1)


def fingerprint_body() -> dict[str, Any]:
    """A request whose answer identifies the weights by the largest logprobs of the token after `PROBE`'s prompt."""
    request = Request(PROBE_IDS, Sampling(max_tokens=1))
    return {**request_body(request, 1, NO_VERSION), "logprobs": TOP_LOGPROBS, "cache_salt": None}


def read_fingerprint(answer: Any) -> Float32Array:
    """The logprobs float32 [`TOP_LOGPROBS`] in nats, largest first. Raises `ValueError` if the answer has none."""
    try:
        top = answer["choices"][0]["logprobs"]["top_logprobs"][0]
        largest = float32_array(sorted(top.values(), reverse=True)[:TOP_LOGPROBS])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"the server returns no top_logprobs ({type(error).__name__}: {error}): it cannot be compared with others"
        ) from error
    if not np.isfinite(largest).all():
        raise ValueError(f"the server returns senseless top_logprobs: {largest.tolist()}")
    return largest


def _contexts(listed: Any) -> dict[str, int]:
    """Model -> context length in tokens."""
    try:
        return {str(model["id"]): int(model.get("max_model_len") or NO_LIMIT_TOKENS) for model in listed["data"]}
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ValueError(f"the server's list of models cannot be read: {listed!r:.200}") from error


def choose_model(listed: Any, wanted: str | None) -> tuple[str, int]:
    """The requested model's name and context length in tokens, from the server's model list.

    Raises `ValueError` if the list lacks the wanted model or, without a wanted model, does not have exactly one.
    """
    contexts = _contexts(listed)
    if wanted is None and len(contexts) != 1:
        raise ValueError(f"the server serves {sorted(contexts)!r}: set served_model in [worker.options] to one of them")
    name = next(iter(contexts)) if wanted is None else wanted
    if name not in contexts:
        raise ValueError(f"the server serves {sorted(contexts)!r}, not served_model = {name!r}")
    return name, contexts[name]


def check_logprobs(probed: Completion) -> None:
    """Raise `ValueError` unless these logprobs belong to the distribution sampled for `PROBE`.

    With top_k = 1, one token has logprob 0, or m tokens with equal logits have logprob -log m each, since servers keep
    ties.
    """
    if len(probed.ids) == 0:
        raise ValueError("the server returned no tokens, although some were requested")
    equals = np.exp(-probed.logprobs)
    if (np.abs(equals - equals.round()) > 0.01).any():
        logprobs = ", ".join(f"{logprob:.3f}" for logprob in probed.logprobs)
        raise ValueError(
            f"the server returns logprobs of {logprobs} for tokens that were certain: these are of the model's "
            f"distribution, not the sampled distribution; start vLLM with --logprobs-mode processed_logprobs"
        )
