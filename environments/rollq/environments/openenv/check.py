"""Checks an OpenEnv server without a model."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rollq.environments.episodes import ENV
from rollq.environments.kinds import Finding, Level
from rollq.environments.openenv.options import OpenEnvOptions
from rollq.environments.openenv.rows import episode_of
from rollq.environments.openenv.schemas import calls_tools, fields_of, misfits
from rollq.environments.openenv.server import NoRoute, server_at
from rollq.environments.openenv.session import SessionLost
from rollq.environments.openenv.wire import Refused, Unreadable
from rollq.environments.trials import try_rows

NO_ACTION: Final = {"rollq_no_such_field": 1}
"""An action that is invalid in every environment."""
PLACES_S: Final = 30.0
"""How long a server may take to release its places."""


def check(url: str, options: OpenEnvOptions, rows: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Faults in a server, and in these rows' episodes."""
    with asyncio.Runner() as runner:
        try:
            yield from runner.run(_schemas(url, options))
            yield from runner.run(try_rows(lambda: episode_of(url, options), rows))
            yield from runner.run(_invalid_action(url, options, rows))
            yield from runner.run(_places(url, options, rows))
        except (SessionLost, NoRoute) as error:
            yield Finding(Level.ERROR, f"{url}: {error}")


async def _schemas(url: str, options: OpenEnvOptions) -> list[Finding]:
    schema = await server_at(url).action_schema()
    if options.tools != calls_tools(schema):
        wrong = "actions are not MCP tool calls" if options.tools else "actions are MCP tool calls: set tools"
        return [Finding(Level.WARNING, wrong)]
    if not fields_of(schema):
        return [Finding(Level.WARNING, "the schema of actions has no fields")]
    problems = misfits(schema, options.action) if options.action else []
    return [Finding(Level.ERROR, problem) for problem in problems]


async def _invalid_action(url: str, options: OpenEnvOptions, rows: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Whether the server refuses an invalid action and continues the episode."""
    episode = episode_of(url, options)
    try:
        await episode.open(rows[0][ENV])
        step = await episode.act(NO_ACTION)
        await episode.act(NO_ACTION)
    except Exception as error:  # noqa: BLE001 - a server may fail in any way
        return [Finding(Level.WARNING, f"an invalid action ends the episode: {error}")]
    finally:
        await episode.teardown()
    accepted = getattr(step, "invalid", 0) == 0
    return [Finding(Level.WARNING, f"the server accepts an invalid action: {NO_ACTION}")] if accepted else []


async def _places(url: str, options: OpenEnvOptions, rows: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Whether the server has released all earlier episodes' places."""
    episode = episode_of(url, options)
    try:
        async with asyncio.timeout(PLACES_S):
            await episode.open(rows[0][ENV])
    except TimeoutError:
        return [Finding(Level.ERROR, f"no episode is open, but the server has no free place: {episode.waits_for}")]
    except (Refused, Unreadable):
        return []  # the trial of the row reported it
    finally:
        await episode.teardown()
    return []
