"""Settings of the consumer and of the reference trainer: section `[trainer]` of `rollq.toml`."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from rollq.buffer.advantages import AdvantageSettings
from rollq.buffer.settings import Settings
from rollq.buffer.training import ResumeMode

Transport = Literal["redis", "path", "nccl"]
ASLEEP = "transport 'nccl' with colocated = true: engines that sleep cannot take weights; set transport = 'path'"


class NcclSettings(Settings):
    """How a trainer with `transport = "nccl"` meets its workers."""

    address: str | None = Field(default=None, description="of the trainer's machine, for workers; default: its name")
    join_s: float = Field(default=30, gt=0, description="how long a publication waits for workers to be ready")
    timeout_s: float = Field(default=300, gt=0, description="longest that sending may take once they are")


class ConsumerSettings(Settings):
    """Who takes the batches, and how. Every rank of a launch passes the same, but for `rank`."""

    trainer_id: str = Field(default="trainer", description="the same id takes over from its dead self at once")
    launch_id: str | None = Field(default=None, description="one launch, all its ranks; default: a random one")
    rank: int = Field(default=0, ge=0)
    world_size: int = Field(default=1, gt=0)
    mode: ResumeMode = Field(default="replay", description="what becomes of batches after the step resumed from")
    takeover: bool = Field(default=False, description="take the run from another trainer that still lives")
    timeout_s: float | None = Field(default=None, gt=0, description="longest wait for one batch; default: for ever")
    transport: Transport = Field(
        default="redis", description="how weights reach workers: redis up to 64 MiB, path, or nccl into vLLM"
    )
    weights_dir: Path | None = Field(default=None, description="transport path: a folder shared with all workers")
    keep_versions: int = Field(default=3, gt=0, description="published weights that stay, for slow workers")
    nccl: NcclSettings = NcclSettings()
    advantages: AdvantageSettings = AdvantageSettings()
    colocated: bool = Field(default=False, description="engines sleep while the trainer has their GPUs")

    @model_validator(mode="after")
    def _ranks_make_sense(self) -> Self:
        if self.rank >= self.world_size:
            raise ValueError(f"rank {self.rank} of world_size {self.world_size}: ranks count from 0")
        if self.world_size > 1 and self.launch_id is None:
            raise ValueError("several ranks need the launch_id that their launcher gave them all")
        return self

    @model_validator(mode="after")
    def _engines_that_take_weights_are_awake(self) -> Self:
        if self.transport == "nccl" and self.colocated:
            raise ValueError(ASLEEP)
        return self


class GrpoSettings(Settings):
    """Variants of the loss.

    aggregation `token`: every loss token of the batch counts the same (DAPO, Yu et al. 2025, arXiv:2503.14476).
    aggregation `sequence`: mean over a sample's tokens, then over samples (GRPO, Shao et al. 2024, arXiv:2402.03300).
    aggregation `constant`: sum over a sample's tokens divided by the constant `constant_tokens`, then mean over samples
    (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).
    old_logprobs `behaviour`: ratios against the logprobs that the engine reported.
    old_logprobs `recomputed`: ratios against the trainer's own weights before the update, times the truncated
    importance weight min(old / behaviour, `importance_cap`) (Yao et al. 2025, "Your Efficient RL Framework Secretly
    Brings You Off-Policy RL Training").
    """

    aggregation: Literal["token", "sequence", "constant"] = "token"
    constant_tokens: int = Field(default=1024, gt=0, description="divisor of aggregation constant: the token limit")
    clip_low: float = Field(default=0.2, ge=0, lt=1, description="ratios below 1 - clip_low are clipped")
    clip_high: float = Field(default=0.2, ge=0, description="ratios above 1 + clip_high are clipped")
    kl_coefficient: float = Field(default=0.0, ge=0, description="weight of the KL to a reference model")
    old_logprobs: Literal["behaviour", "recomputed"] = "behaviour"
    importance_cap: float = Field(default=2.0, gt=0, description="largest truncated importance weight")
    entropy: bool = Field(default=False, description="measure the policy's entropy (one more pass over the logits)")


class TrainerSettings(Settings):
    """The reference GRPO trainer: section `[trainer]`. Batch sizes and the sync interval come from the tasks."""

    model: Path = Field(description="Hugging Face folder of the initial model; also the reference of the KL")
    output: Path = Field(description="folder for checkpoints, shared weights and metrics.jsonl")
    steps: int = Field(gt=0, description="train until this step")
    learning_rate: float = Field(default=1e-6, gt=0, description="of AdamW, constant")
    weight_decay: float = Field(default=0.0, ge=0)
    gradient_clip: float = Field(default=1.0, gt=0, description="largest norm of the gradient")
    loss: GrpoSettings = GrpoSettings()
    advantages: AdvantageSettings = AdvantageSettings()
    micro_batch_tokens: int = Field(default=16_384, gt=0, description="tokens of one forward and backward pass")
    layout: Literal["packed", "padded"] = Field(
        default="padded", description="packed needs flash attention to be the quicker one: its rows are long"
    )
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int | None = Field(default=None, gt=0, description="CPU threads; default: torch's choice")
    checkpoint_every: int = Field(default=10, gt=0, description="steps between two checkpoints")
    evaluate_every: int = Field(default=0, ge=0, description="steps between two evaluations; 0: never")
    evaluation_timeout_s: float | None = Field(default=None, gt=0, description="longest wait for one evaluation")
    transport: Transport = Field(
        default="redis", description="how weights reach workers: redis up to 64 MiB, path, or nccl into vLLM"
    )
    nccl: NcclSettings = NcclSettings()
    keep_versions: int = Field(default=3, gt=0, description="published weights that stay, for slow workers")
    trainer_id: str = Field(default="trainer", description="the same id takes over from its dead self at once")
    takeover: bool = Field(default=False, description="take the run from another trainer that still lives")
    mode: ResumeMode = Field(default="replay", description="what becomes of batches after the step resumed from")
    timeout_s: float | None = Field(default=None, gt=0, description="longest wait for one batch; default: for ever")
    colocated: bool = Field(default=False, description="engines sleep while the trainer has their GPUs")
    max_bad_batches: int = Field(default=3, gt=0, description="batches in a row whose loss may be NaN")
    verify_logprobs: float | None = Field(
        default=None, gt=0, description="stop when a logprob of staleness 0 differs from the engine's by more"
    )
    shuffle_rewards: bool = Field(default=False, description="a control that must not learn: rewards change places")
    record_dir: Path | None = Field(default=None, description="keep every trained batch and its weights, to verify")

    @model_validator(mode="after")
    def _nccl_needs_gpus(self) -> Self:
        if self.transport == "nccl" and not self.device.startswith("cuda"):
            raise ValueError(f"transport 'nccl' sends from a GPU: set device = 'cuda', not {self.device!r}")
        if self.transport == "nccl" and self.colocated:
            raise ValueError(ASLEEP)
        return self
