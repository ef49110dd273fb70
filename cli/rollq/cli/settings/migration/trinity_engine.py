"""Trinity-RFT's rollout model as `[worker]`."""

from collections.abc import Callable
from typing import Any, Final

from rollq.cli.settings.migration.conversion import Conversion, Given
from rollq.cli.settings.migration.trinity_source import Source, text_of
from rollq.cli.settings.migration.trinity_tasks import Limits
from rollq.cli.settings.migration.values import Placeholder

ENGINE_ARGS: Final = {
    "tensor_parallel_size": 1, "data_parallel_size": 1, "pipeline_parallel_size": 1, "enable_expert_parallel": False,
    "enforce_eager": False, "enable_prefix_caching": True, "enable_chunked_prefill": True,
    "gpu_memory_utilization": None, "seed": 0,
}  # fmt: skip
"""A rollout model's setting and vLLM's argument -> vLLM's default. A default value is left out."""
_READERS: Final[dict[type, Callable[[Conversion, Given, str], Any]]] = {bool: Conversion.flag, int: Conversion.whole}


def convert_engine(run: Conversion, source: Source, limits: Limits) -> None:
    engine, model = source.engine, run.take(source.model, "model_path")
    args, dtype = _arguments(run, engine, limits), run.word(engine, "dtype")
    kind = text_of(run.word(engine, "engine_type"), "vllm")
    has_servers = run.flag(source.external, "enable")
    kind = "external" if has_servers else kind
    path = text_of(model, "model")
    run.put(source.model, "model_path", "trainer.model", path, note=_note(model, path))
    if kind == "sglang":
        run.put(engine, "engine_type", "worker.engine", "sglang", note="start SGLang's servers, and name them in urls")
        run.set("worker.options", {"urls": ["http://127.0.0.1:30000"], "push_model": path})
    elif kind == "external":
        run.put(engine, "engine_type", "worker.engine", "openai", note="name the servers in urls")
        name = run.word(source.external, "model_name")
        served = {"served_model": name} if name else {}
        run.put(source.external, "model_name", "worker.options", {"urls": ["http://127.0.0.1:8000/v1"], **served})
    else:
        note = "" if kind in ("vllm", "vllm_async") else f"{kind} in Trinity"
        run.put(engine, "engine_type", "worker.engine", "vllm", note=note)
        kept = {"dtype": dtype if dtype in ("auto", "float32", "float16") else "bfloat16", "engine_args": args}
        run.put(source.model, "model_path", "worker.options", {"model": path} | kept)
    _attempts(run, source)


def _note(model: Any, path: str) -> str:
    """The remedy for a model path that is not a folder yet."""
    if isinstance(model, Placeholder):
        return f"replace {path}: environment variables without a default"
    return "a folder of the model: download it from the Hub" if _is_of_hub(path) else ""


def _arguments(run: Conversion, engine: Given, limits: Limits) -> dict[str, Any]:
    """The arguments of vLLM."""
    args: dict[str, Any] = {"max_model_len": limits.whole}
    for name, default in ENGINE_ARGS.items():
        read = _READERS.get(type(default), Conversion.number)
        value = read(run, engine, name)
        if value not in (None, default):
            args[name] = value
    extra, longest = run.take(engine, "extra_engine_args"), run.whole(engine, "max_model_len")
    if longest is not None:
        args["max_model_len"] = longest
    return args | (extra if isinstance(extra, dict) else {})


def _is_of_hub(path: str) -> bool:
    """Whether a path looks like a model's or data set's name on the Hub: `owner/name`."""
    return path.count("/") == 1 and not path.startswith((".", "/", "~")) and not path.endswith("/")


def _attempts(run: Conversion, source: Source) -> None:
    tries = run.whole(source.explorer, "max_retry_times")
    if tries is None or "max_retry_times" not in source.explorer:
        return
    for path in run.written.tasks():
        if (*path, "offline") not in run.written.values:
            run.put(source.explorer, "max_retry_times", "tasks.NAME.limits.max_tries", tries + 1, path)
