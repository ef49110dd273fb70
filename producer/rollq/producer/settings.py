"""Settings of the producer: section `[producer]` of `rollq.toml`."""

from typing import Literal, Self

from pydantic import Field, model_validator

from rollq.buffer.settings import Settings


class ProducerSettings(Settings):
    """How far ahead of the trainer prompts are scheduled, and in what portions."""

    strategy: Literal["sync", "async"] = Field(
        default="async", description="sync: only what the live weights are for; async: as far as staleness allows"
    )
    over_sample: float = Field(
        default=0.0, ge=0, description="async only: groups scheduled beyond the bound, as a share of a batch"
    )
    adaptive_over_sample: bool = Field(
        default=False, description="async only: schedule more when much is filtered or fails, up to 3 batches"
    )
    groups_per_job: int = Field(default=1, gt=0, le=1000, description="groups that one RQ ticket may take")
    # the buffer takes 3 s without anybody reaping for an outage, and then judges no worker dead
    tick_s: float = Field(default=1.0, gt=0, le=2, description="longest pause between two looks at the buffer")

    @model_validator(mode="after")
    def _sync_has_no_surplus(self) -> Self:
        if self.strategy == "sync" and (self.over_sample > 0 or self.adaptive_over_sample):
            raise ValueError("over_sample needs strategy = 'async': sync schedules exactly the batch")
        return self
