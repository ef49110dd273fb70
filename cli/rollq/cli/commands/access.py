"""`rollq runs acl`: restricts the rights of each role."""

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollq.buffer.common.writing import writing_to
from rollq.buffer.errors import ConfigError
from rollq.cli.options import settings_file

if TYPE_CHECKING:
    from rollq.buffer.store.users import User


@click.command(short_help="Print an ACL file with one user per role.")
@settings_file
@click.option(
    "--passwords",
    "folder",
    type=click.Path(path_type=Path),
    required=True,
    help="Folder with a password file per user; missing files are created, readable only by you.",
)
@click.option(
    "--also",
    metavar="DIGEST",
    multiple=True,
    help="Also allow the functions of another release, while its roles still run; repeat it.",
)
def acl(file: Path, folder: Path, also: tuple[str, ...]) -> None:
    """Print an ACL file with one user per role of the run: producer, worker, trainer, archiver, monitor,
    operator.

    Two more users manage the server: admin, the only user that may change it, and replica, which a replica uses to log
    in to its primary. The default user is switched off. FILE is rollq.toml. The ACL file holds digests of the
    passwords. Give each machine only the password file of its role, and keep the admin's file away from all roles.

    The file names the functions of this release. While roles are upgraded one by one, use the newer rollq with --also
    and the digest of the other release, which `rollq doctor` prints.

    \b
    Example:
      rollq runs acl rollq.toml --passwords passwords > rollq.acl
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
    """The password in the user's file, which is created if missing."""
    path = folder / user.value
    with writing_to("--passwords", folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError), open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as new:
            new.write(secrets.token_hex(32) + "\n")
    try:
        password = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"password file {str(path)!r}: cannot be read: {error}") from error
    if not password:
        raise ConfigError(f"password file {str(path)!r}: is empty")
    return password
