"""The environment variables and the memory of a process that runs a judge.

Invariant: a variable that nobody named is passed on only if Python or a library is known to need it, and its value does
not look like a login.
"""

import os
import re
import resource
from collections.abc import Mapping, Sequence
from typing import Final

from rollq.buffer.common.memory import usable_memory
from rollq.buffer.errors import ConfigError

KNOWN: Final = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|HOSTNAME|TERM|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|TEMP|TMP|XDG_\w+|VIRTUAL_ENV|CONDA_\w+"
    r"|PYTHON\w+|LD_LIBRARY_PATH|LD_PRELOAD|DYLD_\w+|SSL_CERT_FILE|SSL_CERT_DIR|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE"
    r"|(?i:https?|no|all)_(?i:proxy)|MALLOC_\w+|(OMP|GOMP|KMP|MKL|OPENBLAS|NUMEXPR|VECLIB)_\w+|(CUDA|NVIDIA|HIP|ROCR)_\w+"
    r"|(TORCH|TORCHINDUCTOR|PYTORCH|TRITON|TOKENIZERS|TRANSFORMERS|HF|TF|XLA|JAX)_\w+"
)
"""Names of variables that Python, the system and libraries of numbers read."""
SECRET: Final = re.compile(r"PASS|PWD|SECRET|TOKEN(?!IZERS)|CREDENTIAL|KEY|AUTH|(^|_)PAT(_|$)", re.IGNORECASE)
"""Names of variables that may hold a secret, among the known ones."""
LOGIN: Final = re.compile(r"://[^/@\s]*@")
"""A URL with a user or a password."""


def known_to_be_harmless(environment: Mapping[str, str], named: Sequence[str] = ()) -> dict[str, str]:
    """The variables of `environment` that a judge gets: the harmless ones, and the ones in `named`. Pure."""
    return {
        name: value
        for name, value in environment.items()
        if name in named or (KNOWN.fullmatch(name) and not SECRET.search(name) and not LOGIN.search(value))
    }


def check_named(named: Sequence[str]) -> None:
    """Raise `ConfigError` for a variable that this process does not have."""
    if missing := [name for name in named if name not in os.environ]:
        raise ConfigError(f"[worker] judge_environment: the worker has no environment variable {missing[0]!r}")


def most_memory() -> int:
    """Bytes that a judge may use: half of the machine's memory, or of the container's."""
    return usable_memory() // 2


def limit_memory() -> None:
    """Let this process, and each that it starts, have `most_memory`. Address space that is only reserved, as CUDA
    does, does not count."""
    most, (_, hard) = most_memory(), resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:  # only root may raise it
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
