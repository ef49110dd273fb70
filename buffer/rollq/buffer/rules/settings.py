"""Settings that every role shares: the servers, and the task rules that the buffer itself keeps.

Each role defines its own sections in its own package; `rollq.cli.settings.model` composes them into `rollq.toml`.
Unknown keys are errors everywhere.
"""

from collections.abc import Iterator, Mapping
from math import inf
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationInfo, field_validator, model_validator

from rollq.buffer.common.whole_numbers import LIMIT
from rollq.buffer.rules.batch_sizes import groups_at
from rollq.buffer.rules.staleness import stale_threshold

MAX_BATCH_GROUPS = 1000
LONGEST_S = 10**9
"""The longest duration in a setting, in seconds: 31 years. The timers of Python and of servers take no longer ones."""

Order = Literal["staleness", "arrival", "newest", "uniform", "priority"]


class Settings(BaseModel):
    """Base class of all settings: frozen, with unknown keys refused and defaults validated. Whole numbers have at most
    15 digits, so that Lua, JSON and numpy keep them exactly. Durations, whose names end in `_s`, fit any timer."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
    REMOVED: ClassVar[Mapping[str, str]] = {}
    """Removed key -> why it is gone and what to do, for the error that refuses the key."""

    @field_validator("*", mode="before")
    @classmethod
    def _paths_are_not_empty(cls, value: Any, info: ValidationInfo) -> Any:
        kind = cls.model_fields[str(info.field_name)].annotation
        if value == "" and (kind is Path or Path in get_args(kind)):
            raise ValueError("is empty; write a path, or leave it out")  # else it would be the current folder
        return value

    @field_validator("*")
    @classmethod
    def _whole_numbers_are_exact(cls, value: Any) -> Any:
        for number in _whole_numbers(value):
            if number >= LIMIT:
                raise ValueError(f"must be less than {LIMIT}")
            if number <= -LIMIT:
                raise ValueError(f"must be greater than {-LIMIT}")
        return value

    @field_validator("*")
    @classmethod
    def _durations_fit_timers(cls, value: Any, info: ValidationInfo) -> Any:
        if str(info.field_name).endswith("_s") and isinstance(value, int | float) and LONGEST_S < value < inf:
            raise ValueError(f"must be at most {LONGEST_S} seconds")
        return value


def _whole_numbers(value: Any) -> Iterator[int]:
    """The whole numbers in a field's value; options of engines and functions may be any numbers."""
    if isinstance(value, int):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _whole_numbers(item)


class RedisSettings(Settings):
    """The Redis servers of a run."""

    buffer_url: str = Field(
        default="redis://127.0.0.1:6379/0",
        description="server of the buffer; or nodes of a cluster, as in redis://a:7000,b:7000/0",
    )
    queue_url: str | None = Field(default=None, description="server of the RQ tickets; default: buffer_url")
    user: str | None = Field(default=None, description="user on both servers; see docs/guide/security.md")
    password: SecretStr | None = Field(
        default=None, description="password of both servers; better given as ROLLQ_REDIS_PASSWORD"
    )
    ca_file: Path | None = Field(
        default=None, description="certificate of the authority that signed the servers' certificates"
    )
    certificate_file: Path | None = Field(default=None, description="certificate that this role shows to the servers")
    key_file: Path | None = Field(default=None, description="private key of certificate_file")


class PayloadSettings(Settings):
    """The place of the large frames of groups, if it is not the buffer's servers."""

    url: str | None = Field(
        default=None, description="s3://bucket/prefix, or the absolute path of a folder that all machines share"
    )
    min_bytes: int | None = Field(
        default=None,
        gt=0,
        description=(
            "smallest frame that is kept there; smaller ones stay on the servers; default: 1 MiB, and 512 KiB "
            "in the folder of an embedded server"
        ),
    )

    max_buffer_bytes: int | None = Field(
        default=None, gt=0, description="most bytes for the frames of all groups, wherever they are; default: no limit"
    )


class PromptLength(Settings):
    """The length of prompts, which producers and workers share."""

    max_prompt_tokens: int = Field(
        default=4096, gt=0, description="longest prompt, in tokens; longer ones are left out and counted"
    )


class ArchiveSettings(Settings):
    """The place where `rollq archive` keeps all groups that are trained or dropped."""

    url: str | None = Field(default=None, description="s3://bucket/prefix, or a folder; default: no archive")


class GroupRules(Settings):
    """How the buffer treats the groups of a task or of an evaluation."""

    group_size: int = Field(default=8, gt=0, le=1024, description="samples generated for one prompt")
    max_tries: int = Field(default=3, gt=0, description="attempts that end in an engine error before a group fails")
    max_deaths: int = Field(
        default=3,
        ge=2,
        description="workers that die holding a group before it is quarantined; up to 2 more if many die anyway",
    )
    lease_s: float = Field(default=30.0, ge=1, description="seconds of silence after which a worker loses its groups")
    audit_groups: int = Field(
        default=1000, ge=0, description="failed groups kept for inspection, and the same number of filtered ones"
    )
    archive: bool = Field(
        default=False, description="keep what is trained or dropped until `rollq archive` has written it"
    )


class TaskRules(GroupRules):
    """The rules that the buffer's functions apply to a task; stored in its clock, and the same for every role."""

    batch_groups: int = Field(ge=0, le=MAX_BATCH_GROUPS, description="groups of this task in one training batch")
    weight: float = Field(default=1.0, ge=0, allow_inf_nan=False, description="share of the groups of [batch]")
    max_staleness: int = Field(
        default=1, ge=0, description="weight syncs that a token may be behind when it is trained; 0: on policy"
    )
    sync_weights_interval: int = Field(default=1, gt=0, description="train steps between two weight syncs")
    order: Order = Field(
        default="staleness",
        description="which completed groups a batch takes: the stalest, those whose prompts were taken first, the "
        "newest, any, or any by their priorities",
    )
    priority_decay: float = Field(
        default=0.5, gt=0, le=1, description="order priority: factor of a group's priority each time it was trained"
    )
    expiry: Literal["member", "group"] = Field(
        default="member", description="what is reset when a group expires: its stale samples, or all of them"
    )
    offline: bool = Field(
        default=False, description="only `rollq import` or `Buffer.insert` fill the task; it is never sampled"
    )
    kind: Literal["train", "eval"] = Field(default="train", description="whether groups are trained or evaluated")
    schedule: tuple[tuple[int, int], ...] = Field(
        default=(), description="(step, groups) pairs: from that train step on, batches take that many groups"
    )
    tail_batch_trigger_size: int = Field(
        default=0, ge=-1, description="0: sample expired groups again at once; N: once N have expired; -1: drop them"
    )
    tail_batch_max_tries: int | None = Field(
        default=None, gt=0, description="interruptions after which a group is not interrupted again; default: no limit"
    )
    stragglers: Literal["wait", "expire"] = Field(
        default="wait",
        description="whether a batch waits for running groups too stale for the next one, or lets them expire",
    )
    max_token_staleness: int | None = Field(
        default=None, ge=0, description="weight syncs after which a token is masked out of the loss; default: never"
    )
    max_uses: int = Field(default=1, gt=0, description="how many times a group may be trained")
    reuse_cooldown_steps: int = Field(default=0, ge=0, description="train steps between two uses of a group")
    keep_window: int = Field(
        default=256, gt=0, le=10_000, description="number of finished groups over which the keep rate is measured"
    )
    prompt_stats: bool = Field(
        default=False,
        description="keep the pass rate, reward and length of every prompt; implied by orders that use them",
    )
    pass_reward: float = Field(
        default=0.5, allow_inf_nan=False, description="lowest reward with which a sample counts as passed"
    )
    partial_rollout: bool = Field(
        default=False, description="continue interrupted samples from the tokens that they already have"
    )
    min_valid_samples: int | None = Field(
        default=None, gt=0, description="samples of a group that must succeed; default: all of group_size"
    )
    max_uncheckpointed_steps: int = Field(
        default=100, gt=0, description="trained batches kept for a restart before a checkpoint is required"
    )
    resume: Literal["durable", "fresh"] = Field(
        default="durable", description="keep trained batches until a checkpoint covers them, or drop them at commit"
    )

    @property
    def stale_threshold(self) -> int:
        """A group is too old when any of its tokens reaches this staleness (train steps)."""
        return stale_threshold(self.max_staleness, self.sync_weights_interval)

    @property
    def token_threshold(self) -> int:
        """A token is masked when it reaches this staleness (train steps)."""
        syncs = self.max_staleness if self.max_token_staleness is None else self.max_token_staleness
        return stale_threshold(syncs, self.sync_weights_interval)

    @model_validator(mode="after")
    def _groups_can_be_complete(self) -> Self:
        if self.min_valid_samples is not None and self.min_valid_samples > self.group_size:
            raise ValueError(
                f"min_valid_samples = {self.min_valid_samples}: must not exceed group_size = {self.group_size}"
            )
        return self

    @model_validator(mode="after")
    def _expiry_is_consistent(self) -> Self:
        if self.tail_batch_trigger_size == -1 and self.tail_batch_max_tries is not None:
            raise ValueError(
                "tail_batch_max_tries needs groups to be sampled again, but tail_batch_trigger_size = -1 drops "
                "expired groups; leave one of them out"
            )
        if self.max_token_staleness is not None and self.max_token_staleness > self.max_staleness:
            raise ValueError(
                f"max_token_staleness = {self.max_token_staleness}: tokens never get older than max_staleness = "
                f"{self.max_staleness}; lower the first or raise the second"
            )
        return self

    @model_validator(mode="after")
    def _staleness_is_exact(self) -> Self:
        if self.stale_threshold >= LIMIT:
            raise ValueError(
                f"max_staleness = {self.max_staleness}: together with sync_weights_interval = "
                f"{self.sync_weights_interval} it allows {self.stale_threshold} train steps, and must allow less than "
                f"{LIMIT}"
            )
        return self

    @model_validator(mode="after")
    def _evaluations_are_sampled(self) -> Self:
        if self.offline and self.kind == "eval":
            raise ValueError("offline = true: groups of an evaluation are always sampled; leave this out")
        return self

    @model_validator(mode="after")
    def _batches_take_groups(self) -> Self:
        steps, sizes = [step for step, _ in self.schedule], [groups for _, groups in self.schedule]
        if steps != sorted({*steps} - {0}):
            raise ValueError("schedule: steps must increase, from 1")
        if not 0 <= min(sizes, default=0) <= max(sizes, default=0) <= MAX_BATCH_GROUPS:
            raise ValueError(f"schedule: a batch holds 0 to {MAX_BATCH_GROUPS} groups of a task")
        if self.weight and not any([self.batch_groups, *sizes]):
            raise ValueError("batch_groups = 0: no batch ever takes a group of this task; leave the task out")
        return self

    def groups_at(self, step: int) -> int:
        """The task's number of groups in the batch of `step` (from 1)."""
        return groups_at(self.batch_groups, self.schedule, step)


FIXED_RULES: Mapping[str, str] = {
    "group_size": "groups under way have that many samples",
    "kind": "it decides at admission whether groups are trained or evaluated",
    "lease_s": "running workers renew their leases by it",
    "max_token_staleness": "samples in the buffer were aged by it",
    "min_valid_samples": "running workers judge groups by it",
    "offline": "it decided whether the first groups were sampled or inserted",
    "order": "groups in the buffer were sorted by it",
    "partial_rollout": "running workers resume samples by it",
    "priority_decay": "groups in the buffer were sorted by it",
    "resume": "it decided whether trained batches were kept",
    "sync_weights_interval": "a running trainer publishes by it",
}
"""Rules that cannot change during a run, and why."""
CHANGEABLE_RULES = tuple(name for name in TaskRules.model_fields if name not in FIXED_RULES)
"""Rules that may change during a run."""
