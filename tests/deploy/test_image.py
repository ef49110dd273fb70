"""What can be checked of the image without building it: its instructions, the files that they name, and the wheel."""

import fnmatch
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "compose" / "Dockerfile"
INSTRUCTION = re.compile(r"(ARG|FROM|ENV|WORKDIR|RUN|COPY|USER|HEALTHCHECK|CMD) (.+)")
PARTS = ["buffer", "producer", "workers", "consumer", "monitor", "environments", "cli", "integrations"]


def instructions() -> list[tuple[str, str]]:
    """Name and arguments of each instruction; lines that go on are joined."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text("utf-8"), flags=re.MULTILINE)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    found = [INSTRUCTION.fullmatch(line) for line in lines]
    assert all(found), lines
    return [(match[1], " ".join(match[2].split())) for match in found if match]


def arguments(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


def sent_to_the_builder(path: str) -> bool:
    """Whether .dockerignore lets a path of the repository through: the last pattern that matches decides."""
    sent = True
    for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            pattern = line.removeprefix("!").removeprefix("**/")
            if any(fnmatch.fnmatch(part, pattern) for part in (path, *map(str, Path(path).parents), Path(path).name)):
                sent = line.startswith("!")
    return sent


def test_every_file_that_is_copied_exists_and_is_sent_to_the_builder() -> None:
    sources = [word for rest in arguments("COPY") if "--from" not in rest for word in rest.split()[:-1]]
    assert {*PARTS, "pyproject.toml", "compose/on-free-gpu"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert sent_to_the_builder(source), source
    assert not sent_to_the_builder(".git/config")
    assert not sent_to_the_builder("compose/secrets/redis_password")
    assert not sent_to_the_builder("buffer/rollq/__pycache__")


def test_the_wheel_is_made_of_all_that_is_copied() -> None:
    copied = {word for rest in arguments("COPY") for word in rest.split()}
    assert set(PARTS) <= copied
    assert os.access(ROOT / "compose" / "on-free-gpu", os.X_OK)


def test_the_image_has_two_stages_no_root_and_a_health_check() -> None:
    names = [name for name, _ in instructions()]
    assert [rest.split(" AS ")[1] for rest in arguments("FROM")] == ["builder", "runtime"]
    assert arguments("USER") == ["10001:10001"]
    assert names.index("USER") > max(index for index, name in enumerate(names) if name in ("COPY", "RUN"))
    assert '["rollq", "status", "/etc/rollq/rollq.toml"]' in arguments("HEALTHCHECK")[0]


def test_a_linter_has_nothing_to_say() -> None:
    hadolint = str(Path(sys.executable).with_name("hadolint"))
    assert subprocess.run([hadolint, str(DOCKERFILE)], capture_output=True, text=True).stdout == ""


@pytest.mark.parametrize("script", arguments("RUN"))
def test_every_script_of_the_dockerfile_is_one_that_a_shell_can_read(script: str) -> None:
    assert subprocess.run(["/bin/sh", "-n", "-c", script], capture_output=True, text=True).stderr == ""


@pytest.mark.parametrize(
    ("extra", "has"),
    [
        ("base", "redis"),
        ("torch", "transformers"),
        ("vllm", "vllm"),
        ("dashboard", "starlette"),
        ("archive", "pyarrow"),
    ],
)
def test_requirements_of_an_image_are_those_of_its_extra(extra: str, has: str) -> None:
    command = [sys.executable, str(ROOT / "compose" / "requirements.py"), extra]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    names = [re.split(r"[^a-z]", line)[0] for line in lines]
    assert has in names
    assert ("torch" in names) is (extra == "torch")
    assert ("pyarrow" in names) is (extra in ("torch", "archive")), "trainers and archivers write Parquet files"
    assert "rollq" not in names


def test_an_extra_that_no_image_is_made_of_is_refused() -> None:
    command = [sys.executable, str(ROOT / "compose" / "requirements.py"), "demo"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, "must be one of base, archive, dashboard, torch, vllm" in result.stderr) == (1, True)


@pytest.mark.long
def test_the_wheel_holds_every_module_and_data_file_and_works_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    tracked = subprocess.run(["git", "ls-files", *PARTS], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    expected = {path.partition("/")[2] for path in tracked.splitlines() if (ROOT / path).exists()}
    with zipfile.ZipFile(wheel) as archive:
        assert expected <= set(archive.namelist())
    alone = tmp_path / "alone"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(alone)]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    code = (
        f"import sys; sys.path.insert(0, {str(alone)!r})\n"
        "import importlib, importlib.resources as resources, pathlib\n"
        f"for part in {PARTS!r}:\n"
        "    module = importlib.import_module('rollq.' + part)\n"
        f"    assert module.__file__.startswith({str(alone)!r}), module.__file__\n"
        "from rollq.buffer.store.library import library_source\n"
        "assert 'local function put(' in library_source()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
