"""Certificates for TLS between the roles and their servers, made with the program openssl."""

import secrets
import shutil
import subprocess
from collections.abc import Collection, Iterator
from ipaddress import ip_address
from pathlib import Path
from tempfile import TemporaryDirectory

from rollq.buffer.errors import ConfigError

DAYS = 3650
NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
CONFIG = """\
[req]
distinguished_name = name
[name]
[ca]
basicConstraints = critical, CA:TRUE, pathlen:0
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[leaf]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = {usage}
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = {names}
"""


def make_certificates(folder: Path, hosts: Collection[str], clients: Collection[str]) -> Iterator[Path]:
    """Create `ca`, `server` and a certificate for each client in `folder`, as `.crt` and `.key`; yield what was new.

    `hosts`: names and addresses of the server, besides localhost. Raises `ConfigError` without openssl, and with its
    message when it fails.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (folder / "ca.crt").exists():
        _openssl(CONFIG.format(usage="clientAuth", names="DNS:ca"), _authority(folder))
        yield _readable(folder / "ca.crt")
    server_names = ",".join(map(_subject, dict.fromkeys(("localhost", "127.0.0.1", *hosts))))
    # the server also shows its certificate as a client, when it waits for itself to answer
    leaves = {"server": ("serverAuth, clientAuth", server_names)}
    leaves |= {name: ("clientAuth", f"DNS:{name}") for name in clients}
    for name, (usage, names) in leaves.items():
        if not (folder / f"{name}.crt").exists():
            _openssl(CONFIG.format(usage=usage, names=names), *_leaf(folder, name))
            (folder / f"{name}.csr").unlink()
            yield _readable(folder / f"{name}.crt")


def _subject(host: str) -> str:
    try:
        return f"IP:{ip_address(host)}"
    except ValueError:
        return f"DNS:{host}"


def _authority(folder: Path) -> list[str]:
    files = ("-keyout", str(folder / "ca.key"), "-out", str(folder / "ca.crt"))
    return ["req", "-x509", *NEW_KEY, "-days", str(DAYS), "-subj", "/CN=rollq", "-extensions", "ca", *files]


def _leaf(folder: Path, name: str) -> tuple[list[str], list[str]]:
    """The request for a certificate, and its signing."""
    request, key, certificate = (str(folder / f"{name}.{kind}") for kind in ("csr", "key", "crt"))
    authority = ("-CA", str(folder / "ca.crt"), "-CAkey", str(folder / "ca.key"))
    serial = ("-set_serial", f"0x{secrets.token_hex(16)}")
    return (
        ["req", *NEW_KEY, "-subj", f"/CN={name}", "-keyout", key, "-out", request],
        [
            "x509",
            "-req",
            "-in",
            request,
            *authority,
            *serial,
            "-days",
            str(DAYS),
            "-extensions",
            "leaf",
            "-out",
            certificate,
        ],
    )


def _openssl(config: str, *commands: list[str]) -> None:
    """Run commands of openssl with `config`; its keys are readable only for this user."""
    program = shutil.which("openssl")
    if program is None:
        raise ConfigError(
            "`rollq certificates` needs the program openssl: install it (Debian: apt-get install openssl)"
        )
    with TemporaryDirectory() as temporary:
        path = Path(temporary, "openssl.cnf")
        path.write_text(config)
        for command in commands:
            option = "-extfile" if command[0] == "x509" else "-config"
            done = subprocess.run([program, *command, option, str(path)], capture_output=True, text=True, umask=0o077)
            if done.returncode:
                raise ConfigError(f"openssl {command[0]} failed: {done.stderr.strip()[-500:]}")


def _readable(certificate: Path) -> Path:
    certificate.chmod(0o644)
    return certificate
