"""Requests and answers of OpenAI's completions API. Pure: plain values in and out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollq.buffer.rollouts import FinishReason, Float32Array, VersionSpan
from rollq.workers.engines.protocol import Completion, Request, Sampling, WeightsVersion, parse_reason

NO_LIMIT_TOKENS = 1 << 62
"""Context of a server that does not report it; the server itself refuses requests that are too long."""
PROBE = Request(np.array([1, 2, 3, 4], np.int32), Sampling(max_tokens=8, top_k=1))
"""The simplest request: every server can answer it, and its logprobs are known."""

TOP_LOGPROBS = 5


def request_body(request: Request, tokens: int, version: WeightsVersion) -> dict[str, Any]:
    """A request for at most `tokens` new tokens, without the model's name.

    It sets every parameter for which a server may have another default.
    """
    sampling, prefix = request.sampling, request.prefix_ids
    return {
        "prompt": request.prompt_ids if prefix is None else np.concatenate([request.prompt_ids, prefix]),
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
        "cache_salt": f"{version.epoch}.{version.version}",  # keys and values of other weights must not be used
        **rare_fields(sampling, tokens),
    }


def rare_fields(sampling: Sampling, tokens: int) -> dict[str, Any]:
    """The rare parameters that are set, as vLLM's server calls them."""
    fields = sampling.rare()
    if "min_tokens" in fields:
        fields["min_tokens"] = min(sampling.min_tokens, tokens)
    guides = {kind: fields.pop(f"guided_{kind}") for kind in ("json", "regex") if f"guided_{kind}" in fields}
    return {**fields, "structured_outputs": guides} if guides else fields


@dataclass(slots=True, eq=False)
class Tokens:
    """The part of a completion that has arrived: ids, their logprobs in nats, and why it ended, if it has. `url` is the
    server's, for messages; `broken`: tokens that had come were lost, because a server broke off. `added` is called
    whenever tokens arrive."""

    url: str = "the server"
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: str | None = None
    broken: bool = False
    added: Callable[[], None] | None = None

    def begin(self, url: str) -> None:
        """Start anew: the server at `url` is asked."""
        self.broken = self.broken or bool(self.ids)
        self.url, self.ids, self.logprobs, self.reason = url, [], [], None

    def add(self, answer: Any) -> None:
        """Append an answer, or an event of one that is streamed. Raises `ValueError` when it lacks token ids or
        logprobs."""
        try:
            if not answer["choices"]:  # the event with the usage
                return
            choice = answer["choices"][0]
            ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
            if len(ids) != len(logprobs):
                raise ValueError(f"{len(ids)} token ids and {len(logprobs)} logprobs")
            self.ids += ids
            self.logprobs += logprobs
            self.reason = choice["finish_reason"] or self.reason
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"the answer of {self.url} lacks choices[0].token_ids, .logprobs.token_logprobs or .finish_reason "
                f"({type(error).__name__}: {error}): a server with return_token_ids is needed, such as vLLM's; it said "
                f"{answer!r:.200}"
            ) from error
        if self.added is not None:
            self.added()

    def completion(self, version: WeightsVersion, reason: FinishReason | None = None) -> Completion:
        """As a completion by `version`, ended by `reason` or as the server said.

        Raises `ValueError` when ids or logprobs make no sense.
        """
        try:
            ids, logprobs = np.array(self.ids, dtype=np.int32), float32_array(self.logprobs)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{self.url} gave token ids or logprobs that are not numbers: {error}") from error
        if ids.ndim != 1 or logprobs.shape != ids.shape or not np.isfinite(logprobs).all() or (ids < 0).any():
            raise ValueError(f"{self.url} gave {ids.shape} token ids and {logprobs.shape} logprobs, or senseless ones")
        spans = (VersionSpan(version.epoch, version.version, len(ids)),) if len(ids) else ()
        return Completion(ids, logprobs, spans, parse_reason(self.reason) if reason is None else reason)


def float32_array(numbers: Sequence[float]) -> Float32Array:
    """An array of these numbers; those that float32 cannot hold become infinite. Raises `TypeError`, `ValueError`."""
    with np.errstate(over="ignore"):
        return np.array(numbers, dtype=np.float32)


def join_parts(parts: Sequence[Completion], reason: FinishReason) -> Completion:
    """Parts of one answer, each made after those before, as one that ended with `reason`."""
    if not parts:
        return Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), (), reason)
    return Completion(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        tuple(span for part in parts for span in part.versions),
        reason,
    )


def read_completion(answer: Any, version: WeightsVersion) -> Completion:
    """The completion in a server's answer. Raises `ValueError` when it lacks token ids or logprobs."""
    tokens = Tokens()
    tokens.add(answer)
    return tokens.completion(version)


def fingerprint_body() -> dict[str, Any]:
    """A request whose answer identifies the weights: the largest logprobs of the token after `PROBE`'s prompt."""
    request = Request(PROBE.prompt_ids, Sampling(max_tokens=1))
    return {**request_body(request, 1, WeightsVersion(0, 0, "")), "logprobs": TOP_LOGPROBS, "cache_salt": None}


def read_fingerprint(answer: Any) -> Float32Array:
    """Logprobs float32 [`TOP_LOGPROBS`] in nats, largest first. Raises `ValueError` if the answer has none."""
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


def choose_model(listed: Any, wanted: str | None) -> tuple[str, int]:
    """Name and context length in tokens of the model to ask for, from the server's list of models.

    Raises `ValueError` when the wanted one, or a single one, is not in it.
    """
    try:
        contexts = {str(model["id"]): int(model.get("max_model_len") or NO_LIMIT_TOKENS) for model in listed["data"]}
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ValueError(f"the server's list of models cannot be read: {listed!r:.200}") from error
    if wanted is None and len(contexts) != 1:
        raise ValueError(f"the server serves {sorted(contexts)!r}: set served_model in [worker.options] to one of them")
    name = next(iter(contexts)) if wanted is None else wanted
    if name not in contexts:
        raise ValueError(f"the server serves {sorted(contexts)!r}, not served_model = {name!r}")
    return name, contexts[name]


def check_probe(probed: Completion) -> None:
    """Raise `ValueError` unless the tokens of `PROBE` came back with the logprobs of what was sampled.

    With top_k = 1 that is one token, of logprob 0; or m tokens of equal logits, which servers keep, of -log m each.
    """
    if len(probed.ids) == 0:
        raise ValueError("the server gave no token where some were asked for")
    equals = np.exp(-probed.logprobs)
    if (np.abs(equals - equals.round()) > 0.01).any():
        logprobs = ", ".join(f"{logprob:.3f}" for logprob in probed.logprobs)
        raise ValueError(
            f"the server gives tokens that had to be sampled logprobs of {logprobs}: these are "
            "of the model and not of what was sampled; start vLLM with --logprobs-mode processed_logprobs"
        )
