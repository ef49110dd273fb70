"""Refuses settings that the adapter cannot honour, and batches for which TRL's loss cannot be computed. Pure."""

from typing import TYPE_CHECKING

import numpy as np

from rollq.buffer.errors import ConfigError, InvalidGroup
from rollq.consumer.batches.batch import Batch

if TYPE_CHECKING:
    from trl import GRPOConfig

BY_TOKENS = ("dapo", "cispo")
"""Losses that divide by the whole batch's number of loss tokens."""
BY_SAMPLES = ("grpo", "dr_grpo")
"""Losses that average over a micro-batch's rows."""


EXACT = frozenset(
    """beta cast_lm_head_to_fp32 delta disable_dropout epsilon epsilon_high importance_sampling_level loss_type
    max_completion_length model_init_kwargs off_policy_mask_threshold temperature trust_remote_code
    use_bias_correction_kl""".split()  # noqa: SIM905 - a line for each of 50 names
)
"""TRL's settings that work exactly, for any split into micro-batches and ranks."""
UNUSED = frozenset(
    """cache_implementation chat_template_kwargs ds3_gather_for_generation entropy_coef_delta entropy_coef_max
    entropy_coef_min entropy_target generation_batch_size generation_kwargs log_completions log_completions_hub_repo
    log_multimodal log_unique_prompts max_tool_calling_iterations min_p multi_objective_aggregation
    num_completions_to_print num_generations num_generations_eval pad_to_multiple_of ref_model_mixup_alpha
    ref_model_sync_steps repetition_penalty reward_weights sapo_temperature_neg sapo_temperature_pos scale_rewards
    shuffle_dataset top_k top_p transformers_continuous_batching_config use_transformers_continuous_batching
    use_transformers_paged vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos vllm_enable_sleep_mode
    vllm_gpu_memory_utilization vllm_group_port vllm_importance_sampling_cap vllm_importance_sampling_clip_max
    vllm_importance_sampling_clip_min vllm_importance_sampling_correction vllm_importance_sampling_mode
    vllm_max_model_length vllm_mode vllm_model_impl vllm_server_base_url vllm_server_host vllm_server_port
    vllm_server_timeout vllm_structured_outputs_regex vllm_tensor_parallel_size""".split()  # noqa: SIM905 - a line for each of 50 names
)
"""TRL's settings without effect: those for its generation, rewards and completion log, and parts of refused
settings."""
REFUSED = frozenset(
    """entropy_coef mask_truncated_completions num_iterations router_aux_loss_coef steps_per_generation sync_ref_model
    top_entropy_quantile use_adaptive_entropy use_vllm""".split()  # noqa: SIM905 - a line for each of 50 names
)
"""TRL's settings that must keep their default: their effect depends on micro-batches, or the adapter cannot honour
them. With a mixture of experts, `router_aux_loss_coef` must be 0: by default, TRL takes the model's."""


def check_config(args: "GRPOConfig") -> None:
    """Raise `ConfigError` for the first setting that the adapter cannot honour."""
    losses = (*BY_TOKENS, *BY_SAMPLES)
    by_micro_batch = "depends on micro-batches"
    wanted = [
        ("max_steps", args.max_steps > 0, "it is the last train step, and must be positive"),
        ("loss_type", args.loss_type in losses, f"use one of {', '.join(losses)}: others depend on micro-batches"),
        ("num_iterations", args.num_iterations == 1, "it must be 1: a batch is trained with one update"),
        (
            "steps_per_generation",
            args.steps_per_generation == args.gradient_accumulation_steps,
            f"leave it out: a batch is one update of {args.gradient_accumulation_steps} micro-batches",
        ),
        ("use_vllm", not args.use_vllm, "leave it out: rollq's workers generate"),
        ("eval_strategy", args.eval_strategy == "no", "leave it out, and call `consumer.evaluate`"),
        ("entropy_coef", not args.entropy_coef, f"leave it out: the bonus {by_micro_batch}"),
        ("use_adaptive_entropy", not args.use_adaptive_entropy, f"leave it out: the bonus {by_micro_batch}"),
        ("top_entropy_quantile", args.top_entropy_quantile == 1, f"leave it out: the quantile {by_micro_batch}"),
        (
            "mask_truncated_completions",
            not args.mask_truncated_completions,
            "leave it out, and set filters = ['overlong'] of the task: rollq says which samples are trained",
        ),
        (
            "sync_ref_model",
            not args.sync_ref_model,
            "leave it out: checkpoints lack the reference, so resumed training would use a different one",
        ),
        ("neftune_noise_alpha", not args.neftune_noise_alpha, "leave it out: its noise is not in the logprobs"),
        ("label_smoothing_factor", not args.label_smoothing_factor, "leave it out: TRL's policy losses have no labels"),
        ("save_strategy", args.save_strategy in ("no", "steps"), "set it to 'steps' or 'no': there are no epochs"),
        ("save_only_model", not args.save_only_model, "leave it out: resuming needs the optimizer's state"),
    ]
    for name, is_good, remedy in wanted:
        if not is_good:
            raise ConfigError(f"GRPOConfig {name} = {getattr(args, name)!r}: {remedy}")


def check_batch(batch: Batch, args: "GRPOConfig") -> None:
    """Raise `ConfigError` for another rank's batch, and `InvalidGroup` for samples with several segments if the loss
    needs each sample in one row."""
    mine = (args.process_index, args.world_size)
    if (batch.rank, batch.world_size) != mine:
        raise ConfigError(
            f"the consumer is rank {batch.rank} of {batch.world_size}, and TRL has rank {mine[0]} of "
            f"{mine[1]}: open it with `rollq.integrations.trl.connect`"
        )
    samples = batch.content.sequence_samples
    by_row = {
        "loss_type": args.loss_type == "grpo",
        "importance_sampling_level": args.importance_sampling_level == "sequence",
        "off_policy_mask_threshold": args.off_policy_mask_threshold is not None,
    }
    if any(by_row.values()) and len(np.unique(samples)) < len(samples):
        found = " and ".join(f"{name} = {getattr(args, name)!r}" for name, is_one in by_row.items() if is_one)
        raise InvalidGroup(
            f"step {batch.step} has samples of several segments, and GRPOConfig {found} treats each segment as a "
            "sample: set loss_type = 'dapo', importance_sampling_level = 'token' and off_policy_mask_threshold = None"
        )
