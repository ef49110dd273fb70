"""`python -m benchmarks.peers FOLDER`: put + claim + decode through rollq and through its peers, in turns.

The peers are installed into virtual environments in FOLDER: first run it with `--prepare`.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

from benchmarks import machine, report
from benchmarks.exchange import SIZES
from benchmarks.peers.protocol import Request
from benchmarks.ranks import hear, tell
from benchmarks.results import Result, ratios, take_turns

ROOT = Path(__file__).parents[2]


class Peer(NamedTuple):
    """A peer: its name, and the packages that pip installs for it."""

    name: str
    requirements: tuple[str, ...]


PEERS: Mapping[str, Peer] = {
    "reverb": Peer("Reverb", ("dm-reverb==0.14.0", "tensorflow-cpu==2.14.*")),
    "transfer_queue": Peer("TransferQueue", ("TransferQueue==0.1.11", "torch==2.13.0")),
}
"""Name of the environment, and of the module that runs in it -> the peer."""
CALLS = {"4 KB": 100, "147 KB": 50, "1 MB": 20, "16 MB": 2}
"""The number of calls with one group in a repetition. With 16 groups, it is a quarter, but at least one."""
REPETITIONS = 11


def prepare(folder: Path) -> None:
    """Install each peer into a virtual environment in `folder`."""
    for environment, peer in PEERS.items():
        subprocess.run([sys.executable, "-m", "venv", str(folder / environment)], check=True)
        pip = [python_in(folder, environment), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "-c", str(ROOT / "constraints-cpu.txt"), *peer.requirements], check=True)


def python_in(folder: Path, environment: str) -> str:
    """The Python of an environment."""
    return str(folder / environment / "bin" / "python")


class Process:
    """The process of a store, which measures requests."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.version = hear(process)

    def groups_per_s(self, request: Request) -> float:
        """Measure one request."""
        tell(self._process, json.dumps(request))
        return request.groups * request.calls / float(hear(self._process))


@contextmanager
def started(python: str, module: str) -> Iterator[Process]:
    """The process of a store."""
    command = [python, "-m", f"benchmarks.peers.{module}"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Process(process)


def compare(rollq: Process, peers: Mapping[str, Process], label: str, per_call: int, quick: bool) -> list[Result]:
    """A result for each peer: groups of one size, with `per_call` of them in a call."""
    size = SIZES[label]
    calls = 1 if quick else max(1, CALLS[label] // (1 if per_call == 1 else 4))
    request = Request(size.prompt_tokens, size.response_tokens, per_call, calls)
    sides = [lambda process=process: process.groups_per_s(request) for process in (rollq, *peers.values())]
    take_turns(1, *sides)  # warms caches and connections
    through_rollq, *through_peers = take_turns(2 if quick else REPETITIONS, *sides)
    return [
        Result(
            name=f"peers-{peer}-{label.replace(' ', '').lower()}-{per_call}",
            what=f"put + claim + decode of {label} groups, {per_call} per call, against {PEERS[peer].name}",
            unit="times",
            target=1.0,
            better="higher",
            values=ratios(through_rollq, through_peer),
            details={
                "rollq_groups_per_s": float(np.median(through_rollq)),
                "peer_groups_per_s": float(np.median(through_peer)),
            },
        )
        for peer, through_peer in zip(peers, through_peers, strict=True)
    ]


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--prepare", "installs", is_flag=True, help="Only install the peers into environments in FOLDER.")
@click.option("--only", type=click.Choice(list(PEERS)), help="Compare with this peer only.")
@click.option("--quick", is_flag=True, help="Few repetitions, without the largest groups.")
@click.option("--output", type=click.Path(path_type=Path), help="Also write the results as JSON.")
def main(folder: Path, installs: bool, only: str | None, quick: bool, output: Path | None) -> None:
    if installs:
        prepare(folder)
        return
    described = {**machine.describe(), "load_per_core_before": round(machine.load_per_core(), 2)}
    results = []
    with ExitStack() as stack:
        rollq = stack.enter_context(started(sys.executable, "through_rollq"))
        peers = {
            peer: stack.enter_context(started(python_in(folder, peer), f"through_{peer}"))
            for peer in PEERS
            if only in (None, peer)
        }
        described |= {peer: process.version for peer, process in peers.items()}
        for label, size in SIZES.items():
            for per_call in size.targets:
                if not (quick and label == "16 MB"):
                    click.echo(f"measuring {label}, {per_call} per call ...", err=True)
                    results += compare(rollq, peers, label, per_call, quick)
    report.print_table(described, results)
    if output:
        output.write_bytes(report.as_json(described, results))


if __name__ == "__main__":
    main()
