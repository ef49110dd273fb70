"""The faults of all generators of reasoning-gym that are known: a check finds them, and no others."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import pytest

from rollq.environments.kinds import Finding, Level
from rollq.environments.reasoning_gym.checking import faults_of_grader
from rollq.environments.reasoning_gym.judge import GeneratorOptions
from rollq.environments.reasoning_gym.package import WRONG
from rollq.environments.reasoning_gym.plain_answers import RUN_TEXTS
from rollq.workers.judging.process_pool import JudgePool

ROWS = 20
MAKE = """
import itertools, os, sys
import orjson
out = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)
from rollq.environments.kinds import kind_named
from rollq.environments.reasoning_gym.generators import names
for name in names():
    if name != "composite":  # it mixes others, which its options name
        rows = kind_named("reasoning-gym").open(name, {}, "train").rows()
        out.write(orjson.dumps([name, list(itertools.islice(rows, int(sys.argv[1])))]) + b"\\n")
        out.flush()
"""
UNSTABLE = {"codeio", "isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
NO_OWN_ANSWER = {name for name, fault in WRONG.items() if "own answers" in fault}
PAYS_FOR_RUBBISH = set(WRONG) - NO_OWN_ANSWER
Rows = dict[str, list[Mapping[str, Any]]]


def making(hash_seed: int) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", MAKE, str(ROWS)], env=environment, stdout=subprocess.PIPE
    )


@pytest.fixture(scope="module")
def rows() -> tuple[Rows, Rows]:
    """The first rows of all generators, under two hash seeds."""
    processes = (making(0), making(1))
    first, second = (dict(map(orjson.loads, process.communicate()[0].splitlines())) for process in processes)
    return first, second


@pytest.fixture(scope="module")
def found(rows: tuple[Rows, Rows]) -> Mapping[str, Sequence[Finding]]:
    """The faults of all graders."""

    async def check_all() -> dict[str, Sequence[Finding]]:
        processes = JudgePool(2)
        try:
            return {
                name: await faults_of_grader(GeneratorOptions(generator=name), made, processes)
                for name, made in rows[0].items()
            }
        finally:
            await processes.close()

    return asyncio.run(check_all())


def with_words(found: Mapping[str, Sequence[Finding]], words: str) -> set[str]:
    return {name for name, findings in found.items() if any(words in each.text for each in findings)}


def test_rows_of_six_depend_on_the_hash_seed(rows: tuple[Rows, Rows]) -> None:
    first, second = rows
    assert len(first) == 105
    assert {name for name in first if first[name] != second[name]} == UNSTABLE


def test_seven_graders_are_wrong_and_no_others(found: Mapping[str, Sequence[Finding]]) -> None:
    errors = {name for name, findings in found.items() if any(each.level is Level.ERROR for each in findings)}
    assert with_words(found, "rubbish scores 1 for all questions") == PAYS_FOR_RUBBISH
    assert with_words(found, "own answers of 20 of 20 rows do not score 1") == NO_OWN_ANSWER
    assert errors == set(WRONG)


def test_nine_graders_run_what_they_read(found: Mapping[str, Sequence[Finding]]) -> None:
    assert with_words(found, "runs an answer as code") == RUN_TEXTS


def test_graders_hang_and_raise_on_texts(found: Mapping[str, Sequence[Finding]]) -> None:
    hanging = with_words(found, "hangs on '9**9**9**9'")
    assert len(hanging) >= 7
    assert hanging <= RUN_TEXTS
    assert with_words(found, "raises on") >= {"boxnet", "coin_flip", "prime_factorization"}
