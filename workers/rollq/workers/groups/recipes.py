"""Recipes, from local configuration: how a worker generates, judges and filters each task's groups."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from rollq.buffer.common.user_functions import inside
from rollq.buffer.errors import ConfigError
from rollq.buffer.rules.shards import task_of
from rollq.buffer.values.rollouts import EMPTY_SAMPLE, Lease, Sample
from rollq.workers.agents.loops import AgentLoop, is_resumable, records, sessions
from rollq.workers.engines.protocol import Sampling, Tokenizer
from rollq.workers.gateway.open_sessions import Gateway
from rollq.workers.groups.agent_loops import close_loop, is_offered, make_loop
from rollq.workers.groups.filters import Filter
from rollq.workers.groups.overlong import OVERLONG
from rollq.workers.groups.read_prompts import ReadPrompt, tokenizer_of
from rollq.workers.groups.salvage import SHORT_TOKENS
from rollq.workers.groups.task_settings import WorkerTask
from rollq.workers.http.pools import ModelPool
from rollq.workers.judging.group_judge import GroupJudge, make_group_judge
from rollq.workers.judging.judge import Judge, JudgeContext
from rollq.workers.judging.own_answers import AsSample, OwnAnswers, sample_of
from rollq.workers.judging.process_pool import JudgePool
from rollq.workers.judging.task_judge import make_task_judge
from rollq.workers.seeds import sample_seed, turn_seed
from rollq.workers.settings import WorkerSettings


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a worker generates, judges and filters one task's groups."""

    settings: WorkerTask
    loop: AgentLoop
    judge: Judge
    own_answers: OwnAnswers
    filters: tuple[Filter, ...]
    pools: Mapping[str, ModelPool]
    run_seed: int
    group_judge: GroupJudge | None = None

    def resumes(self, lease: Lease) -> bool:
        """Whether interrupted samples continue from their tokens. False for evaluations, whose samples come from a
        single version of the weights."""
        return is_resumable(self.loop) and self.settings.partial_rollout and not lease.evaluation

    def salvages(self, lease: Lease) -> bool:
        """Whether unfinished samples are kept in the buffer in case this worker is killed."""
        settings = self.settings
        is_long = self.records or settings.max_tokens > SHORT_TOKENS
        return settings.partial_rollout and is_long and not lease.evaluation

    @property
    def records(self) -> bool:
        """Whether the agent loop waits until its calls are in the buffer."""
        return records(self.loop)

    @property
    def sessions(self) -> int | None:
        """The number of samples that the agent loop runs at a time; None if only the engine limits it."""
        return sessions(self.loop)

    @property
    def hanging_calls(self) -> int:
        """The number of calls to its judges that are long overdue."""
        together = self.group_judge.call.slots.hanging if self.group_judge else 0
        return self.judge.hanging + together

    @property
    def min_valid_samples(self) -> int:
        """The number of a group's samples that must complete."""
        return self.settings.min_valid_samples or self.settings.group_size

    def tokenizer(self, tokenizer: Tokenizer) -> Tokenizer:
        """The worker's tokenizer with this task's chat template options."""
        return tokenizer_of(tokenizer, self.settings.template_options)

    async def close(self) -> None:
        """Release the resources of the loop and the judge."""
        await close_loop(self.loop)
        await self.judge.close()

    def as_sample(self, prompt: ReadPrompt) -> AsSample:
        """A function that turns texts into samples, as if the engine had generated them for a prompt."""
        sampling = self.settings.sampling(0).as_dict()
        return partial(sample_of, prompt_ids=prompt.ids, encode=prompt.tokenizer.encode, sampling=sampling)

    def previous(self, lease: Lease, so_far: Sample) -> Sample:
        """The sample that the agent loop continues: `so_far` if the loop resumes it, otherwise an empty sample."""
        return so_far if so_far.awaits_judge or self.resumes(lease) else EMPTY_SAMPLE

    def sampling(self, lease: Lease, index: int, made_tokens: int = 0) -> Sampling:
        """Every sampling parameter of one sample in this attempt, including the seed.

        `made_tokens` is the number of the sample's tokens that this attempt has already generated. An engine would
        restart the random number sequence after these tokens, so the sample gets another seed.
        """
        seed = sample_seed(self.run_seed, lease.task, lease.group_id, index, lease.attempt)
        return self.settings.sampling(turn_seed(seed, made_tokens) if made_tokens else seed)


def make_recipes(
    tasks: Mapping[str, WorkerTask],
    settings: WorkerSettings,
    run_seed: int,
    processes: JudgePool,
    gateway: Gateway | None = None,
) -> dict[str, Recipe]:
    """The recipe of every task; a task's shards share a recipe. `gateway` is the worker's.

    Raises `ConfigError` for a loop, judge, filter or pool that does not exist.
    """
    limit_s = settings.judge_timeout_s
    pools = {name: ModelPool(name, pool) for name, pool in settings.pools.items()}
    by_task = {task_of(name): task for name, task in tasks.items()}
    _check_scorers(by_task, pools)
    recipes: dict[str, Recipe] = {}
    for name, task in by_task.items():
        context = JudgeContext(limit_s, processes, task.isolate_judge, pools)
        with inside(table_of(name, task)):
            recipes[name] = _make_recipe(task, context, run_seed, gateway)
            if gateway is not None and is_offered(recipes[name].loop):
                gateway.tasks.add(name)
    return {name: recipes[task_of(name)] for name in tasks}


def _check_scorers(tasks: Mapping[str, WorkerTask], pools: Mapping[str, ModelPool]) -> None:
    for name, task in tasks.items():
        for scorer in task.scorers:
            if scorer not in pools:
                raise ConfigError(
                    f"tasks.{name}.judging.scorers names {scorer!r}: there is no table [worker.pools.{scorer}]"
                )


def _make_recipe(task: WorkerTask, context: JudgeContext, run_seed: int, gateway: Gateway | None) -> Recipe:
    judge = make_task_judge(task.judge, task.judge_options, context)
    return Recipe(
        settings=task,
        loop=make_loop(task.agent_loop, task.agent_options, gateway),
        judge=judge,
        own_answers=OwnAnswers(
            judge, task.answer_text, of_text=task.agent_loop == "single_turn", may_raise=task.on_judge_error == "zero"
        ),
        filters=tuple(Filter.load(path, context.timeout_s) for path in task.filters if path != OVERLONG),
        pools=context.pools,
        run_seed=run_seed,
        group_judge=make_group_judge(task.group_judge, context) if task.group_judge else None,
    )


def check_templates(recipes: Mapping[str, Recipe], tokenizer: Tokenizer) -> None:
    """Raise `ConfigError` for options that the tokenizer's chat template does not read."""
    for name, recipe in recipes.items():
        with inside(table_of(task_of(name), recipe.settings)):
            recipe.tokenizer(tokenizer)


def table_of(name: str, task: WorkerTask) -> str:
    """The name of a task's table in the settings."""
    return f"{'tasks' if task.kind == 'train' else 'evaluations'}.{name}"
