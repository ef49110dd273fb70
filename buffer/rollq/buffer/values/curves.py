"""The table of curves: a train step's numbers that are kept and drawn by step, and their names. Pure.

Metrics on disk, trackers, Prometheus, the dashboard and the terminal all take these numbers' names from here.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

ChartGroup = Literal["learning", "lengths", "optimisation", "freshness", "speed"]
MOST_NUMBERS: Final = 96
"""The most numbers kept per step. Beyond this, numbers with a task in their names are left out first."""
MOST_ROW_BYTES: Final = 4096
"""The most bytes that a step's names and numbers take in the store."""
MOST_STEP: Final = 10**15 - 1
_NUMBER_BYTES: Final = 20
"""The most bytes that a number in a row takes, with quotes and commas."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart.

    `name` joins the number's keys in a line of `metrics.jsonl` with `/`, as trackers do; a key `*` means any key, such
    as a task. `trl` and `verl` are the names that TRL and verl give the same, or nearly the same, number.
    """

    name: str
    text: str
    metric: str
    trl: str = ""
    verl: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        """The number's keys in a metrics line."""
        return tuple(self.name.split("/"))


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines that are drawn together, since they have the same unit."""

    name: str
    title: str
    unit: str
    group: ChartGroup
    lines: tuple[Line, ...]


CHARTS: Final[tuple[Chart, ...]] = (
    Chart("reward", "Reward", "", "learning", (
        Line("reward", "mean reward of the batch",
             "rollq_trainer_reward", "reward", "critic/rewards/mean"),
        Line("rewards/*", "the same, by task",
             "rollq_trained_reward"),
    )),
    Chart("parts", "Parts of the reward", "", "learning", (
        Line("parts/*/*", "mean of a part of the reward, or of another number of samples, by task",
             "rollq_trained_part", "rewards/NAME/mean"),
    )),
    Chart("equal_rewards", "Groups with equal rewards", "share", "learning", (
        Line("frac_reward_zero_std", "share of groups whose samples all have the same reward, which teach nothing",
             "rollq_trained_equal_rewards_ratio", "frac_reward_zero_std"),
    )),
    Chart("entropy", "Entropy", "nats", "learning", (
        Line("entropy", "mean entropy of the policy at a trained token; with `[trainer.loss] entropy = true`",
             "rollq_trained_entropy_nats", "entropy", "actor/entropy"),
    )),
    Chart("response_length", "Response length", "tokens", "lengths", (
        Line("response_length/mean", "mean response length of a sample, over all its turns",
             "rollq_trained_response_mean_tokens", "completions/mean_length", "response_length/mean"),
        Line("response_length/p95", "95 % of samples are as long or shorter",
             "rollq_trained_response_p95_tokens"),
        Line("response_length/max", "the longest sample",
             "rollq_trained_response_max_tokens", "completions/max_length", "response_length/max"),
    )),
    Chart("truncated", "Truncated responses", "share", "lengths", (
        Line("response_length/clip_ratio", "share of samples that were cut at the length limit",
             "rollq_trained_truncated_ratio", "completions/clipped_ratio", "response_length/clip_ratio"),
    )),
    Chart("loss", "Loss", "", "optimisation", (
        Line("loss", "loss of the batch",
             "rollq_trained_loss", "loss", "actor/pg_loss"),
    )),
    Chart("gradient_norm", "Gradient norm", "", "optimisation", (
        Line("gradient_norm", "norm of the gradient before it was clipped",
             "rollq_trained_gradient_norm", "grad_norm", "actor/grad_norm"),
    )),
    Chart("learning_rate", "Learning rate", "", "optimisation", (
        Line("learning_rate", "learning rate of the step",
             "rollq_trained_learning_rate", "learning_rate", "actor/lr"),
    )),
    Chart("kl", "KL to the reference", "nats", "optimisation", (
        Line("kl", "mean k3 estimate of KL(policy || reference) at a trained token; with `kl_coefficient` above 0",
             "rollq_trained_kl_nats", "kl", "actor/kl_loss"),
    )),
    Chart("clip_fraction", "Clipped tokens", "share", "optimisation", (
        Line("clip_fraction", "share of trained tokens whose ratio was clipped",
             "rollq_trained_clipped_ratio", "clip_ratio/region_mean", "actor/pg_clipfrac"),
        Line("masked_fraction", "share of trained tokens that a mask or a correction left out",
             "rollq_trained_masked_ratio"),
    )),
    Chart("staleness", "Staleness", "steps", "freshness", (
        Line("staleness", "mean staleness of a trained token, in train steps",
             "rollq_trained_staleness_steps"),
    )),
    Chart("mismatch", "Mismatch of logprobs", "nats", "freshness", (
        Line("mismatch/mean", "mean difference between the trainer's and the engines' logprobs",
             "rollq_trainer_mismatch_nats", "sampling/sampling_logp_difference/mean",
             "training/rollout_probs_diff_mean"),
        Line("mismatch/p99", "99 % of tokens differ by as much or less",
             "rollq_trainer_mismatch_p99_nats"),
    )),
    Chart("tokens_per_s", "Trained tokens", "tokens/s", "speed", (
        Line("tokens_per_s", "trained tokens per second of the whole step",
             "rollq_trained_tokens_per_second", "", "perf/throughput"),
    )),
    Chart("seconds", "Seconds of a step", "s", "speed", (
        Line("wait_s", "seconds in which the trainer waited for the batch",
             "rollq_trained_wait_seconds", "", "timing_s/gen"),
        Line("train_s", "seconds of gradients and updates",
             "rollq_trained_train_seconds", "", "timing_s/update_actor"),
        Line("publish_s", "seconds of publishing weights",
             "rollq_trained_publish_seconds", "", "timing_s/update_weights"),
    )),
)  # fmt: skip
LINES: Final = tuple(line for chart in CHARTS for line in chart.lines)


def numbers_of(line: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers in a metrics line that have curves, by name, within a row's limits."""
    found: dict[str, float] = {}
    taken = 0
    for name, value in _numbers(line):
        taken += len(name.encode(errors="replace")) + _NUMBER_BYTES
        if len(found) < MOST_NUMBERS and taken <= MOST_ROW_BYTES:
            found[name] = value
    return found


def step_of(line: Mapping[str, Any]) -> int | None:
    """The train step of a metrics line; None without one."""
    step = line.get("step")
    return step if type(step) is int and 0 <= step <= MOST_STEP else None


def as_number(value: Any) -> float | None:
    """Round a finite number, up to 1e300 in size, to six significant digits; returns None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300 or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


def labels_of(name: str, line: Line) -> tuple[str, ...] | None:
    """The parts of a name in place of each `*` in a line; None if the name does not match the line."""
    keys = name.split("/", len(line.keys) - 1)
    if len(keys) != len(line.keys) or any(key not in ("*", mine) for key, mine in zip(line.keys, keys, strict=True)):
        return None
    return tuple(mine for key, mine in zip(line.keys, keys, strict=True) if key == "*")


def lines_of(chart: Chart, names: Collection[str]) -> list[str]:
    """The names that a chart shows, in the chart's order."""
    return [name for line in chart.lines for name in names if labels_of(name, line) is not None]


def _numbers(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for one in sorted(LINES, key=lambda line: line.keys.count("*")):  # first the numbers that every run has
        yield from _at(line, one.keys, "")


def _at(value: Any, keys: tuple[str, ...], name: str) -> Iterator[tuple[str, float]]:
    if not keys:
        if (number := as_number(value)) is not None:
            yield name, number
        return
    if not isinstance(value, Mapping):
        return
    for key in list(value) if keys[0] == "*" else [keys[0]]:
        if isinstance(key, str) and key in value:
            yield from _at(value[key], keys[1:], f"{name}/{key}" if name else key)
