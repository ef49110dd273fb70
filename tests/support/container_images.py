"""Images of containers in tests, made of programs of this machine, since no registry can be reached."""

import os
import re
import shutil
import subprocess
from pathlib import Path

PROGRAMS = ("bash", "sh", "sleep", "cat", "rm", "mkdir", "ln", "setsid", "nohup", "ls", "chmod", "seq")
CONFIGURATION = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
"""
"""Lets podman run in a container itself, where the limits that it sets otherwise are out of reach."""
STORAGE = """
[storage]
driver = "overlay"
graphroot = "{folder}/images"
runroot = "{folder}/running"
"""


def configure_podman(folder: Path) -> dict[str, str]:
    """The variables with which podman runs in a container itself, too, and keeps everything in a folder."""
    runtime = f'runtime = "{found}"\n' if (found := shutil.which("runc")) else ""
    (folder / "containers.conf").write_text(CONFIGURATION + runtime)
    (folder / "storage.conf").write_text(STORAGE.format(folder=folder))
    return {
        "CONTAINERS_CONF": str(folder / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
        "BUILDAH_ISOLATION": "chroot",
    }


def import_image(name: str, folder: Path) -> None:
    """Make an image of a few programs."""
    root = folder / "root"
    for place in ("app", "tmp", "root", "etc"):
        (root / place).mkdir(parents=True)
    for program in PROGRAMS:
        path = shutil.which(program)
        assert path is not None
        _copy(path, root / "usr/bin" / program)
        for library in re.findall(r"(?:=> )?(/\S+) \(0x", _ldd(path)):
            _copy(library, root / library.lstrip("/"))
    (root / "bin").symlink_to("usr/bin")
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/bash\n")
    archive = folder / "image.tar"
    subprocess.run(["tar", "-C", root, "-cf", archive, "."], check=True)
    subprocess.run(
        ["podman", "import", "--change", "ENV=PATH=/usr/bin", archive, name], check=True, capture_output=True
    )


def _ldd(path: str) -> str:
    return subprocess.run(["ldd", os.path.realpath(path)], check=True, capture_output=True, text=True).stdout


def _copy(source: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        shutil.copy(os.path.realpath(source), target)
