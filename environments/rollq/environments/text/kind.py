"""The kind `text`, named by the dotted path of a class or function that makes environments."""

import asyncio
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import distributions
from itertools import count, islice
from pathlib import Path
from shutil import which
from typing import Any, Final

from pydantic import Field

from rollq.buffer.common import exact_json
from rollq.buffer.errors import ConfigError
from rollq.buffer.rules.settings import Settings
from rollq.environments.episodes import ENV, OPENING, SEED, row_seed
from rollq.environments.kinds import Finding, Level, path_in
from rollq.environments.options import read_options
from rollq.environments.text.episode import ARGUMENTS, TextEpisode, is_text, opening_text
from rollq.environments.text.files import digest_of_code, digest_of_file, problem_of, source_files
from rollq.environments.text.processes import ChildFailed, end_children
from rollq.environments.trials import AT_ONCE, try_rows

EPISODE: Final = "rollq.environments.text.episode.TextEpisode"
CONCURRENT: Final = 32
"""How many episodes a worker runs at a time, each in a process, unless the task sets another number."""


class TextOptions(Settings):
    """`env_options`."""

    options: dict[str, Any] = Field(default_factory=dict, description="arguments of the class")
    episodes: str = Field(default="", description="file with more arguments of the class, one JSON object per row")
    python: str = Field(default="", description="Python interpreter that has the packages; default: the worker's")
    seed: int = Field(default=0, ge=0, description="the seeds of the rows are drawn from it")


class Text:
    """Environments of Gymnasium, GEM, SkyRL-gym and TextArena, for one player."""

    def open(self, name: str, options: Mapping[str, Any], split: str, folder: Path = Path()) -> "TextSource":
        """The environment at a dotted path; nothing is imported, but code beside `rollq.toml` must define the name."""
        if not all(part.isidentifier() for part in name.split(".")) or "." not in name:
            raise ConfigError(
                f'env = "text:{name}": write a dotted path, such as text:games.Guess or text:gymnasium.make'
            )
        source = TextSource(name, read_options(TextOptions, options), split, folder)
        if source.has_own_code and (problem := problem_of(folder, name)):
            raise ConfigError(f'env = "text:{name}": {problem}')
        return source

    def installed(self) -> str:
        """Return "built in": only the environment's package is needed."""
        return "built in"

    def install(self) -> str:
        """How to install an environment."""
        return "install the environment's package; env_options.python names another Python that has it"

    def names(self) -> Iterable[str]:
        """Only the user knows the classes."""
        return ()


class TextSource:
    """One class of environments."""

    def __init__(self, path: str, options: TextOptions, split: str, folder: Path) -> None:
        self.path, self.options, self.split = path, options, split
        self.python = python_in(folder, options.python)
        self._folder = folder

    def identity(self) -> dict[str, str]:
        """The class, its package and version, and all that its rows depend on, including files beside `rollq.toml`."""
        package = self.path.partition(".")[0]
        episodes = self.options.episodes
        options = self.options.model_dump(exclude={"python"}, exclude_defaults=True)
        return {
            "kind": "text",
            "environment": self.path,
            "package": package,
            "version": version_of(package, self.python),
            "options": exact_json.dumps(options).decode(),
            "split": self.split,
            **({"code": digest_of_code(self._folder, package)} if self.has_own_code else {}),
            **({"episodes": digest_of_file(path_in(self._folder, episodes))} if episodes else {}),
        }

    @property
    def has_own_code(self) -> bool:
        """Whether the class is beside `rollq.toml`, and not in an installed package."""
        package = self.path.partition(".")[0]
        return bool(source_files(self._folder, package)) and not version_of(package, self.python)

    def rows(self) -> Iterator[dict[str, Any]]:
        """A row for each line of `episodes`, with the episode's opening as the prompt; without `episodes`, an unlimited
        number of rows, one per seed.

        Do not call it in a running event loop. Raises `ConfigError`.
        """
        places = self._places()
        with asyncio.Runner() as runner:
            try:
                while batch := list(islice(places, AT_ONCE)):
                    yield from runner.run(self._opened(batch))
            finally:
                runner.run(end_children())

    def settings(self) -> dict[str, Any]:
        """The loop `environment` with an episode in a process, judged by its steps' rewards."""
        python = {"python": self.python} if self.python else {}
        options = {"options": self.options.options} if self.options.options else {}
        return {
            "answer_field": "",
            "judge": "environment",
            "agent_loop": "environment",
            "agent_options": {
                "environment": EPISODE,
                "options": {"path": self.path, **python, **options},
                "concurrent": CONCURRENT,
            },
        }

    def check(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
        """Check that episodes match their rows, open the same way twice, open 16 at once, and leave no process."""
        with asyncio.Runner() as runner:
            try:
                yield from runner.run(try_rows(self._episode, rows))
            finally:
                runner.run(end_children())
        if not (version_of(self.path.partition(".")[0], self.python) or self.has_own_code):
            yield Finding(
                Level.NOTE,
                "the class is neither in an installed package nor beside rollq.toml: only different openings reveal "
                "a change",
            )

    def _episode(self) -> TextEpisode:
        return TextEpisode(self.path, self.python, self.options.options)

    def _places(self) -> Iterator[dict[str, Any]]:
        seeds = ({SEED: row_seed(self.options.seed, self.split, row)} for row in count())
        arguments = self._arguments()
        if arguments is None:
            return seeds
        return ({**place, ARGUMENTS: given} for given, place in zip(arguments, seeds, strict=False))

    def _arguments(self) -> list[dict[str, Any]] | None:
        if not self.options.episodes:
            return None
        try:
            lines = path_in(self._folder, self.options.episodes).read_bytes().splitlines()
            made = [exact_json.loads(line) for line in lines if line.strip()]
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"env_options.episodes = {self.options.episodes!r}: cannot be read: {reason}") from error
        if wrong := next((row for row, each in enumerate(made, 1) if not isinstance(each, dict)), 0):
            raise ConfigError(f"env_options.episodes: line {wrong} of {self.options.episodes} is not a JSON object")
        return made

    async def _opened(self, places: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        made = await asyncio.gather(*(self._row(place) for place in places), return_exceptions=True)
        rows = []
        for each in made:
            if isinstance(each, ChildFailed):
                raise ConfigError(
                    f'env = "text:{self.path}": {each}; install what it needs, or name a Python that has it with '
                    "env_options.python"
                ) from each
            if isinstance(each, BaseException):
                raise each
            rows.append(each)
        return rows

    async def _row(self, place: Mapping[str, Any]) -> dict[str, Any]:
        episode = self._episode()
        try:
            opened = await episode.open(place)
        finally:
            await episode.teardown()
        opening = opening_text(opened)
        prompt = {"prompt": opening} if is_text(opened) else {"messages": opened}
        return {**prompt, ENV: {**place, OPENING: opening}}


def python_in(folder: Path, written: str) -> str:
    """A Python by its path; a bare name is a command, and stays unchanged."""
    return str(path_in(folder, written)) if "/" in written else written


def version_of(package: str, python: str) -> str:
    """The version of an installed package, in another Python's folders if one is given; empty without the package."""
    site = Path(which(python) or python).parent.parent.glob("lib/python*/site-packages")
    found = next(iter(distributions(name=package, path=list(map(str, site)) if python else sys.path)), None)
    return "" if found is None else found.version
