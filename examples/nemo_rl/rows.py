"""Rows for NeMo-RL's GRPO from a batch of rollq: one for each sequence, padded to the longest."""

import torch

from rollq.consumer import Batch


def rows_of(batch: Batch, pad_id: int = 0) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Ids of the rows, and their fields: [B, T] for fields with a value per token, else [B]."""
    sequences = list(batch.sequences)
    tokens = {
        "input_ids": ([torch.from_numpy(sequence.ids).long() for sequence in sequences], pad_id),
        "generation_logprobs": ([torch.from_numpy(sequence.logprobs).float() for sequence in sequences], 0),
        "token_mask": ([torch.from_numpy(sequence.loss_mask).float() for sequence in sequences], 0),
        "prompt_ids_for_adv": (
            [torch.from_numpy(sequence.ids[: sequence.prompt_tokens]).long() for sequence in sequences],
            pad_id,
        ),
    }
    fields = {
        name: torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=pad)
        for name, (values, pad) in tokens.items()
    }
    fields["input_lengths"] = torch.tensor([len(sequence.ids) for sequence in sequences])
    fields["sample_mask"] = torch.ones(len(sequences))
    fields["total_reward"] = torch.tensor([float(batch.rewards[sequence.sample]) for sequence in sequences])
    groups = [batch.group_ids[int(index)] for index in batch.sequence_groups]
    return [f"{batch.step}-{task}-{group}_g{row}" for row, (task, group) in enumerate(groups)], fields
