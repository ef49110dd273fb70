"""Reads a YAML settings file with OmegaConf's interpolations, without running anything in it: tags are refused.

Environment variables count as unset: `${oc.env:NAME,default}` is its default. `${oc.decode:text}` is the text read as
YAML. `${a.b}` is the value at that place.
"""

import re
from pathlib import Path
from typing import Any, Final

from rollq.buffer.errors import ConfigError
from rollq.cli.settings.migration.expressions import joined
from rollq.cli.settings.migration.values import Placeholder, Unknown

MOST_NODES: Final = 20_000
MOST_ROUNDS: Final = 20
"""The most interpolations in one string, and inside each other."""

TOO_LARGE: Final = "too large, or refers to itself: write its values out"
_FLOAT: Final = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.[\d_]+)([eE][-+]?\d+)|[-+]?(\d[\d_]*\.[\d_]*|\.[\d_]+)")
"""Numbers with a point or an exponent, such as 1e-6, which is a string in YAML 1.1 and a number in OmegaConf."""
_INNERMOST: Final = re.compile(r"\$\{([^${}]*)\}")


def content(path: Path, text: str) -> dict[str, Any]:
    """The file's resolved mapping. Raises `ConfigError` for a file without a mapping, or with unsupported YAML."""
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ConfigError(f"{path}: YAML needs the package {error.name!r}: pip install 'rollq[convert]'") from error

    try:
        data = _loader(yaml, path)(text).get_single_data()
    except ConfigError:
        raise
    except yaml.constructor.ConstructorError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise ConfigError(
            f"{path}: line {line}: {error.problem}: tags and unusual keys are not read; remove them"
        ) from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: neither settings of Trinity-RFT nor of XTuner: the file has no mapping of keys")
    return _Resolver(path, data).resolved()


def _loader(yaml: Any, path: Path) -> Any:
    """Return PyYAML's safe loader, with OmegaConf's numbers. The loader refuses duplicate keys and large files."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """PyYAML's safe loader, with OmegaConf's numbers. Refuses duplicate keys and large files."""

        nodes = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self._count(1)
            return super().compose_node(parent, index)

        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            seen: set[tuple[str, str]] = set()
            for key, _ in node.value:
                name = (key.tag, key.value if isinstance(key.value, str) else "")
                if name in seen and name[1]:
                    raise ConfigError(f"{path}: line {key.start_mark.line + 1}: {name[1]!r} is there twice: remove one")
                seen.add(name)
            return node

        def flatten_mapping(self, node: Any) -> None:
            super().flatten_mapping(node)
            self._count(len(node.value))

        def _count(self, number: int) -> None:
            self.nodes += number
            if self.nodes > MOST_NODES:
                raise ConfigError(f"{path}: {TOO_LARGE}")

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:float"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(f"^(?:{_FLOAT.pattern})$"), list("-+.0123456789")
    )
    return Loader


class _Resolver:
    """Replaces interpolations in a file's content."""

    def __init__(self, path: Path, data: dict[Any, Any]) -> None:
        self._path = path
        self._data = data
        self._nodes = 0

    def resolved(self) -> dict[str, Any]:
        found: dict[str, Any] = self._value(self._data, 0)
        return found

    def _value(self, value: Any, depth: int) -> Any:
        self._nodes += 1
        if self._nodes > MOST_NODES or depth > MOST_ROUNDS:
            raise ConfigError(f"{self._path}: {TOO_LARGE}")
        if isinstance(value, dict):
            return {str(key): self._value(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list):
            return [self._value(item, depth + 1) for item in value]
        return self._text(value) if _interpolates(value) else value

    def _text(self, text: str) -> Any:
        parts: list[Any] = [text]
        for _ in range(MOST_ROUNDS):
            place = [*map(_interpolates, parts), True].index(True)
            match = _INNERMOST.search("".join(parts[place : place + 1]))
            if match is None:
                break
            value = self._one(match[1])
            if parts == [match[0]]:
                parts = [value]
            else:
                parts[place : place + 1] = _around(parts[place], match, value, Unknown(text))
        whole = parts[0] if len(parts) == 1 else joined("", parts)
        return Unknown(text) if whole is NotImplemented or _interpolates(whole) else whole

    def _one(self, inside: str) -> Any:
        """The value of one interpolation."""
        kind, colon, rest = inside.partition(":")
        if colon:
            return _resolved(kind.strip(), rest)
        found: Any = self._data
        for part in inside.strip().split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return Unknown("${" + inside + "}") if found is None or isinstance(found, dict | list) else found


def _resolved(resolver: str, argument: str) -> Any:
    """The value of an interpolation with a resolver of OmegaConf."""
    if resolver == "oc.decode":
        return _scalar(argument.strip())
    if resolver not in ("oc.env", "env"):
        return Unknown(f"${{{resolver}:{argument}}}")
    name, comma, default = argument.partition(",")
    return _scalar(default.strip()) if comma else Placeholder(name.strip())


def _interpolates(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _around(text: str, match: re.Match[str], value: Any, unknown: Unknown) -> list[Any]:
    """The parts of a string in which `value` replaces the match, or `unknown` if no string can hold the value."""
    before, after = text[: match.start()], text[match.end() :]
    if isinstance(value, str | int | float):
        return [f"{before}{value}{after}"]
    return [before, value if isinstance(value, Placeholder) else unknown, after]


def _scalar(text: str) -> Any:
    """The value of an interpolation's text, as YAML would read it."""
    words = {"null": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    if re.fullmatch(r"[-+]?\d+", text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text.strip("'\"")
