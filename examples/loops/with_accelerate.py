"""A trainer in several ranks with Accelerate."""

import secrets

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from transformers import AutoModelForCausalLM

from rollq.consumer import Consumer, ConsumerSettings, policy_loss

accelerator = Accelerator(cpu=True)  # Accelerator() on GPUs
model = AutoModelForCausalLM.from_pretrained("sums/model")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)

settings = ConsumerSettings(
    rank=accelerator.process_index,
    world_size=accelerator.num_processes,
    launch_id=broadcast_object_list([secrets.token_hex(8)])[0],
    reduction="mean",
)
whole = accelerator.unwrap_model(model)
with Consumer.connect("redis://127.0.0.1:6379/0", run="demo", weights=whole, settings=settings) as consumer:
    for batch in consumer:
        for micro in batch.micro_batches(max_tokens=16_384):
            accelerator.backward(policy_loss(model, micro.to(accelerator.device)))
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.wait_for_everyone()
        consumer.publish(whole, step=batch.step)
        consumer.commit(batch)
        accelerator.print(f"step {batch.step}: reward {batch.mean_reward:.3f}, gradient norm {norm:.3f}")
        if batch.step == 20:
            break
accelerator.end_training()
