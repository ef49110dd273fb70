"""`rollq convert` of XTuner configs that are known only in part, or have values of other types."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from rollq.cli.settings.migration.convert import NewSettings, converted

CONFIG = """
task = TaskSpecConfig(task_name="t", agent_loop_config=SingleTurnAgentLoopConfig(sample_params=SampleParams(
    max_tokens=512)), judger_config=GSM8KJudgerConfig(), sampler_config=SamplerConfig(prompt_repeat_k=8,
    dataloader_cfg=DataloaderConfig(dataset_config_list=[{"dataset": DatasetConfig(anno_path="a.jsonl"),
    "tokenize_fn": RLTextTokenizeFnConfig(max_length=512)}])))
worker = WorkerConfig(optim_cfg=AdamWConfig(lr=1e-6), loss_cfg=GRPOLossConfig(), pack_max_length=8192)
trainer = RLColocateTrainerConfig(train_batch_size=64, total_train_steps=3, load_from="m", work_dir="w",
    rollout_config=RolloutConfig(env="e", tensor_parallel_size=4), train_worker_cfg=worker,
    advantage_estimator_config=GRPOAdvantageConfig(), agent_loop_manager_cfg=AgentLoopManagerConfig(tasks=task))
"""


def joined(text: str) -> str:
    """Comments on one line."""
    return " ".join(text.replace("\n#", " ").split())


def convert(folder: Path, changes: str) -> tuple[dict[str, Any], NewSettings]:
    """The new file of the config, changed by statements at its end."""
    (folder / "rl.py").write_text(f"{CONFIG}\n{changes}\n", "utf-8")
    new = converted(folder / "rl.py")
    return tomllib.loads(new.text), new


@pytest.mark.parametrize(
    ("changes", "comment"),
    [
        ("trainer.train_batch_size = compute()", "trainer.train_batch_size = compute(): known only when the file runs, "
         "so the default counts here; replace tasks.NAME.batch_groups or batch.groups"),
        ("worker.optim_cfg.lr = cfg.lr", "AdamWConfig.lr = cfg.lr: known only when the file runs"),
        ("trainer.rollout_config = load()", "RolloutConfig: load(): known only when the file runs"),
        ("trainer.rollout_config = RolloutConfig(env='e', **load())", "RolloutConfig: load(): known only when"),
        ("trainer.rollout_config = trainer", "RolloutConfig: RLColocateTrainerConfig(...): known only when"),
        ("worker.loss_cfg = 3", "GRPOLossConfig: 3: known only when the file runs"),
        ("worker.loss_cfg.policy_loss_cfg = load()", "policy_loss_cfg: load(): known only when the file runs"),
        ("trainer.advantage_estimator_config = load()", "GRPOAdvantageConfig: load(): known only when"),
        ("task.produce_strategy_config = load()", "SyncProduceStrategyConfig: load(): known only when"),
        ("task.judger_config = load()", "replace: load(), known only when the XTuner file runs; write this function"),
        ("task.sampler_config = [1]", "SamplerConfig: [1]: known only when the file runs"),
        ("task.sampler_config.dataloader_cfg.dataset_config_list = load()",
         "DataloaderConfig.dataset_config_list = load(): known only when the file runs"),
        ("trainer.rollout_config.extra_rollout_config = {'vllm_a': load(), 'vllm_b': 1}",
         "['engine_args']['a'] = load(): known only when the file runs, or without a form in TOML"),
        ("trainer.train_batch_size = True", "trainer.train_batch_size = true: not a whole number, so the default"),
        ("trainer.train_batch_size = 10**30 + 1", "trainer.train_batch_size = "),
        ("trainer.seed = 'many'", "trainer.seed = 'many': not of the type of seed, so the default counts here"),
        ("task.agent_loop_config.sample_params.max_tokens = 'many'", "not of the type of tasks.t.max_tokens"),
        ("worker.loss_cfg.use_kl_loss = 'perhaps'", "use_kl_loss = 'perhaps': neither true nor false"),
        ("worker.loss_cfg.use_kl_loss = True; worker.loss_cfg.kl_loss_type = [1]", "kl_loss_type = [1]: not a string"),
        ("worker.optim_cfg.lr = -1.0", "trainer.learning_rate = -1.0: left out, because rollq refuses it"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_a_comment_and_counted(tmp_path: Path, changes: str, comment: str) -> None:
    _, new = convert(tmp_path, changes)
    assert comment in joined(new.text)
    assert " 1 to replace, " in new.summary


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ("task.produce_strategy_config = load()", "max_staleness = 0"),
        ("task.produce_strategy_config = load()", 'strategy = "sync"'),
        ("worker.loss_cfg = load()", 'preset = "ppo"'),
        ("worker.optim_cfg = load()", "learning_rate = 1e-05"),
    ],
)
def test_a_default_that_an_unknown_table_may_replace_says_so(tmp_path: Path, changes: str, key: str) -> None:
    _, new = convert(tmp_path, changes)
    lines = new.text.splitlines()
    assert "replace: known only when the file runs" in lines[lines.index(key) - 1]


def test_everything_known_leaves_nothing_to_replace(tmp_path: Path) -> None:
    _, new = convert(tmp_path, "")
    assert " 0 to replace, " in new.summary
    assert new.problem == ""


@pytest.mark.parametrize(
    ("changes", "place", "value"),
    [
        ("trainer.train_batch_size = 32.0", ("tasks", "t", "batch_groups"), 32),
        ("trainer.train_batch_size = '32'", ("tasks", "t", "batch_groups"), 32),
        ("worker.optim_cfg.lr = '1e-5'", ("trainer", "learning_rate"), 1e-5),
        ("task.agent_loop_config.sample_params.max_tokens = 256.0", ("tasks", "t", "max_tokens"), 256),
        ("trainer.rollout_config = RolloutConfig(**dict(env='kw'))", ("run",), "kw"),
    ],
)
def test_a_number_may_be_written_otherwise(tmp_path: Path, changes: str, place: tuple[str, ...], value: object) -> None:
    found: Any = convert(tmp_path, changes)[0]
    for part in place:
        found = found[part]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("tasks", "names", "unread"),
    [
        ("(task, TaskSpecConfig(task_name='b'))", ["t", "b"], 0),
        ("[TaskSpecConfig(task_name=name) for name in ('a', 'b')]", ["a", "b"], 0),
        ("[*[task], TaskSpecConfig(task_name='c')]", ["t", "c"], 0),
        ("[task, load()]", ["t"], 1),
        ("[task, *load()]", ["t"], 1),
        ("load()", ["task"], 1),
        ("[make(name) for name in load()]", ["task"], 1),
    ],
)
def test_tasks_are_read_or_said_to_be_there(tmp_path: Path, tasks: str, names: list[str], unread: int) -> None:
    data, new = convert(tmp_path, f"trainer.agent_loop_manager_cfg.tasks = {tasks}")
    assert list(data["tasks"]) == names
    assert new.summary.startswith("1 task not read, ") == (unread == 1)
    assert new.text.count("# NOT READ: agent_loop_manager_cfg = ") == unread


@pytest.mark.parametrize(
    ("judger", "judge", "comment"),
    [
        ("GSM8KJudgerConfig()", "regex", "300 characters"),
        ("GSM8KJudgerConfig(reward_handler=mine)", "judges.mine", "write this function"),
        ("GSM8KJudgerConfig(reward_handler=load('x'))", "judges.load_x", "write this function"),
        ("DapoMathJudgerConfig(reward_handler='http://x/j', enable_overlong_buffer=True)", "http", "the server gets"),
        ("GSM8KJudgerConfig(extra_info={'score': 2, 'format_score': 0.5})", "regex",
         "the rewards differ: score = 2, format_score = 0.5 in XTuner"),
        ("DapoMathJudgerConfig(extra_info=load())", "math", "XTuner's extra_info is load(): the rewards may differ"),
        ("GEO3KJudgerConfig(extra_info={'format_score': 0.2})", "weighted", "mathruler"),
    ],
)  # fmt: skip
def test_a_judge_gives_xtuners_rewards_or_says_that_they_differ(
    tmp_path: Path, judger: str, judge: str, comment: str
) -> None:
    data, new = convert(
        tmp_path, f"def mine(response, label, extra_info):\n    return 1\ntask.judger_config = {judger}"
    )
    assert data["tasks"]["t"]["judge"] == judge
    assert comment in joined(new.text)
    assert ("the rewards" in joined(new.text)) == ("extra_info" in judger and "GEO3K" not in judger)


def test_a_judge_of_a_source_that_is_unknown_is_named(tmp_path: Path) -> None:
    branches = "ComposedJudgerConfig(branches={'a': GSM8KJudgerConfig(), 'b': load()})"
    _, new = convert(tmp_path, f"task.judger_config = {branches}")
    assert "ComposedJudgerConfig.branches['b'] = load(): known only when the file runs" in joined(new.text)
