"""Certificates for TLS, made by the commands of docs/guide/security.md."""

import subprocess
from pathlib import Path

from support.documented_commands import ROOT, code_with

PAGE = ROOT / "docs" / "guide" / "security.md"


def make_certificates(folder: Path, host: str = "10.0.0.1") -> None:
    """Create `folder` with an authority and a certificate for the server, for each role and for `admin`.

    `host` is the server's name, in addition to localhost.
    """
    code = code_with(PAGE, "openssl req").replace("certificates", folder.name).replace("IP:10.0.0.1", f"DNS:{host}")
    subprocess.run(["/bin/sh", "-e", "-c", code], cwd=folder.parent, check=True, capture_output=True)
