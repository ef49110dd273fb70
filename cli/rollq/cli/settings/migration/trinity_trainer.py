"""Trinity-RFT's trainer and optimizer as `[trainer]`."""

from rollq.cli.settings.migration.conversion import Conversion, Given
from rollq.cli.settings.migration.trinity_source import ENOUGH_STEPS, Source
from rollq.cli.settings.migration.trinity_tasks import Limits
from rollq.cli.settings.migration.trinity_verl import convert_verl
from rollq.cli.settings.migration.values import shown
from rollq.cli.settings.migration.written import Path as Place


def convert_learning(run: Conversion, source: Source, limits: Limits) -> None:
    optimizer = source.optimizer
    convert_verl(run, source.trainer, source.verl)
    for name, value in source.replaced.items():
        run.written.comment(
            f"algorithm.optimizer.{name} = {shown(value)}", "trainer.trainer_config gives another value"
        )
    run.copy(optimizer)
    run.copy(source.model)
    for given, name in ((optimizer, "clip_grad"), (source.trainer, "grad_clip")):
        if name in given:
            run.put(given, name, "trainer.gradient_clip", run.number(given, name))
    _schedule(run, optimizer)
    _warm_up(run, optimizer)
    run.set("trainer.device", "cuda")
    run.set("trainer.dtype", "bfloat16")
    _micro_batches(run, source.trainer, limits)
    _lora(run, source.model)
    if run.flag(source.tinker, "enable"):
        run.put(source.tinker, "rank", "trainer.lora.rank", run.positive(source.tinker, "rank"))
        run.leave(source.tinker, "enable", "rollq trains on your machines")


def _schedule(run: Conversion, optimizer: Given) -> None:
    style, old = run.word(optimizer, "lr_scheduler_type"), run.word(optimizer, "warmup_style")
    name = "warmup_style" if isinstance(old, str) else "lr_scheduler_type"
    schedule = old if isinstance(old, str) else style
    if schedule in ("cosine", "linear"):
        note = (
            "over all steps: replace trainer.steps"
            if run.written.values.get(("trainer", "steps")) == ENOUGH_STEPS
            else ""
        )
        run.put(optimizer, name, "trainer.schedule", schedule, note=note)
    elif schedule not in ("constant", None):
        run.leave(optimizer, name, "rollq has constant, linear and cosine")


def _micro_batches(run: Conversion, trainer: Given, limits: Limits) -> None:
    tokens = run.whole(trainer, "max_token_len_per_gpu")
    tokens = 2 * limits.whole if tokens is None else tokens
    longest = max((_longest(run, at) for at in run.written.tasks()), default=0)
    note = f"{tokens} in Trinity; rollq needs room for a whole sample" if tokens < longest else ""
    run.put(trainer, "max_token_len_per_gpu", "trainer.micro_batch_tokens", max(tokens, longest), note=note)


def _longest(run: Conversion, at: Place) -> int:
    values = run.written.values
    return int(values.get((*at, "rows", "max_prompt_tokens"), 4096)) + int(values.get((*at, "max_tokens"), 1024))


def _warm_up(run: Conversion, optimizer: Given) -> None:
    steps, ratio = run.positive(optimizer, "lr_warmup_steps"), run.number(optimizer, "lr_warmup_steps_ratio")
    total = run.written.values.get(("trainer", "steps"))
    if steps is not None:
        run.put(optimizer, "lr_warmup_steps", "trainer.warmup_steps", steps)
    elif ratio is not None and ratio > 0:
        if total == ENOUGH_STEPS:
            run.leave(optimizer, "lr_warmup_steps_ratio", "the number of steps is unknown; set trainer.warmup_steps")
        else:
            run.put(optimizer, "lr_warmup_steps_ratio", "trainer.warmup_steps", round(ratio * int(total or 0)))


def _lora(run: Conversion, model: Given) -> None:
    configs = model.fields.get("lora_configs")
    if isinstance(configs, list) and configs and isinstance(configs[0], dict):
        model.taken.add("lora_configs")
        adapter = Given("LoRAConfig", configs[0], f"{model.where}lora_configs[0].")
        run.copy(adapter)
        run.rest(adapter)


def convert_checkpoints(run: Conversion, source: Source, places: list[Place]) -> None:
    _saving(run, source.trainer, places)
    note = "workers read weights in trainer.output, which all machines must see; or use s3"
    run.put(source.sync, "sync_method", "trainer.transport", "path", note=note)
    run.take(source.sync, "sync_method")
    if run.flag(source.algorithm, "enable_router_replay") is True:
        run.put(source.algorithm, "enable_router_replay", "trainer.replay_experts", True, note="experimental")
    _evaluating(run, source.explorer, places)


def _saving(run: Conversion, trainer: Given, places: list[Place]) -> None:
    every, keep = (run.positive(trainer, name) for name in ("save_interval", "max_checkpoints_to_keep"))
    export = run.word(trainer, "save_hf_checkpoint")
    note = "rollq always saves checkpoints, by default every 10 steps"
    run.put_or_leave(trainer, "save_interval", "trainer.checkpoint_every", every, note)
    for at in places if (every or 0) > 100 else ():
        run.put(trainer, "save_interval", "tasks.NAME.batches.max_uncheckpointed_steps", every, at)
    if export == "always":
        run.put(trainer, "save_hf_checkpoint", "trainer.export_every", every)
    note = "rollq cannot keep all: trainer.keep_checkpoints says how many; trainer.export_every keeps weights"
    run.put_or_leave(trainer, "max_checkpoints_to_keep", "trainer.keep_checkpoints", keep, note)


def _evaluating(run: Conversion, explorer: Given, places: list[Place]) -> None:
    every = run.positive(explorer, "eval_interval")
    has_evaluations = any(path[0] == "evaluations" for path in run.written.values)
    first = run.flag(explorer, "eval_on_startup")
    if has_evaluations and every is not None:
        interval = run.written.values.get((*places[0], "staleness", "sync_weights_interval"), 1)
        whole = max(every // interval, 1) * interval
        note = "" if whole == every else f"{every} in Trinity, which makes it a multiple of its sync_interval as well"
        run.put(explorer, "eval_interval", "trainer.evaluate_every", whole, note=note)
        if first is False:
            run.put(explorer, "eval_on_startup", "trainer.evaluate_at_start", False)
