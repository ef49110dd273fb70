"""Rows for verl's V1 trainer from a batch of rollq: one per sequence, with the fields of verl's agent loops."""

from typing import Any

import torch

from rollq.consumer import Batch


def rows_of(batch: Batch) -> tuple[list[str], list[dict[str, Any]], list[dict[str, Any]]]:
    """Keys, fields and tags of the sequences of a batch, in order.

    A key is `{uid}_{session}_{index}`, which name a group, its sample, and the sample's segment; verl splits keys at
    underscores.
    """
    keys, rows, tags = [], [], []
    segments: dict[int, int] = {}
    for sequence in batch.sequences:
        task, group_id = batch.group_ids[int(batch.sample_groups[sequence.sample])]
        uid = f"{batch.step}-{task}-{group_id}".replace("_", "-")
        index = segments[sequence.sample] = segments.get(sequence.sample, -1) + 1
        keys.append(f"{uid}_{sequence.sample}_{index}")
        ids = torch.from_numpy(sequence.ids).long()
        prompts, responses = ids[: sequence.prompt_tokens], ids[sequence.prompt_tokens :]
        mask = torch.from_numpy(sequence.loss_mask[sequence.prompt_tokens :]).long()
        scores = torch.zeros(len(responses))
        scores[-1] = float(batch.rewards[sequence.sample])
        versions = sequence.versions[sequence.versions >= 0]
        oldest, newest = (int(versions.min()), int(versions.max())) if len(versions) else (batch.step, batch.step)
        rows.append(
            {
                "uid": uid,
                "prompts": prompts,
                "responses": responses,
                "input_ids": ids,
                "position_ids": torch.arange(len(ids)),
                "response_mask": mask,
                "loss_mask": mask,
                "rollout_log_probs": torch.from_numpy(sequence.logprobs[sequence.prompt_tokens :]).float(),
                "rm_scores": scores,
                "num_turns": index + 1,
                "multi_modal_inputs": {},
                "extra_fields": {"min_global_steps": oldest, "max_global_steps": newest, "reward_extra_info": {}},
            }
        )
        tags.append(
            {
                "status": "success",
                "prompt_len": len(prompts),
                "response_len": len(responses),
                "seq_len": len(ids),
                "global_steps": batch.step,
                "min_global_steps": oldest,
                "max_global_steps": newest,
            }
        )
    return keys, rows, tags
