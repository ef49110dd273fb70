"""The kind `mcp`: a server with tools. The user supplies the prompts and the judge."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, Final

from rollq.environments.kinds import Finding, path_in
from rollq.environments.mcp.check import check_server
from rollq.environments.options import read_options
from rollq.workers.agents.mcp.server import McpServer
from rollq.workers.agents.tools import ToolSettings

TABLE: Final = "server"
"""The name of the table in `agent_options.tools`."""


@dataclass(frozen=True, slots=True)
class McpSource:
    """One server, whose tools a task gets. A server has no rows."""

    makes_rows: ClassVar[bool] = False
    settings_of_tools: ToolSettings

    def identity(self) -> dict[str, str]:
        """The server and a digest of its tools. Asks the server; raises `ConfigError` if the server does not answer."""
        listed = McpServer(TABLE, self.settings_of_tools).listed
        return {
            "package": "mcp",
            "version": version("mcp"),
            "server": str(self.settings_of_tools.mcp),
            "tools": ", ".join(sorted(listed.tools)),
            "digest": listed.digest,
        }

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield nothing: a tool server has no prompts."""
        return iter(())

    def settings(self) -> dict[str, Any]:
        """The loop `tools` with the server's tools."""
        given = self.settings_of_tools.model_dump(mode="json", exclude_unset=True)
        return {"agent_loop": "tools", "agent_options": {"tools": {TABLE: given}}}

    def check(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
        """The server's faults; the user supplies rows."""
        return check_server(TABLE, self.settings_of_tools)


class Mcp:
    """Servers, each named by its URL or by the command that starts it."""

    def open(self, name: str, options: Mapping[str, Any], split: str, folder: Path = Path()) -> McpSource:
        """The server of this name. `options` are the keys of its table in `agent_options.tools`.

        Starts nothing. Raises `ConfigError` for a wrong name or option.
        """
        settings = read_options(ToolSettings, {**options, "mcp": name})
        if settings.mcp_url is None:
            settings = settings.model_copy(update={"folder": path_in(folder, str(settings.folder or ""))})
        return McpSource(settings)

    def installed(self) -> str:
        """See `Kind.installed`."""
        try:
            return version("mcp")
        except PackageNotFoundError:
            return ""

    def install(self) -> str:
        """See `Kind.install`."""
        return "pip install 'rollq[mcp]'"

    def names(self) -> Iterable[str]:
        """Return nothing: only the user knows the servers."""
        return ()
