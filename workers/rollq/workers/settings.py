"""Settings of a worker: section `[worker]` of `rollq.toml`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from rollq.buffer.common.matching import matching
from rollq.buffer.rules.settings import Settings
from rollq.buffer.weights.manifest import Verify
from rollq.workers.engines.protocol import SwapMode
from rollq.workers.http.pools import PoolSettings

PoolName = Annotated[
    str, matching(r"[A-Za-z][A-Za-z0-9_]*", "must begin with a letter, and have only letters, digits and _")
]
"""The name of a pool, which is also part of an environment variable's name."""


class PauseMode(StrEnum):
    """How the running groups of a paused task end."""

    DRAIN = "drain"  # they finish
    ABORT = "abort"  # they are interrupted, and keep partial rollouts and finished samples


class GatewaySettings(Settings):
    """The address at which the gateway of a worker listens."""

    bind: Annotated[str, matching(r".+:\d{1,5}", "must be an address and a port, as in 0.0.0.0:8000")] = Field(
        default="127.0.0.1:0", description="address and port of the gateway; port 0: a free one"
    )
    url: str = Field(
        default="", description="URL at which agents elsewhere reach the gateway; default: the address of bind"
    )
    max_body_mb: float = Field(default=16, gt=0, description="largest request, in megabytes")


class WorkerSettings(Settings):
    """A worker: its engine, its capacity, how it follows the weights, and its time limits."""

    engine: str = Field(
        default="transformers", description="transformers, vllm, openai, sglang, simulated, or a dotted path"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="options of the engine, such as its model")
    tokenizer: Path | None = Field(default=None, description="folder of the tokenizer; default: the engine's model")
    chat_template: Path | None = Field(
        default=None, description="file with the chat template to use; default: the tokenizer's"
    )
    name: Annotated[str, matching(r"[A-Za-z0-9_-]{1,32}", "must have 1 to 32 characters of A-Z a-z 0-9 _ -")] | None = (
        Field(default=None, description="name of the worker; a random suffix is added; default: the host's")
    )
    samples_in_flight: int | None = Field(
        default=None,
        gt=0,
        description="samples generated concurrently; default: as many as the engine, or the agent loop, can take",
    )
    swap: SwapMode = Field(
        default=SwapMode.KEEP,
        description="what running requests do at new weights: continue on them (keep), finish first (wait), or stop "
        "(abort); restart: they stop, and vLLM restarts, for models whose weights it cannot reload",
    )
    weights_folder: Path | None = Field(
        default=None, description="folder for downloaded weights; default: a temporary folder"
    )
    verify: Verify = Field(
        default=Verify.FULL, description="how much of the weights in a shared folder to check: full, fast, sizes"
    )
    attempt_timeout_s: float = Field(default=1800, gt=0, description="longest attempt at a group, in seconds")
    dynamic_timeout: bool = Field(
        default=False,
        description="shorten attempt_timeout_s to 3 times the mean of the task's groups, once 100 have finished",
    )
    judge_timeout_s: float = Field(
        default=60, gt=0, description="longest time for judging a sample, or for a filter, in seconds"
    )
    judge_processes: int = Field(
        default=2, gt=0, description="processes for judges that need the CPU, such as math, and for isolate_judge"
    )
    judge_environment: tuple[str, ...] = Field(
        default=(), description="environment variables that these processes get, in addition to those for libraries"
    )
    pools: dict[PoolName, PoolSettings] = Field(
        default_factory=dict, description="auxiliary models for scorers and judges, by name"
    )
    gateway: GatewaySettings = Field(
        default_factory=GatewaySettings, description="where agents reach the model, for the loops harness and outside"
    )
    pause: PauseMode = Field(
        default=PauseMode.DRAIN, description="whether running groups of a paused task finish or are interrupted"
    )
    pause_timeout_s: float = Field(
        default=300, gt=0, description="seconds after a pause when groups that still run are interrupted"
    )
    grace_s: float = Field(default=30, ge=0, description="seconds that running groups may continue after a stop signal")
    engine_restarts: int = Field(default=3, ge=0, description="restarts of a dead engine; 0: exit at the first death")

    @model_validator(mode="after")
    def _only_vllm_restarts(self) -> Self:
        if self.swap is SwapMode.RESTART and self.engine != "vllm":
            raise ValueError(f"swap = 'restart' is for engine 'vllm', not {self.engine!r}: set keep, wait or abort")
        return self
