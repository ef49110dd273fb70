"""`rollq convert` of files that are made to break it: each ends in a file that TOML reads, or in one sentence."""

import os
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rollq.cli.main import main
from rollq.cli.settings.migration.plain import is_plain
from rollq.cli.settings.migration.values import Made, shown

TRAINER = """
trainer = RLColocateTrainerConfig(train_batch_size=8, total_train_steps=3, load_from="m", work_dir="w", FIELDS
    agent_loop_manager_cfg=AgentLoopManagerConfig(tasks=TaskSpecConfig(task_name="t")))
"""
YAML = """
project: p
name: n
model: {model_path: m}
algorithm: {algorithm_type: grpo, repeat_times: 8}
buffer: {batch_size: 4, total_steps: 3, explorer_input: {taskset: {path: a.jsonl}}}
"""


def convert(path: Path) -> Result:
    return CliRunner().invoke(main, ["convert", str(path)])


@pytest.mark.parametrize(
    ("before", "fields", "after"),
    [
        ("x = []\nx.append(x)\ny = x == x", "zork=x, rollout_config=x,", ""),
        ("x = {}\nx['a'] = x", "zork=x,", ""),
        ("x = {}\nx['vllm_a'] = x", "rollout_config=RolloutConfig(extra_rollout_config=x),", ""),
        ("", "", "trainer.trace_config = trainer\ntrainer.resources = trainer"),
        ("x = [1]\n" + "x = [x, x]\n" * 60 + "y = x == x\nz = copy.deepcopy(x)", "zork=x,", ""),
        ("x = [1]\ny = [1]\n" + "x = [x, x]\ny = [y, y]\n" * 60 + "if is_there():\n    x = y", "zork=x,", ""),
        ("x = 'a'\n" + "x = x + x\n" * 60, "zork=x,", ""),
        (f"x = 0x{'f' * 100_000}", "seed=x, zork=f'{x}',", ""),
        ("", "seed=float('nan'), train_worker_cfg=WorkerConfig(optim_cfg=AdamWConfig(lr=1e400)),", ""),
        ("", "", "trainer.load_from = [1]\ntrainer.tokenizer_path = {'a': 1}"),
        ("", "", "trainer.work_dir = os.environ['A\\x1b[31m\\n']\ntrainer.load_from = '\\ud800'"),
        ("x = {'vllm_a b': 1, 'vllm_\\x7f': None, 3: 4}", "rollout_config=RolloutConfig(extra_rollout_config=x),", ""),
        ("def f(x):\n    return f(x + 1)\ny = f(0)", "", ""),
        ("x = [1][True]\ny = {[]: 1}\nz = 1[0]\nint(1, 2)\nlen()\n'a'.split('')\n[1].items()", "", ""),
        ("\ufeff", "", ""),
    ],
    ids=range(15),
)
def test_a_config_becomes_toml(tmp_path: Path, before: str, fields: str, after: str) -> None:
    text = f"{before}\n{TRAINER.replace('FIELDS', fields)}\n{after}\n"
    (tmp_path / "rl.py").write_text(text, "utf-8")
    result = convert(tmp_path / "rl.py")
    assert (result.exit_code, result.exception) == (0, None)
    assert "t" in tomllib.loads(result.stdout)["tasks"]


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("rl.py", "def f(x):\n    return [f(x), f(x), f(x)]\ny = f(0)", "to read: write its values as literals"),
        ("rl.py", "x = " + "-" * 5000 + "1", "not Python|nested too deeply"),
        ("rl.yaml", f"{YAML}a: {'[' * 3000}{']' * 3000}", "not YAML"),
        ("rl.yaml", f"{YAML}a: [{'1,' * 30_000}]", "too large, or refers to itself"),
        ("rl.yaml", f"{YAML}a: &a [*a]", "too large, or refers to itself"),
        ("rl.yaml", f"{YAML}a: &a {{{', '.join(f'x{i}: 1' for i in range(1500))}}}\n" + "".join(
            f"b{i}: {{<<: *a}}\n" for i in range(20)), "too large"),
        ("rl.yaml", f"{YAML}name: other", "line 7: 'name' is there twice: remove one"),
        ("rl.yaml", YAML.replace("batch_size: 4", "batch_size: 4, batch_size: 9"), "'batch_size' is there twice"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path, name: str, text: str, problem: str) -> None:
    (tmp_path / name).write_text(text, "utf-8")
    result = convert(tmp_path / name)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert any(part in result.stderr for part in problem.split("|"))
    assert str(tmp_path / name) in result.stderr


@pytest.mark.parametrize(
    "changes",
    ["model: [1]", "buffer: 3", "explorer: null", "trainer: []", "synchronizer: {sync_style: [x], sync_interval: x}",
     "monitor: {monitor_type: [x]}", "data_processor: {experience_pipeline: {operators: [{name: [x]}, {}, 3]}}",
     "trainer: {save_interval: x, total_steps: [x], max_token_len_per_gpu: x, save_hf_checkpoint: [x]}",
     "explorer: {eval_interval: x, rollout_model: {engine_type: [x], extra_engine_args: 3, dtype: [x]}}",
     "algorithm: {algorithm_type: [1], repeat_times: [1], policy_loss_fn: [x], kl_loss_fn: [x], kl_penalty_fn: [k]}",
     "algorithm: {policy_loss_fn: rec, policy_loss_fn_args: {clip_mode: [x]}, loss_agg_mode: [x]}"],
)  # fmt: skip
def test_values_of_any_type_become_toml(tmp_path: Path, changes: str) -> None:
    kept = [line for line in YAML.splitlines() if not line.startswith(changes.partition(":")[0] + ":")]
    (tmp_path / "rl.yaml").write_text("\n".join([*kept, changes]), "utf-8")
    result = convert(tmp_path / "rl.yaml")
    assert (result.exit_code, result.exception) == (0, None)
    tomllib.loads(result.stdout)


def test_a_pipe_and_a_device_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "zero.py").symlink_to("/dev/zero")
    for name in ("pipe.py", "zero.py"):
        result = convert(tmp_path / name)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert f"{name}: not a regular file" in result.stderr


def test_a_long_or_endless_value_is_shown_in_short() -> None:
    shared: list[object] = [1]
    for _ in range(60):
        shared = [shared, shared]
    endless: list[object] = []
    endless.append(endless)
    for value in (shared, endless, {"a" * 200: shared}, 16**100_000, "a" * 10_000, Made("A" * 500)):
        assert len(shown(value)) <= 100
    assert [is_plain(shared), is_plain(endless), is_plain(2**63), is_plain([None])] == [False] * 4
