"""DPO on the best and the worst sample of each group."""

import numpy as np
import torch
from torch.nn.functional import logsigmoid


def sample_logprobs(model, micro, samples):
    """The logprob of the response of each sample, over all its segments, [samples]."""
    output = model(micro.input_ids, attention_mask=micro.attention_mask)
    logprobs = output.logits[:, :-1].log_softmax(-1).gather(-1, micro.input_ids[:, 1:, None]).squeeze(-1)
    mask = micro.loss_mask[:, 1:]
    return logprobs.new_zeros(samples).index_add(0, micro.sample_index[:, 1:][mask], logprobs[mask])


def pairs_of(batch):
    """The best and the worst valid sample of each group whose rewards differ, by index."""
    for group in range(len(batch.groups)):
        members = np.flatnonzero((batch.sample_groups == group) & batch.valid)
        if len(members) and np.ptp(batch.rewards[members]) > 0:
            yield members[batch.rewards[members].argmax()], members[batch.rewards[members].argmin()]


def dpo_loss(model, reference, batch, beta=0.1):
    micro, samples = batch.to_torch(), len(batch.samples)  # both samples of a pair are here
    with torch.no_grad():
        before = sample_logprobs(reference, micro, samples)
    gain = sample_logprobs(model, micro, samples) - before
    best, worst = np.array(list(pairs_of(batch))).T
    return -logsigmoid(beta * (gain[best] - gain[worst])).mean()
