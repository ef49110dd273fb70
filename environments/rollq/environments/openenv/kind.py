"""The kind `openenv`, named by the URL of a server."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from rollq.buffer.common import exact_json
from rollq.buffer.errors import ConfigError
from rollq.environments.kinds import Finding
from rollq.environments.openenv.options import OpenEnvOptions
from rollq.environments.options import read_options

ROOM: Final = "rollq.environments.openenv"
SETUP_S: Final = 600.0
"""How long a sample waits for a place, unless the task sets another time."""


class OpenEnv:
    """Environments on OpenEnv servers."""

    def open(self, name: str, options: Mapping[str, Any], split: str, folder: Path = Path()) -> "OpenEnvSource":
        """The environment at a URL; no request is made."""
        if problem := _problem_of(name):
            raise ConfigError(
                f'env = "openenv:{name}": {problem}: write the URL of the server, as openenv:http://127.0.0.1:8000'
            )
        return OpenEnvSource(name, read_options(OpenEnvOptions, options), split)

    def installed(self) -> str:
        """Return "built in": aiohttp, the only required package, is not checked."""
        return "built in"

    def install(self) -> str:
        """How to install aiohttp."""
        return "pip install 'rollq[gateway]'"

    def names(self) -> Iterable[str]:
        """Only the user knows the URLs."""
        return ()


def _problem_of(url: str) -> str:
    """Why this is not the URL of a server; empty for a valid URL."""
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        return str(error)
    if parts.scheme not in ("http", "https"):
        return "it does not begin with http:// or https://"
    if not has_host:
        return "it has no host, or port 0"
    return "it has parts other than a host and a path" if parts.query or parts.fragment else ""


class OpenEnvSource:
    """One environment behind a server. Its module imports aiohttp only when the server is asked."""

    def __init__(self, url: str, options: OpenEnvOptions, split: str) -> None:
        self.url, self.options, self.split = url, options, split

    def identity(self) -> dict[str, str]:
        """The server, and all that its rows depend on."""
        names = {"observation", "prompt", "reset", "seed", "tools"}
        options = self.options.model_dump(include=names, exclude_defaults=True)
        return {
            "kind": "openenv",
            "server": self.url,
            "options": exact_json.dumps(options).decode(),
            "split": self.split,
        }

    def rows(self) -> Iterator[dict[str, Any]]:
        """A row for each of the split's tasks, with the first observation as the prompt; without a task list, an
        unlimited number of rows, one per seed.

        The server must be running. Do not call it in a running event loop.
        """
        from rollq.environments.openenv.rows import make_rows

        return make_rows(self.url, self.options, self.split)

    def settings(self) -> dict[str, Any]:
        """The loop `environment` with an episode of this server, judged by its steps' rewards."""
        episode = "ToolEpisode" if self.options.tools else "Episode"
        return {
            "answer_field": "",
            "judge": "environment",
            "agent_loop": "environment",
            "agent_options": {
                "environment": f"{ROOM}.episode.{episode}",
                "options": {"url": self.url, **self.options.for_episodes()},
                "setup_timeout_s": SETUP_S,
                **({"tool_parser": "auto"} if self.options.tools else {}),
            },
        }

    def check(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
        """Check that episodes match their rows, open the same way twice, open 16 at once, and free their places. Also
        check the schema of actions, and the answer to an invalid action."""
        from rollq.environments.openenv.check import check

        return check(self.url, self.options, rows)
