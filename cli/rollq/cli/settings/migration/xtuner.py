"""Converts XTuner v1's RL trainer configs to `rollq.toml`: settings of the whole run. Tasks are in
`xtuner_tasks.py`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from rollq.buffer.errors import ConfigError
from rollq.buffer.rules.settings import MAX_BATCH_GROUPS
from rollq.cli.settings.migration.conversion import Conversion, Given
from rollq.cli.settings.migration.names import plain_name
from rollq.cli.settings.migration.table import system
from rollq.cli.settings.migration.values import REST, Made, Placeholder, shown
from rollq.cli.settings.migration.xtuner_loss import convert_loss
from rollq.cli.settings.migration.xtuner_tasks import convert_evaluation, convert_task, made

TRAINERS: Final = ("RLColocateTrainerConfig", "RLDisaggregatedTrainerConfig")
ENOUGH_STEPS: Final = 1_000_000
"""Train steps for a run that ends after passes over the prompts."""


def trainer_of(path: Path, names: Mapping[str, Any]) -> Made:
    """The trainer's config among a file's assigned names. Raises `ConfigError` if there is none."""
    configs = [value for value in (names.get("trainer"), *names.values()) if isinstance(value, Made)]
    if config := next(filter(_is_of_rl, configs), None):
        return config
    if any(config.group.endswith("TrainerConfig") for config in configs):
        raise ConfigError(
            f"{path}: settings of XTuner's trainer for SFT or pre-training; rollq takes those for RL, "
            f"{' or '.join(TRAINERS)}"
        )
    raise ConfigError(f"{path}: a Python file without XTuner's {' or '.join(TRAINERS)}")


def _is_of_rl(config: Made) -> bool:
    return config.group in TRAINERS or "agent_loop_manager_cfg" in config.fields


def convert(path: Path, config: Made) -> Conversion:
    """The new file for an XTuner config."""
    run = Conversion(system("xtuner"))
    trainer = Given(config.group if config.group in TRAINERS else TRAINERS[0], config.fields, "trainer.")
    rollout = made(config.fields.get("rollout_config"), "RolloutConfig")
    worker = made(config.fields.get("train_worker_cfg"), "WorkerConfig")
    trainer.taken |= {"rollout_config", "train_worker_cfg", "agent_loop_manager_cfg", "eval_agent_loop_manager_cfg"}
    name = run.word(rollout, "env")
    run.set("run", plain_name(name if isinstance(name, str) and name else path.stem, 64))
    run.copy(trainer)
    is_sync = _tasks(run, trainer)
    _duration(run, trainer)
    _checkpoints(run, trainer)
    _evaluations(run, trainer)
    _engine(run, rollout, trainer)
    _learning(run, worker, trainer)
    convert_loss(run, worker, made(config.fields.get("advantage_estimator_config"), "GRPOAdvantageConfig"))
    trainer.taken.add("advantage_estimator_config")
    _places(run, trainer, is_sync)
    for given in (worker, rollout, trainer):
        run.rest(given)
    return run


def _specs(manager: Any) -> list[Any]:
    """The tasks of an agent loop manager, which may have one or several tasks, or may be a task itself. Some may be
    unknown."""
    if isinstance(manager, dict):
        manager = Made("AgentLoopManagerConfig", manager)
    if not isinstance(manager, Made):
        return [] if manager is None else [manager]
    tasks = manager.fields.get("tasks", manager.fields.get(REST, manager))
    found = tasks if isinstance(tasks, list | tuple) else [tasks]
    return [Made("TaskSpecConfig", task) if isinstance(task, dict) else task for task in found]


def _known(run: Conversion, trainer: Given, name: str) -> list[Made]:
    """The tasks that can be read. A comment lists the others."""
    specs = _specs(trainer.fields.get(name))
    run.unread += [f"{name} = {shown(spec)}" for spec in specs if not isinstance(spec, Made)]
    return [spec for spec in specs if isinstance(spec, Made)]


def _tasks(run: Conversion, trainer: Given) -> bool:
    """The tables of tasks. Returns whether all are produced synchronously."""
    specs = _known(run, trainer, "agent_loop_manager_cfg") or [Made("TaskSpecConfig")]
    groups, note = _groups(run, trainer)
    interval = run.whole(trainer, "sync_weights_interval")
    asynchronous = []
    for spec in specs:
        at, is_async = convert_task(run, spec, len(specs))
        asynchronous.append(is_async)
        run.put(trainer, "sync_weights_interval", "tasks.NAME.staleness.sync_weights_interval", interval, at)
    if len(specs) == 1:
        run.put(trainer, "train_batch_size", "tasks.NAME.batch_groups", groups, at, note)
    else:
        run.put(trainer, "train_batch_size", "batch.groups", groups, note=note)
    run.set("producer.strategy", "async" if any(asynchronous) else "sync")
    if len(set(asynchronous)) > 1:
        run.written.note(("producer", "strategy"), "one for all tasks; in XTuner some are synchronous")
    if not any(asynchronous):
        run.written.values.pop(("producer", "over_sample"), None)
    return not any(asynchronous)


def _groups(run: Conversion, trainer: Given) -> tuple[int, str]:
    """The number of groups in a batch, and how the batch differs from XTuner's."""
    groups = run.positive(trainer, "train_batch_size")
    if groups is None:
        return 64, "replace: prompts of a train step"
    if groups > MAX_BATCH_GROUPS:
        return MAX_BATCH_GROUPS, f"{groups} in XTuner; a batch has at most {MAX_BATCH_GROUPS}"
    return groups, ""


def _duration(run: Conversion, trainer: Given) -> None:
    steps, epochs = run.whole(trainer, "total_train_steps"), run.whole(trainer, "total_epochs")
    if steps is not None:
        run.put(trainer, "total_train_steps", "trainer.steps", steps)
        if epochs is not None:
            run.leave(trainer, "total_epochs", "total_train_steps takes precedence")
        return
    if epochs is not None:
        for at in run.written.tasks():
            run.put(trainer, "total_epochs", "tasks.NAME.curriculum.passes", epochs, at)
        note = "training ends after the passes over the prompts"
        run.put(trainer, "total_epochs", "trainer.steps", ENOUGH_STEPS, note=note)
        return
    run.set("trainer.steps", ENOUGH_STEPS, note="replace: the file has no known number of steps or epochs")


def _checkpoints(run: Conversion, trainer: Given) -> None:
    every, keep = run.positive(trainer, "checkpoint_interval"), run.positive(trainer, "checkpoint_maxkeep")
    reason = "rollq always saves checkpoints, by default every 10 steps"
    run.put_or_leave(trainer, "checkpoint_interval", "trainer.checkpoint_every", every, reason)
    for at in run.written.tasks() if (every or 0) > 100 else ():
        run.put(trainer, "checkpoint_interval", "tasks.NAME.batches.max_uncheckpointed_steps", every, at)
    reason = "rollq cannot keep all: trainer.keep_checkpoints says how many; trainer.export_every keeps weights"
    run.put_or_leave(trainer, "checkpoint_maxkeep", "trainer.keep_checkpoints", keep, reason)
    if run.flag(trainer, "checkpoint_no_save_optimizer") is True:
        run.put(trainer, "checkpoint_no_save_optimizer", "trainer.save_optimizer", False)
    exports = run.positive(trainer, "hf_interval")
    run.put(trainer, "hf_interval", "trainer.export_every", exports, note="XTuner also exports after the last step")


def _evaluations(run: Conversion, trainer: Given) -> None:
    specs = _known(run, trainer, "eval_agent_loop_manager_cfg")
    is_enabled, every = run.flag(trainer, "enable_evaluate"), run.whole(trainer, "evaluate_step")
    first = run.flag(trainer, "enable_initial_evaluate")
    for spec in specs:
        convert_evaluation(run, spec)
    if specs and is_enabled and every is not None:
        run.put(trainer, "evaluate_step", "trainer.evaluate_every", every)
        run.put(trainer, "enable_initial_evaluate", "trainer.evaluate_at_start", bool(first))
    elif specs:
        run.put(trainer, "enable_evaluate", "trainer.evaluate_every", 0, note="enable_evaluate is false")
    run.rest(made(trainer.fields.get("evaluator_config"), "EvaluatorConfig"))
    trainer.taken.add("evaluator_config")


ENGINE_ARGS: Final = {
    "tensor_parallel_size": "tensor_parallel_size", "data_parallel_size": "data_parallel_size",
    "gpu_memory_utilization": "gpu_memory_utilization", "context_length": "max_model_len", "random_seed": "seed",
    "rollout_max_batch_size_per_instance": "max_num_seqs", "enable_chunked_prefill": "enable_chunked_prefill",
    "enable_prefix_caching": "enable_prefix_caching",
}  # fmt: skip
"""Field of a rollout config -> argument of vLLM."""
_READERS: Final[Mapping[str, Callable[[Conversion, Given, str], Any]]] = {
    "gpu_memory_utilization": Conversion.number,
    "enable_chunked_prefill": Conversion.flag,
    "enable_prefix_caching": Conversion.flag,
}
"""How to read a field that is not a whole number."""
SAME_IN_VLLM: Final = {"tensor_parallel_size": 1, "data_parallel_size": 1}


def _engine(run: Conversion, rollout: Given, trainer: Given) -> None:
    args = _engine_args(run, rollout) | _extra_args(run, rollout)
    model, dtype = run.take(rollout, "model_path"), run.word(rollout, "dtype")
    options = {
        "model": _text(model or trainer.fields.get("load_from"), "model"),
        "dtype": dtype if dtype in ("float32", "float16") else "bfloat16",
    }
    run.set("worker.engine", "vllm", note="XTuner's engine is chosen by environment variables")
    run.put(rollout, "model_path", "worker.options", options | ({"engine_args": args} if args else {}))
    _limits(run, rollout, trainer)


def _engine_args(run: Conversion, rollout: Given) -> dict[str, Any]:
    args: dict[str, Any] = {}
    for name, argument in ENGINE_ARGS.items():
        value = _READERS.get(name, Conversion.whole)(run, rollout, name)
        if value not in (None, SAME_IN_VLLM.get(name)):
            args[argument] = value
    if run.positive(rollout, "expert_parallel_size") not in (None, 1):
        args["enable_expert_parallel"] = True
    prefill = run.whole(rollout, "chunked_prefill_size")
    if args.get("enable_chunked_prefill") and prefill is not None:
        args["max_num_batched_tokens"] = prefill
    return args


def _limits(run: Conversion, rollout: Given, trainer: Given) -> None:
    """Set the tokenizer, a worker's reactions to timeouts and failures, and the replay of experts."""
    tokenizer = run.take(rollout, "tokenizer_path")
    if "tokenizer_path" not in trainer:
        run.put(rollout, "tokenizer_path", "worker.tokenizer", tokenizer)
    run.put(rollout, "rollout_timeout", "worker.attempt_timeout_s", run.number(rollout, "rollout_timeout"))
    run.put(rollout, "max_retry_per_worker", "worker.engine_restarts", run.number(rollout, "max_retry_per_worker"))
    retries = run.whole(rollout, "max_retry_per_sample")
    tries = None if retries is None else retries + 1
    for at in run.written.tasks():
        run.put(rollout, "max_retry_per_sample", "tasks.NAME.limits.max_tries", tries, at)
    if run.flag(rollout, "enable_return_routed_experts") is True:
        run.put(rollout, "enable_return_routed_experts", "trainer.replay_experts", True, note="experimental")


def _extra_args(run: Conversion, rollout: Given) -> dict[str, Any]:
    """The arguments for vLLM in `extra_rollout_config`."""
    extra = run.take(rollout, "extra_rollout_config")
    extra = extra.fields if isinstance(extra, Made) else extra
    args = {}
    for name, value in extra.items() if isinstance(extra, dict) else ():
        setting = f"RolloutConfig.extra_rollout_config {name} = {shown(value)}"
        if str(name).startswith("vllm_"):
            args[str(name).removeprefix("vllm_")] = value
        elif name == REST:
            run.to_replace += 1
            run.written.comment(
                f"RolloutConfig.extra_rollout_config: {shown(value)}",
                "known only when the file runs; add its arguments to engine_args",
            )
        else:
            run.without += 1
            run.written.comment(setting, "none, because the engine is vLLM")
    return args


def _text(value: Any, default: str) -> str:
    """A path as a string, including the names of environment variables."""
    return value if isinstance(value, str) else value.text if isinstance(value, Placeholder) else default


def _learning(run: Conversion, worker: Given, trainer: Given) -> None:
    optimizer = made(worker.fields.get("optim_cfg"), "AdamWConfig")
    sharding = made(worker.fields.get("fsdp_cfg"), "FSDPConfig")
    rates = made(worker.fields.get("lr_cfg"), "LRConfig")
    worker.taken |= {"optim_cfg", "fsdp_cfg", "lr_cfg"}
    run.copy(optimizer)
    run.copy(worker)
    if optimizer.group == "MuonConfig":
        run.written.note(
            ("trainer", "learning_rate"), "for Muon in XTuner; rollq's optimizer is AdamW, which needs another rate"
        )
    run.put(sharding, "param_dtype", "trainer.dtype", _dtype(run, sharding))
    ratio = run.number(sharding, "recompute_ratio")
    run.put(sharding, "recompute_ratio", "trainer.checkpoint_activations", bool(ratio))
    model = run.take(worker, "load_from")
    if "load_from" not in trainer:
        run.put(worker, "load_from", "trainer.model", model if model is not None else "model")
    longest = max((_longest(run, at) for at in run.written.tasks()), default=0)
    tokens = run.whole(worker, "pack_max_length") or 0
    note = f"{tokens} in XTuner; rollq needs room for a whole sample" if 0 < tokens < longest else ""
    run.put(worker, "pack_max_length", "trainer.micro_batch_tokens", max(tokens, longest), note=note)
    run.rest(optimizer)
    run.rest(sharding)
    run.rest(rates)


def _dtype(run: Conversion, sharding: Given) -> str:
    dtype = sharding.fields.get("param_dtype", "bfloat16")
    name = getattr(dtype, "name", dtype)
    if name in ("torch.float32", "float32"):
        found = "float32"
    else:
        found = "bfloat16"
        if name not in ("torch.bfloat16", "bfloat16"):
            run.refuse(sharding, "param_dtype", "neither bfloat16 nor float32")
    sharding.taken.add("param_dtype")
    return found


def _longest(run: Conversion, at: tuple[str, ...]) -> int:
    """The most tokens of a task's sample, including the prompt."""
    prompt = run.written.values.get((*at, "rows", "max_prompt_tokens"), 4096)
    sample = run.written.values.get((*at, "max_tokens"), 2048)
    return int(prompt) + int(sample)


def _places(run: Conversion, trainer: Given, is_sync: bool) -> None:
    """Set the locations of the run's files, and its devices."""
    output = run.take(trainer, "work_dir")
    run.put(trainer, "work_dir", "trainer.output", output if output is not None else "work_dir")
    note = "workers read weights from trainer.output, so all machines must see it; otherwise, use s3"
    run.set("trainer.transport", "path", note=note)
    tracker = run.word(trainer, "exp_tracker")
    if tracker == "tensorboard":
        run.put(trainer, "exp_tracker", "trainer.trackers", ["tensorboard"])
    for name in ("rollout_resources", "train_resources", "resources"):
        resources = made(trainer.fields.get(name), "AcceleratorResourcesConfig")
        resources.where = f"{name}."
        trainer.taken.add(name)
        if name in trainer:
            device = "npu" if run.word(resources, "accelerator") == "NPU" else "cuda"
            run.put(resources, "accelerator", "trainer.device", device)
            run.rest(resources)
    if trainer.group == "RLColocateTrainerConfig":
        _colocated(run, is_sync)


def _colocated(run: Conversion, is_sync: bool) -> None:
    interval = run.written.values.get((*run.written.tasks()[0], "staleness", "sync_weights_interval"))
    if is_sync and interval == 1:
        run.set("trainer.colocated", True, note="experimental: engines sleep while the trainer uses their GPUs")
    else:
        run.written.comment(
            "RLColocateTrainerConfig with asynchronous production or rarer weight syncs",
            'none, because rollq\'s engines take turns with the trainer only with producer.strategy = "sync" and a '
            "weight sync after every step; give workers and trainer different GPUs",
        )
