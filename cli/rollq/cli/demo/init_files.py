"""The files that `rollq init` writes, for the reader to replace. Pure."""

import json
import re

ARCHIVE = "archive"

OWN_TASK = """\
[tasks.digits]
prompts = "prompts.jsonl"      # replace: one JSON object per line, with "prompt" and "answer"
judge = "rewards.digits"       # replace: the function in rewards.py
"""
ENV_TASK = """\
[tasks.{name}]
env = {env}
"""
EVALUATION = """
[evaluations.{name}-test]      # rows that are never trained on
env = {env}
env_options = {{ rows = 50 }}
group_size = 1
max_tokens = 32
"""

SETTINGS = """\
# Written by `rollq init`. Paths start at this folder. examples/rollq.toml has all settings.
run = {run}

[redis]
buffer_url = "redis://127.0.0.1:6379/0"   # `rollq up` starts this server, if none answers

[archive]
url = "archive"                # trained groups are kept here; without it, a checkpoint drops them

{task}batch_groups = 8               # prompts in a training batch
group_size = 8                 # samples of each prompt
max_tokens = {max_tokens}
temperature = 1.0
{evaluation}
[worker.options]
model = "model"                # replace, twice: the folder of a real model, such as "Qwen3-0.6B"

[trainer]
model = "model"                # this one has 0.3 M parameters and knows nothing, but learns on any laptop
output = "trainer"
steps = 40
learning_rate = 1e-3           # for a real model, 1e-6
device = "cpu"                 # "cuda" with a GPU
threads = 1
"""

JUDGE = '''\
def digits(prompt, sample):
    """The share of the sample's characters that are digits. For your task: is it prompt.answer?"""
    return sum(character.isdigit() for character in sample.text) / max(1, len(sample.text))
'''

PROMPTS = "".join(
    json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a in range(10, 26) for b in range(10, 26)
)


def files(run: str, env: str | None = None) -> dict[str, str]:
    """The content of each file, by name. With an environment, the task has the environment's prompts and judge."""
    if env is None:
        settings = SETTINGS.format(run=json.dumps(run), task=OWN_TASK, max_tokens=8, evaluation="")
        return {"rollq.toml": settings, "prompts.jsonl": PROMPTS, "rewards.py": JUDGE}
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", env.partition(":")[2]).strip("-")[:32] or "env"
    table = {"name": name, "env": json.dumps(env)}
    evaluation = EVALUATION.format(**table)
    return {
        "rollq.toml": SETTINGS.format(
            run=json.dumps(run), task=ENV_TASK.format(**table), max_tokens=32, evaluation=evaluation
        )
    }
