"""What a worker does with the groups of each task: loop, judge and sampling, from local configuration."""

from collections.abc import Mapping
from dataclasses import dataclass

from rollq.buffer.schema import Lease
from rollq.buffer.settings import TaskSettings
from rollq.workers.engine import Sampling
from rollq.workers.judges import Judge
from rollq.workers.loops import AgentLoop, make_loop, sample_seed
from rollq.workers.settings import WorkerSettings


@dataclass(frozen=True, slots=True)
class Recipe:
    """One task's."""

    settings: TaskSettings
    loop: AgentLoop
    judge: Judge
    run_seed: int

    def sampling(self, lease: Lease, index: int) -> Sampling:
        """Every sampling parameter of one sample in this attempt, its seed included."""
        task = self.settings
        return Sampling(
            max_tokens=task.max_tokens,
            temperature=task.temperature,
            top_p=task.top_p,
            top_k=task.top_k,
            stop=task.stop,
            seed=sample_seed(self.run_seed, lease.task, lease.group_id, index, lease.attempt),
        )


def make_recipes(tasks: Mapping[str, TaskSettings], settings: WorkerSettings, run_seed: int) -> dict[str, Recipe]:
    """The recipe of every task. Raises `ConfigError` for a loop or judge that does not exist."""
    return {
        name: Recipe(task, make_loop(task.agent_loop), Judge.named(task.judge, settings.judge_timeout_s), run_seed)
        for name, task in tasks.items()
    }
