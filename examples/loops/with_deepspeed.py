"""A trainer in several ranks with DeepSpeed."""

import secrets

import deepspeed
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from rollq.consumer import Consumer, ConsumerSettings, policy_loss

ACCUMULATION = 4
deepspeed.init_distributed("gloo")  # "nccl" on GPUs
launch = [secrets.token_hex(8)]
dist.broadcast_object_list(launch)
model = AutoModelForCausalLM.from_pretrained("sums/model")
engine, *_ = deepspeed.initialize(
    model=model,
    config={
        "train_micro_batch_size_per_gpu": 1,  # has no effect, since rollq makes the micro-batches
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    },
)
settings = ConsumerSettings(
    rank=dist.get_rank(), world_size=dist.get_world_size(), launch_id=launch[0], reduction="mean"
)
with Consumer.connect("redis://127.0.0.1:6379/0", run="demo", weights=model, settings=settings) as consumer:
    for batch in consumer:
        for micro in batch.micro_batches(max_tokens=16_384, count=ACCUMULATION):
            engine.backward(policy_loss(engine, micro.to(engine.device)), scale_wrt_gas=False)
            engine.step()  # updates after the last micro-batch
        dist.barrier()
        consumer.publish(model, step=batch.step)
        consumer.commit(batch)
        if dist.get_rank() == 0:
            norm = float(engine.get_global_grad_norm())
            print(f"step {batch.step}: reward {batch.mean_reward:.3f}, gradient norm {norm:.3f}")
        if batch.step == 20:
            break
dist.destroy_process_group()
