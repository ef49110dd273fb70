"""Commands that restrict who may do what: `rollq acl`, `rollq certificates` and `rollq load-functions`."""

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollq.buffer.errors import ConfigError
from rollq.cli.options import run_options

if TYPE_CHECKING:
    from rollq.buffer.store.users import User


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--passwords",
    "folder",
    type=click.Path(path_type=Path),
    required=True,
    help="Folder with a password file per user; those that are missing are created, readable only for you.",
)
@click.option(
    "--also",
    metavar="DIGEST",
    multiple=True,
    help="Also allow the functions of another release, while its roles still run; repeat it.",
)
def acl(file: Path, folder: Path, also: tuple[str, ...]) -> None:
    """Print an ACL file with one user per role of the run: producer, worker, trainer, monitor, operator.

    Two more users take care of the server: admin, the only one that may change it, and replica, as which a replica logs
    in to its primary. The default user is switched off. FILE is rollq.toml. The ACL file holds digests of the
    passwords. Give each machine only the password file of its role, and keep that of admin away from all roles.

    The file names the functions of this release. While another one is replaced, role by role, use the newer rollq with
    --also and the digest of the other one, which `rollq doctor` and `rollq load-functions` print.

    \b
    Example:
      rollq acl rollq.toml --passwords passwords > rollq.acl
      rollq redis --acl rollq.acl
      ROLLQ_REDIS_USER=sums-worker ROLLQ_REDIS_PASSWORD_FILE=passwords/worker rollq work rollq.toml
    """
    from rollq.buffer.store.library import is_digest
    from rollq.buffer.store.users import USERS, acl_lines, password_digest, user_name
    from rollq.cli.settings.file import load_settings

    for release in also:
        if not is_digest(release):
            raise ConfigError(f"--also {release!r}: must be the 12 hexadecimal digits that `rollq doctor` prints")
    run = load_settings(file).run
    digests = {user: password_digest(_password(folder, user)) for user in USERS}
    click.echo("\n".join(acl_lines(run, digests, also)))
    click.echo(f"users {', '.join(user_name(run, user) for user in USERS)}; their passwords are in {folder}", err=True)
    click.echo("a server takes this file with `rollq redis --acl`, or as `aclfile` in its configuration", err=True)


def _password(folder: Path, user: "User") -> str:
    """The password in the user's file, which is created if it is missing."""
    path = folder / user.value
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as new:
            new.write(secrets.token_hex(32) + "\n")
    except FileExistsError:
        pass
    password = path.read_text("utf-8").strip()
    if not password:
        raise ConfigError(f"password file {str(path)!r}: is empty")
    return password


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--host", "hosts", multiple=True, help="Name or IP address of the server, besides localhost; repeat it.")
def certificates(directory: Path, hosts: tuple[str, ...]) -> None:
    """Make certificates for TLS in the folder DIR: an authority, one for the server, one per role, and one for admin.

    What is in DIR already is kept, so remove server.crt to name other hosts. Keep ca.key away from all roles: it signs
    new certificates. Needs the program openssl.

    \b
    Example:
      rollq certificates certificates --host 10.0.0.1
      rollq redis --certificates certificates --program /usr/bin/redis-server --bind 10.0.0.1 --acl rollq.acl
    """
    from rollq.buffer.store.users import Role, ServerUser
    from rollq.cli.certificate_files import make_certificates

    for path in make_certificates(directory, hosts, [*Role, ServerUser.ADMIN]):
        click.echo(f"created {path}")


@click.command("load-functions")
@run_options
def load_functions(file: Path | None, url: str | None, run_name: str | None) -> None:
    """Load rollq's functions into the server, as the operator, where no other role may. An upgrade may need it again.

    \b
    Example:
      export ROLLQ_REDIS_USER=sums-operator ROLLQ_REDIS_PASSWORD_FILE=passwords/operator
      rollq load-functions rollq.toml
    """
    from rollq.buffer.store.functions import load_library
    from rollq.buffer.store.library import digest, library_name
    from rollq.cli.run_location import find_run

    with find_run(file, url, run_name).without_payloads() as buffer:
        load_library(buffer.servers)
        click.echo(f"the server has the functions {library_name()}, of the release with digest {digest()}")
