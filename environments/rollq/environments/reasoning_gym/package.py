"""The package reasoning-gym as it is installed here, without importing it."""

from importlib.metadata import PackageNotFoundError, version
from typing import Final

PACKAGE: Final = "reasoning-gym"
INSTALL: Final = "pip install 'rollq[reasoning-gym]'"


def installed() -> str:
    """Its version from its metadata, since it gives another one itself; empty without it."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return ""
