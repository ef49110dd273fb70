"""`make mutants`: breaks the modules that decide, one small change at a time, and counts what the tests notice.

Cosmic Ray makes the changes, in copies of the project; only the quick tests of a module run against its mutants,
without a server. Prints the survivors, and fails when less than `ENOUGH` of a module's mutants are killed.

Usage: python tests/mutants.py [part of a module's path]
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

ROOT = Path(__file__).parent.parent
SOURCES = ("buffer", "producer", "workers", "consumer", "monitor", "environments", "cli", "integrations")
ENOUGH = 0.9
TIMEOUT_S = 20
MODULES = {
    "buffer/rollq/buffer/rules/batch_sizes.py": ("tests/buffer/test_batch_sizes.py",),
    "buffer/rollq/buffer/rules/staleness.py": (
        "tests/buffer/test_guarantees.py", "-k", "xb05 or xb06 or xb17", "-m", "not any_server",
    ),
    "buffer/rollq/buffer/query/language.py": ("tests/buffer/query/test_language.py",),
    "buffer/rollq/buffer/query/plan.py": ("tests/buffer/query/test_plan.py",),
    "producer/rollq/producer/strategy.py": ("tests/producer/test_strategy.py",),
    "consumer/rollq/consumer/claims/outlook.py": ("tests/consumer/test_outlook.py",),
    "workers/rollq/workers/groups/filters.py": (
        "tests/workers/groups/test_filters.py",
        "-k", "same_reward or would_be or first_filter or says_which or one_sample",
    ),
}  # fmt: skip
"""Module -> arguments for pytest that choose its tests."""
OPERATORS_LEFT_OUT = (
    "core/RemoveDecorator",  # a frozen dataclass that is none any more decides the same
    "core/ReplaceBinaryOperator_BitOr",  # unions in annotations
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a module's mutants; the diffs of those that no test noticed."""

    module: str
    mutants: int
    survivors: tuple[str, ...]

    @property
    def killed(self) -> float:
        """Share of the mutants that a test noticed."""
        return 1 - len(self.survivors) / max(self.mutants, 1)


def mutate(module: str, tests: Sequence[str]) -> Outcome:
    """Try every mutant of `module` in a copy of the project."""
    with tempfile.TemporaryDirectory(prefix="rollq-mutants-") as name:
        folder = Path(name)
        for source in (*SOURCES, "tests", "docs"):
            shutil.copytree(ROOT / source, folder / source, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        python_path = os.pathsep.join(str(folder / source) for source in SOURCES)
        environment = {**os.environ, "PYTHONPATH": python_path, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        left_out = orjson.dumps([f"{operator}.*" for operator in OPERATORS_LEFT_OUT]).decode()
        (folder / "mutants.toml").write_text(
            f'[cosmic-ray]\nmodule-path = "{module}"\ntimeout = {TIMEOUT_S}.0\n'
            f"test-command = {orjson.dumps(shlex.join(command)).decode()}\n"
            '[cosmic-ray.distributor]\nname = "local"\n'
            f"[cosmic-ray.filters.operators-filter]\nexclude-operators = {left_out}\n"
        )

        def run(*words: str) -> str:
            done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=True)
            return done.stdout

        tool = str(Path(sys.executable).with_name("cosmic-ray"))
        run(*command)  # without a change they pass, or nothing is learnt
        run(tool, "init", "mutants.toml", "session.sqlite")
        run(str(Path(sys.executable).with_name("cr-filter-operators")), "session.sqlite", "mutants.toml")
        run(tool, "exec", "mutants.toml", "session.sqlite")
        results = [orjson.loads(line)[1] for line in run(tool, "dump", "session.sqlite").splitlines()]
    return outcome(module, results)


def outcome(module: str, results: Sequence[Any]) -> Outcome:
    """The outcome of a session, from its dump: a result each, None for mutants that were left out."""
    tried = [result for result in results if result and result["worker_outcome"] != "skipped"]
    survivors = [result["diff"] for result in tried if result["test_outcome"] == "survived"]
    return Outcome(module, len(tried), tuple(survivors))


def main(arguments: Sequence[str]) -> int:
    chosen = {module: tests for module, tests in MODULES.items() if not arguments or arguments[0] in module}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = list(pool.map(mutate, chosen, chosen.values()))
    for found in outcomes:
        print("\n".join(found.survivors))
    for found in outcomes:
        print(f"{found.killed:6.1%} of {found.mutants:4} mutants killed  {found.module}")
    return 0 if all(found.killed >= ENOUGH for found in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
