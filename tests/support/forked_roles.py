"""Commands of rollq in processes of their own, as forks of one that has imported torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

from rollq.cli.main import main
from support.forks import fork
from support.waiting import PATIENCE_S


@contextmanager
def role(folder: Path, *words: str) -> Iterator[BaseProcess]:
    """A command of rollq in `folder`, whose output goes to a file there. It gets SIGTERM at the end."""
    process = fork(folder, folder / f"{words[0]}-{words[-1]}.log", _rollq, *words)
    try:
        yield process
    finally:
        process.terminate()
        process.join(PATIENCE_S)


def _rollq(*words: str) -> None:
    main(words)
