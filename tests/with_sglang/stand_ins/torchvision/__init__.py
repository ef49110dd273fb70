"""In place of torchvision, which needs the CUDA of its torch: SGLang imports it, and uses it for images alone."""

from typing import Any

__version__ = "0.28.0"


class _Names(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class Nothing(metaclass=_Names):
    """Any class or enumeration of torchvision."""


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Nothing
