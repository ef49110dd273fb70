"""Commands of rollq in processes of their own, as forks of one that has imported torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

from benchmarks.recorder import train_recorded

from rollq.cli.main import main
from support.forks import fork
from support.waiting import PATIENCE_S


@contextmanager
def role(folder: Path, *words: str) -> Iterator[BaseProcess]:
    """A command of rollq in `folder`, whose output goes to a file there. It gets SIGTERM at the end."""
    with _ended(fork(folder, folder / f"{words[0]}-{words[-1]}.log", _rollq, *words)) as process:
        yield process


@contextmanager
def recorded_trainer(folder: Path) -> Iterator[BaseProcess]:
    """`rollq train rollq.toml` in `folder`, which records and checks what it trains; see `benchmarks.recorder`."""
    with _ended(fork(folder, folder / "train-rollq.toml.log", train_recorded, Path("rollq.toml"), 1e-4)) as process:
        yield process


@contextmanager
def _ended(process: BaseProcess) -> Iterator[BaseProcess]:
    try:
        yield process
    finally:
        process.terminate()
        process.join(PATIENCE_S)


def _rollq(*words: str) -> None:
    main(words)
