"""A trainer in several ranks that trains while its batch fills."""

import secrets

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from rollq.consumer import Consumer, ConsumerSettings, LossSettings, policy_loss

dist.init_process_group("gloo")
launch = [secrets.token_hex(8)]
dist.broadcast_object_list(launch)
model = AutoModelForCausalLM.from_pretrained("sums/model")
for layer in (*model.model.layers, model):
    fully_shard(layer)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loss = LossSettings()
settings = ConsumerSettings(
    rank=dist.get_rank(), world_size=dist.get_world_size(), launch_id=launch[0], reduction="mean"
)
with Consumer.connect("redis://127.0.0.1:6379/0", run="demo", weights=model, settings=settings) as consumer:
    while consumer.step <= 20:
        stream = consumer.stream(max_tokens=1_024, loss=loss)
        for micro in stream:  # waits until there is enough for each rank
            policy_loss(model, micro, loss).backward()
        if stream.batch is None:  # stopped, or production has ended: nothing to train
            break
        stream.finish(model.parameters())  # from here on, these are the whole batch's gradients
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        batch = stream.batch
        consumer.publish(model, step=batch.step)
        consumer.commit(batch)
        if dist.get_rank() == 0:
            print(f"step {batch.step}: reward {batch.mean_reward:.3f}, gradient norm {norm:.3f}")
dist.destroy_process_group()
