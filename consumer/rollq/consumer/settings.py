"""Settings of the consumer and of the reference trainer: section `[trainer]` of `rollq.toml`."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from rollq.buffer.calls.training import ResumeMode
from rollq.buffer.common.s3 import URL
from rollq.buffer.rewards.advantages import AdvantageSettings
from rollq.buffer.rules.settings import Settings
from rollq.buffer.weights.chain import MAX_DELTAS
from rollq.consumer.batches.sequences import Reduction
from rollq.consumer.losses.settings import LossSettings
from rollq.consumer.tracker_settings import MlflowSettings, TensorBoardSettings, TrackerName, WandbSettings

OnReplayMismatch = Literal["warn", "regenerate", "fail"]
Transport = Literal["redis", "path", "s3", "nccl"]

MAX_FILE_BYTES = 5 << 30
"""The usual size of model shards."""
KEPT_CHECKPOINTS = 2


class NcclSettings(Settings):
    """How a trainer with `transport = "nccl"` sends weights to its workers."""

    address: str | None = Field(
        default=None, description="address at which workers reach the trainer's machine; default: its host name"
    )
    join_s: float = Field(default=30, gt=0, description="longest wait for workers to join a broadcast, in seconds")
    timeout_s: float = Field(default=300, gt=0, description="longest broadcast once they have joined, in seconds")


class LoraSettings(Settings):
    """An adapter to train instead of the model's weights."""

    rank: int = Field(default=16, gt=0, description="rank of the adapter's matrices")
    alpha: int = Field(default=32, gt=0, description="scales the adapter's output by alpha / rank")
    targets: Literal["all-linear"] | list[str] = Field(
        default="all-linear", description='names of the modules to adapt; "all-linear": all except the head'
    )


class ClientSettings(Settings):
    """How any trainer, including the reference trainer, holds its run, takes batches and sends weights."""

    trainer_id: str = Field(
        default="trainer", description="name of the trainer in the errors of other trainers that try to take the run"
    )
    mode: ResumeMode = Field(
        default="replay", description="what happens to batches after the checkpoint's step: replay, return, regenerate"
    )
    takeover: bool = Field(default=False, description="take the run from a trainer that is still alive")
    accept_new_store: bool = Field(
        default=False,
        description="train even if the checkpoint belongs to another store, or the store does not know its step",
    )
    on_replay_mismatch: OnReplayMismatch = Field(
        default="warn",
        description="if batches are replayed with weights other than the recorded weights: warn, regenerate the rest, "
        "or fail",
    )
    timeout_s: float | None = Field(
        default=None, gt=0, description="longest wait for one batch, in seconds; default: no limit"
    )
    max_outage_s: float | None = Field(
        default=None, ge=0, description="longest wait for a server that does not answer, in seconds; default: no limit"
    )
    transport: Transport = Field(
        default="redis",
        description="how weights reach workers: redis (up to 64 MiB), path (a shared folder), s3 (an object store), "
        "nccl (into vLLM; experimental)",
    )
    s3_url: str | None = Field(default=None, description="transport s3: where weights are stored, s3://bucket/prefix")
    full_every: int = Field(
        default=1,
        gt=0,
        le=MAX_DELTAS,
        description="publish a complete copy every n-th time, with deltas in between; 1: always complete",
    )
    publish_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None, description="dtype of published weights, except for folders; default: the model's dtype"
    )
    max_file_bytes: int = Field(
        default=MAX_FILE_BYTES,
        gt=0,
        description="bytes of tensors in one safetensors file of published weights and checkpoints; larger models have "
        "several files",
    )
    keep_versions: int = Field(default=3, gt=0, description="published weights that are kept for slow workers")
    nccl: NcclSettings = Field(default=NcclSettings(), description="settings of transport nccl")
    advantages: AdvantageSettings = Field(default=AdvantageSettings(), description="how rewards become advantages")
    prefetch_bytes: int = Field(
        default=1 << 30,
        ge=0,
        description="memory for reading groups of the next batch while this one is trained, in bytes; 0: none",
    )
    colocated: bool = Field(default=False, description="put the engines to sleep while the trainer uses their GPUs")

    @model_validator(mode="after")
    def _transport_s3_has_a_url(self) -> Self:
        if self.transport == "s3" and not (self.s3_url and URL.fullmatch(self.s3_url)):
            raise ValueError(f"transport 's3' needs s3_url = 's3://bucket/prefix', not {self.s3_url!r}")
        return self

    @model_validator(mode="after")
    def _engines_that_take_weights_are_awake(self) -> Self:
        if self.transport == "nccl" and self.colocated:
            raise ValueError(
                "transport 'nccl' with colocated = true: engines that sleep cannot take weights; set transport = 'path'"
            )
        if self.transport == "nccl" and self.full_every > 1:
            raise ValueError("transport 'nccl' always sends all weights: leave full_every out")
        return self


class ConsumerSettings(ClientSettings):
    """Settings of a `Consumer`. All ranks of a launch pass equal settings, except `rank`."""

    launch_id: str | None = Field(
        default=None, description="id of this launch, the same on all its ranks; default: a random one"
    )
    rank: int = Field(default=0, ge=0, description="rank of this process, from 0")
    world_size: int = Field(default=1, gt=0, description="number of ranks in this launch")
    reduction: Reduction = Field(
        default="sum", description="how the ranks combine their gradients: sum, or mean, as DDP and FSDP do"
    )
    weights_dir: Path | None = Field(
        default=None, description="transport path: folder for weights, shared with all workers"
    )
    seed: int = Field(default=0, description="seed of draws, for tasks whose order has draws")

    @model_validator(mode="after")
    def _ranks_are_consistent(self) -> Self:
        if self.rank >= self.world_size:
            raise ValueError(f"rank {self.rank} of world_size {self.world_size}: ranks count from 0")
        if self.world_size > 1 and self.launch_id is None:
            raise ValueError("several ranks need a launch_id, the same on all of them")
        return self


class TrainerSettings(ClientSettings):
    """The reference trainer. Batch sizes and the sync interval come from the tasks."""

    model: Path = Field(description="Hugging Face folder of the initial model, which is also the reference model")
    output: Path = Field(description="folder for checkpoints, shared weights and metrics.jsonl")
    steps: int = Field(gt=0, description="train until this step")
    learning_rate: float = Field(default=1e-6, gt=0, description="largest learning rate of AdamW")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="how the learning rate falls after the warm-up: not at all, or to 0 at `steps`"
    )
    warmup_steps: int = Field(default=0, ge=0, description="train steps in which the learning rate rises from 0")
    weight_decay: float = Field(default=0.0, ge=0, description="weight decay of AdamW")
    gradient_clip: float = Field(default=1.0, gt=0, description="largest norm of the gradient")
    updates_per_batch: int = Field(
        default=1, gt=0, description="optimizer steps per batch, each on a part of its groups"
    )
    credit: Literal["sample", "tokens", "turns"] = Field(
        default="sample",
        description="unit that gets an advantage: a sample, or each token or turn that the judge rewards",
    )
    discount: float = Field(
        default=1.0, ge=0, le=1, description="with credit tokens or turns: weight of the next return"
    )
    loss: LossSettings = Field(
        default=LossSettings(), description="name of the loss, or a table with its settings; default: clipped PPO"
    )
    micro_batch_tokens: int = Field(default=16_384, gt=0, description="tokens in one forward and backward pass")
    layout: Literal["packed", "padded"] = Field(
        default="padded", description="how sequences form micro-batches; packed is faster only with flash attention"
    )
    device: str = Field(default="cpu", description="torch device of the model, such as cpu or cuda")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="dtype of passes, published weights and frozen weights; trained weights, the optimizer and "
        "checkpoints have float32",
    )
    compute_dtype: Literal["bfloat16"] | None = Field(
        default=None, description="dtype of only forward and backward passes; default: `dtype`"
    )
    logprob_chunk: int = Field(
        default=1024, ge=0, description="tokens whose logits are in memory at a time; 0: a whole micro-batch"
    )
    checkpoint_activations: bool = Field(
        default=False, description="recompute activations in the backward pass, which saves most of their memory"
    )
    lora: LoraSettings | None = Field(
        default=None, description="train and publish only an adapter; default: train all weights"
    )
    threads: int | None = Field(default=None, gt=0, description="CPU threads used by torch; default: torch's choice")
    checkpoint_every: int = Field(default=10, gt=0, description="train steps between two checkpoints")
    keep_checkpoints: int = Field(
        default=KEPT_CHECKPOINTS, gt=0, description="how many of the newest checkpoints to keep"
    )
    save_optimizer: bool = Field(
        default=True, description="save the optimizer's state in checkpoints; without it, a resumed run differs"
    )
    export_every: int = Field(
        default=0, ge=0, description="train steps between two exports of the weights, which are never removed; 0: never"
    )
    evaluate_every: int = Field(default=0, ge=0, description="train steps between two evaluations; 0: never")
    evaluate_at_start: bool = Field(
        default=True, description="evaluate the initial weights too, if evaluate_every is set"
    )
    evaluation_metrics: str | None = Field(
        default=None,
        description="dotted path of a function of an evaluation's name and its results, for further metrics",
    )
    priorities: str | None = Field(
        default=None,
        description="dotted path of a function of a trained batch that gives each of its groups a priority for later "
        "draws; needs a task with order priority",
    )
    max_mismatch: float | None = Field(
        default=1.0,
        gt=0,
        description="stop when a batch's logprobs differ from the engine's by more than this on average, in nats",
    )
    replay_experts: bool = Field(
        default=False, description="route tokens to the experts that the engine chose, in a mixture of experts"
    )
    trackers: tuple[TrackerName, ...] = Field(
        default=(), description="trackers that also get metrics and sampled rollouts: tensorboard, wandb, mlflow"
    )
    tracked_rollouts: int = Field(
        default=8, ge=0, le=1000, description="rollouts of each step that trackers show; 0: none"
    )
    tensorboard: TensorBoardSettings = Field(
        default=TensorBoardSettings(), description="settings of tracker tensorboard"
    )
    wandb: WandbSettings = Field(default=WandbSettings(), description="settings of tracker wandb")
    mlflow: MlflowSettings = Field(default=MlflowSettings(), description="settings of tracker mlflow")

    REMOVED: ClassVar[Mapping[str, str]] = {
        "evaluation_timeout_s": "an evaluation may take any time, and `rollq status` shows it; leave it out"
    }

    @model_validator(mode="after")
    def _nccl_needs_gpus(self) -> Self:
        if self.transport == "nccl" and not self.device.startswith("cuda"):
            raise ValueError(f"transport 'nccl' sends from a GPU: set device = 'cuda', not {self.device!r}")
        return self

    @model_validator(mode="after")
    def _adapters_can_be_published(self) -> Self:
        if self.lora is None:
            return self
        if self.transport == "nccl":
            raise ValueError(
                "transport 'nccl' sends whole models: with [trainer.lora], set transport = 'redis' or 'path'"
            )
        if self.replay_experts:
            raise ValueError("replay_experts trains routers: leave it out with [trainer.lora]")
        if self.publish_dtype is not None:
            raise ValueError("publish_dtype rounds whole models: leave it out with [trainer.lora]")
        return self

    @model_validator(mode="after")
    def _credit_agrees(self) -> Self:
        if self.credit == "sample":
            if self.discount != 1:
                raise ValueError(
                    f'discount = {self.discount!r}: needs credit = "tokens" or "turns"; set it, or leave discount out'
                )
            return self
        given = f'credit = "{self.credit}"'
        if "batch" in (self.advantages.baseline, self.advantages.scale):
            raise ValueError(f'{given}: compares within groups, so baseline and scale in advantages cannot be "batch"')
        if self.advantages.baseline == "opo" or self.advantages.pass_k > 1:
            raise ValueError(
                f'{given}: baseline = "opo" and pass_k in advantages compare whole samples; leave them out, or set '
                'credit = "sample"'
            )
        if self.loss.surrogate == "gmpo":
            raise ValueError(f"{given}: loss gmpo has one advantage for each sample; choose another loss")
        return self

    @model_validator(mode="after")
    def _warm_up_ends(self) -> Self:
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps = {self.warmup_steps} must be less than steps = {self.steps}")
        return self

    @property
    def compute_in(self) -> Literal["float32", "bfloat16"]:
        """The dtype of forward and backward passes."""
        return self.compute_dtype or self.dtype

    def consumer(
        self, *, rank: int = 0, world_size: int = 1, launch_id: str | None = None, seed: int = 0
    ) -> ConsumerSettings:
        """Settings for a rank's consumer. Weights for transport `path` go to a folder inside `output`."""
        shared = {name: getattr(self, name) for name in ClientSettings.model_fields}
        if self.dtype != "float32" and self.lora is None:
            shared["publish_dtype"] = self.publish_dtype or self.dtype  # the dtype of passes
        return ConsumerSettings(
            weights_dir=self.output / "weights",
            rank=rank,
            world_size=world_size,
            launch_id=launch_id,
            seed=seed,
            reduction="mean" if world_size > 1 else "sum",  # as FSDP combines gradients
            **shared,
        )
