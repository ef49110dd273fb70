"""Processes of tests, as forks of one that has imported what takes each of them seconds: torch, transformers and TRL.

There is one such process per test process, and it cannot import tests: only what is installed can be preloaded.
"""

import multiprocessing

ROLES = [
    "rollq.cli.settings_file",
    "rollq.workers.run",
    "rollq.producer.run",
    "rollq.consumer.consumer",
    # imported at their first use
    "encodings.idna",
    "numpy.ma",
    "importlib.readers",
]
"""Modules of the roles, without torch."""
TRAINERS = [
    "accelerate",
    "peft",
    "rollq.consumer.trainer",
    "rollq.integrations.trl.trainer",
    "rollq.workers.weight_follower",
    "safetensors.torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "transformers.models.qwen3.modeling_qwen3",
]
"""Modules of trainers."""

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(ROLES + TRAINERS)
