"""The environment variables and the memory limit of a process that runs a judge.

Invariant: a process gets the variables that the settings name. It gets another variable only if Python, the system or a
library is known to read it, its name does not suggest a secret, and its value does not look like a login.
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
"""Names of variables that Python, the system and numerical libraries read."""
SECRET: Final = re.compile(r"PASS|PWD|SECRET|TOKEN(?!IZERS)|CREDENTIAL|KEY|AUTH|(^|_)PAT(_|$)", re.IGNORECASE)
"""Names of known variables that may hold a secret."""
LOGIN: Final = re.compile(r"://[^/@\s]*@")
"""A URL with a user or a password."""


def known_to_be_harmless(environment: Mapping[str, str], named: Sequence[str] = ()) -> dict[str, str]:
    """The variables in `environment` for a judge: the harmless ones and those in `named`. Pure."""
    return {
        name: value
        for name, value in environment.items()
        if name in named or (KNOWN.fullmatch(name) and not SECRET.search(name) and not LOGIN.search(value))
    }


def check_named(named: Sequence[str]) -> None:
    """Raise `ConfigError` for a variable that is not set in this process."""
    if missing := [name for name in named if name not in os.environ]:
        raise ConfigError(f"[worker] judge_environment: the worker has no environment variable {missing[0]!r}")


def most_memory() -> int:
    """The memory limit of a judge, in bytes: half of the machine's or container's memory."""
    return usable_memory() // 2


def limit_memory() -> None:
    """Limit this process and its descendants to `most_memory` each. Address space that is only reserved, as by CUDA,
    does not count."""
    most, (_, hard) = most_memory(), resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:  # only root may raise it
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
