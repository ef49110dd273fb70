"""`rollq convert` of RL configs of XTuner: files in the form of its examples."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from rollq.buffer.errors import ConfigError
from rollq.cli.settings.file import load_settings
from rollq.cli.settings.migration.convert import NewSettings, converted

HEAD = """
import os
work_dir = os.environ["WORK_DIR"]
model_path = os.environ["MODEL_PATH"]
longest = 2 * 1024
tokenizer = AutoTokenizer.from_pretrained(model_path)
"""
TASK = """
def keep(samples):
    return len({sample.reward["score"] for sample in samples}) > 1
judger = DapoMathJudgerConfig(judger_name="dapo_math", eos_token=tokenizer.eos_token, tokenizer=tokenizer,
    enable_overlong_buffer=True, max_response_len=longest, overlong_buffer_len=512, overlong_penalty_factor=1.0)
def sampler(path, k):
    tokenize = RLTextTokenizeFnConfig(max_length=512)
    dataset = {"dataset": DatasetConfig(name="math", anno_path=path), "tokenize_fn": tokenize}
    loader = DataloaderConfig(dataset_config_list=[dataset], pack_max_length=8192)
    return SamplerConfig(dataloader_cfg=loader, prompt_repeat_k=k)
def loop(temperature):
    params = SampleParams(max_tokens=longest, top_k=0, top_p=1.0, temperature=temperature, min_tokens=0)
    return SingleTurnAgentLoopConfig(hf_checkpoint=model_path, sample_params=params)
train = AgentLoopManagerConfig(tasks=TaskSpecConfig(task_name="train_task", agent_loop_config=loop(1.0),
    judger_config=judger, produce_strategy_config=STRATEGY, sampler_config=sampler(os.environ["DATA"], 16)))
held_out = AgentLoopManagerConfig(tasks=TaskSpecConfig(task_name="eval_task", agent_loop_config=loop(0.0),
    judger_config=judger, sampler_config=sampler("/data/test.jsonl", 4)))
"""
TRAINER = """
policy = dict(cliprange_low=0.2, cliprange_high=0.28, loss_type=os.environ.get("LOSS", "vanilla"), clip_ratio_c=10.0,
    log_prob_diff_min=-20.0)
loss = GRPOLossConfig(policy_loss_cfg=policy, ignore_idx=-100, use_kl_loss=KL, kl_loss_coef=0.01,
    kl_loss_type="low_var_kl", mode="chunk", chunk_size=512, rollout_is=CORRECTION)
worker = WorkerConfig(model_cfg=get_model_config_from_hf(model_path), load_from=model_path,
    optim_cfg=AdamWConfig(lr=2e-6, weight_decay=0.1, betas=(0.9, 0.95)), loss_cfg=loss,
    lr_cfg=LRConfig(lr_type="cosine", warmup_ratio=0.1), fsdp_cfg=FSDPConfig(torch_compile=False, recompute_ratio=0.5),
    optimizer_steps=16, pack_max_length=32768)
engine = dict(vllm_enforce_eager=True, lmdeploy_log_level="INFO")
trainer = RLColocateTrainerConfig(resources=AcceleratorResourcesConfig(accelerator="GPU", num_workers=8),
    train_worker_cfg=worker, tokenizer_path=model_path, load_from=model_path, train_batch_size=512,
    rollout_config=RolloutConfig(env="dapo math", model_path=model_path, tensor_parallel_size=2,
        max_retry_per_sample=2, context_length=longest + 512, extra_rollout_config=engine),
    agent_loop_manager_cfg=train, eval_agent_loop_manager_cfg=held_out, advantage_estimator_config=ADVANTAGES,
    evaluate_step=5, work_dir=work_dir, seed=123, checkpoint_interval=200, invented=3, LENGTH)
"""
DEFAULTS = {
    "STRATEGY": "SyncProduceStrategyConfig()",
    "CORRECTION": "RolloutImportanceSampling()",
    "ADVANTAGES": "GRPOAdvantageConfig()",
    "LENGTH": "total_train_steps=50",
    "KL": "False",
}


def joined(text: str) -> str:
    """Comments on one line."""
    return " ".join(text.replace("\n#", " ").split())


def convert(folder: Path, **changes: str) -> tuple[dict[str, Any], NewSettings]:
    """The new file, which rollq accepts, of a config with changes."""
    text = HEAD + TASK + TRAINER
    for name, default in DEFAULTS.items():
        text = text.replace(f"{name})", f"{changes.get(name, default)})").replace(
            f"={name},", f"={changes.get(name, default)},"
        )
    file, out = folder / "config.py", folder / "rollq.toml"
    file.write_text(text, "utf-8")
    new = converted(file)
    out.write_text(new.text, "utf-8")
    load_settings(out, {})
    assert new.problem == ""
    return tomllib.loads(new.text), new


def test_a_synchronous_run(tmp_path: Path) -> None:
    data, new = convert(tmp_path)
    task = data["tasks"]["train_task"]
    assert (data["run"], data["seed"], data["producer"]) == ("dapo-math", 123, {"strategy": "sync"})
    assert (task["batch_groups"], task["group_size"], task["max_tokens"], task["max_staleness"]) == (512, 16, 2048, 0)
    assert task["prompts"] == "DATA"
    assert "# replace DATA: environment variables without a default\nprompts" in new.text
    assert task["rows"] == {"answer_field": "reward_model.ground_truth", "max_prompt_tokens": 512}
    assert task["judge"] == "math"
    assert task["judging"] == {"overlong_buffer_tokens": 512, "overlong_penalty": 0.5}
    assert task["sampling"] == {"top_p": 1.0, "top_k": 0}, "min_tokens = 0 asks for nothing"
    assert task["limits"] == {"max_tries": 3}
    evaluation = data["evaluations"]["eval_task"]
    assert (evaluation["prompts"], evaluation["group_size"], evaluation["temperature"]) == ("/data/test.jsonl", 4, 0.0)
    assert "judging" not in evaluation


def test_the_trainer_and_the_engine(tmp_path: Path) -> None:
    data, new = convert(tmp_path)
    trainer = data["trainer"]
    expected = {
        "model": "MODEL_PATH", "output": "WORK_DIR", "steps": 50, "learning_rate": 2e-6, "weight_decay": 0.1,
        "updates_per_batch": 16, "micro_batch_tokens": 32768, "device": "cuda", "dtype": "bfloat16",
        "checkpoint_activations": True, "evaluate_every": 5, "evaluate_at_start": False, "checkpoint_every": 200,
        "colocated": True, "transport": "path", "trackers": ["tensorboard"], "logprob_chunk": 512,
    }  # fmt: skip
    assert {key: value for key, value in trainer.items() if not isinstance(value, dict)} == expected
    assert data["tasks"]["train_task"]["batches"] == {"max_uncheckpointed_steps": 200}
    assert trainer["advantages"] == {"deviation": "sample", "eps": 1e-8}
    assert trainer["loss"] == {
        "preset": "ppo", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0, "old_logprobs": "recomputed",
        "correction": "none",
    }  # fmt: skip
    assert data["worker"]["options"] == {
        "model": "MODEL_PATH",
        "dtype": "bfloat16",
        "engine_args": {
            "tensor_parallel_size": 2, "gpu_memory_utilization": 0.85, "max_model_len": 2560, "enforce_eager": True,
        },
    }  # fmt: skip
    assert "lmdeploy_log_level" in new.text.partition("# Without a key")[2]


def test_every_other_value_is_a_comment_with_its_reason(tmp_path: Path) -> None:
    _, new = convert(tmp_path)
    comments = joined(new.text.partition("# Without a key")[2])
    assert "AdamWConfig.betas = [0.9, 0.95]: none, because rollq's AdamW has torch's betas" in comments
    assert (
        "LRConfig.lr_type = 'cosine'; LRConfig.warmup_ratio = 0.1: none, because XTuner's RL trainer does not"
        in comments
    )
    assert "trainer.invented = 3: not known to rollq's table of XTuner v1" in comments
    assert "WorkerConfig.model_cfg = get_model_config_from_hf(model_path): none, because" in comments


def test_an_asynchronous_run(tmp_path: Path) -> None:
    strategy = (
        "AsyncProduceStrategyConfig(over_sample_threshold=0.2, enable_partial_rollout=1, max_staleness=2, "
        "max_token_staleness=5, tail_batch_trigger_size=256, is_valid_sample_fn=keep)"
    )
    data, new = convert(tmp_path, STRATEGY=strategy, LENGTH="total_epochs=3, sync_weights_interval=4")
    task = data["tasks"]["train_task"]
    assert data["producer"] == {"strategy": "async", "over_sample": 0.2}
    assert task["staleness"] == {
        "partial_rollout": True, "tail_batch_trigger_size": 256, "sync_weights_interval": 4,
    }  # fmt: skip
    assert (task["max_staleness"], task["filters"], task["curriculum"]) == (2, ["filters.keep"], {"passes": 3})
    assert data["trainer"]["steps"] == 1_000_000
    assert "colocated" not in data["trainer"]
    assert "none, because tokens never get older than max_staleness = 2" in joined(new.text)


def test_absent_settings_have_xtuners_defaults(tmp_path: Path) -> None:
    data, _ = convert(tmp_path, STRATEGY="AsyncProduceStrategyConfig()")
    task = data["tasks"]["train_task"]
    assert (task["max_staleness"], task["staleness"]["tail_batch_trigger_size"]) == (0, -1)


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (
            "rollout_is_threshold=(2, 0)",
            {"correction": "truncated", "correction_level": "token", "importance_cap": 2.0},
        ),
        (
            "rollout_is_level='sequence', rollout_is_mode='mask', rollout_is_threshold=(3, 0.1)",
            {"correction": "masked", "correction_level": "sequence", "importance_cap": 3.0, "importance_floor": 0.1},
        ),
        (
            "rollout_is_mode='both', rollout_is_threshold=(5, 0), rollout_is_mask_threshold=(5, 0.5)",
            {"correction": "masked", "correction_level": "token", "importance_cap": 5.0, "importance_floor": 0.5},
        ),
        (
            "rollout_is_level='geometric', rollout_is_mode='mask', rollout_is_threshold=(1.01, 0.99)",
            {"correction": "none", "mask": "geometric", "mask_low": 0.99, "mask_high": 1.01},
        ),
    ],
)
def test_corrections(tmp_path: Path, correction: str, expected: dict[str, object]) -> None:
    data, _ = convert(tmp_path, CORRECTION=f"RolloutImportanceSampling({correction})")
    assert expected.items() <= data["trainer"]["loss"].items()


@pytest.mark.parametrize(
    ("advantages", "expected"),
    [
        ("RLOOAdvantageConfig()", {"baseline": "leave_one_out", "scale": "none"}),
        ("OPOAdvantageConfig()", {"baseline": "opo", "scale": "none"}),
        ("PassKAdvantageConfig(k=2)", {"pass_k": 2}),
        ("DrGRPOAdvantageConfig(max_length=4096)", {"scale": "none"}),
        ("GRPOAdvantageConfig(eps=1e-6)", {"deviation": "sample", "eps": 1e-6}),
    ],
)
def test_advantages(tmp_path: Path, advantages: str, expected: dict[str, object]) -> None:
    data, _ = convert(tmp_path, ADVANTAGES=advantages)
    assert data["trainer"]["advantages"] == expected
    loss = data["trainer"]["loss"]
    assert (loss.get("aggregation"), loss.get("constant_tokens")) == (
        ("constant", 4096) if "DrGRPO" in advantages else (None, None)
    )


def test_the_divergence_from_the_initial_model(tmp_path: Path) -> None:
    assert convert(tmp_path, KL="True")[0]["trainer"]["loss"].items() >= {"kl": "k3", "kl_coefficient": 0.01}.items()


def test_several_tasks_share_a_batch_and_rows_choose_their_judge(tmp_path: Path) -> None:
    several = (
        TASK
        + """
mapped = RLQwen3VLTokenizeFnConfig(processor_path=model_path, enable_thinking=False,
    data_judger_mapping={"gsm": {"gsm8k": 1.0}, "mixed": {"gsm8k": 0.5, "geo": 0.5}})
second = TaskSpecConfig(task_name="second:task", weight=3.0, agent_loop_config=loop(1.0),
    judger_config=ComposedJudgerConfig(branches={"gsm8k": GSM8KJudgerConfig(), "geo": GEO3KJudgerConfig()}),
    produce_strategy_config=STRATEGY, sampler_config=SamplerConfig(prompt_repeat_k=4, dataloader_cfg=DataloaderConfig(
        dataset_config_list=[{"dataset": DatasetConfig(anno_path="a.jsonl"), "tokenize_fn": mapped}])))
train.tasks = [train.tasks, second]
"""
    )
    file, out = tmp_path / "config.py", tmp_path / "rollq.toml"
    text = HEAD + several + TRAINER
    for name, default in DEFAULTS.items():
        text = text.replace(f"{name})", f"{default})").replace(f"={name},", f"={default},")
    file.write_text(text, "utf-8")
    out.write_text(converted(file).text, "utf-8")
    settings = load_settings(out, {})
    settings.row_readers()
    data = tomllib.loads(out.read_text("utf-8"))
    assert data["batch"] == {"groups": 512}
    assert [data["tasks"][name]["batches"]["weight"] for name in ("train_task", "second-task")] == [1.0, 3.0]
    second = data["tasks"]["second-task"]
    assert second["rows"]["template_options"] == {"enable_thinking": False}
    assert second["judge"]["gsm"] == {"judge": "regex", "options": {"pattern": "#### (-?[0-9.,]+)"}}
    assert [(one["judge"], one["weight"]) for one in second["judge"]["mixed"]] == [("regex", 0.5), ("weighted", 0.5)]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("trainer = TrainerConfig(lr=1)", "for SFT or pre-training; rollq takes those for RL"),
        ("x = 1", "a Python file without XTuner's RLColocateTrainerConfig"),
    ],
)
def test_another_python_file_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "other.py").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        converted(tmp_path / "other.py")


def test_an_empty_config_gives_a_file_that_names_what_to_replace(tmp_path: Path) -> None:
    (tmp_path / "bare.py").write_text("trainer = RLDisaggregatedTrainerConfig()")
    new = converted(tmp_path / "bare.py")
    (tmp_path / "rollq.toml").write_text(new.text)
    load_settings(tmp_path / "rollq.toml", {})
    assert new.text.count("# replace: ") == 3
