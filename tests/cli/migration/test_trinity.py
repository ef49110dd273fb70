"""`rollq convert` of settings of Trinity-RFT: files in the form of its examples."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollq.buffer.errors import ConfigError
from rollq.cli.settings.file import load_settings
from rollq.cli.settings.migration.convert import NewSettings, converted

RUN = """
project: trinity
group: first
name: gsm8k run
checkpoint_root_dir: ${oc.env:ROOT,./checkpoints}
model: {model_path: "${oc.env:MODEL,Qwen/Qwen3-8B}", max_model_len: 3072, max_response_tokens: 2048, top_k: -1}
algorithm:
  algorithm_type: grpo
  repeat_times: 8
  optimizer: {lr: 1e-6, lr_warmup_steps_ratio: 0.1, lr_scheduler_type: cosine, betas: [0.9, 0.95]}
buffer:
  batch_size: 96
  total_epochs: 2
  total_steps: 100
  explorer_input:
    taskset:
      name: gsm8k
      path: openai/gsm8k
      subset_name: main
      format: {prompt_key: question, response_key: answer}
      rollout_args: {temperature: 0.9}
    eval_tasksets:
      - {name: held out, path: test.jsonl, repeat_times: 4, rollout_args: {temperature: 0.0, top_p: 0.7}}
    default_workflow_type: math_boxed_workflow
explorer:
  eval_interval: 10
  max_retry_times: 4
  rollout_model: {engine_num: 2, tensor_parallel_size: 2, seed: 42, enable_prefix_caching: true, dtype: bfloat16}
synchronizer: {sync_method: nccl, sync_interval: 4, sync_offset: 6}
trainer: {save_interval: 200, max_token_len_per_gpu: 1000, invented: 1}
monitor: {monitor_type: wandb}
"""


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with some of its values changed; None removes one."""
    result = dict(base)
    for key, value in changes.items():
        result[key] = merged(base.get(key) or {}, value) if isinstance(value, dict) else value
    return {key: value for key, value in result.items() if value is not None}


def joined(text: str) -> str:
    """Comments on one line."""
    return " ".join(text.replace("\n#", " ").split())


def leaves(value: Any) -> int:
    """How many settings there are."""
    if isinstance(value, dict):
        return sum(map(leaves, value.values()))
    is_tables = isinstance(value, list) and all(isinstance(item, dict) for item in value)
    return sum(map(leaves, value)) if is_tables else 1


def convert(folder: Path, changes: dict[str, Any]) -> tuple[dict[str, Any], NewSettings]:
    """The new file, which rollq accepts, of the run with changes."""
    file, out = folder / "config.yaml", folder / "rollq.toml"
    file.write_text(yaml.safe_dump(merged(yaml.safe_load(RUN), changes), sort_keys=False), "utf-8")
    new = converted(file)
    out.write_text(new.text, "utf-8")
    load_settings(out, {})
    assert new.problem == ""
    return tomllib.loads(new.text), new


def algorithm(folder: Path, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Loss and advantages of an algorithm."""
    trainer = convert(folder, {"algorithm": changes})[0]["trainer"]
    return trainer["loss"], trainer.get("advantages", {})


def test_a_run(tmp_path: Path) -> None:
    data, new = convert(tmp_path, {})
    task = data["tasks"]["gsm8k"]
    assert data["run"] == "trinity-gsm8k-run"
    assert (task["batch_groups"], task["group_size"], task["max_tokens"], task["temperature"]) == (96, 8, 2048, 0.9)
    assert task["max_staleness"] == 2, "6 steps in syncs of 4"
    assert task["staleness"] == {"sync_weights_interval": 4}
    assert task["sampling"] == {"top_p": 1.0, "top_k": 0}
    assert task["rows"] == {
        "prompt_field": "question", "answer_field": "answer", "chat": True, "max_prompt_tokens": 1024,
    }  # fmt: skip
    assert (task["judge"], task["curriculum"], task["limits"]) == ("math", {"prompt_order": "file"}, {"max_tries": 5})
    assert "load_dataset('openai/gsm8k', 'main', split='train').save_to_disk(folder)" in " ".join(
        new.text.split("\n# ")
    )
    evaluation = data["evaluations"]["held-out"]
    assert (evaluation["group_size"], evaluation["temperature"], evaluation["sampling"]["top_p"]) == (4, 0.0, 0.7)
    assert evaluation["rows"]["answer_field"] == "response"


def test_the_trainer_and_the_engine(tmp_path: Path) -> None:
    data, new = convert(tmp_path, {})
    expected = {
        "model": "Qwen/Qwen3-8B", "output": "./checkpoints/trinity/first/gsm8k run", "steps": 100, "transport": "path",
        "learning_rate": 1e-6, "schedule": "cosine", "warmup_steps": 10, "weight_decay": 0.01,
        "micro_batch_tokens": 3072, "device": "cuda", "dtype": "bfloat16", "checkpoint_every": 200,
        "evaluate_every": 8, "trackers": ["wandb"], "checkpoint_activations": True,
    }  # fmt: skip
    trainer = data["trainer"]
    assert {key: value for key, value in trainer.items() if not isinstance(value, dict)} == expected
    assert data["tasks"]["gsm8k"]["batches"] == {"max_uncheckpointed_steps": 200}
    assert trainer["wandb"] == {"project": "trinity"}
    assert trainer["loss"] == {
        "preset": "ppo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "aggregation": "token",
        "kl_coefficient": 0.001, "kl": "k2",
    }  # fmt: skip
    assert trainer["advantages"] == {"deviation": "sample", "eps": 1e-6}
    engine = {"max_model_len": 3072, "tensor_parallel_size": 2, "gpu_memory_utilization": 0.9, "seed": 42}
    assert data["worker"]["options"] == {"model": "Qwen/Qwen3-8B", "dtype": "bfloat16", "engine_args": engine}
    comments = joined(new.text.partition("# Without a key")[2])
    assert "algorithm.optimizer.betas = [0.9, 0.95]: none, because rollq's AdamW has torch's betas" in comments
    assert "trainer.invented = 1: not known to rollq's table of Trinity-RFT 0.6.0" in comments


def test_every_setting_is_counted_once(tmp_path: Path) -> None:
    assert convert(tmp_path, {})[1].summary.startswith(
        "39 settings converted, 0 to replace, 2 without an equivalent, 2 with one outside rollq.toml"
    )
    assert leaves(yaml.safe_load(RUN)) == 39 + 2 + 2


@pytest.mark.parametrize(
    ("changes", "loss"),
    [
        ({"algorithm_type": "dapo", "policy_loss_fn_args": {"clip_range_high": 0.28, "clip_ratio_c": 1e6}},
         {"preset": "ppo", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1e6, "aggregation": "token"}),
        ({"algorithm_type": "gspo", "kl_loss_fn": "none"},
         {"preset": "gspo", "clip_low": 0.0003, "clip_high": 0.0004, "aggregation": "sequence"}),
        ({"algorithm_type": "cispo", "kl_loss_fn": "none"},
         {"preset": "cispo", "ratio_cap": 1.28, "aggregation": "token"}),
        ({"algorithm_type": "sapo", "kl_loss_fn_args": {"kl_coef": 0}},
         {"preset": "sapo", "sapo_positive": 1.0, "sapo_negative": 1.05, "aggregation": "token"}),
        ({"kl_loss_fn": "low_var_kl", "kl_loss_fn_args": {"kl_coef": 0.02}, "loss_agg_mode": "seq-mean-token-sum"},
         {"preset": "ppo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "aggregation": "constant",
          "constant_tokens": 1, "kl": "k3", "kl_coefficient": 0.02}),
        ({"kl_loss_fn": "k1", "bypass_old_logprobs": False},
         {"preset": "ppo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "aggregation": "token",
          "old_logprobs": "recomputed", "correction": "none"}),
        ({"algorithm_type": "opmd", "kl_loss_fn": "none"}, {"preset": "losses.opmd"}),
    ],
)  # fmt: skip
def test_losses(tmp_path: Path, changes: dict[str, Any], loss: dict[str, Any]) -> None:
    assert algorithm(tmp_path, **changes)[0] == loss


def test_rec_and_the_clips_that_rollq_has(tmp_path: Path) -> None:
    both = {"algorithm_type": "rec", "kl_loss_fn": "none"}
    one_side = {"clip_mode": "one-side", "epsilon_high": 0.3}
    assert algorithm(tmp_path, **both, policy_loss_fn_args=one_side) == (
        {"preset": "rec", "clip_low": 0.2, "clip_high": 0.3}, {"scale": "none"},
    )  # fmt: skip
    assert algorithm(tmp_path, **both, policy_loss_fn_args={"clip_mode": "ring"})[0] == {"preset": "losses.rec"}


@pytest.mark.parametrize(
    ("changes", "advantages"),
    [
        ({"algorithm_type": "rloo"}, {"baseline": "leave_one_out", "scale": "none"}),
        ({"algorithm_type": "reinforceplusplus"}, {"baseline": "batch", "scale": "batch"}),
        ({"advantage_fn_args": {"std_cal_level": "batch", "epsilon": 1e-4}},
         {"deviation": "sample", "eps": 1e-4, "scale": "batch"}),
        ({"advantage_fn": "remax"}, {"baseline": "group"}),
    ],
)  # fmt: skip
def test_advantages(tmp_path: Path, changes: dict[str, Any], advantages: dict[str, Any]) -> None:
    assert algorithm(tmp_path, **changes)[1] == advantages


def test_filters_and_the_penalty_for_long_answers(tmp_path: Path) -> None:
    reward = {"enable_overlong_penalty": True, "penalty_factor": 1.0, "max_response_length": 2048, "cache_length": 512}
    operators = [
        {"name": "mask_response_truncated"},
        {"name": "dapo_dynamic_sampling"},
        {"name": "mine", "args": {"a": 1}},
    ]
    changes = {
        "buffer": {
            "explorer_input": {"taskset": {"reward_fn_args": reward, "default_reward_fn_type": "math_dapo_reward"}}
        },
        "data_processor": {"experience_pipeline": {"operators": operators}},
    }
    data, new = convert(tmp_path, changes)
    task = data["tasks"]["gsm8k"]
    assert task["filters"] == ["overlong", "zero_advantage"]
    assert task["judging"] == {"overlong_buffer_tokens": 512, "overlong_penalty": 0.5}
    assert "before max_tokens" not in new.text
    reward["max_response_length"] = 4096
    assert "# before max_tokens; in Trinity before 4096\n" in convert(tmp_path, changes)[1].text
    assert "operators[2].name = 'mine': none, because rollq has no such operator" in joined(new.text)


def test_groups_of_equal_rewards_are_left_out(tmp_path: Path) -> None:
    data, _ = convert(tmp_path, {"algorithm": {"advantage_fn_args": {"std_threshold": 0}}})
    assert data["tasks"]["gsm8k"]["filters"] == ["zero_advantage"]


@pytest.mark.parametrize(
    ("changes", "groups"),
    [
        ({"train_batch_size": 512}, 64),
        ({"train_batch_size": 500}, 62),
        ({"batch_size": 4000}, 1000),
    ],
)
def test_a_batch_is_in_prompts(tmp_path: Path, changes: dict[str, int], groups: int) -> None:
    data, new = convert(tmp_path, {"buffer": changes})
    assert data["tasks"]["gsm8k"]["batch_groups"] == groups
    assert f"{next(iter(changes.values()))}" in new.text


def test_rows_have_tools_for_one_turn(tmp_path: Path) -> None:
    taskset: dict[str, Any] = {"format": {"tools_key": "functions"}}
    data, _ = convert(tmp_path, {"buffer": {"explorer_input": {"taskset": taskset}}})
    assert data["tasks"]["gsm8k"]["rows"]["tools_field"] == "functions"
    taskset["default_workflow_type"] = "my_workflow"
    data, new = convert(tmp_path, {"buffer": {"explorer_input": {"taskset": taskset}}})
    assert "tools_field" not in data["tasks"]["gsm8k"]["rows"]
    assert "format.tools_key = 'functions': none, because loops.my gives the model its tools" in joined(new.text)


def test_staleness_control_counts_one_more(tmp_path: Path) -> None:
    control = {"sample_strategy": "staleness_control", "sample_strategy_args": {"max_staleness": 9}}
    data, _ = convert(tmp_path, {"algorithm": control})
    assert data["tasks"]["gsm8k"]["max_staleness"] == 2, "8 steps in syncs of 4"


def test_several_tasksets_share_a_batch(tmp_path: Path) -> None:
    tasksets = [{"name": "a", "path": "a.jsonl"}, {"name": "b", "path": "b.jsonl"}]
    data, _ = convert(tmp_path, {"buffer": {"explorer_input": {"taskset": None, "tasksets": tasksets}}})
    assert list(data["tasks"]) == ["a", "b"]
    assert data["batch"] == {"groups": 96}


def test_imitation_is_an_offline_task(tmp_path: Path) -> None:
    buffer = {"train_batch_size": 64, "trainer_input": {"experience_buffer": {"name": "demos", "path": "demos.jsonl"}}}
    data, _ = convert(
        tmp_path, {"mode": "train", "algorithm": {"algorithm_type": "sft", "repeat_times": 1}, "buffer": buffer}
    )
    assert data["tasks"]["demos"].items() >= {"offline": True, "batch_groups": 64, "group_size": 1}.items()
    assert data["trainer"]["loss"] == {"preset": "ppo", "sft": {"demos": 1.0}}


def test_a_benchmark_has_its_evaluations(tmp_path: Path) -> None:
    data, new = convert(tmp_path, {"mode": "bench", "buffer": {"explorer_input": {"taskset": None}}})
    assert list(data["evaluations"]) == ["held-out"]
    assert "`rollq evaluate` runs the evaluations" in new.text


def test_values_that_rollq_refuses_become_comments(tmp_path: Path) -> None:
    data, new = convert(tmp_path, {"algorithm": {"optimizer": {"lr": -1}}, "model": {"repetition_penalty": 1.2}})
    assert "learning_rate" not in data["trainer"]
    assert "trainer.learning_rate = -1.0: left out, because rollq refuses it" in new.text
    assert data["evaluations"]["held-out"]["sampling"]["repetition_penalty"] == 1.2
    assert "only evaluations can have it" in joined(new.text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("actor_rollout_ref: {}\ntrainer: {}", "settings of verl, named by `trainer_config_path`"),
        (
            "model: gpt\nservices: {}",
            "neither settings of Trinity-RFT nor of XTuner; of the tables of Trinity-RFT it has model",
        ),
    ],
)
def test_another_yaml_file_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "other.yaml").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        converted(tmp_path / "other.yaml")


@pytest.mark.parametrize(
    ("changes", "setting", "text"),
    [
        ({"policy_loss_fn_args": {"clip_range": True}}, "policy_loss_fn_args.clip_range = true", "not a number"),
        ({"policy_loss_fn_args": "wide"}, "policy_loss_fn_args = 'wide'", "not a table"),
        ({"policy_loss_fn_args": {"width": 2}}, "policy_loss_fn_args.width = 2", "not known to rollq's table"),
        ({"kl_loss_fn_args": {"kl_coef": [1]}}, "kl_loss_fn_args.kl_coef = [1]", "not a number"),
        ({"advantage_fn_args": {"epsilon": "small"}}, "advantage_fn_args.epsilon = 'small'", "not a number"),
        ({"advantage_fn_args": {"std_threshold": "none"}}, "advantage_fn_args.std_threshold = 'none'", "not a number"),
        ({"advantage_fn_args": {"penalty": 0.1}}, "advantage_fn_args.penalty = 0.1", "not known to rollq's table"),
    ],
)  # fmt: skip
def test_arguments_that_are_not_used_are_comments(
    tmp_path: Path, changes: dict[str, Any], setting: str, text: str
) -> None:
    _, new = convert(tmp_path, {"algorithm": changes})
    comments = new.text.replace("\n#   ", " ")
    assert re.search(rf"^# .*algorithm\.{re.escape(setting)}(;.*)?: {text}", comments, re.MULTILINE), comments


def test_settings_of_verl_replace_those_of_the_optimizer(tmp_path: Path) -> None:
    actor = {"optim": {"lr": 3e-6, "weight_decay": 0.1}, "ppo_max_token_len_per_gpu": 900, "ppo_epochs": 1}
    verl = {
        "actor_rollout_ref": {"actor": actor, "model": {"enable_gradient_checkpointing": False}},
        "critic": {"optim": {"lr": 1e-5}},
    }
    data, new = convert(tmp_path, {"trainer": {"trainer_config": verl}})
    trainer = data["trainer"]
    assert (trainer["learning_rate"], trainer["weight_decay"], trainer["warmup_steps"]) == (3e-6, 0.1, 10)
    assert trainer["checkpoint_activations"] is False
    comments = joined(new.text)
    assert "algorithm.optimizer.lr = 1e-06: trainer.trainer_config gives another value" in comments
    place = "trainer.trainer_config.actor_rollout_ref.actor"
    assert f"{place}.ppo_max_token_len_per_gpu = 900: see trainer.micro_batch_tokens" in comments
    assert f"{place}.ppo_epochs = 1: none, because it belongs to verl" in comments
    assert "trainer.trainer_config.critic.optim.lr = 1e-05: none, because rollq train has no critic" in comments


def test_the_optimizer_may_be_verls_alone(tmp_path: Path) -> None:
    verl = {"actor": {"optim": {"lr": 3e-6, "betas": [0.9, 0.99]}}}
    data, new = convert(tmp_path, {"algorithm": {"optimizer": None}, "trainer": {"trainer_config": verl}})
    assert data["trainer"]["learning_rate"] == 3e-6
    assert "trainer.trainer_config.actor.optim.betas = [0.9, 0.99]: none, because rollq's AdamW" in joined(new.text)


def test_a_priority_queue_takes_the_newest(tmp_path: Path) -> None:
    queue = {"name": "queue", "replay_buffer": {"enable": True, "priority_fn": "decay_limit_randomization"}}
    data, new = convert(tmp_path, {"buffer": {"trainer_input": {"experience_buffer": queue}}})
    assert data["tasks"]["gsm8k"]["batches"]["order"] == "newest"
    assert "replay_buffer.priority_fn = 'decay_limit_randomization': see tasks.NAME.batches.order" in joined(new.text)


def test_tinker_trains_an_adapter(tmp_path: Path) -> None:
    data, new = convert(tmp_path, {"model": {"tinker": {"enable": True, "base_url": "http://127.0.0.1:1"}}})
    assert data["trainer"]["lora"]["rank"] == 16
    assert "model.tinker.base_url = 'http://127.0.0.1:1': none, because rollq trains on your machines" in joined(
        new.text
    )
    assert "lora" not in convert(tmp_path, {"model": {"tinker": {"enable": False, "rank": 8}}})[0]["trainer"]


def test_servers_of_a_model_have_its_name(tmp_path: Path) -> None:
    external = {"enable": True, "model_name": "large", "base_url_env": "BASE"}
    worker = convert(tmp_path, {"model": {"external_model": external}})[0]["worker"]
    assert worker["engine"] == "openai"
    assert worker["options"] == {"urls": ["http://127.0.0.1:8000/v1"], "served_model": "large"}


def test_epochs_of_imitation_are_uses_of_a_group(tmp_path: Path) -> None:
    buffer = {"total_steps": None, "train_batch_size": 64, "trainer_input": {"experience_buffer": {"name": "demos"}}}
    imitated = {"algorithm_type": "sft", "repeat_times": None, "kl_loss_fn": "k1"}
    data, new = convert(tmp_path, {"mode": "train", "algorithm": imitated, "buffer": buffer})
    assert data["tasks"]["demos"]["batches"]["max_uses"] == 2
    assert "replace: the samples that you import x batches.max_uses / batch_groups" in joined(new.text)
    assert "algorithm.kl_loss_fn = 'k1': none, because samples are imitated as they are" in joined(new.text)


def test_groups_of_one_sample_have_two_in_rollq(tmp_path: Path) -> None:
    changes = {"algorithm": {"repeat_times": 1}, "buffer": {"train_batch_size": 720}}
    data, new = convert(tmp_path, changes)
    task = data["tasks"]["gsm8k"]
    assert (task["group_size"], task["batch_groups"]) == (2, 360)
    assert "train_batch_size = 720, by 2 samples of a prompt" in new.text


def test_the_weight_of_experts_is_named(tmp_path: Path) -> None:
    arguments = {"mu": 0.2, "ppo_mini_batch_size": 32}
    _, new = convert(tmp_path, {"algorithm": {"algorithm_type": "mix", "policy_loss_fn_args": arguments}})
    assert "set trainer.loss.sft = { NAME = 0.25 }, which is mu / (1 - mu)" in joined(new.text)
    assert "policy_loss_fn_args.ppo_mini_batch_size = 32: none, because rollq divides a batch itself" in joined(
        new.text
    )


def test_arguments_without_effect_need_no_comment(tmp_path: Path) -> None:
    rec = {"clip_mode": "one-side", "temp": 1.0, "regularizer": "none", "regularizer_coef": 0.0}
    _, new = convert(tmp_path, {"algorithm": {"algorithm_type": "rec", "policy_loss_fn_args": rec}})
    assert "policy_loss_fn_args" not in new.text


def test_grpo_of_verl_is_grpo(tmp_path: Path) -> None:
    assert algorithm(tmp_path, algorithm_type="grpo_verl") == algorithm(tmp_path, algorithm_type="grpo")


@pytest.mark.parametrize(
    ("changes", "setting", "reason"),
    [
        ({"algorithm": {"algorithm_type": "opmd", "policy_loss_fn_args": {"tau": 0.0}}},
         "algorithm.policy_loss_fn_args.tau = 0.0", "it is an argument of opmd, and rollq gives a custom function"),
        ({"algorithm": {"algorithm_type": "rec", "policy_loss_fn_args": {"weight": "advantage", "temp": 0.5}}},
         "algorithm.policy_loss_fn_args.temp = 0.5", "it is an argument of rec, and rollq gives a custom function"),
        ({"algorithm": {"advantage_fn": "clipb", "advantage_fn_args": {"mu": 2.5}}},
         "algorithm.advantage_fn_args.mu = 2.5", "it is an argument of clipb"),
        ({"algorithm": {"algorithm_type": "mix", "sample_strategy_args": {"expert_data_ratio": 0.2}}},
         "algorithm.sample_strategy_args = {expert_data_ratio: 0.2}", "experts have the share of their offline task"),
        ({"algorithm": {"sample_strategy": "own", "sample_strategy_args": {"a": 1}}, "trainer": {"invented": None}},
         "algorithm.sample_strategy_args.a = 1", None),
        ({"buffer": {"explorer_input": {"taskset": {"default_reward_fn_type": "mine", "reward_fn_args": {"a": 1}}}}},
         "reward_fn_args = {a: 1}", "they are the arguments of judges.mine, which you write"),
        ({"buffer": {"explorer_input": {"taskset": {"data_selector": {"selector_type": "difficulty_based",
                                                                      "feature_keys": ["rate"]}}}}},
         "data_selector.feature_keys = ['rate']", "rollq measures how often a prompt is solved"),
    ],
)  # fmt: skip
def test_nothing_is_dropped_without_a_comment(
    tmp_path: Path, changes: dict[str, Any], setting: str, reason: str | None
) -> None:
    comments = joined(convert(tmp_path, changes)[1].text)
    text = f"none, because {reason}" if reason else "not known to rollq's table"
    assert f"{setting}: {text}" in comments
