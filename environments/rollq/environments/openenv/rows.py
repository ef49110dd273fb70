"""The rows of an OpenEnv server: its listed tasks, or seeds, each with the opening of its episode."""

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rollq.buffer.errors import ConfigError
from rollq.environments.episodes import ENV, OPENING, SEED, row_seed
from rollq.environments.openenv.episode import Episode, ToolEpisode
from rollq.environments.openenv.options import OpenEnvOptions
from rollq.environments.openenv.schemas import only_field
from rollq.environments.openenv.server import NoRoute, Server, server_at
from rollq.environments.openenv.session import SessionLost
from rollq.environments.openenv.templates import NoSuchField, render
from rollq.environments.openenv.wire import Refused, Unreadable

AT_ONCE: Final = 16
"""How many episodes an export opens at once."""


@dataclass(frozen=True, slots=True)
class TaskList:
    """One split's tasks. `route` is the environment's name in routes, empty if there is no list and tasks are
    unlimited."""

    route: str
    split: str
    count: float

    async def places(self, server: Server, start: int, stop: int, seed: int) -> list[tuple[dict[str, Any], Any]]:
        """The episodes of the rows from `start` to `stop`, each with its task."""
        seeds = [{SEED: row_seed(seed, self.split, row)} for row in range(start, stop)]
        if not self.route:
            return [(place, {}) for place in seeds]
        tasks = await self._tasks(server, start, stop)
        indices = range(start, stop)
        return [
            ({"split": self.split, "index": index, **place}, task)
            for index, place, task in zip(indices, seeds, tasks, strict=True)
        ]

    async def _tasks(self, server: Server, start: int, stop: int) -> Sequence[Any]:
        try:
            answer = await server.post(f"{self.route}/task_range", {"split": self.split, "start": start, "stop": stop})
        except NoRoute:
            return [{}] * (stop - start)  # an environment that needs a task reports this
        tasks: list[Any] = answer["tasks"]
        if len(tasks) != stop - start:
            raise ConfigError(
                f"{server.url}: got {len(tasks)} tasks for tasks {start} to {stop} of split {self.split!r}"
            )
        return tasks


async def list_tasks(server: Server, split: str) -> TaskList:
    """A split's task list, or unlimited seeds if the server has no list.

    Raises `ConfigError` for a split that does not exist, and `SessionLost`.
    """
    try:
        [name] = await server.get("list_environments")
        count = (await server.post(f"{name}/num_tasks", {"split": split}))["num_tasks"]
    except (NoRoute, ValueError):
        return TaskList("", split, math.inf)
    try:
        splits = [each["name"] for each in await server.get(f"{name}/splits")]
    except NoRoute:
        splits = [split]
    if split not in splits or not count:
        raise ConfigError(f"{server.url}: no task in split {split!r}; the splits are {', '.join(splits)}")
    return TaskList(name, split, count)


def make_rows(url: str, options: OpenEnvOptions, split: str) -> Iterator[dict[str, Any]]:
    """The rows, each made by opening its episode once. Raises `ConfigError`."""
    with asyncio.Runner() as runner:
        try:
            server, tasks = runner.run(_begin(url, options, split))
            start = 0
            while start < tasks.count:
                stop = int(min(start + AT_ONCE, tasks.count))
                yield from runner.run(_opened(server, options, tasks, start, stop))
                start = stop
        except (SessionLost, Refused, Unreadable, NoRoute, NoSuchField) as error:
            raise ConfigError(f"{url}: {error}") from error


def episode_of(url: str, options: OpenEnvOptions) -> Episode | ToolEpisode:
    """Make a new episode, as a worker does."""
    return (ToolEpisode if options.tools else Episode)(url, **options.for_episodes())


async def _begin(url: str, options: OpenEnvOptions, split: str) -> tuple[Server, TaskList]:
    server = server_at(url)
    if options.action is None and not options.tools:
        only_field(await server.action_schema())
    return server, await list_tasks(server, split)


async def _opened(
    server: Server, options: OpenEnvOptions, tasks: TaskList, start: int, stop: int
) -> list[dict[str, Any]]:
    places = await tasks.places(server, start, stop, options.seed)
    made = await asyncio.gather(
        *(_row(server.url, options, place, task) for place, task in places), return_exceptions=True
    )
    for error in made:
        if isinstance(error, BaseException):
            raise error
    return [row for row in made if isinstance(row, dict)]


async def _row(url: str, options: OpenEnvOptions, place: Mapping[str, Any], task: Any) -> dict[str, Any]:
    episode = episode_of(url, options)
    try:
        opened = await episode.open(place)
        opening = episode.text_of(opened)
    finally:
        await episode.teardown()
    prompt = render(options.prompt, {**opened.fields, "task": task}) if options.prompt else opening
    if not prompt:
        raise NoSuchField("an episode opens without text: set prompt, with fields of the observation or of {task}")
    return {"prompt": prompt, ENV: {**place, OPENING: opening}}
