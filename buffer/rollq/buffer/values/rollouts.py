"""The values that travel through rollq: prompts, samples, groups, leases and results. All are frozen.

Invariant: a `Segment`'s `logprobs`, `loss_mask` and version spans cover exactly its `response_ids`. `check_group`
enforces this at the buffer's two entrances, `Buffer.put` and `Buffer.insert`; all other code relies on it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from rollq.buffer.errors import InvalidGroup
from rollq.buffer.values.failures import FailureKind

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ArrayRef:
    """A large array outside Redis: `uri` (file:///...) of a file with this `sha256`; see `rollq.buffer.wire.arrays`."""

    uri: str
    sha256: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        texts = (self.uri, self.sha256, self.dtype)
        if not all(isinstance(text, str) for text in texts) or not all(type(size) is int for size in self.shape):
            raise InvalidGroup(f"{self!r}: uri, sha256 and dtype are texts, shape is a tuple of ints")


NamedArrays = Mapping[str, npt.NDArray[Any] | ArrayRef]


class Status(StrEnum):
    """A group's status. A group is in exactly one status set."""

    PENDING = "pending"  # waits for a worker
    RUNNING = "running"  # leased by a worker until a deadline
    COMPLETED = "completed"  # ready to be trained
    GATHERED = "gathered"  # finished; waits for the rest of its batch, or belongs to an evaluation
    COOLING = "cooling"  # trained, and waits to be trained once more
    ABORTED = "aborted"  # interrupted; may hold partial tokens
    EXPIRED = "expired"  # too stale; waits for a re-roll
    FILTERED = "filtered"  # finished, but not worth training; kept for audit, capped
    FAILED = "failed"  # out of attempts, invalid or quarantined; kept for audit, capped
    CLAIMED = "claimed"  # handed to the trainer as part of a step's batch
    ARCHIVED = "archived"  # trained; kept until a checkpoint covers it
    LEAVING = "leaving"  # trained or dropped; kept until the archive has it


SCHEDULED: Final = (
    Status.PENDING, Status.RUNNING, Status.COMPLETED, Status.GATHERED, Status.COOLING, Status.CLAIMED
)  # fmt: skip
"""The statuses of groups that are on their way to the trainer. The producer compares their number with its target."""


AUDITED: Final = (Status.FILTERED, Status.FAILED)
"""The statuses of groups that are only kept for inspection, not queued."""
NOT_AUDITED: Final = tuple(status for status in Status if status not in AUDITED)


class SampleStatus(StrEnum):
    """A sample's status. The values are the letters that Redis keeps, one per sample."""

    PENDING = "p"  # nothing generated, or reset
    COMPLETED = "c"  # finished and judged
    ABORTED = "a"  # interrupted; its tokens may be continued
    FAILED = "f"  # cannot be trained; `error` says why, and `failure` at which part


class FinishReason(StrEnum):
    """Why generation of a sample ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"
    ERROR = "error"


_ENDS: Final = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS)


class VersionSpan(NamedTuple):
    """A number of consecutive response `tokens` that the weights (`epoch`, `version`) made."""

    epoch: int
    version: int
    tokens: int


NO_EPOCH: Final = -1
NO_VERSION: Final = -1
"""Epoch and version of inserted samples' tokens, which no weights of the run have made, and of the live weights before
the first trainer."""


def unversioned(tokens: int) -> tuple[VersionSpan, ...]:
    """The spans for `tokens` response tokens that no weights of the run have made."""
    return (VersionSpan(NO_EPOCH, NO_VERSION, tokens),) if tokens else ()


def absent_logprobs(tokens: int) -> Float32Array:
    """NaN, float32 [tokens], as the logprobs of `tokens` response tokens without known logprobs."""
    return np.full(tokens, np.nan, np.float32)


@dataclass(frozen=True, slots=True)
class ImageRef:
    """The image file at `url`, with this `sha256` in hex; see `rollq.buffer.wire.images`. `url` is `file:///...`,
    `https://...`, or `data:;base64,...`, which is the file itself.
    """

    url: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    `content` is the text, or a tuple of chat messages (`{"role": ..., "content": ...}`). `ids` holds optional token
    ids, which take precedence over `content`. `answer` is the reference that a judge compares with. `metadata` is
    free-form. `row` is the prompt's index among the task's prompts, if known; the buffer keeps statistics by row.
    `images` fill the image placeholders, in order; `image_options` are arguments for the model's image processor.
    `tools` holds tool definitions in OpenAI's format, which the chat template shows to the model beside `content`.
    """

    content: str | tuple[Mapping[str, Any], ...]
    answer: Any = None
    ids: tuple[int, ...] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[ImageRef, ...] = ()
    image_options: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()
    row: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One stretch of model output with its context.

    Shapes: `prompt_ids` int32 [P]; `response_ids` int32 [R]; `logprobs` float32 [R], behaviour logprobs in nats under
    the distribution that was sampled from, all NaN where absent (see `Buffer.insert`); `loss_mask` bool [R], False on
    tokens from the environment (None means all True); `versions` cover R tokens in order. `arrays` holds named arrays
    or references to arrays, per token (first dimension R, or P + R) or per sample (any shape).
    """

    prompt_ids: Int32Array
    response_ids: Int32Array
    logprobs: Float32Array
    versions: tuple[VersionSpan, ...]
    loss_mask: BoolArray | None = None
    arrays: NamedArrays = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One trajectory: one or more segments that share one reward.

    `sampling` holds every sampling parameter sent to the engine, `reward_parts` holds the named terms of `reward`, and
    `tools` holds the definitions that the model was given; `tool_choice` says how the model was to use the tools.
    `session_id` names the conversation in the engine or environment; `extra` is free-form. `failure` is the part at
    which a failed sample failed, and None for other samples. It is also None for a sample that was left out before it
    could fail, whose finish reason is `abort`.
    """

    segments: tuple[Segment, ...]
    status: SampleStatus
    finish_reason: FinishReason | None = None
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    text: str = ""
    error: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    session_id: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    failure: FailureKind | None = None

    @property
    def awaits_judge(self) -> bool:
        """Whether the sample is whole and was interrupted while it was judged."""
        return self.status is SampleStatus.ABORTED and self.finish_reason in _ENDS

    @property
    def response_tokens(self) -> int:
        """Number of response tokens in all segments."""
        return sum([len(segment.response_ids) for segment in self.segments])

    @property
    def oldest_version(self) -> int | None:
        """Smallest version of any response token; None without versioned tokens."""
        return min(self._versions(), default=None)

    @property
    def newest_version(self) -> int | None:
        """Largest version of any response token; None without versioned tokens."""
        return max(self._versions(), default=None)

    @property
    def is_inserted(self) -> bool:
        """Whether the sample has tokens that no weights of the run have made."""
        return any(span.version == NO_VERSION for segment in self.segments for span in segment.versions)

    def _versions(self) -> list[int]:
        spans = [span for segment in self.segments for span in segment.versions]
        return [span.version for span in spans if span.version != NO_VERSION]


EMPTY_SAMPLE = Sample(segments=(), status=SampleStatus.PENDING)
"""A sample without generated tokens, or a sample that was reset."""


@dataclass(frozen=True, slots=True)
class PipelineOutput:
    """An experience pipeline's output for one group: rewards that replace the judge's, and optional advantages.

    Each holds one number per sample; the number for a sample that did not complete has no meaning.
    """

    rewards: tuple[float, ...]
    advantages: tuple[float, ...] | None = None

    @classmethod
    def decode(cls, stored: str | bytes | None) -> "PipelineOutput | None":
        """Decode the output from its JSON; returns None if that is empty."""
        fields = orjson.loads(stored or b"{}")
        return cls(tuple(fields["rewards"]), fields["advantages"] and tuple(fields["advantages"])) if fields else None


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """One prompt and its samples, as the trainer gets them. `oldest_version` is the version of the group's oldest
    token, where the rewind decides how tokens of dead epochs count; `NO_TOKENS` for an inserted group."""

    task: str
    group_id: int
    prompt: Prompt
    samples: Sequence[Sample]
    oldest_version: int
    arrival: int
    tries: int
    shaped: PipelineOutput | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """A worker's claim on one group until a deadline on the server's clock.

    `samples` has one entry per sample: the sample that earlier attempts left (completed, or aborted with partial
    tokens), else `EMPTY_SAMPLE`. `attempt` and `nonce` fence the result. A group is `suspect` if a worker died holding
    it, `alone` if it must be the only group in its engine, and `must_finish` if it has used up its interruptions.
    `parts` counts the sample parts that earlier attempts salvaged, with a total of `salvaged_tokens`. `expected_tokens`
    is the mean length of earlier answers to this prompt, 0.0 while unknown. In a loan, which has a different nonce from
    the lease, `borrowed` has the indices of the samples that another worker has lent; it is empty for the lease of the
    whole group. `cut_off` marks a group in a batch that waits only for finished samples (see `Coordination.cut_off`).
    `admitted_ms` and `leased_ms` are the times when the group was admitted and leased, in server ms since 1970.
    """

    task: str
    group_id: int
    attempt: int
    nonce: str
    tries: int
    prompt: Prompt
    samples: tuple[Sample, ...]
    step: int
    evaluation: bool = False
    suspect: bool = False
    alone: bool = False
    must_finish: bool = False
    parts: int = 0
    salvaged_tokens: int = 0
    expected_tokens: float = 0.0
    borrowed: tuple[int, ...] = ()
    cut_off: bool = False
    admitted_ms: int = 0
    leased_ms: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class FinishedGroup:
    """A prompt and its finished samples, which no worker in the run has made; see `Buffer.insert`."""

    prompt: Prompt
    samples: tuple[Sample, ...]


WHOLE: Final = "all"
"""The field for a whole group's frame; see `rollq.buffer.wire.group_fields`."""
BESIDE: Final = "beside"
"""The field for a large frame, which is a separate key in the task's slot."""
AWAY: Final = "away"
"""The field for a large frame in another slot, or in another store (see `rollq.buffer.payloads`)."""
MOST_ERROR_BYTES: Final = 2000
"""The most bytes kept of a task's last error."""
MOST_PARTS: Final = 16_384
MOST_PART_BYTES: Final = 64 << 20
"""Limits on what is salvaged from one group: the number of parts, and their total bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplePart:
    """A salvaged part of a sample that is still being made. `number` counts the group's earlier parts, in this and in
    previous attempts. `index` is the sample's index, and `tokens_before` counts the sample's response tokens before
    this part. `sample` has this part's tokens (see `rollq.buffer.wire.parts`). `tokens_again` counts tokens in it
    that were kept before, in parts that this part replaces.
    """

    lease: Lease
    number: int
    index: int
    tokens_before: int
    sample: Sample
    tokens_again: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class GroupResult:
    """The result of a lease. A `filtered` group is complete, but its filter found it not worth training."""

    lease: Lease
    samples: tuple[Sample, ...]
    filtered: bool = False
    error: str | None = None
    generate_s: float = 0.0
