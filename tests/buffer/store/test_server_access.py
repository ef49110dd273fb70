"""Embedded servers with users, and with TLS in both directions."""

import subprocess
from pathlib import Path

import pytest

from rollq.buffer.errors import ConfigError, ServerUnavailable
from rollq.buffer.store.connection import connect
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.store.redis_url import complete_url
from rollq.buffer.tickets import enqueue_tickets, open_queue
from support.certificates import make_certificates


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory, openssl: Path) -> Path:
    """A folder of certificates for a server on this machine, and for a worker."""
    folder = tmp_path_factory.mktemp("tls") / "certificates"
    make_certificates(folder)
    return folder


def tls_url(server: EmbeddedServer, certificates: Path, name: str | None = "worker") -> str:
    files = (certificates / f"{name}.crt", certificates / f"{name}.key") if name else (None, None)
    return complete_url(server.url, None, certificates / "ca.crt", *files)


def test_buffer_and_queue_speak_tls_in_both_directions(tls_binary: Path, certificates: Path, tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "s", binary=tls_binary, certificates=certificates, password="planted") as server:
        assert server.url.startswith("rediss://")
        with connect(tls_url(server, certificates), password="planted") as client:
            assert client.ping()
        queue = open_queue(tls_url(server, certificates), "r", password="planted")
        with queue.connection:
            assert len(enqueue_tickets(queue, "r", 2, 1)) == 2
            assert queue.count == 2
        with pytest.raises(ServerUnavailable):  # no certificate of ours
            connect(tls_url(server, certificates, name=None), password="planted")
        with pytest.raises(ServerUnavailable, match="certificate verify failed"):  # none of the server's authority
            connect(server.url, password="planted")
        with pytest.raises(ServerUnavailable):  # no TLS at all
            connect(server.url.replace("rediss://", "redis://"), password="planted")
        assert server.pid is not None
        assert b"planted" not in Path(f"/proc/{server.pid}/cmdline").read_bytes()


def test_a_certificate_of_another_authority_opens_nothing(
    tls_binary: Path, certificates: Path, tmp_path: Path, openssl: Path
) -> None:
    foreign = tmp_path / "foreign"
    make_certificates(foreign)
    with EmbeddedServer(tmp_path / "s", binary=tls_binary, certificates=certificates) as server:
        files = (certificates / "ca.crt", foreign / "worker.crt", foreign / "worker.key")
        with pytest.raises(ServerUnavailable):
            connect(complete_url(server.url, None, *files))
        files = (foreign / "ca.crt", certificates / "worker.crt", certificates / "worker.key")
        with pytest.raises(ServerUnavailable, match="certificate verify failed"):
            connect(complete_url(server.url, None, *files))


def test_a_server_under_another_name_is_not_trusted(tls_binary: Path, certificates: Path, tmp_path: Path) -> None:
    with (
        EmbeddedServer(tmp_path / "s", binary=tls_binary, certificates=certificates, bind="127.0.0.2") as server,
        pytest.raises(ServerUnavailable, match=r"127\.0\.0\.2"),
    ):
        connect(tls_url(server, certificates))


def test_the_certificates_pass_a_strict_check(certificates: Path, openssl: Path) -> None:
    files = sorted(map(str, certificates.glob("*.crt")))
    verify = ("verify", "-x509_strict", "-CAfile", str(certificates / "ca.crt"), *files)
    subprocess.run([openssl, *verify], check=True, capture_output=True)


def test_only_their_owner_reads_the_keys(certificates: Path) -> None:
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in certificates.iterdir() if path.suffix == ".key"}
    assert set(modes) >= {"ca.key", "server.key", "worker.key"}
    assert set(modes.values()) == {"0o600"}


def test_a_server_program_without_tls_says_so(certificates: Path, tmp_path: Path) -> None:
    with pytest.raises(ServerUnavailable, match="this server program has no TLS - choose another"):
        EmbeddedServer(tmp_path / "s", certificates=certificates).start()


def test_a_server_with_users_starts_again_with_its_data(fresh_server_of_each_kind: EmbeddedServer) -> None:
    server = fresh_server_of_each_kind
    server.stop()
    server.directory.joinpath("users.acl").write_text("user default reset off\nuser me on >secret ~* &* +@all\n")
    again = EmbeddedServer(server.directory, binary=server.binary, acl=server.directory / "users.acl")
    for value in (None, b"kept"):
        with again, connect(again.url.replace("://", "://me@"), password="secret") as client:
            assert client.get("key") == value
            client.set("key", "kept")


@pytest.mark.parametrize(
    ("lines", "message"),
    [(None, "cannot be read"), ("requirepass x\n", "every line must define a user")],
)
def test_an_acl_file_that_is_not_one_is_refused(tmp_path: Path, lines: str | None, message: str) -> None:
    acl = tmp_path / "users.acl"
    if lines is not None:
        acl.write_text(lines)
    with pytest.raises(ConfigError, match=message):
        EmbeddedServer(tmp_path / "s", acl=acl).start()


def test_arguments_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not both"):
        EmbeddedServer(tmp_path, password="p", acl=tmp_path / "a")
    with pytest.raises(ConfigError, match=r"has no ca\.crt"):
        EmbeddedServer(tmp_path, certificates=tmp_path)
    with pytest.raises(ConfigError, match="a unix socket needs no certificates"):
        EmbeddedServer(tmp_path, certificates=tmp_path, unix_socket=True)


@pytest.mark.parametrize(
    ("url", "user", "files", "complete"),
    [
        ("redis://h:1/0", None, (None, None, None), "redis://h:1/0"),
        ("redis://h:1/0", "r-worker", (None, None, None), "redis://r-worker@h:1/0"),
        ("redis://other@h", "r-worker", (None, None, None), "redis://other@h"),
        ("unix:///s.sock?db=0", "u", (None, None, None), "unix://u@/s.sock?db=0"),
        ("rediss://h/0", None, (Path("/a b"), None, None), "rediss://h/0?ssl_ca_certs=%2Fa+b"),
        (
            "rediss://h/0?x=1",
            None,
            (None, Path("/c"), Path("/k")),
            "rediss://h/0?x=1&ssl_certfile=%2Fc&ssl_keyfile=%2Fk",
        ),
    ],
)
def test_a_url_gets_the_user_and_the_files_of_tls(
    url: str, user: str | None, files: tuple[Path | None, Path | None, Path | None], complete: str
) -> None:
    assert complete_url(url, user, *files) == complete


def test_files_of_tls_are_not_ignored_by_a_url_without_tls() -> None:
    with pytest.raises(ConfigError, match=r"^server URL 'redis://\*\*\*@h': has no TLS, but"):
        complete_url("redis://u:secret@h", None, Path("/ca.crt"), None, None)
