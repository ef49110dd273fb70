"""The metrics of an evaluation, from the results of its prompts. Pure."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from rollq.buffer.calls.evaluations import EvaluatedGroup
from rollq.buffer.errors import ConfigError
from rollq.buffer.rewards.at_k import best_at_k, pass_at_k, sizes, worst_at_k
from rollq.buffer.values.sample_numbers import means, together

log = logging.getLogger(__name__)

MetricFunction = Callable[[str, Sequence[EvaluatedGroup]], Mapping[str, float]]
"""A user-written function: an evaluation's name and its prompts' results -> further metrics by name."""

MOST_SOURCES = 32
"""With more data sources than this, metrics are only computed over all prompts."""


def evaluation_metrics(
    name: str,
    groups: Sequence[EvaluatedGroup],
    *,
    detailed: bool = False,
    pass_reward: float = 0.5,
    function: MetricFunction | None = None,
) -> dict[str, float]:
    """Metrics `eval/<name>/...` over the prompts of an evaluation.

    `count` is the number of finished and judged prompts, `failed` the number of groups without tries left, and
    `unfinished` the number of all others. `reward` averages the prompts' mean rewards over their samples (avg@n), and
    `tokens` is the mean number of response tokens per completed sample. `parts/<name>` are the means of reward parts
    and other numbers over the samples that have them. Without a finished prompt, there are only the counts.

    `detailed` adds the prompts' reward_min, reward_max and reward_std (population); if a prompt has several judged
    samples, `pass@k` for each k of `rollq.buffer.rewards.at_k.sizes`, and `best@k` and `worst@k` for each k above 1:
    means over the prompts with at least k judged samples, where a sample passes with `pass_reward`; and
    `source/<data source>/...`: the same for each data source's prompts, if there
    are several sources. `function` adds the metrics that it returns for all prompts. Raises `ConfigError` if it returns
    anything but numbers by name.
    """
    metrics = _metrics_of(groups, pass_reward, detailed=detailed)
    if detailed:
        for source, of_source in _by_source(name, groups).items():
            measured = _metrics_of(of_source, pass_reward, detailed=True)
            metrics |= {f"source/{source}/{key}": value for key, value in measured.items()}
    if function is not None:
        metrics |= _further(function, name, groups)
    return {f"eval/{name}/{key}": value for key, value in metrics.items()}


def _metrics_of(groups: Sequence[EvaluatedGroup], pass_reward: float, *, detailed: bool) -> dict[str, float]:
    done = [group for group in groups if group.reward is not None]
    failed = sum(group.failed for group in groups)
    metrics: dict[str, float] = {"count": len(done), "failed": failed, "unfinished": len(groups) - len(done) - failed}
    if not done:
        return metrics
    rewards = np.array([group.reward for group in done], dtype=np.float64)
    metrics["reward"] = float(rewards.mean())
    metrics.update(_averages(done))
    if detailed:
        metrics |= {
            "reward_min": float(rewards.min()),
            "reward_max": float(rewards.max()),
            "reward_std": float(rewards.std()),
            **dict(_at_k(done, pass_reward)),
        }
    return metrics


def _averages(done: Sequence[EvaluatedGroup]) -> Iterator[tuple[str, float]]:
    yield "tokens", sum(group.tokens for group in done) / sum(group.samples for group in done)
    for part, value in means(together(group.numbers for group in done)).items():
        yield f"parts/{part}", value


def _at_k(groups: Sequence[EvaluatedGroup], pass_reward: float) -> Iterator[tuple[str, float]]:
    passed = partial(_passed, pass_reward)
    most = max(len(group.rewards) for group in groups)
    ks = list(sizes(most)) if most > 1 else []
    for name, skipped, at_k in (("pass", 0, passed), ("best", 1, best_at_k), ("worst", 1, worst_at_k)):
        for k in ks[skipped:]:
            values = [at_k(group.rewards, k) for group in groups if len(group.rewards) >= k]
            yield f"{name}@{k}", sum(values) / len(values)


def _passed(pass_reward: float, rewards: Sequence[float], k: int) -> float:
    return pass_at_k(len(rewards), sum(reward >= pass_reward for reward in rewards), k)


def _by_source(name: str, groups: Sequence[EvaluatedGroup]) -> dict[str, list[EvaluatedGroup]]:
    """Each data source's prompts, if there are two to `MOST_SOURCES` sources."""
    sources: dict[str, list[EvaluatedGroup]] = {}
    for group in groups:
        if group.source is not None:
            sources.setdefault(group.source, []).append(group)
    if len(sources) > MOST_SOURCES:
        log.warning("evaluation %s: %d data sources, so their metrics are left out", name, len(sources))
    return dict(sorted(sources.items())) if 1 < len(sources) <= MOST_SOURCES else {}


def _further(function: MetricFunction, name: str, groups: Sequence[EvaluatedGroup]) -> dict[str, float]:
    metrics = function(name, groups)
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"evaluation_metrics returned {metrics!r:.80}; expected a dict of numbers by name")
    for key, value in metrics.items():
        if not isinstance(key, str) or isinstance(value, bool) or not isinstance(value, int | float | np.number):
            raise ConfigError(f"evaluation_metrics returned {key!r:.40}: {value!r:.40}; expected numbers by name")
    return {key: float(value) for key, value in metrics.items()}
