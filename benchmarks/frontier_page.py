"""The results of `benchmarks.frontier`: which cells agree with staleness 0, as a table, a picture and JSON."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from benchmarks.machine import describe
from rollq.monitor.report.report import running_mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = "## Results"
"""Heading of the page's last section; the plan comes before it, and results never change the plan."""
COLOURS = {"ppo": "#0072b2", "decoupled_tis": "#009e73", "cispo": "#cc79a7", "reinforce": "#d55e00"}
SMOOTHING_STEPS = 10


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished cell: its settings, and its result.

    `held_out` is the mean held-out reward of the last weights, `rewards` the mean reward of each trained batch. For the
    steps after the tenth, it has `mean_staleness` of the trained tokens, and `least_sample_size`, the smallest
    effective sample size of the oldest tokens of a batch, as a share. For all steps, it has `mean_clipped`, the share
    of clipped tokens, `mean_kl` from the engine's policy in nats, and `largest_gradient_norm` before clipping.
    """

    loss: str
    max_staleness: int
    seed: int
    learning_rate: float
    held_out: float
    rewards: Sequence[float]
    mean_staleness: float
    least_sample_size: float
    mean_clipped: float
    largest_gradient_norm: float
    mean_kl: float


@dataclass(frozen=True, slots=True)
class Row:
    """The cells of one loss, bound and learning rate, over the seeds, and the cells of bound 0 (None if these are the
    cells of bound 0)."""

    cells: Sequence[Outcome]
    at_zero: Sequence[Outcome] | None

    @property
    def mean(self) -> float:
        """Mean held-out reward."""
        return statistics.mean(cell.held_out for cell in self.cells)

    @property
    def deviation(self) -> float:
        """Standard deviation of the held-out reward over the seeds; 0 with one seed."""
        return deviation([cell.held_out for cell in self.cells])

    @property
    def difference(self) -> float | None:
        """Mean held-out reward less the reward at bound 0."""
        return None if self.at_zero is None else self.mean - Row(self.at_zero, None).mean

    @property
    def pooled(self) -> float | None:
        """Pooled standard deviation of both: the root of the mean of their variances."""
        if self.at_zero is None:
            return None
        return math.sqrt((self.deviation**2 + Row(self.at_zero, None).deviation ** 2) / 2)

    @property
    def paired(self) -> float | None:
        """Standard deviation over the seeds of each seed's difference from bound 0, which had the same model."""
        if self.at_zero is None:
            return None
        at_zero = {cell.seed: cell.held_out for cell in self.at_zero}
        return deviation([cell.held_out - at_zero[cell.seed] for cell in self.cells if cell.seed in at_zero])

    @property
    def verdict(self) -> str:
        """Whether the difference is within one pooled standard deviation, or the reward is higher."""
        if self.difference is None or self.pooled is None:
            return ""
        if abs(self.difference) <= self.pooled:
            return "within"
        return "higher" if self.difference > 0 else "**lower**"


def deviation(values: Sequence[float]) -> float:
    """Sample standard deviation; 0 for a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _signed(value: float | None, sign: str = "+") -> str:
    return "" if value is None else format(value, f"{sign}.3f")


def rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """A row per learning rate, loss and bound, in the order of their first cells."""
    groups: dict[tuple[float, str, int], list[Outcome]] = {}
    for cell in outcomes:
        groups.setdefault((cell.learning_rate, cell.loss, cell.max_staleness), []).append(cell)
    return [Row(cells, groups.get((rate, loss, 0)) if bound else None) for (rate, loss, bound), cells in groups.items()]


def table(found: Sequence[Row]) -> str:
    """Format rows as a Markdown table."""
    lines = [
        "| loss | bound | held-out reward | against 0 | pooled deviation | verdict | deviation by seed | "
        "staleness of tokens | least effective sample size | clipped | largest gradient norm | KL, nats |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        cell, cells = row.cells[0], row.cells
        columns = [
            f"`{cell.loss}`",
            str(cell.max_staleness),
            f"{row.mean:.3f} ± {row.deviation:.3f}",
            _signed(row.difference),
            _signed(row.pooled, ""),
            row.verdict,
            _signed(row.paired, ""),
            f"{statistics.mean(each.mean_staleness for each in cells):.2f}",
            f"{min(each.least_sample_size for each in cells):.2f}",
            f"{statistics.mean(each.mean_clipped for each in cells):.2%}",
            f"{max(each.largest_gradient_norm for each in cells):.2f}",
            f"{statistics.mean(each.mean_kl for each in cells):.4f}",
        ]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def figure(outcomes: Sequence[Outcome], usual_rate: float) -> "Figure":
    """The picture. Left: the held-out reward by bound, with a point per seed and the mean of each loss. Right: the
    rewards at the high rate."""
    from matplotlib.figure import Figure  # takes a second to import

    drawing = Figure(figsize=(11.0, 4.6), layout="constrained")
    left, right = drawing.subplots(1, 2)
    usual = [cell for cell in outcomes if cell.learning_rate == usual_rate]
    bounds = sorted({cell.max_staleness for cell in usual})
    losses = list(dict.fromkeys(cell.loss for cell in usual))
    for number, loss in enumerate(losses):
        shift = 0.12 * (number - (len(losses) - 1) / 2)
        means = []
        for place, bound in enumerate(bounds):
            values = [cell.held_out for cell in usual if (cell.loss, cell.max_staleness) == (loss, bound)]
            left.scatter([place + shift] * len(values), values, color=COLOURS[loss], s=14, alpha=0.5)
            means.append(statistics.mean(values) if values else math.nan)
        left.plot([place + shift for place in range(len(bounds))], means, color=COLOURS[loss], label=loss)
    left.set_xticks(range(len(bounds)), [str(bound) for bound in bounds])
    left.set(xlabel="max_staleness, in weight syncs", ylabel="held-out reward", title="usual learning rate")
    high = [cell for cell in outcomes if cell.learning_rate != usual_rate]
    for loss in dict.fromkeys(cell.loss for cell in high):
        curves = [running_mean(cell.rewards, SMOOTHING_STEPS) for cell in high if cell.loss == loss]
        for number, curve in enumerate(curves):
            label = loss if number == 0 else None
            right.plot(range(1, len(curve) + 1), curve, color=COLOURS[loss], alpha=0.7, label=label)
    bounds_high = ", ".join(sorted({str(cell.max_staleness) for cell in high}))
    rates = ", ".join(sorted({f"{cell.learning_rate:g}" for cell in high}))
    right.set(xlabel="train step", ylabel=f"reward of the trained batch (mean of {SMOOTHING_STEPS} steps)", ylim=(0, 1))
    right.set_title(f"learning rate {rates}, max_staleness {bounds_high}, a line per seed")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower left" if axes is left else "upper right")
    return drawing


def write_results(
    docs: Path,
    outcomes: Sequence[Outcome],
    before: Mapping[int, float],
    parity: tuple[int, float],
    steps: int,
    note: str = "",
) -> None:
    """Write the picture, the JSON and the last section of `frontier.md` into `docs`.

    `before` has the held-out reward of each seed's initial model. `parity` has the steps compared, and the largest
    difference of a logprob, in nats. `note` follows the tables.
    """
    usual_rate = outcomes[0].learning_rate
    usual = [cell for cell in outcomes if cell.learning_rate == usual_rate]
    high = [cell for cell in outcomes if cell.learning_rate != usual_rate]
    docs.mkdir(parents=True, exist_ok=True)
    figure(outcomes, usual_rate).savefig(docs / "frontier.png", dpi=130)
    written = orjson.dumps([asdict(cell) for cell in outcomes], option=orjson.OPT_APPEND_NEWLINE)
    (docs / "frontier.json").write_bytes(written)
    initial = ", ".join(f"{reward:.3f}" for reward in before.values())
    about = "; ".join(f"{name} {fact}" for name, fact in describe().items())
    paragraphs = [
        RESULTS,
        f"Parity: in {parity[0]} steps, `sync` and `async` trained on the same groups, tokens, versions, advantages "
        f"and rewards. The engine's logprobs differ by at most {parity[1]:.1g} nats.",
        f"{len(before)} seeds, {steps} steps. Held-out reward of the initial models: {initial}.",
        table(rows(usual)),
        "![held-out reward by bound, and reward at a high learning rate](frontier.png)",
    ]
    if high:
        paragraphs += [f"At learning rate {high[0].learning_rate:g}:", table(rows(high))]
    paragraphs += [note, f"Measured on: {about}."]
    page = docs / "frontier.md"
    plan = page.read_text("utf-8").partition(RESULTS)[0] if page.exists() else ""
    page.write_text("\n\n".join(text.strip() for text in (plan, *paragraphs) if text.strip()) + "\n", "utf-8")
    print(f"\n{table(rows(outcomes))}")
