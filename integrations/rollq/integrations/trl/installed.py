"""Checks TRL's installed release: the adapter overrides methods that other releases may lack."""

from importlib.metadata import PackageNotFoundError, version

from rollq.buffer.errors import ConfigError

SUPPORTED = "1.16"
REMEDY = "pip install 'rollq[trl]'"


def check_installed() -> None:
    """Raise `ConfigError`, with the installed release and the remedy, if that release is unsupported."""
    try:
        found = version("trl")
    except PackageNotFoundError:
        raise ConfigError(f"rollq.integrations.trl needs TRL {SUPPORTED}, which is not installed: {REMEDY}") from None
    if not f"{found}.".startswith(f"{SUPPORTED}."):
        raise ConfigError(f"rollq.integrations.trl works with TRL {SUPPORTED}, but {found} is installed: {REMEDY}")
