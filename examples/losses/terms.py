"""The parts of a loss, for the tokens of any trainer."""

import torch

from rollq.consumer.losses import LossSettings, policy_terms, token_weights

new = torch.tensor([-1.0, -0.4, -2.0], requires_grad=True)
behaviour = torch.tensor([-1.1, -0.5, -1.0])
advantages = torch.tensor([1.0, 1.0, -0.5])
samples = torch.tensor([0, 0, 1])  # the first two belong to one sample

settings = LossSettings(preset="gspo")
found = policy_terms(settings, new=new, behaviour=behaviour, advantages=advantages, samples=samples)
weights = token_weights(torch.tensor([2.0, 2.0, 1.0]), settings.aggregation, tokens=3, samples=2, constant=1024)
loss = (found.terms * weights).sum()
loss.backward()
print(f"{loss.item():.4f}, clipped: {found.was_clipped.tolist()}")
