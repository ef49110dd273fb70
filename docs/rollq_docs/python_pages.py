"""Reference of the Python API: the public names of each package, from their docstrings by mkdocstrings."""

from importlib import import_module
from inspect import getdoc

from pydantic import BaseModel

from rollq_docs.settings_page import table_of

PACKAGES = (
    "rollq.buffer",
    "rollq.producer",
    "rollq.workers",
    "rollq.consumer",
    "rollq.consumer.losses",
    "rollq.integrations.trl",
)


def python_page(package: str) -> str:
    """The page of a package."""
    module = import_module(package)
    summary = (getdoc(module) or "").split("\n\n")[0]
    names = sorted(module.__all__, key=lambda name: (not name[0].isupper(), name.lower()))
    parts = [_entry(package, name, getattr(module, name)) for name in names]
    return "\n\n".join([f"# {package}", summary, *parts]) + "\n"


def _entry(package: str, name: str, value: object) -> str:
    if isinstance(value, type) and issubclass(value, BaseModel):
        return f"## {name}\n\n{getdoc(value)}\n\n{table_of(value)}"
    return f"::: {package}.{name}"
