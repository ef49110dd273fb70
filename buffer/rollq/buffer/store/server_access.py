"""Access to an embedded server: the users in its ACL file, and its TLS certificates."""

from pathlib import Path
from typing import Any

from rollq.buffer.errors import ConfigError

START_USER = "rollq-start"
"""A process that started a server with an ACL file checks as this user whether the server answers. It also joins an
embedded cluster's nodes as this user, and the nodes replicate as this user."""
START_RIGHTS = "+info +ping +cluster +psync +replconf"
SERVER_FILES = ("ca.crt", "server.crt", "server.key")


def user_lines(acl: Path, start_password: str) -> list[str]:
    """The users in an ACL file and the start user, as lines for the server's configuration.

    Raises `ConfigError` for a file that cannot be read or holds anything else.
    """
    try:
        users = [line for line in acl.read_text("utf-8").splitlines() if line]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"ACL file {str(acl)!r}: cannot be read: {error}") from error
    if not all(line.startswith("user ") for line in users):
        raise ConfigError(f"ACL file {str(acl)!r}: every line must define a user, as in `user NAME on ...`")
    return [*users, f"user {START_USER} on >{start_password} {START_RIGHTS}"]


def tls_config(certificates: Path) -> list[tuple[str, str]]:
    """Configure TLS on the only port, for clients that show a certificate."""
    files = [("cert", "server.crt"), ("key", "server.key"), ("ca-cert", "ca.crt")]
    return [
        ("port", "0"),
        ("tls-auth-clients", "yes"),
        *((f"tls-{kind}-file", str(certificates / name)) for kind, name in files),
    ]


def server_tls(certificates: Path) -> dict[str, Any]:
    """The driver's options for connecting to any of the server's addresses from its own machine."""
    return {
        "ssl_ca_certs": str(certificates / "ca.crt"),
        "ssl_certfile": str(certificates / "server.crt"),
        "ssl_keyfile": str(certificates / "server.key"),
        "ssl_check_hostname": False,
    }


def check_access(password: str | None, acl: Path | None, socket_path: Path | None, certificates: Path | None) -> None:
    """Raise `ConfigError` for `EmbeddedServer` arguments that contradict each other or name missing files."""
    if password and acl:
        raise ConfigError("give a password or an ACL file, not both: the file has the passwords of all users")
    if socket_path and certificates:
        raise ConfigError("a unix socket needs no certificates: it is not encrypted, and stays on this machine")
    for name in SERVER_FILES:
        if certificates and not (certificates / name).is_file():
            raise ConfigError(
                f"certificates {str(certificates)!r}: has no {name}; docs/guide/security.md shows how to make it"
            )
