"""The outcome of each of a group's samples, stored beside the group's numbers so that lists and queries need not read
samples.

In Redis the outcomes are JSON, by column: `[rewards, tokens, finish reasons, {index: error}, {index: failure}]`.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import orjson

from rollq.buffer.values.rollouts import Sample, SampleStatus

log = logging.getLogger(__name__)

ERROR_CHARACTERS = 200
"""The most characters that an outcome keeps of an error."""


@dataclass(frozen=True, slots=True)
class SampleOutcome:
    """One sample that has started. `reward` is the sample's reward, None without one. `tokens` counts response tokens
    in all segments. `is_valid` is true if the sample is finished and judged, and so may be trained. `error` is
    shortened, "" without an error. `failure` is the value of its `FailureKind`, None unless the sample has failed."""

    index: int
    reward: float | None
    tokens: int
    finish_reason: str | None
    error: str
    is_valid: bool
    failure: str | None = None


def encode_outcomes(samples: Sequence[Sample], tokens: Sequence[int]) -> bytes:
    """Encode all samples' outcomes as Redis holds them. `tokens` counts each response's tokens."""
    return encode_columns(
        [None if sample.reward is None else float(sample.reward) for sample in samples],
        tokens,
        [sample.finish_reason and sample.finish_reason.value for sample in samples],
        [sample.error for sample in samples],
        [sample.failure and sample.failure.value for sample in samples],
    )


def encode_columns(
    rewards: Sequence[float | None],
    tokens: Sequence[int],
    finish_reasons: Sequence[str | None],
    errors: Sequence[str | None],
    failures: Sequence[str | None],
) -> bytes:
    """Encode outcomes as Redis holds them, from columns with an entry for each sample."""
    cut = {str(index): error[:ERROR_CHARACTERS] for index, error in enumerate(errors) if error}
    failed = {str(index): kind for index, kind in enumerate(failures) if kind}
    return orjson.dumps([rewards, tokens, finish_reasons, cut, failed], option=orjson.OPT_SERIALIZE_NUMPY)


def decode_outcomes(encoded: bytes | str, letters: str) -> tuple[SampleOutcome, ...]:
    """Decode the outcomes of samples that have started, by `letters`. If they are unreadable, logs this and returns
    an empty tuple."""
    if not encoded:
        return ()
    try:
        rewards, tokens, reasons, errors, failures = orjson.loads(encoded)
        columns = enumerate(zip(rewards, tokens, reasons, letters, strict=True))
        return tuple(
            SampleOutcome(
                index,
                None if reward is None else float(reward),
                int(count),
                None if reason is None else str(reason),
                str(errors.get(str(index), "")),
                letter == SampleStatus.COMPLETED,
                (kind := failures.get(str(index))) and str(kind),
            )
            for index, (reward, count, reason, letter) in columns
            if letter != SampleStatus.PENDING
        )
    except (TypeError, ValueError, AttributeError) as error:
        log.warning("the outcomes of a group's samples cannot be read, so it is shown without them: %s", error)
        return ()


def longest(outcomes: Iterable[SampleOutcome]) -> int | None:
    """The longest response's number of tokens; None without responses."""
    return max((outcome.tokens for outcome in outcomes), default=None)


def rewards_of(outcomes: Iterable[SampleOutcome]) -> list[float]:
    """The rewards of the samples that have rewards."""
    return [outcome.reward for outcome in outcomes if outcome.reward is not None]
