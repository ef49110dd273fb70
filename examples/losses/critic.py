"""A value head beside the policy, whose advantages (GAE) replace the advantages of groups."""

from dataclasses import replace

from rollq.consumer import policy_loss
from rollq.consumer.losses import generalised_advantages, value_loss


def value_of(model, head, micro):
    """The value before each loss token, from the hidden state of the token before it, [n]."""
    output = model(micro.input_ids, attention_mask=micro.attention_mask, output_hidden_states=True)
    values = head(output.hidden_states[-1].detach()).squeeze(-1)  # the head alone learns from them
    return values[:, :-1][micro.loss_mask[:, 1:]]


def add_gradients(model, head, batch, settings, *, max_tokens=16_384, gamma=1.0, lam=0.95):
    for micro in batch.micro_batches(max_tokens, padded=True, whole_samples=True, arrays=["token_rewards"]):
        mask, values = micro.loss_mask, value_of(model, head, micro)
        rewards, samples = micro.arrays["token_rewards"][mask], micro.sample_index[mask]
        found, returns = generalised_advantages(rewards, values.detach(), samples, gamma=gamma, lam=lam)
        micro = replace(micro, advantages=micro.advantages.masked_scatter(mask, found))
        errors = value_loss(values, values.detach(), returns)
        loss = policy_loss(model, micro, settings) + 0.5 * errors.sum() / micro.counts.loss_tokens
        loss.backward()
