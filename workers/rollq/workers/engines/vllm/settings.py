"""Settings of engine `vllm`."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from rollq.buffer.rules.settings import Settings

RESERVED_ARGS = {
    "model": "set [worker.options] model",
    "tokenizer": "it is the model's",
    "skip_tokenizer_init": "an id outside the vocabulary would kill the engine",
    "dtype": "set [worker.options] dtype",
    "load_format": "weights are loaded from the model's folder",
    "logprobs_mode": "training needs the logprobs of what was sampled",
    "generation_config": "every sampling parameter is sent with each request",
    "scheduling_policy": "evaluations overtake training",
    "worker_extension_cls": "it loads weights",
    "mm_processor_kwargs": "set image_options of the task, which the trainer needs too",
    "mm_processor_cache_gb": "vLLM can die when it is cleared at a swap",
}
"""vLLM's arguments that rollq sets itself, each with the reason."""


class VllmSettings(Settings):
    """Which model vLLM serves, and how."""

    model: Path = Field(description="folder written by save_pretrained")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(default="auto", description="auto: the model's")
    recompute_cache: bool = Field(
        default=True, description="false: after a swap, running requests continue from the old weights' keys and values"
    )
    engine_args: dict[str, Any] = Field(default_factory=dict, description="more arguments of vLLM's AsyncEngineArgs")

    @field_validator("engine_args")
    @classmethod
    def _reserved(cls, args: dict[str, Any]) -> dict[str, Any]:
        for name in RESERVED_ARGS.keys() & args.keys():
            raise ValueError(f"{name!r} is set by rollq: {RESERVED_ARGS[name]}")
        return args
